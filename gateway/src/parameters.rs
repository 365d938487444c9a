//! The supported parameters of a request, for both protocols. Other parameters are ignored, as in
//! Triton. Parameters that would change the response are refused, so that no client mistakes the
//! response for another.
//!
//! Known parameters with a wrong type are refused for every model, as in Triton's
//! `SetInferenceRequestMetadata`. This includes sequence parameters of models without state.

use std::num::NonZeroU64;
use std::time::Duration;

use millrace_proto::inference::InferParameter;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_types::function::TIMEOUT_MAX;
use millrace_types::sequences::SEQUENCE_NAME_MAX;
use millrace_types::{Failure, InSequence, Reason, SequenceId};

/// Parameter with the id of a request's sequence.
pub(crate) const SEQUENCE_ID: &str = "sequence_id";
/// Parameter that requests an output in binary (REST).
pub(crate) const BINARY: &str = "binary_data";
/// Parameter with the length of an input in binary after the JSON (REST).
pub(crate) const BINARY_SIZE: &str = "binary_data_size";
/// All parameters that the gateway reads.
pub(crate) const KNOWN: [&str; 10] = [
    "priority",
    "timeout",
    "binary_data_output",
    SEQUENCE_ID,
    "sequence_start",
    "sequence_end",
    BINARY,
    BINARY_SIZE,
    "shared_memory_region",
    "classification",
];

/// A parameter's value, in either protocol.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum ParameterValue<'a> {
    Bool(bool),
    Count(u64),
    /// A negative integer; only in gRPC.
    Negative(i64),
    Text(&'a str),
    Other,
}

impl<'a> From<&'a InferParameter> for ParameterValue<'a> {
    fn from(wire: &'a InferParameter) -> Self {
        match &wire.parameter_choice {
            Some(ParameterChoice::BoolParam(flag)) => Self::Bool(*flag),
            Some(ParameterChoice::Uint64Param(n)) => Self::Count(*n),
            Some(ParameterChoice::Int64Param(n)) => u64::try_from(*n).map_or(Self::Negative(*n), Self::Count),
            Some(ParameterChoice::StringParam(text)) => Self::Text(text),
            _ => Self::Other,
        }
    }
}

/// The parameters of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequestParameters {
    /// Priority: 1 is the highest, and 0 leaves the choice to the server.
    pub priority: u64,
    /// Time that the client waits, if given.
    pub timeout: Option<Duration>,
    /// Whether outputs are sent in binary unless they request otherwise (REST).
    pub binary_output: bool,
    /// Sequence of the request, in terms of Triton's sequence extension.
    pub sequence: Option<InSequence>,
}

impl RequestParameters {
    /// Reads a request's parameters.
    pub(crate) fn read<'a>(
        given: impl Iterator<Item = (&'a str, ParameterValue<'a>)>,
    ) -> Result<Self, Failure> {
        let mut read = Self::default();
        let mut sequence = None;
        let mut start = false;
        let mut end = false;
        for (name, value) in given {
            match name {
                "priority" => read.priority = count(name, value)?,
                // In Triton's protocol, 0 means no timeout.
                "timeout" => {
                    let timeout = Duration::from_micros(count(name, value)?).min(TIMEOUT_MAX);
                    read.timeout = (!timeout.is_zero()).then_some(timeout);
                }
                "binary_data_output" => read.binary_output = flag(name, value)?,
                SEQUENCE_ID => sequence = sequence_id(value)?,
                "sequence_start" => start = flag(name, value)?,
                "sequence_end" => end = flag(name, value)?,
                _ => {}
            }
        }
        read.sequence = sequence.map(|id| InSequence { id, start, end });
        Ok(read)
    }
}

fn count(name: &str, value: ParameterValue<'_>) -> Result<u64, Failure> {
    match value {
        ParameterValue::Count(n) => Ok(n),
        _ => Err(Failure::malformed(format!("parameter {name:?} must be an integer, and not negative"))),
    }
}

/// Reads a sequence id. In Triton's protocol, 0 and an empty text mean no sequence. Triton's C++
/// client writes numbers from 2^63 into a signed field, from which Triton's server reads them
/// unchanged.
pub(crate) fn sequence_id(value: ParameterValue<'_>) -> Result<Option<SequenceId>, Failure> {
    match value {
        ParameterValue::Count(n) => Ok(NonZeroU64::new(n).map(SequenceId::Number)),
        ParameterValue::Negative(n) => Ok(NonZeroU64::new(n.cast_unsigned()).map(SequenceId::Number)),
        ParameterValue::Text("") => Ok(None),
        ParameterValue::Text(text) if text.len() <= SEQUENCE_NAME_MAX => {
            Ok(Some(SequenceId::Name(text.to_owned())))
        }
        _ => Err(Failure::malformed(format!(
            "parameter {SEQUENCE_ID:?} must be an integer from 1, or a text of up to {SEQUENCE_NAME_MAX} bytes"
        ))),
    }
}

