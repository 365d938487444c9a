//! Functions that keep state from one request to the next (T11): what of their models' inputs and
//! outputs it is, and how long a sequence of requests may be silent. It follows Triton's
//! `sequence_batching` with implicit state, so that what its users know holds here.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::limits::STATES_MAX;
use crate::tensor::{DataType, Dim, TensorSpec, element_count, shape_text};
use crate::workflow::{Ports, Signature};

/// The sequences that a worker keeps of a function, when it names no number.
pub const SEQUENCES_DEFAULT: u32 = 64;
/// The most sequences that a worker keeps of a function.
pub const SEQUENCES_MAX: u32 = 1024;
/// How long a sequence that nobody asks for is kept, when its function names no time.
pub const IDLE_DEFAULT: Duration = Duration::from_secs(60);
/// The longest that a sequence that nobody asks for is kept: a day.
pub const IDLE_MAX: Duration = Duration::from_secs(24 * 3600);
/// The most bytes of a sequence's name, as Triton has it.
pub const SEQUENCE_NAME_MAX: usize = 128;

/// The state of a function.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sequences {
    /// The model's outputs that are its inputs again with the next request of a sequence.
    pub state: Vec<StatePair>,
    /// A sequence that nobody asked for so long ends.
    pub idle: Duration,
    /// How many there are at one time on the worker.
    pub max: u32,
}

/// An output that is kept, and the input that it is with the next request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StatePair {
    /// The model's input. Zeros at a sequence's beginning.
    pub input: String,
    /// The model's output.
    pub output: String,
}

/// A tensor of state as a model declares it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateTensor {
    /// The input.
    pub input: TensorSpec,
    /// The output that it is next.
    pub output: String,
    /// Its size.
    pub bytes: usize,
}

/// What a function with state is refused for, whatever its model is.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SequencesError {
    /// No state, or more than [`STATES_MAX`].
    #[error(
        "sequences.state has {0} tensors: name 1 to {STATES_MAX}, or leave sequences out for a function without state"
    )]
    States(usize),
    /// The same input, or output, twice.
    #[error("sequences.state has {0:?} twice: name each input and each output once")]
    Twice(String),
    /// A zero or endless time.
    #[error("sequences.idle {0:?} is out of range: write a time above zero and up to 24h, such as 60s")]
    Idle(Duration),
    /// No sequence, or more than [`SEQUENCES_MAX`].
    #[error(
        "sequences.max is {0}: write a number from 1 to {SEQUENCES_MAX}, or leave it out for {SEQUENCES_DEFAULT}"
    )]
    Max(u32),
    /// Several workers, each of which would have sequences of its own.
    #[error(
        "replicas is {0}: a function with sequences is on one worker, which has their state; write 1, or leave it out"
    )]
    Replicas(u32),
    /// Requests that run as one.
    #[error("sequences and batching exclude each other: leave one out")]
    Batched,
}

/// A model that cannot keep the state that is asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// No such input or output.
    #[error("sequences.state names the {which} {name:?}, which the model has not: it has {}", known.join(", "))]
    Unknown {
        /// Input or output.
        which: &'static str,
        /// The name.
        name: String,
        /// Those there are.
        known: Vec<String>,
    },
    /// What comes out is not what goes in.
    #[error(
        "sequences.state hands output {output:?}, {} of shape {}, to input {input:?}, {} of shape {}: both have to be the same",
        .gives.0, shape_text(&.gives.1), .takes.0, shape_text(&.takes.1)
    )]
    Differs {
        /// The output.
        output: String,
        /// Its type and shape.
        gives: (DataType, Vec<Dim>),
        /// The input.
        input: String,
        /// Its type and shape.
        takes: (DataType, Vec<Dim>),
    },
    /// Its size is not known beforehand.
    #[error(
        "the state {input:?} is {datatype} of shape {}: state has a datatype of fixed size and a shape without free dimensions; export the model so",
        shape_text(shape)
    )]
    Free {
        /// The input.
        input: String,
        /// Its type.
        datatype: DataType,
        /// Its shape.
        shape: Vec<Dim>,
    },
}

