//! Conversions of declared sequences and of requests that belong to a sequence.

use std::num::NonZeroU64;

use millrace_types::Failure;
use millrace_types::sequences::{
    IDLE_DEFAULT, InSequence, SEQUENCE_NAME_MAX, SEQUENCES_DEFAULT, SequenceId, SequenceSpec, StatePair,
};

use super::times::{duration_wire, time};
use crate::worker::in_sequence::Id;
use crate::{admin, worker};

/// Parses the sequences of a spec. The spec's own validation checks the ranges.
pub(super) fn of_spec(wire: admin::Sequences) -> Result<SequenceSpec, Failure> {
    let pair = |admin::SequenceState { input, output }| StatePair { input, output };
    Ok(SequenceSpec {
        state: wire.state.into_iter().map(pair).collect(),
        idle: time("sequences.idle", wire.idle)?.unwrap_or(IDLE_DEFAULT),
        max: if wire.max == 0 { SEQUENCES_DEFAULT } else { wire.max },
    })
}

/// Encodes the sequences of a spec.
pub(super) fn spec_wire(sequences: &SequenceSpec) -> admin::Sequences {
    let pair =
        |pair: &StatePair| admin::SequenceState { input: pair.input.clone(), output: pair.output.clone() };
    admin::Sequences {
        state: sequences.state.iter().map(pair).collect(),
        idle: Some(duration_wire(sequences.idle)),
        max: sequences.max,
    }
}

/// Parses the sequences of a placed function.
///
/// # Errors
/// [`millrace_types::Reason::InvalidSpec`] with the fault.
pub fn placed_sequences(wire: worker::Sequences) -> Result<SequenceSpec, Failure> {
    let pair = |worker::SequenceState { input, output }| admin::SequenceState { input, output };
    let worker::Sequences { state, idle, max } = wire;
    of_spec(admin::Sequences { state: state.into_iter().map(pair).collect(), idle, max })
}

/// Encodes the sequences of a placed function.
#[must_use]
pub fn placed_sequences_wire(sequences: &SequenceSpec) -> worker::Sequences {
    let pair = |admin::SequenceState { input, output }| worker::SequenceState { input, output };
    let admin::Sequences { state, idle, max } = spec_wire(sequences);
    worker::Sequences { state: state.into_iter().map(pair).collect(), idle, max }
}

/// Parses a request's position in a sequence.
///
/// # Errors
/// [`millrace_types::Reason::MalformedRequest`] if the sequence has no id or too long a name.
pub fn in_sequence(wire: worker::InSequence) -> Result<InSequence, Failure> {
    let id = match wire.id {
        Some(Id::Number(number)) => NonZeroU64::new(number).map(SequenceId::Number),
        Some(Id::Name(name)) if name.len() > SEQUENCE_NAME_MAX => {
            let message =
                format!("a sequence name has {} bytes: at most {SEQUENCE_NAME_MAX} are allowed", name.len());
            return Err(Failure::malformed(message));
        }
        Some(Id::Name(name)) => (!name.is_empty()).then_some(SequenceId::Name(name)),
        None => None,
    };
    let id = id
        .ok_or_else(|| Failure::malformed("the sequence id is 0 or empty: send a number from 1 or a name"))?;
    Ok(InSequence { id, start: wire.start, end: wire.end })
}

/// Encodes a request's position in a sequence.
#[must_use]
pub fn in_sequence_wire(place: InSequence) -> worker::InSequence {
    let InSequence { id, start, end } = place;
    let id = Some(match id {
        SequenceId::Number(number) => Id::Number(number.get()),
        SequenceId::Name(name) => Id::Name(name),
    });
    worker::InSequence { id, start, end }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::{FunctionSpec, Reason};

    use super::*;
    use crate::convert::{function_key, function_spec, function_spec_wire};

    fn sequences() -> SequenceSpec {
        let state = vec![StatePair { input: "h_in".into(), output: "h_out".into() }];
        SequenceSpec { state, idle: Duration::from_secs(5), max: 3 }
    }

    #[test]
    fn declared_sequences_survive_the_wire() {
        let key = function_key("", "counter").unwrap();
        let spec = FunctionSpec { sequences: Some(sequences()), ..FunctionSpec::new(key) };
        assert_eq!(function_spec(function_spec_wire(&spec)), Ok(spec));
        assert_eq!(placed_sequences(placed_sequences_wire(&sequences())), Ok(sequences()));
        let short = worker::Sequences { idle: None, max: 0, ..placed_sequences_wire(&sequences()) };
        let read = placed_sequences(short).unwrap();
        assert_eq!((read.idle, read.max), (IDLE_DEFAULT, SEQUENCES_DEFAULT));
    }

    #[test]
    fn a_position_in_a_sequence_survives_the_wire_and_bad_ids_are_refused() {
        let number = SequenceId::Number(NonZeroU64::MIN);
        for id in [number, SequenceId::Name("s".repeat(SEQUENCE_NAME_MAX))] {
            let place = InSequence { id, start: true, end: false };
            assert_eq!(in_sequence(in_sequence_wire(place.clone())), Ok(place));
        }
        let long = "s".repeat(SEQUENCE_NAME_MAX + 1);
        for id in [None, Some(Id::Number(0)), Some(Id::Name(String::new())), Some(Id::Name(long))] {
            let refused = in_sequence(worker::InSequence { id, start: true, end: true }).unwrap_err();
            assert_eq!(refused.reason, Reason::MalformedRequest);
        }
    }
}