/// Reads a boolean parameter.
pub(crate) fn flag(name: &str, value: ParameterValue<'_>) -> Result<bool, Failure> {
    match value {
        ParameterValue::Bool(flag) => Ok(flag),
        _ => Err(Failure::malformed(format!("parameter {name:?} must be true or false"))),
    }
}

/// Refuses parameters of an input or output that request unsupported features.
pub(crate) fn refuse_unserved<'a>(
    tensor: &str,
    mut given: impl Iterator<Item = (&'a str, ParameterValue<'a>)>,
) -> Result<(), Failure> {
    let unserved = given.find_map(|(name, value)| match name {
        "shared_memory_region" => Some("shared memory is not served: send the contents in the request"),
        "classification" if value != ParameterValue::Count(0) => {
            Some("classification is not served: sort the output where you read it")
        }
        _ => None,
    });
    match unserved {
        Some(why) => Err(Failure::new(Reason::Unimplemented, format!("tensor {tensor:?}: {why}"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a>(given: &[(&'a str, ParameterValue<'a>)]) -> Result<RequestParameters, Failure> {
        RequestParameters::read(given.iter().copied())
    }

    #[test]
    fn known_parameters_are_read_and_others_ignored() {
        let given = [
            ("priority", ParameterValue::Count(2)),
            ("timeout", ParameterValue::Count(1500)),
            ("colour", ParameterValue::Text("blue")),
            ("binary_data_output", ParameterValue::Bool(true)),
        ];
        let timeout = Some(Duration::from_micros(1500));
        let expected = RequestParameters { priority: 2, timeout, binary_output: true, sequence: None };
        assert_eq!(read(&given), Ok(expected));
    }

    #[test]
    fn a_sequence_id_may_be_a_number_or_a_text() {
        let long = "s".repeat(SEQUENCE_NAME_MAX + 1);
        let largest = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(-1)) };
        let id = |value| {
            let given = [("sequence_start", ParameterValue::Bool(true)), ("sequence_id", value)];
            read(&given).map(|it| it.sequence)
        };
        let begins = |id| Ok(Some(InSequence { id, start: true, end: false }));
        assert_eq!(id(ParameterValue::Count(1)), begins(SequenceId::Number(NonZeroU64::MIN)));
        assert_eq!(
            id(ParameterValue::Text("1")),
            begins(SequenceId::Name("1".into())),
            "a text is not the same id as the number"
        );
        assert_eq!(id(ParameterValue::from(&largest)), begins(SequenceId::Number(NonZeroU64::MAX)));
        assert_eq!((id(ParameterValue::Count(0)), id(ParameterValue::Text(""))), (Ok(None), Ok(None)));
        let ends =
            read(&[("sequence_id", ParameterValue::Count(1)), ("sequence_end", ParameterValue::Bool(true))]);
        assert!(ends.unwrap().sequence.is_some_and(|it| it.end && !it.start));
        for wrong in [ParameterValue::Text(&long), ParameterValue::Bool(true), ParameterValue::Other] {
            assert_eq!(id(wrong).unwrap_err().reason, Reason::MalformedRequest);
        }
    }

    #[test]
    fn a_timeout_of_zero_is_none_and_a_long_one_is_capped() {
        assert_eq!(read(&[("timeout", ParameterValue::Count(0))]).unwrap().timeout, None);
        assert_eq!(read(&[("timeout", ParameterValue::Count(u64::MAX))]).unwrap().timeout, Some(TIMEOUT_MAX));
    }

    #[test]
    fn known_parameters_of_a_wrong_type_are_refused() {
        for wrong in [
            ("priority", ParameterValue::Other),
            ("timeout", ParameterValue::Bool(true)),
            ("binary_data_output", ParameterValue::Count(1)),
            ("sequence_start", ParameterValue::Count(1)),
            ("sequence_end", ParameterValue::Text("true")),
        ] {
            assert_eq!(read(&[wrong]).unwrap_err().reason, Reason::MalformedRequest);
        }
        let negative = InferParameter { parameter_choice: Some(ParameterChoice::Int64Param(-1)) };
        assert!(read(&[("timeout", ParameterValue::from(&negative))]).is_err());
    }

    #[test]
    fn parameters_that_would_change_the_response_are_refused() {
        let refused = refuse_unserved("x", [("classification", ParameterValue::Count(3))].into_iter());
        assert_eq!(refused.unwrap_err().reason, Reason::Unimplemented);
        assert!(refuse_unserved("x", [("shared_memory_region", ParameterValue::Other)].into_iter()).is_err());
        assert!(
            refuse_unserved(
                "x",
                [("classification", ParameterValue::Count(0)), ("mine", ParameterValue::Other)].into_iter()
            )
            .is_ok()
        );
    }
}
