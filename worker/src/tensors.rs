//! Conversion of tensors between the gateway's messages and an executor's frames. Small tensors
//! travel inline. The bytes of large tensors are in memfds, so that the socket carries only
//! descriptors.

use std::io::{self, Write as _};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bytes::Bytes;
use millrace_proto::executor::{ObjectPart, Tensor, tensor::Contents};
use millrace_proto::frames::DESCRIPTORS_MAX;
use millrace_proto::worker::InferTensor;
use millrace_types::tensor::element_count;
use millrace_types::{DataType, Failure, Reason, RequestInput, check_inputs};

use crate::object_handle::{ObjectHandle, ObjectRange, TransferReader, TransferRequester};
pub use crate::objects::INLINE_BYTES_MAX;
use crate::objects::{Contents as Held, InputTensor, memory, size_of, size_of_memory};
use crate::port::Descriptor;
use crate::request::BatchShare;
use crate::signature::FunctionSignature;

/// Maximum bytes of all inline tensors of a request; further tensors are put into memfds.
pub const INLINE_TOTAL_BYTES_MAX: usize = 1 << 20;

/// Checks a request's tensors against the inputs and outputs that the model declares.
///
/// # Errors
/// [`Reason::InvalidInput`], [`Reason::InvalidOutput`], with the model's declaration in the message.
pub fn check(
    inputs: &[InferTensor],
    outputs: &[String],
    signature: &FunctionSignature,
) -> Result<(), Failure> {
    let invalid = |message: String| Failure::new(Reason::InvalidInput, message);
    let mut given = Vec::with_capacity(inputs.len());
    for input in inputs {
        let InferTensor { name, datatype, shape, .. } = input;
        if !input.parts.is_empty() && !input.data.is_empty() {
            return Err(invalid(format!("input {name:?} has bytes and parts: send only one of the two")));
        }
        let parsed: DataType =
            datatype.parse().map_err(|error| invalid(format!("input {name:?}: {error}")))?;
        let found = size_of(input);
        // A shape of elements without a fixed size has to be countable too, because a program gets
        // the shape as it is.
        if !fits(parsed, shape, found as u64) {
            return Err(invalid(format!(
                "input {name:?}: {found} bytes do not make {datatype} of shape {shape:?}"
            )));
        }
        given.push(RequestInput { name, datatype: parsed, shape });
    }
    check_inputs(&signature.inputs, &given).map_err(|error| invalid(error.to_string()))?;
    match outputs.iter().find(|name| signature.outputs.iter().all(|output| output.name != **name)) {
        Some(name) => {
            let known: Vec<_> = signature.outputs.iter().map(|output| output.name.as_str()).collect();
            let message = format!("output {name:?} is unknown: the model gives {}", known.join(", "));
            Err(Failure::new(Reason::InvalidOutput, message))
        }
        None => Ok(()),
    }
}

/// A request's inputs in the executor's format, or a process's outputs in that format.
#[derive(Debug, Default)]
pub(crate) struct PackedTensors {
    pub(crate) tensors: Vec<Tensor>,
    /// Descriptors that the tensors' `contents_fd` index.
    pub(crate) descriptors: Vec<Descriptor>,
    /// The objects that the tensors name, each once.
    pub(crate) objects: Vec<Arc<ObjectHandle>>,
}

impl PackedTensors {
    /// Returns contents that are outside the message, and adds their descriptor or object.
    fn add(&mut self, contents: Held) -> Result<Contents, Failure> {
        Ok(match contents {
            Held::Inline(data) => self.memory(Arc::new(memfd(&data)?)),
            Held::Memory { fd, .. } => self.memory(fd),
            Held::Kept(part) => self.object(part),
        })
    }

    fn memory(&mut self, fd: Descriptor) -> Contents {
        self.descriptors.push(fd);
        // The number fits: there are at most as many descriptors as the function has tensors.
        Contents::ContentsFd(self.descriptors.len() as u32 - 1)
    }

    fn object(&mut self, ObjectRange { object, offset, bytes }: ObjectRange) -> Contents {
        let key = object.key;
        if self.objects.iter().all(|known| known.key != key) {
            self.objects.push(object);
        }
        Contents::Object(ObjectPart { object: key.0, offset, bytes })
    }
}