impl Sequences {
    /// Checks every field against its range, and what else of a function excludes it.
    ///
    /// # Errors
    /// The first [`SequencesError`] found.
    pub fn validate(&self, replicas: u32, batched: bool) -> Result<(), SequencesError> {
        if !(1..=STATES_MAX).contains(&self.state.len()) {
            return Err(SequencesError::States(self.state.len()));
        }
        for (place, pair) in self.state.iter().enumerate() {
            let before = &self.state[..place];
            if before.iter().any(|it| it.input == pair.input) {
                return Err(SequencesError::Twice(pair.input.clone()));
            }
            if before.iter().any(|it| it.output == pair.output) {
                return Err(SequencesError::Twice(pair.output.clone()));
            }
        }
        if self.idle.is_zero() || self.idle > IDLE_MAX {
            return Err(SequencesError::Idle(self.idle));
        }
        if !(1..=SEQUENCES_MAX).contains(&self.max) {
            return Err(SequencesError::Max(self.max));
        }
        if replicas != 1 {
            return Err(SequencesError::Replicas(replicas));
        }
        if batched { Err(SequencesError::Batched) } else { Ok(()) }
    }

    /// The state as a model declares it, in the order named.
    ///
    /// # Errors
    /// The first [`StateError`] found.
    pub fn states(&self, model: Ports<'_>) -> Result<Vec<StateTensor>, StateError> {
        self.state.iter().map(|pair| state(pair, model)).collect()
    }

    /// What of a model's inputs and outputs clients see: all but the state.
    #[must_use]
    pub fn shown(&self, model: Ports<'_>) -> Signature {
        let inputs = model.inputs.iter().filter(|it| self.state.iter().all(|pair| pair.input != it.name));
        let outputs = model.outputs.iter().filter(|it| self.state.iter().all(|pair| pair.output != it.name));
        Signature { inputs: inputs.cloned().collect(), outputs: outputs.cloned().collect() }
    }
}

fn state(pair: &StatePair, model: Ports<'_>) -> Result<StateTensor, StateError> {
    let find = |which, name: &str, specs: &[TensorSpec]| {
        specs.iter().find(|spec| spec.name == name).cloned().ok_or_else(|| StateError::Unknown {
            which,
            name: name.to_owned(),
            known: specs.iter().map(|spec| format!("{:?}", spec.name)).collect(),
        })
    };
    let input = find("input", &pair.input, model.inputs)?;
    let output = find("output", &pair.output, model.outputs)?;
    let fixed = input.shape.iter().all(|dim| matches!(dim, Dim::Fixed(_)));
    let elements = if fixed { element_count(&input.wire_shape()) } else { None };
    let Some(bytes) = elements.zip(input.datatype.size()).and_then(|(n, size)| n.checked_mul(size)) else {
        let TensorSpec { name: input, datatype, shape } = input;
        return Err(StateError::Free { input, datatype, shape });
    };
    if (input.datatype, &input.shape) != (output.datatype, &output.shape) {
        return Err(StateError::Differs {
            output: output.name,
            gives: (output.datatype, output.shape),
            input: input.name,
            takes: (input.datatype, input.shape),
        });
    }
    Ok(StateTensor { input, output: output.name, bytes })
}

/// Which sequence of a function a request is of: the protocol's `sequence_id`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SequenceId {
    /// A number. The protocol's 0 is no sequence.
    Number(NonZeroU64),
    /// A text of up to [`SEQUENCE_NAME_MAX`] bytes. The protocol's empty one is no sequence.
    Name(String),
}

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Name(name) => write!(f, "{name:?}"),
        }
    }
}

/// A text that names no sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a sequence is a number from 1, or a text of 1 to {SEQUENCE_NAME_MAX} bytes")]
pub struct NoSequenceId;

/// As people write it: what is only digits is a number.
impl FromStr for SequenceId {
    type Err = NoSequenceId;

    fn from_str(text: &str) -> Result<Self, NoSequenceId> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().map(Self::Number).map_err(|_| NoSequenceId);
        }
        if text.len() > SEQUENCE_NAME_MAX { Err(NoSequenceId) } else { Ok(Self::Name(text.to_owned())) }
    }
}

