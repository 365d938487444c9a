//! Functions that keep state between requests (T11): the inputs and outputs of the model that are
//! state, and the idle time after which a sequence of requests ends. The rules follow Triton's
//! `sequence_batching` with implicit state, so that knowledge of Triton applies here.

use std::fmt;
use std::num::NonZeroU64;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::limits::STATES_MAX;
use crate::signature::{Signature, SignatureRef};
use crate::tensor::{DataType, Dim, TensorSpec, element_count, shape_text};

/// The default number of sequences that a worker keeps for a function.
pub const SEQUENCES_DEFAULT: u32 = 64;
/// Maximum number of sequences that a worker keeps for a function.
pub const SEQUENCES_MAX: u32 = 1024;
/// The default time after which an idle sequence ends.
pub const IDLE_DEFAULT: Duration = Duration::from_secs(60);
/// The longest time after which an idle sequence may end: a day.
pub const IDLE_MAX: Duration = Duration::from_secs(24 * 3600);
/// Maximum length of a sequence's name, in bytes, as in Triton.
pub const SEQUENCE_NAME_MAX: usize = 128;

/// The sequence state of a function.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct SequenceSpec {
    /// The outputs of the model that become inputs of the sequence's next request.
    pub state: Vec<StatePair>,
    /// The time without a request after which a sequence ends.
    pub idle: Duration,
    /// Maximum number of sequences on the worker at one time.
    pub max: u32,
}

/// A state tensor: an output of a request, and the input of the next request that receives the
/// output.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StatePair {
    /// The name of the model's input, which is zeros when a sequence begins.
    pub input: String,
    /// The name of the model's output.
    pub output: String,
}

/// A state tensor as a model declares the tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateTensor {
    /// The declaration of the input.
    pub input: TensorSpec,
    /// The name of the output that becomes the input of the next request.
    pub output: String,
    /// The size of the tensor, in bytes.
    pub bytes: usize,
}

/// The fault of a sequence declaration, found without looking at the model.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SequenceSpecError {
    /// There is no state tensor, or there are more than [`STATES_MAX`].
    #[error(
        "sequences.state has {0} tensors: name 1 to {STATES_MAX}, or leave sequences out for a function without state"
    )]
    States(usize),
    /// The same input or output is named twice.
    #[error("sequences.state has {0:?} twice: name each input and each output once")]
    Twice(String),
    /// The idle time is zero or exceeds [`IDLE_MAX`].
    #[error("sequences.idle {0:?} is out of range: write a time above zero and up to 24h, such as 60s")]
    Idle(Duration),
    /// The number of sequences is zero or exceeds [`SEQUENCES_MAX`].
    #[error(
        "sequences.max is {0}: write a number from 1 to {SEQUENCES_MAX}, or leave max out for {SEQUENCES_DEFAULT}"
    )]
    Max(u32),
    /// The function has several replicas, each of which would have sequences of its own.
    #[error(
        "replicas is {0}: a function with sequences runs on one worker, which keeps their state; write 1, or leave replicas out"
    )]
    Replicas(u32),
    /// The function has both sequences and batching.
    #[error("sequences and batching exclude each other: leave one out")]
    Batched,
}

/// The fault of a state declaration that the model cannot satisfy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StateTensorError {
    /// The model has no such input or output.
    #[error("sequences.state names the {which} {name:?}, which the model does not have: the model has {}", known.join(", "))]
    Unknown {
        /// The kind of the tensor: "input" or "output".
        which: &'static str,
        /// The name that the declaration uses.
        name: String,
        /// The quoted names that the model has.
        known: Vec<String>,
    },
    /// The output and the input differ in datatype or shape.
    #[error(
        "sequences.state pairs output {output:?}, {} of shape {}, with input {input:?}, {} of shape {}: both must have the same datatype and shape",
        .gives.0, shape_text(&.gives.1), .takes.0, shape_text(&.takes.1)
    )]
    Differs {
        /// The name of the output.
        output: String,
        /// The datatype and shape of the output.
        gives: (DataType, Vec<Dim>),
        /// The name of the input.
        input: String,
        /// The datatype and shape of the input.
        takes: (DataType, Vec<Dim>),
    },
    /// The size of the state is not known beforehand.
    #[error(
        "state tensor {input:?} is {datatype} of shape {}: export the model with a datatype of fixed size and a shape without free dimensions",
        shape_text(shape)
    )]
    Free {
        /// The name of the input.
        input: String,
        /// The datatype of the input.
        datatype: DataType,
        /// The shape of the input.
        shape: Vec<Dim>,
    },
}