/// Converts a request's inputs to the executor's format.
///
/// # Errors
/// [`Reason::InvalidInput`] if there are more large tensors than a frame can carry,
/// [`Reason::QueueFull`] if memory is short.
pub(crate) fn pack(inputs: Vec<InputTensor>) -> Result<PackedTensors, Failure> {
    let mut packed = PackedTensors::default();
    let mut inline_left = INLINE_TOTAL_BYTES_MAX;
    let mut large = 0;
    for InputTensor { name, datatype, shape, contents } in inputs {
        let contents = match contents {
            Held::Inline(data) if data.len() <= INLINE_BYTES_MAX.min(inline_left) => {
                inline_left -= data.len();
                Contents::Inline(data)
            }
            contents => {
                // An object on a GPU counts too, because a copy to the host may be needed.
                large += 1;
                if large > DESCRIPTORS_MAX {
                    let message =
                        format!("more than {DESCRIPTORS_MAX} inputs of over {INLINE_BYTES_MAX} bytes");
                    return Err(Failure::new(Reason::InvalidInput, message));
                }
                packed.add(contents)?
            }
        };
        packed.tensors.push(Tensor { name, datatype, shape, contents: Some(contents) });
    }
    Ok(packed)
}

/// Converts a process's outputs to the tensors of an answer. The tensors stay within this worker,
/// so no bytes are copied, however large.
pub(crate) fn given(outputs: Vec<InputTensor>) -> PackedTensors {
    let mut packed = PackedTensors::default();
    for InputTensor { name, datatype, shape, contents } in outputs {
        let contents = match contents {
            Held::Inline(data) => Contents::Inline(data),
            Held::Memory { fd, .. } => packed.memory(fd),
            Held::Kept(part) => packed.object(part),
        };
        packed.tensors.push(Tensor { name, datatype, shape, contents: Some(contents) });
    }
    packed
}

fn memfd(data: &[u8]) -> Result<OwnedFd, Failure> {
    let write = || {
        let mut file = memory("millrace-input")?;
        file.write_all(data)?;
        Ok(file.into())
    };
    write().map_err(|error: io::Error| {
        Failure::new(Reason::QueueFull, format!("no memory for the inputs ({error}): try again soon"))
    })
}

/// Returns the byte range of a request's rows in an output of `bytes` bytes.
pub(crate) fn part(bytes: u64, share: Option<BatchShare>) -> Range<u64> {
    let Some(BatchShare { first, rows, of }) = share else { return 0..bytes };
    let row = bytes / u64::from(of).max(1);
    let end = |rows: u32| (u64::from(rows) * row).min(bytes);
    end(first)..end(first.saturating_add(rows))
}

fn read_part(fd: &Descriptor, share: Option<BatchShare>) -> io::Result<Bytes> {
    let bytes = size_of_memory(fd)? as u64;
    let part = part(bytes, share);
    let whole = Held::Memory { fd: Arc::clone(fd), bytes };
    // The range fits in `usize`, because the bytes are in memory.
    whole.read(part.start, (part.end - part.start) as usize)
}

/// The reason why outputs cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// The output has no contents.
    #[error("output {0:?} has no contents")]
    Empty(String),
    /// The output names an object that the run did not keep.
    #[error("output {0:?} names an object that the run did not keep")]
    NoObject(String),
    /// The output names a descriptor that was not sent.
    #[error("output {0:?} names descriptor {1}, which was not sent")]
    NoDescriptor(String, u32),
    /// The output's bytes are not those of its shape.
    #[error("output {0:?}: {1} bytes do not make {2} of shape {3:?}")]
    Size(String, u64, String, Vec<i64>),
    /// The output does not have a row for each row of the batched run.
    #[error("output {0:?} has shape {1:?}, which does not fit the rows of the batched run")]
    Rows(String, Vec<i64>),
    /// The output was on a GPU and was lost when its executor died.
    #[error("output {0:?} was lost with its GPU's executor")]
    Lost(String),
    /// The memory of the output cannot be read.
    #[error("output {0:?}: {1}")]
    Read(String, io::Error),
    /// The answer would be larger than a message may be.
    #[error(
        "output {name:?} makes the answer {bytes}, and a message has at most {max}: ask for fewer rows or fewer outputs, or raise the worker's message limit"
    )]
    TooLarge {
        name: String,
        /// Bytes of all outputs up to this one.
        bytes: millrace_types::Bytes,
        /// Maximum bytes of a message.
        max: millrace_types::Bytes,
    },
}