/// A request's place in a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InSequence {
    /// Which.
    pub id: SequenceId,
    /// It begins it, anew where there is one: state is zeros.
    pub start: bool,
    /// It ends it: state goes with its answer.
    pub end: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequences() -> Sequences {
        let pair = |input: &str, output: &str| StatePair { input: input.into(), output: output.into() };
        let state = vec![pair("h_in", "h_out"), pair("c_in", "c_out")];
        Sequences { state, idle: IDLE_DEFAULT, max: SEQUENCES_DEFAULT }
    }

    fn tensor(name: &str, datatype: DataType, shape: &[Dim]) -> TensorSpec {
        TensorSpec { name: name.into(), datatype, shape: shape.to_vec() }
    }

    fn model() -> Signature {
        let (one, free) = ([Dim::Fixed(1), Dim::Fixed(4)], [Dim::Symbol("N".into())]);
        Signature {
            inputs: vec![
                tensor("x", DataType::Fp32, &free),
                tensor("c_in", DataType::Int64, &one),
                tensor("h_in", DataType::Fp32, &one),
            ],
            outputs: vec![
                tensor("h_out", DataType::Fp32, &one),
                tensor("y", DataType::Fp32, &free),
                tensor("c_out", DataType::Int64, &one),
            ],
        }
    }

    #[test]
    fn clients_see_all_but_the_state() {
        let model = model();
        let states = sequences().states((&model).into()).unwrap();
        let found: Vec<_> =
            states.iter().map(|it| (it.input.name.as_str(), it.output.as_str(), it.bytes)).collect();
        assert_eq!(found, [("h_in", "h_out", 16), ("c_in", "c_out", 32)]);
        let shown = sequences().shown((&model).into());
        let names = |specs: &[TensorSpec]| specs.iter().map(|it| it.name.clone()).collect::<Vec<_>>();
        assert_eq!((names(&shown.inputs), names(&shown.outputs)), (vec!["x".into()], vec!["y".into()]));
    }

    #[test]
    fn people_write_a_sequence_as_a_number_or_a_text() {
        assert_eq!("7".parse(), Ok(SequenceId::Number(NonZeroU64::new(7).unwrap())));
        assert_eq!("7a".parse(), Ok(SequenceId::Name("7a".into())));
        let long = "s".repeat(SEQUENCE_NAME_MAX + 1);
        for none in ["", "0", "99999999999999999999", long.as_str()] {
            assert_eq!(none.parse::<SequenceId>(), Err(NoSequenceId), "{none}");
        }
    }

    #[test]
    fn a_model_that_cannot_keep_the_state_is_refused() {
        let refused = |change: fn(&mut Signature)| {
            let mut model = model();
            change(&mut model);
            sequences().states((&model).into()).unwrap_err().to_string()
        };
        for (says, message) in [
            ("the input \"h_in\"", refused(|model| model.inputs[2].name = "h".into())),
            ("the output \"c_out\"", refused(|model| model.outputs[2].name = "c".into())),
            ("both have to be the same", refused(|model| model.outputs[0].datatype = DataType::Fp16)),
            ("both have to be the same", refused(|model| model.outputs[0].shape[1] = Dim::Fixed(5))),
            ("without free dimensions", refused(|model| model.inputs[2].shape[0] = Dim::Symbol("N".into()))),
            ("fixed size", refused(|model| model.inputs[2].datatype = DataType::Bytes)),
            ("fixed size", refused(|model| model.inputs[2].shape[0] = Dim::Fixed(u64::MAX))),
        ] {
            assert!(message.contains(says), "{says}: {message}");
        }
    }

    #[test]
    fn each_bad_setting_is_refused() {
        let check = |change: fn(&mut Sequences)| {
            let mut sequences = sequences();
            change(&mut sequences);
            sequences.validate(1, false)
        };
        assert_eq!(check(|_| {}), Ok(()));
        assert_eq!(check(|it| it.state.clear()), Err(SequencesError::States(0)));
        assert_eq!(check(|it| it.state[1].input = "h_in".into()), Err(SequencesError::Twice("h_in".into())));
        assert_eq!(
            check(|it| it.state[1].output = "h_out".into()),
            Err(SequencesError::Twice("h_out".into()))
        );
        assert_eq!(check(|it| it.idle = Duration::ZERO), Err(SequencesError::Idle(Duration::ZERO)));
        assert_eq!(check(|it| it.idle = IDLE_MAX * 2), Err(SequencesError::Idle(IDLE_MAX * 2)));
        assert_eq!(check(|it| it.max = 0), Err(SequencesError::Max(0)));
        assert_eq!(check(|it| it.max = SEQUENCES_MAX + 1), Err(SequencesError::Max(SEQUENCES_MAX + 1)));
        assert_eq!(sequences().validate(2, false), Err(SequencesError::Replicas(2)));
        assert_eq!(sequences().validate(1, true), Err(SequencesError::Batched));
    }
}