impl SequenceSpec {
    /// Checks every field against its range, and the fields of the function that exclude sequences.
    ///
    /// # Errors
    /// The first [`SequenceSpecError`] found.
    pub fn validate(&self, replicas: u32, batched: bool) -> Result<(), SequenceSpecError> {
        if !(1..=STATES_MAX).contains(&self.state.len()) {
            return Err(SequenceSpecError::States(self.state.len()));
        }
        for (place, pair) in self.state.iter().enumerate() {
            let before = &self.state[..place];
            if before.iter().any(|it| it.input == pair.input) {
                return Err(SequenceSpecError::Twice(pair.input.clone()));
            }
            if before.iter().any(|it| it.output == pair.output) {
                return Err(SequenceSpecError::Twice(pair.output.clone()));
            }
        }
        if self.idle.is_zero() || self.idle > IDLE_MAX {
            return Err(SequenceSpecError::Idle(self.idle));
        }
        if !(1..=SEQUENCES_MAX).contains(&self.max) {
            return Err(SequenceSpecError::Max(self.max));
        }
        if replicas != 1 {
            return Err(SequenceSpecError::Replicas(replicas));
        }
        if batched { Err(SequenceSpecError::Batched) } else { Ok(()) }
    }

    /// Returns the state tensors as a model declares them, in the order of `state`.
    ///
    /// # Errors
    /// The first [`StateTensorError`] found.
    pub fn states(&self, model: SignatureRef<'_>) -> Result<Vec<StateTensor>, StateTensorError> {
        self.state.iter().map(|pair| state(pair, model)).collect()
    }

    /// Returns the inputs and outputs of a model that clients see: all but the state.
    #[must_use]
    pub fn shown(&self, model: SignatureRef<'_>) -> Signature {
        let inputs = model.inputs.iter().filter(|it| self.state.iter().all(|pair| pair.input != it.name));
        let outputs = model.outputs.iter().filter(|it| self.state.iter().all(|pair| pair.output != it.name));
        Signature { inputs: inputs.cloned().collect(), outputs: outputs.cloned().collect() }
    }
}

fn state(pair: &StatePair, model: SignatureRef<'_>) -> Result<StateTensor, StateTensorError> {
    let find = |which, name: &str, specs: &[TensorSpec]| {
        specs.iter().find(|spec| spec.name == name).cloned().ok_or_else(|| StateTensorError::Unknown {
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
        return Err(StateTensorError::Free { input, datatype, shape });
    };
    if (input.datatype, &input.shape) != (output.datatype, &output.shape) {
        return Err(StateTensorError::Differs {
            output: output.name,
            gives: (output.datatype, output.shape),
            input: input.name,
            takes: (input.datatype, input.shape),
        });
    }
    Ok(StateTensor { input, output: output.name, bytes })
}

/// The id of a sequence within a function: the protocol's `sequence_id`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SequenceId {
    /// A number. In the protocol, 0 means no sequence.
    Number(NonZeroU64),
    /// A text of up to [`SEQUENCE_NAME_MAX`] bytes. In the protocol, the empty text means no
    /// sequence.
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

/// The error for a text that is not a sequence id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a sequence id is a number from 1, or a text of 1 to {SEQUENCE_NAME_MAX} bytes")]
pub struct ParseSequenceIdError;

/// Parses the form that people write: a text of digits alone is a number.
impl FromStr for SequenceId {
    type Err = ParseSequenceIdError;

    fn from_str(text: &str) -> Result<Self, ParseSequenceIdError> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().map(Self::Number).map_err(|_| ParseSequenceIdError);
        }
        if text.len() > SEQUENCE_NAME_MAX {
            Err(ParseSequenceIdError)
        } else {
            Ok(Self::Name(text.to_owned()))
        }
    }
}