/// Converts an executor's outputs to those of one request, and cuts out its rows. Outputs that the
/// request does not share are not copied.
///
/// # Errors
/// [`UnpackError`]: a bug of the worker, or of an executor that no longer works correctly.
pub(crate) fn take(
    outputs: Vec<Tensor>,
    descriptors: &[Descriptor],
    kept: &[Arc<ObjectHandle>],
    share: Option<BatchShare>,
) -> Result<Vec<InputTensor>, UnpackError> {
    let one = |Tensor { name, datatype, mut shape, contents }| {
        if let Some(share) = share {
            if shape.first() != Some(&i64::from(share.of)) {
                return Err(UnpackError::Rows(name, shape));
            }
            shape[0] = share.rows.into();
        }
        let contents = match contents {
            None | Some(Contents::KeptBytes(_)) => return Err(UnpackError::Empty(name)),
            Some(Contents::Object(part)) => match kept.iter().find(|kept| kept.key.0 == part.object) {
                None => return Err(UnpackError::NoObject(name)),
                Some(object) => {
                    let object = Arc::clone(object);
                    let ObjectPart { offset, bytes, .. } = part;
                    Held::Kept(ObjectRange { object, offset, bytes })
                }
            },
            Some(Contents::Inline(data)) => {
                let part = part(data.len() as u64, share);
                Held::Inline(data.slice(part.start as usize..part.end as usize))
            }
            Some(Contents::ContentsFd(place)) => match descriptors.get(place as usize) {
                None => return Err(UnpackError::NoDescriptor(name, place)),
                Some(fd) => match memory_of(fd, share) {
                    Ok(held) => held,
                    Err(error) => return Err(UnpackError::Read(name, error)),
                },
            },
        };
        let bytes = contents.len();
        if !datatype.parse().is_ok_and(|datatype| fits(datatype, &shape, bytes)) {
            return Err(UnpackError::Size(name, bytes, datatype, shape));
        }
        Ok(InputTensor { name, datatype, shape, contents })
    };
    outputs.into_iter().map(one).collect()
}

/// Returns whether a tensor of this type and shape may have this number of bytes.
fn fits(datatype: DataType, shape: &[i64], bytes: u64) -> bool {
    element_count(shape).is_some_and(|elements| match datatype.size() {
        Some(size) => elements.checked_mul(size).is_some_and(|expected| expected as u64 == bytes),
        None => true,
    })
}

fn memory_of(fd: &Descriptor, share: Option<BatchShare>) -> io::Result<Held> {
    Ok(match share {
        None => Held::Memory { fd: fd.clone(), bytes: size_of_memory(fd)? as u64 },
        Some(_) => Held::Inline(read_part(fd, share)?),
    })
}

