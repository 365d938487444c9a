//! The inputs of a run. The inputs of batched requests are concatenated along the first dimension.
//! The outputs are returned whole, and the worker cuts them; or the outputs stay on the GPU, and the
//! worker places the rows of each request.
//!
//! If the requests do not match, or an output does not have a row for each input row, the run fails.
//! The worker then runs each request alone.

use std::collections::HashMap;

use millrace_engine::{Engine, Error as EngineError, Queue as _, TensorBytes, TensorPart as Bytes};
use millrace_proto::executor::Tensor;
use millrace_types::DataType;

use crate::memory::mapping::MappingUse;
use crate::memory::objects::{self, ObjectBytes, ObjectTable};
use crate::socket::conversions::{self, FrameDescriptors, InputContents, ReceivedInput};

/// Reason why requests cannot run as a batch.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BatchError {
    #[error(transparent)]
    Message(#[from] conversions::Error),
    #[error("got {inputs} inputs, which {members} requests cannot share equally")]
    Count { inputs: usize, members: usize },
    #[error("input {0:?} is given twice")]
    Twice(String),
    #[error("input {0:?} differs between the requests of a batch in more than its rows")]
    Unlike(String),
    #[error("the inputs of one request have different numbers of rows")]
    Rows,
    #[error("input {0:?}: {1}")]
    Object(String, objects::Error),
}

/// The rows of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BatchRows {
    /// Sum of the rows of all requests.
    pub(crate) all: usize,
    /// Rows of the request with the most rows.
    pub(crate) most: usize,
}

/// The inputs of a run.
#[derive(Debug)]
pub(crate) struct RunInputs<E: Engine> {
    pub(crate) tensors: HashMap<String, RunInput<E>>,
    /// Rows of the batch; `None` for a single request.
    pub(crate) rows: Option<BatchRows>,
    /// Uses that pin the objects among the inputs. The uses must be dropped after all values that view
    /// the objects.
    pub(crate) uses: Vec<MappingUse<E>>,
}

/// An input, in parts: a part for each request of the batch.
#[derive(Debug)]
pub(crate) struct RunInput<E: Engine> {
    pub(crate) datatype: DataType,
    shape: Vec<usize>,
    parts: Vec<InputPart<E>>,
}

#[derive(Debug)]
enum InputPart<E: Engine> {
    Host(TensorBytes),
    Object(ObjectBytes<E>),
}

impl<E: Engine> RunInput<E> {
    /// Returns the number of bytes if all parts arrived inline.
    pub(crate) fn inline_bytes(&self) -> Option<usize> {
        let bytes = |part: &InputPart<E>| match part {
            InputPart::Host(TensorBytes::Inline(bytes)) => Some(bytes.len()),
            InputPart::Host(TensorBytes::File(_)) | InputPart::Object(_) => None,
        };
        self.parts.iter().map(bytes).sum()
    }

    /// Returns an error for the first object of this input that is not completely loaded.
    pub(crate) fn check_loaded(&self) -> Result<(), objects::Error> {
        self.parts.iter().try_for_each(|part| match part {
            InputPart::Host(_) => Ok(()),
            InputPart::Object(bytes) => bytes.check_loaded(),
        })
    }

    /// Moves the input to the device. An input from a single object, which must be loaded, is read in place.
    pub(crate) fn value(self, launches: &mut E::Queue) -> Result<E::Value, EngineError> {
        let Self { datatype, shape, parts } = self;
        if let [InputPart::Object(part)] = parts.as_slice() {
            return launches.view_region(datatype, shape, part.region(), part.bytes.clone());
        }
        let parts = parts.iter().map(|part| match part {
            InputPart::Host(contents) => Bytes::Host(contents),
            InputPart::Object(part) => Bytes::Region(part.region(), part.bytes.clone()),
        });
        launches.gather(datatype, shape, parts.collect())
    }
}

/// Reads the inputs of `members` requests, which follow each other request by request. With `members`
/// 0 or 1, the inputs belong to a single request and are used unchanged.
pub(crate) fn inputs<E: Engine>(
    inputs: Vec<Tensor>,
    members: u32,
    objects: &ObjectTable<E>,
    descriptors: &mut FrameDescriptors,
) -> Result<RunInputs<E>, BatchError> {
    let members = (members as usize).max(1);
    let each = inputs.len() / members;
    if each * members != inputs.len() || (members > 1 && each == 0) {
        return Err(BatchError::Count { inputs: inputs.len(), members });
    }
    let mut first = HashMap::with_capacity(each);
    let mut rest: HashMap<String, Vec<RunInput<E>>> = HashMap::new();
    let mut rows = vec![None; members];
    let mut uses = Vec::new();
    for (place, input) in inputs.into_iter().enumerate() {
        let (name, tensor) = input_of(conversions::tensor(input, descriptors)?, objects, &mut uses)?;
        if members > 1 {
            let of = &mut rows[place / each];
            let here = tensor.shape.first().copied().ok_or_else(|| BatchError::Unlike(name.clone()))?;
            if *of.get_or_insert(here) != here {
                return Err(BatchError::Rows);
            }
        }
        if place < each {
            if first.insert(name.clone(), tensor).is_some() {
                return Err(BatchError::Twice(name));
            }
        } else {
            rest.entry(name).or_default().push(tensor);
        }
    }
    if members == 1 {
        return Ok(RunInputs { tensors: first, rows: None, uses });
    }
    let joined = first.into_iter().map(|(name, tensor)| {
        let others = rest.remove(&name).filter(|others| others.len() == members - 1);
        let others = others.ok_or_else(|| BatchError::Unlike(name.clone()))?;
        let tensor = join(&name, tensor, others)?;
        Ok((name, tensor))
    });
    let tensors = joined.collect::<Result<_, BatchError>>()?;
    match rest.into_keys().min() {
        Some(name) => Err(BatchError::Unlike(name)),
        None => {
            let rows = rows.into_iter().flatten();
            let rows = BatchRows { all: rows.clone().sum(), most: rows.max().unwrap_or(0) };
            Ok(RunInputs { tensors, rows: Some(rows), uses })
        }
    }
}