/// The sequence that a request belongs to, and the request's position.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct InSequence {
    /// The id of the sequence.
    pub id: SequenceId,
    /// Whether the request begins the sequence. A sequence with the same id begins again, with
    /// state of zeros.
    pub start: bool,
    /// Whether the request ends the sequence. The state is freed after the response.
    pub end: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequences() -> SequenceSpec {
        let pair = |input: &str, output: &str| StatePair { input: input.into(), output: output.into() };
        let state = vec![pair("h_in", "h_out"), pair("c_in", "c_out")];
        SequenceSpec { state, idle: IDLE_DEFAULT, max: SEQUENCES_DEFAULT }
    }

    fn tensor(name: &str, datatype: DataType, shape: &[Dim]) -> TensorSpec {
        TensorSpec { name: name.into(), datatype, shape: shape.to_vec() }
    }

    fn model() -> Signature {
        let one = [Dim::Fixed(1), Dim::Fixed(4)];
        let free = [Dim::Symbol("N".into())];
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
    fn a_text_of_digits_is_a_number_and_other_texts_are_names() {
        assert_eq!("7".parse(), Ok(SequenceId::Number(NonZeroU64::new(7).unwrap())));
        assert_eq!("7a".parse(), Ok(SequenceId::Name("7a".into())));
        let long = "s".repeat(SEQUENCE_NAME_MAX + 1);
        for none in ["", "0", "99999999999999999999", long.as_str()] {
            assert_eq!(none.parse::<SequenceId>(), Err(ParseSequenceIdError), "{none}");
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
            ("the same datatype and shape", refused(|model| model.outputs[0].datatype = DataType::Fp16)),
            ("the same datatype and shape", refused(|model| model.outputs[0].shape[1] = Dim::Fixed(5))),
            ("without free dimensions", refused(|model| model.inputs[2].shape[0] = Dim::Symbol("N".into()))),
            ("fixed size", refused(|model| model.inputs[2].datatype = DataType::Bytes)),
            ("fixed size", refused(|model| model.inputs[2].shape[0] = Dim::Fixed(u64::MAX))),
        ] {
            assert!(message.contains(says), "{says}: {message}");
        }
    }

    #[test]
    fn bad_sequence_settings_are_refused() {
        let check = |change: fn(&mut SequenceSpec)| {
            let mut sequences = sequences();
            change(&mut sequences);
            sequences.validate(1, false)
        };
        assert_eq!(check(|_| {}), Ok(()));
        assert_eq!(check(|it| it.state.clear()), Err(SequenceSpecError::States(0)));
        assert_eq!(
            check(|it| it.state[1].input = "h_in".into()),
            Err(SequenceSpecError::Twice("h_in".into()))
        );
        assert_eq!(
            check(|it| it.state[1].output = "h_out".into()),
            Err(SequenceSpecError::Twice("h_out".into()))
        );
        assert_eq!(check(|it| it.idle = Duration::ZERO), Err(SequenceSpecError::Idle(Duration::ZERO)));
        assert_eq!(check(|it| it.idle = IDLE_MAX * 2), Err(SequenceSpecError::Idle(IDLE_MAX * 2)));
        assert_eq!(check(|it| it.max = 0), Err(SequenceSpecError::Max(0)));
        assert_eq!(check(|it| it.max = SEQUENCES_MAX + 1), Err(SequenceSpecError::Max(SEQUENCES_MAX + 1)));
        assert_eq!(sequences().validate(2, false), Err(SequenceSpecError::Replicas(2)));
        assert_eq!(sequences().validate(1, true), Err(SequenceSpecError::Batched));
    }
}