/// Reads an output's bytes and converts the output to a response's tensor.
///
/// # Errors
/// [`UnpackError::Read`], [`UnpackError::Lost`].
pub(crate) async fn answer(
    output: InputTensor,
    asker: &Arc<TransferRequester>,
) -> Result<InferTensor, UnpackError> {
    let InputTensor { name, datatype, shape, contents } = output;
    let bytes = contents.len();
    let reader = TransferReader::Outside(Arc::clone(asker));
    let Ok((contents, offset)) = contents.on_host(0, bytes, reader).await else {
        return Err(UnpackError::Lost(name));
    };
    // Bytes in memory fit an address space, so the limit is never reached.
    match contents.read(offset, usize::try_from(bytes).unwrap_or(usize::MAX)) {
        Ok(data) => Ok(InferTensor { name, datatype, shape, data, parts: Vec::new() }),
        Err(error) => Err(UnpackError::Read(name, error)),
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::{
        Digest, Dim, FunctionKey, FunctionName, Revision, RevisionKey, TenantName, TensorSpec, Timestamp,
    };
    use proptest::prelude::*;

    use super::*;
    use crate::signature::InputReader;

    fn tensor(name: &str, bytes: usize) -> InferTensor {
        let data = (0..bytes).map(|at| at as u8).collect::<Vec<_>>().into();
        let shape = vec![bytes as i64];
        InferTensor { name: name.into(), datatype: "UINT8".into(), shape, data, parts: Vec::new() }
    }

    fn inputs(tensors: &[InferTensor]) -> Vec<InputTensor> {
        let input = |tensor: &InferTensor| InputTensor {
            name: tensor.name.clone(),
            datatype: tensor.datatype.clone(),
            shape: tensor.shape.clone(),
            contents: Held::Inline(tensor.data.clone()),
        };
        tensors.iter().map(input).collect()
    }

    fn unpack(
        outputs: Vec<Tensor>,
        descriptors: &[Descriptor],
        share: Option<BatchShare>,
    ) -> Result<Vec<InferTensor>, UnpackError> {
        let function = FunctionKey { tenant: TenantName::default(), name: FunctionName::new("f").unwrap() };
        let revision = RevisionKey { function, revision: Revision::FIRST };
        let asker = Arc::new(TransferRequester { revision, came: Timestamp::ZERO, objective: None });
        let answers = take(outputs, descriptors, &[], share)?.into_iter().map(|it| answer(it, &asker));
        futures::executor::block_on(futures::future::try_join_all(answers))
    }

    fn signature() -> FunctionSignature {
        let shape = vec![Dim::Symbol("N".into())];
        let spec =
            |name: &str| TensorSpec { name: name.into(), datatype: DataType::Uint8, shape: shape.clone() };
        FunctionSignature {
            digest: Digest::of(b""),
            inputs: vec![spec("x")],
            outputs: vec![spec("y")],
            reader: InputReader::Gpu,
            state: None,
        }
    }

    #[test]
    fn packed_tensors_unpack_to_themselves_inline_and_from_memory() {
        let sent = vec![tensor("a", 10), tensor("b", INLINE_BYTES_MAX + 1), tensor("c", 0)];
        let PackedTensors { tensors, descriptors, .. } = pack(inputs(&sent)).unwrap();
        assert_eq!(descriptors.len(), 1);
        assert_eq!(unpack(tensors, &descriptors, None).unwrap(), sent);
    }

    #[test]
    fn outputs_of_a_process_are_not_copied() {
        let sent = [tensor("a", 10), tensor("b", INLINE_TOTAL_BYTES_MAX + 1)];
        let PackedTensors { tensors, descriptors, .. } = given(inputs(&sent));
        assert!(descriptors.is_empty());
        let taken = take(tensors.clone(), &[], &[], None).unwrap();
        for (taken, sent) in taken.iter().zip(&sent) {
            let Held::Inline(data) = &taken.contents else { panic!("{taken:?}") };
            assert_eq!((data.as_ptr(), data.len()), (sent.data.as_ptr(), sent.data.len()));
        }
        assert_eq!(unpack(tensors, &[], None).unwrap(), sent);
    }

    #[test]
    fn each_request_of_a_batched_run_gets_its_rows() {
        let large = INLINE_BYTES_MAX + 2;
        let PackedTensors { tensors, descriptors, .. } =
            pack(inputs(&[tensor("a", 6), tensor("b", large)])).unwrap();
        assert_eq!(descriptors.len(), 1);
        let cut = |first, rows, of: usize| {
            let share = Some(BatchShare { first, rows, of: of as u32 });
            unpack(tensors[..1].to_vec(), &descriptors, share).map(|outputs| outputs[0].data.to_vec())
        };
        assert_eq!((cut(0, 1, 6).unwrap(), cut(1, 5, 6).unwrap()), (vec![0], vec![1, 2, 3, 4, 5]));
        assert!(matches!(cut(0, 1, 3), Err(UnpackError::Rows(..))));
        let share = Some(BatchShare { first: 3, rows: 2, of: large as u32 });
        let cut = unpack(tensors[1..].to_vec(), &descriptors, share).unwrap().remove(0);
        assert_eq!((cut.shape, cut.data.to_vec()), (vec![2], vec![3, 4]));
    }

    #[test]
    fn many_small_tensors_do_not_outgrow_a_frame() {
        let many =
            |count: usize| (0..count).map(|n| tensor(&n.to_string(), INLINE_BYTES_MAX)).collect::<Vec<_>>();
        let PackedTensors { tensors, descriptors, .. } = pack(inputs(&many(40))).unwrap();
        let inline: usize = tensors
            .iter()
            .map(|tensor| if let Some(Contents::Inline(data)) = &tensor.contents { data.len() } else { 0 })
            .sum();
        assert_eq!(inline, INLINE_TOTAL_BYTES_MAX);
        assert_eq!(descriptors.len(), 24);
        assert_eq!(pack(inputs(&many(200))).unwrap_err().reason, Reason::InvalidInput);
    }

    #[test]
    fn tensors_that_the_model_does_not_declare_are_refused() {
        let good = tensor("x", 4);
        check(std::slice::from_ref(&good), &["y".into()], &signature()).unwrap();
        let short = InferTensor { data: Bytes::from_static(b"abc"), ..good.clone() };
        let other = InferTensor { datatype: "FLOAT".into(), ..good.clone() };
        for bad in [short, other, tensor("z", 4)] {
            let reason = check(&[bad], &[], &signature()).unwrap_err().reason;
            assert_eq!(reason, Reason::InvalidInput);
        }
        let reason = check(&[good], &["z".into()], &signature()).unwrap_err().reason;
        assert_eq!(reason, Reason::InvalidOutput);
    }

    #[test]
    fn a_shape_of_more_elements_than_can_be_counted_is_refused() {
        for datatype in [DataType::Uint8, DataType::Bytes] {
            let mut signature = signature();
            signature.inputs[0].datatype = datatype;
            signature.inputs[0].shape = ["N", "M"].map(|name| Dim::Symbol(name.into())).into();
            let shape = vec![i64::MAX, 4];
            let input = InferTensor { datatype: datatype.to_string(), shape, ..tensor("x", 4) };
            let failure = check(&[input], &[], &signature).unwrap_err();
            assert_eq!(failure.reason, Reason::InvalidInput, "{datatype}");
        }
    }

    fn contents() -> impl Strategy<Value = Option<Contents>> {
        let inline = prop::collection::vec(any::<u8>(), 0..40);
        prop_oneof![
            6 => inline.prop_map(|bytes| Some(Contents::Inline(bytes.into()))),
            3 => (0..4u32).prop_map(|place| Some(Contents::ContentsFd(place))),
            1 => any::<[u64; 3]>().prop_map(|[object, offset, bytes]| {
                Some(Contents::Object(ObjectPart { object, offset, bytes }))
            }),
            1 => any::<u64>().prop_map(|bytes| Some(Contents::KeptBytes(bytes))),
            1 => Just(None),
        ]
    }

    fn output() -> impl Strategy<Value = Tensor> {
        let datatype = prop::sample::select(vec!["UINT8", "FP32", "BYTES", "float", ""]);
        let dim = prop_oneof![6 => 0..6i64, 1 => any::<i64>()];
        (datatype, prop::collection::vec(dim, 0..4), contents()).prop_map(|(datatype, shape, contents)| {
            Tensor { name: "y".into(), datatype: datatype.into(), shape, contents }
        })
    }

    proptest! {
        /// Any answer of an executor is refused, or has the bytes of its type and shape.
        #[test]
        fn any_answer_of_an_executor_is_refused_or_has_the_bytes_of_its_shape(
            outputs in prop::collection::vec(output(), 0..4),
            files in prop::collection::vec(0..40usize, 0..4),
            share in prop::option::of(any::<[u32; 3]>()),
            small in any::<bool>(),
        ) {
            let descriptors: Vec<Descriptor> =
                files.iter().map(|&bytes| Arc::new(memfd(&vec![7; bytes]).unwrap())).collect();
            let narrow = |number: u32| if small { number % 6 } else { number };
            let share = share.map(|[first, rows, of]| BatchShare {
                first: narrow(first),
                rows: narrow(rows),
                of: narrow(of),
            });
            if let Ok(answers) = unpack(outputs, &descriptors, share) {
                for InferTensor { datatype, shape, data, .. } in answers {
                    prop_assert!(data.len() <= 40);
                    let size = datatype.parse::<DataType>().unwrap().size();
                    let elements = element_count(&shape).unwrap();
                    prop_assert!(size.is_none_or(|size| size * elements == data.len()));
                }
            }
        }
    }

    #[test]
    fn an_output_without_contents_is_an_error() {
        let tensor = |contents| Tensor { name: "y".into(), contents, ..Default::default() };
        for contents in [None, Some(Contents::ContentsFd(3))] {
            assert!(unpack(vec![tensor(contents)], &[], None).is_err());
        }
    }
}