fn input_of<E: Engine>(
    given: ReceivedInput,
    objects: &ObjectTable<E>,
    uses: &mut Vec<MappingUse<E>>,
) -> Result<(String, RunInput<E>), BatchError> {
    let ReceivedInput { name, datatype, shape, contents } = given;
    let part = match contents {
        InputContents::Host(contents) => InputPart::Host(contents),
        InputContents::Object(part) => {
            let (bytes, using) =
                objects.part(part).map_err(|error| BatchError::Object(name.clone(), error))?;
            uses.push(using);
            InputPart::Object(bytes)
        }
    };
    Ok((name, RunInput { datatype, shape, parts: vec![part] }))
}

fn join<E: Engine>(
    name: &str,
    first: RunInput<E>,
    others: Vec<RunInput<E>>,
) -> Result<RunInput<E>, BatchError> {
    let alike =
        |other: &RunInput<E>| other.datatype == first.datatype && other.shape[1..] == first.shape[1..];
    if !others.iter().all(alike) {
        return Err(BatchError::Unlike(name.to_owned()));
    }
    let RunInput { datatype, mut shape, mut parts } = first;
    shape[0] += others.iter().map(|other| other.shape[0]).sum::<usize>();
    parts.extend(others.into_iter().flat_map(|other| other.parts));
    Ok(RunInput { datatype, shape, parts })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use millrace_engine::rten::RtenEngine;
    use millrace_proto::executor::tensor::Contents as Wire;

    use super::*;

    fn tensor(name: &str, shape: &[i64], byte: u8) -> Tensor {
        let count = shape.iter().product::<i64>() as usize;
        let contents = Some(Wire::Inline(vec![byte; count].into()));
        Tensor { name: name.into(), datatype: "UINT8".into(), shape: shape.to_vec(), contents }
    }

    fn join(tensors: Vec<Tensor>, members: u32) -> Result<RunInputs<RtenEngine>, BatchError> {
        inputs(tensors, members, &ObjectTable::new(), &mut FrameDescriptors::new(Vec::new()))
    }

    #[test]
    fn rows_of_requests_are_concatenated_by_input_name() {
        let given = vec![
            tensor("x", &[1, 2], 1),
            tensor("y", &[1], 2),
            tensor("y", &[2], 3),
            tensor("x", &[2, 2], 4),
        ];
        let RunInputs { tensors: joined, rows, .. } = join(given, 2).unwrap();
        assert_eq!(rows, Some(BatchRows { all: 3, most: 2 }));
        let part = |part: &InputPart<_>| match part {
            InputPart::Host(TensorBytes::Inline(bytes)) => bytes.to_vec(),
            _ => unreachable!("the part is inline"),
        };
        let bytes = |name: &str| joined[name].parts.iter().flat_map(part).collect::<Vec<u8>>();
        assert_eq!((bytes("x"), &joined["x"].shape[..]), (vec![1, 1, 4, 4, 4, 4], &[3, 2][..]));
        assert_eq!((bytes("y"), &joined["y"].shape[..]), (vec![2, 3, 3], &[3][..]));
    }

    #[test]
    fn requests_with_mismatched_inputs_are_refused() {
        let x = |shape: &[i64]| tensor("x", shape, 0);
        assert!(matches!(join(vec![x(&[1, 2]), x(&[1, 3])], 2), Err(BatchError::Unlike(_))));
        assert!(matches!(join(vec![x(&[1]), tensor("y", &[1], 0)], 2), Err(BatchError::Unlike(_))));
        assert!(matches!(join(vec![x(&[]), x(&[])], 2), Err(BatchError::Unlike(_))));
        assert!(matches!(join(vec![x(&[1]), x(&[1]), x(&[1])], 2), Err(BatchError::Count { .. })));
        assert!(matches!(join(vec![], 2), Err(BatchError::Count { .. })));
        let uneven = vec![x(&[1]), tensor("y", &[2], 0), x(&[1]), tensor("y", &[1], 0)];
        assert!(matches!(join(uneven, 2), Err(BatchError::Rows)));
        let twice = vec![x(&[1]), x(&[1]), x(&[1]), x(&[1])];
        assert!(matches!(join(twice, 2), Err(BatchError::Twice(_))));
        assert!(matches!(join(vec![x(&[1]), x(&[1])], 1), Err(BatchError::Twice(_))));
    }

    #[test]
    fn inputs_of_a_single_request_are_used_unchanged() {
        for members in [0, 1] {
            let RunInputs { tensors, rows, .. } = join(vec![tensor("x", &[], 9)], members).unwrap();
            assert_eq!((tensors.len(), rows), (1, None));
        }
    }
}
