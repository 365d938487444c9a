//! Converts messages to internal types and back, and checks each message once.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Duration;

use millrace_device::MemoryExtent;
use millrace_engine::{HostTensor, KernelSpec, TensorBytes};
use millrace_proto::convert::sm_share;
use millrace_proto::executor::{self as wire, tensor};
use millrace_slices::gate::SeatToken;
use millrace_slices::tokens::TokenId;
use millrace_types::DataType;

use crate::error::Error as ProcessError;

/// Largest tensor in bytes that is sent inline in its message; larger tensors are sent in a memfd.
pub const INLINE_BYTES_MAX: usize = 64 << 10;

/// The descriptors of a frame. Each descriptor can be taken once.
#[derive(Debug)]
pub(crate) struct FrameDescriptors(Vec<Option<OwnedFd>>);

/// Reason why a message contradicts itself or its frame.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error("descriptor {0} is missing from the message, or is used twice")]
    Descriptor(u32),
    #[error("{name:?} has shape {shape:?}, which is negative")]
    Shape { name: String, shape: Vec<i64> },
    #[error("{name:?} has datatype {datatype:?}, which is not known")]
    DataType { name: String, datatype: String },
    #[error("{0:?} has no contents")]
    NoContents(String),
    #[error("input {0:?} has the contents of a response: name an object that was filled from the output")]
    KeptInput(String),
    #[error("{bytes} bytes at {offset} are past the end of any memory")]
    Overflow { offset: u64, bytes: u64 },
}

impl FrameDescriptors {
    pub(crate) fn new(descriptors: Vec<OwnedFd>) -> Self {
        Self(descriptors.into_iter().map(Some).collect())
    }

    pub(crate) fn take(&mut self, index: u32) -> Result<OwnedFd, Error> {
        self.0.get_mut(index as usize).and_then(Option::take).ok_or(Error::Descriptor(index))
    }
}

/// Converts a token of a seat.
pub(crate) fn token(token: wire::Token) -> Result<SeatToken, ProcessError> {
    let wire::Token { token, period, on, busy_ns } = token;
    let on = sm_share(on).ok_or(ProcessError::Protocol("a token for SMs that no GPU has"))?;
    let busy = (busy_ns > 0).then(|| Duration::from_nanos(busy_ns));
    Ok(SeatToken { token: TokenId(token), period, on, busy })
}

/// Converts a byte range of a region.
pub(crate) fn range(range: wire::ByteRange) -> Result<Range<u64>, Error> {
    let wire::ByteRange { offset, bytes } = range;
    Ok(offset..offset.checked_add(bytes).ok_or(Error::Overflow { offset, bytes })?)
}

/// Converts several byte ranges of a region.
pub(crate) fn ranges(ranges: Vec<wire::ByteRange>) -> Result<Vec<Range<u64>>, Error> {
    ranges.into_iter().map(range).collect()
}

/// Converts an extent to the offset in a region and the physical memory.
pub(crate) fn extent(extent: wire::Extent) -> (u64, MemoryExtent) {
    (extent.range_offset, MemoryExtent { offset: extent.device_offset, bytes: extent.bytes })
}

pub(crate) fn launch(launch: wire::Launch) -> Result<KernelSpec, Error> {
    Ok(KernelSpec { args: launch.args, writes: launch.writes, reads: ranges(launch.reads)? })
}

/// A declared input or output. The shape is absent, because only the model checks shapes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeclaredTensor {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
}

pub(crate) fn declared(spec: wire::TensorSpec) -> Result<DeclaredTensor, Error> {
    let datatype = datatype(&spec.name, &spec.datatype)?;
    Ok(DeclaredTensor { name: spec.name, datatype })
}

fn datatype(name: &str, datatype: &str) -> Result<DataType, Error> {
    datatype.parse().map_err(|_| Error::DataType { name: name.to_owned(), datatype: datatype.to_owned() })
}

/// A received input.
#[derive(Debug)]
pub(crate) struct ReceivedInput {
    pub(crate) name: String,
    pub(crate) datatype: DataType,
    pub(crate) shape: Vec<usize>,
    pub(crate) contents: InputContents,
}

/// The bytes of an input.
#[derive(Debug)]
pub(crate) enum InputContents {
    Host(TensorBytes),
    Object(wire::ObjectPart),
}

pub(crate) fn tensor(
    tensor: wire::Tensor,
    descriptors: &mut FrameDescriptors,
) -> Result<ReceivedInput, Error> {
    let wire::Tensor { name, datatype: named, shape, contents } = tensor;
    let datatype = datatype(&name, &named)?;
    let sizes = shape.iter().map(|&dim| usize::try_from(dim)).collect::<Result<_, _>>();
    let Ok(sizes) = sizes else { return Err(Error::Shape { name, shape }) };
    let contents = match contents {
        Some(tensor::Contents::Inline(bytes)) => InputContents::Host(TensorBytes::Inline(bytes)),
        Some(tensor::Contents::ContentsFd(index)) => {
            InputContents::Host(TensorBytes::File(descriptors.take(index)?))
        }
        Some(tensor::Contents::Object(part)) => InputContents::Object(part),
        Some(tensor::Contents::KeptBytes(_)) => return Err(Error::KeptInput(name)),
        None => return Err(Error::NoContents(name)),
    };
    Ok(ReceivedInput { name, datatype, shape: sizes, contents })
}

/// Converts an output, and appends the descriptor of the output to the message's descriptors.
pub(crate) fn output(name: String, tensor: HostTensor, descriptors: &mut Vec<OwnedFd>) -> wire::Tensor {
    let contents = match tensor.contents {
        TensorBytes::Inline(bytes) => tensor::Contents::Inline(bytes),
        TensorBytes::File(file) => {
            descriptors.push(file);
            // The cast is lossless, because a frame refuses far fewer descriptors.
            tensor::Contents::ContentsFd(descriptors.len() as u32 - 1)
        }
    };
    let HostTensor { datatype, shape, .. } = tensor;
    answered(name, datatype, &shape, contents)
}

/// Converts an output that stays on the GPU.
pub(crate) fn kept_output(name: String, datatype: DataType, shape: &[usize], bytes: u64) -> wire::Tensor {
    answered(name, datatype, shape, tensor::Contents::KeptBytes(bytes))
}

fn answered(name: String, datatype: DataType, shape: &[usize], contents: tensor::Contents) -> wire::Tensor {
    let shape = shape.iter().map(|&dim| dim as i64).collect();
    wire::Tensor { name, datatype: datatype.to_string(), shape, contents: Some(contents) }
}
