//! Tensors of rten. rten's element types are f32, i32, i8 and u8; INT64 and BOOL are
//! stored as i32.
//!
//! A value either owns its memory, or reads bytes of a region in place. INT64 and BOOL are always
//! converted, so they are never read in place.

#![allow(unsafe_code, reason = "a view of pinned bytes of a region lives beside its pin")]

use std::borrow::Cow;
use std::ops::Range;
use std::os::fd::AsFd;

use bytes::Bytes as Buffer;
use millrace_types::DataType;
use rten_tensor::prelude::*;
use rten_tensor::{Tensor, TensorView};

use bytemuck::Pod;
use millrace_device::emulated::{EmulatedRegion, PinnedBytes};
use millrace_device::{Error as DeviceError, memfd};

use crate::api::{HostTensor, TensorBytes, TensorPart};
use crate::error::Error;

#[cfg(target_endian = "big")]
compile_error!("tensors are little-endian on the wire and are not swapped");

/// Datatypes that this engine supports, for messages.
const SUPPORTED: &str = "FP32, INT32, INT64, INT8, UINT8 or BOOL";

/// A tensor of rten.
#[derive(Debug)]
pub struct RtenValue(pub(super) ValueElements);

/// The elements of a value.
#[derive(Debug)]
pub(super) enum ValueElements {
    /// The value owns its memory.
    Own(rten::Value),
    /// The value is a view of a region. The view must not be used after the pinned bytes are dropped.
    InPlace(rten::ValueView<'static>, PinnedBytes),
}

impl RtenValue {
    pub(super) fn own(value: rten::Value) -> Self {
        Self(ValueElements::Own(value))
    }

    pub(super) fn gather(
        datatype: DataType,
        shape: &[usize],
        parts: Vec<TensorPart<'_, EmulatedRegion>>,
    ) -> Result<Self, Error> {
        let value = match datatype {
            DataType::Fp32 => from_shape(shape, elements::<f32>(shape, parts)?),
            DataType::Int32 => from_shape(shape, elements::<i32>(shape, parts)?),
            DataType::Int8 => from_shape(shape, elements::<i8>(shape, parts)?),
            DataType::Uint8 => from_shape(shape, elements::<u8>(shape, parts)?),
            DataType::Int64 => from_shape(shape, narrowed(elements::<i64>(shape, parts)?)?),
            DataType::Bool => {
                let bytes = elements::<u8>(shape, parts)?;
                from_shape(shape, bytes.into_iter().map(|byte| i32::from(byte != 0)).collect())
            }
            other => return Err(Error::DataType(other, SUPPORTED)),
        };
        Ok(Self::own(value))
    }

    /// Creates a value that reads bytes of a region in place. INT64, BOOL and unaligned elements are
    /// copied instead.
    pub(super) fn in_place(
        datatype: DataType,
        shape: &[usize],
        region: &EmulatedRegion,
        bytes: Range<u64>,
    ) -> Result<Self, Error> {
        let view = match datatype {
            DataType::Fp32 => held_view::<f32>(shape, region, &bytes)?,
            DataType::Int32 => held_view::<i32>(shape, region, &bytes)?,
            DataType::Int8 => held_view::<i8>(shape, region, &bytes)?,
            DataType::Uint8 => held_view::<u8>(shape, region, &bytes)?,
            _ => None,
        };
        match view {
            Some(in_place) => Ok(Self(in_place)),
            None => Self::gather(datatype, shape, vec![TensorPart::Region(region, bytes)]),
        }
    }

    pub(super) fn detached(self) -> Self {
        match self.0 {
            ValueElements::InPlace(view, _held) => Self::own(view.to_owned()),
            own @ ValueElements::Own(_) => Self(own),
        }
    }

    pub(super) fn as_view(&self) -> rten::ValueView<'_> {
        match &self.0 {
            ValueElements::Own(value) => value.as_view(),
            ValueElements::InPlace(view, _held) => view.clone(),
        }
    }

    pub(super) fn shape(&self, datatype: DataType) -> Result<Vec<usize>, Error> {
        match datatype {
            DataType::Fp32 => self.tensor::<f32>("FP32").map(|view| view.shape().to_vec()),
            DataType::Int32 => self.tensor::<i32>("INT32").map(|view| view.shape().to_vec()),
            DataType::Int8 => self.tensor::<i8>("INT8").map(|view| view.shape().to_vec()),
            DataType::Uint8 => self.tensor::<u8>("UINT8").map(|view| view.shape().to_vec()),
            DataType::Int64 => self.tensor::<i32>("INT64").map(|view| view.shape().to_vec()),
            DataType::Bool => self.tensor::<i32>("BOOL").map(|view| view.shape().to_vec()),
            other => Err(Error::DataType(other, SUPPORTED)),
        }
    }

    /// Returns a part of the value's bytes. The part is copied if the value stores its elements in
    /// another form or order.
    pub(super) fn bytes(&self, datatype: DataType, part: &Range<u64>) -> Result<Cow<'_, [u8]>, Error> {
        match datatype {
            DataType::Fp32 => exact_part(self.tensor::<f32>("FP32")?, part),
            DataType::Int32 => exact_part(self.tensor::<i32>("INT32")?, part),
            DataType::Int8 => exact_part(self.tensor::<i8>("INT8")?, part),
            DataType::Uint8 => exact_part(self.tensor::<u8>("UINT8")?, part),
            DataType::Int64 => converted_part(&self.tensor::<i32>("INT64")?, part, i64::from),
            DataType::Bool => converted_part(&self.tensor::<i32>("BOOL")?, part, |x| u8::from(x != 0)),
            other => Err(Error::DataType(other, SUPPORTED)),
        }
    }

    pub(super) fn download(&self, datatype: DataType, inline_max: usize) -> Result<HostTensor, Error> {
        let shape = self.shape(datatype)?;
        let size = datatype.size().ok_or(Error::DataType(datatype, SUPPORTED))?;
        let bytes = (shape.iter().product::<usize>() * size) as u64;
        let contents = packed(&self.bytes(datatype, &(0..bytes))?, inline_max)?;
        Ok(HostTensor { datatype, shape, contents })
    }

    fn tensor<'a, T>(&'a self, declared: &str) -> Result<TensorView<'a, T>, Error>
    where
        TensorView<'a, T>: TryFrom<rten::ValueView<'a>>,
    {
        let view = self.as_view();
        let found = view.dtype();
        view.try_into()
            .map_err(|_| Error::Tensor(format!("declared {declared}, but the model makes {found:?}")))
    }
}

fn from_shape<T>(shape: &[usize], elements: Vec<T>) -> rten::Value
where
    rten::Value: From<Tensor<T>>,
{
    Tensor::from_data(shape, elements).into()
}

/// Returns a view of a region's bytes, or `None` if the bytes are not aligned for the elements.
fn held_view<T: Pod>(
    shape: &[usize],
    region: &EmulatedRegion,
    bytes: &Range<u64>,
) -> Result<Option<ValueElements>, Error>
where
    rten::ValueView<'static>: From<TensorView<'static, T>>,
{
    check_size::<T>(shape, bytes.end.saturating_sub(bytes.start))?;
    let held = region.hold(bytes.clone())?;
    let Some(elements) = bytemuck::try_cast_slice::<u8, T>(held.as_slice()).ok() else { return Ok(None) };
    // SAFETY: the memory belongs to the region. `held` keeps it readable and unchanged while `held`
    // lives, even if `held` is moved. The view moves into `ValueElements::InPlace` together with `held`,
    // and is not used longer.
    let elements = unsafe { std::slice::from_raw_parts::<'static, T>(elements.as_ptr(), elements.len()) };
    Ok(Some(ValueElements::InPlace(TensorView::from_data(shape, elements).into(), held)))
}

/// Returns a tensor's elements. Checks first that the parts have the right number of bytes, so that
/// no memory is allocated for bytes that did not arrive.
fn elements<T: Pod>(shape: &[usize], parts: Vec<TensorPart<'_, EmulatedRegion>>) -> Result<Vec<T>, Error> {
    let sizes = parts.iter().map(part_bytes).collect::<Result<Vec<_>, _>>()?;
    let due = check_size::<T>(shape, sizes.iter().fold(0, |all, &size| all.saturating_add(size)))?;
    let mut elements = vec![T::zeroed(); due / size_of::<T>()];
    let mut rest = bytemuck::cast_slice_mut::<T, u8>(&mut elements);
    for (part, size) in parts.into_iter().zip(sizes) {
        // Each split fits, because `check_size` compared the sum of all parts with the buffer's length.
        let (now, later) = rest.split_at_mut(size as usize);
        match part {
            TensorPart::Host(TensorBytes::Inline(bytes)) => now.copy_from_slice(bytes),
            TensorPart::Host(TensorBytes::File(file)) => memfd::read_at(file.as_fd(), now, 0)?,
            TensorPart::Region(region, bytes) => now.copy_from_slice(region.hold(bytes)?.as_slice()),
        }
        rest = later;
    }
    Ok(elements)
}

fn part_bytes(part: &TensorPart<'_, EmulatedRegion>) -> Result<u64, Error> {
    match part {
        TensorPart::Host(TensorBytes::Inline(bytes)) => Ok(bytes.len() as u64),
        TensorPart::Host(TensorBytes::File(file)) => Ok(memfd::size(file)?),
        TensorPart::Region(_, bytes) => Ok(bytes.end.saturating_sub(bytes.start)),
    }
}

/// Returns the size of a tensor in bytes if it equals `found`, and an error otherwise.
fn check_size<T>(shape: &[usize], found: u64) -> Result<usize, Error> {
    let due = shape.iter().try_fold(size_of::<T>(), |bytes, &dim| bytes.checked_mul(dim));
    due.filter(|&due| due as u64 == found).ok_or_else(|| {
        Error::Tensor(format!(
            "{found} bytes are not a tensor of shape {shape:?} with elements of {}",
            size_of::<T>()
        ))
    })
}

fn narrowed(wide: Vec<i64>) -> Result<Vec<i32>, Error> {
    wide.into_iter()
        .enumerate()
        .map(|(index, element)| {
            i32::try_from(element).map_err(|_| {
                Error::Tensor(format!(
                    "element {index} is {element}: the engine rten stores INT64 as 32 bits, from {} to {}: send a number in that range, or start the worker with --engine ort",
                    i32::MIN,
                    i32::MAX
                ))
            })
        })
        .collect()
}

fn exact_part<'a, T: Pod>(view: TensorView<'a, T>, part: &Range<u64>) -> Result<Cow<'a, [u8]>, Error> {
    match view.data() {
        Some(elements) => cut(bytemuck::cast_slice(elements), part).map(Cow::Borrowed),
        None => converted_part(&view, part, |element| element),
    }
}

fn converted_part<'a, T: Copy, U: Pod>(
    view: &TensorView<'_, T>,
    part: &Range<u64>,
    convert: impl Fn(T) -> U,
) -> Result<Cow<'a, [u8]>, Error> {
    // Converts only the elements that overlap the part.
    let size = size_of::<U>() as u64;
    let first = part.start / size;
    let count = part.end.div_ceil(size).saturating_sub(first);
    let elements = view.iter().skip(first as usize).take(count as usize).map(|&element| convert(element));
    let elements: Vec<U> = elements.collect();
    let start = first * size;
    let within = part.start - start..part.end.saturating_sub(start);
    cut(bytemuck::cast_slice(&elements), &within).map(|bytes| Cow::Owned(bytes.to_vec()))
}

fn cut<'a>(bytes: &'a [u8], part: &Range<u64>) -> Result<&'a [u8], Error> {
    let ends = usize::try_from(part.start).ok().zip(usize::try_from(part.end).ok());
    ends.and_then(|(start, end)| bytes.get(start..end)).ok_or_else(|| {
        let problem = "past the end of the value";
        DeviceError::BadExtent { offset: part.start, bytes: part.end.saturating_sub(part.start), problem }
            .into()
    })
}

fn packed(bytes: &[u8], inline_max: usize) -> Result<TensorBytes, Error> {
    if bytes.len() <= inline_max {
        return Ok(TensorBytes::Inline(Buffer::copy_from_slice(bytes)));
    }
    let file = memfd::create("millrace-tensor", bytes.len() as u64)?;
    memfd::write_at(&file, bytes, 0)?;
    Ok(TensorBytes::File(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn upload(tensor: HostTensor) -> Result<RtenValue, Error> {
        RtenValue::gather(tensor.datatype, &tensor.shape, vec![TensorPart::Host(&tensor.contents)])
    }

    fn inline(datatype: DataType, shape: &[usize], bytes: &[u8]) -> HostTensor {
        let contents = TensorBytes::Inline(Buffer::copy_from_slice(bytes));
        HostTensor { datatype, shape: shape.to_vec(), contents }
    }

    fn bytes(tensor: HostTensor) -> Vec<u8> {
        match tensor.contents {
            TensorBytes::Inline(bytes) => bytes.to_vec(),
            TensorBytes::File(file) => {
                let mut bytes = vec![0; memfd::size(&file).unwrap() as usize];
                memfd::read_at(&file, &mut bytes, 0).unwrap();
                bytes
            }
        }
    }

    #[test]
    fn every_datatype_survives_upload_and_download_inline_and_as_a_file() {
        for (datatype, sent) in [
            (DataType::Fp32, [1.5f32, -0.0, f32::MAX, 3.0].map(f32::to_le_bytes).concat()),
            (DataType::Int32, [1i32, -2, i32::MIN, 4].map(i32::to_le_bytes).concat()),
            (DataType::Int64, [1i64, -2, i32::MIN.into(), i32::MAX.into()].map(i64::to_le_bytes).concat()),
            (DataType::Int8, vec![1, 255, 128, 0]),
            (DataType::Uint8, vec![1, 255, 128, 0]),
            (DataType::Bool, vec![1, 0, 0, 1]),
        ] {
            for inline_max in [0, 64] {
                let value = upload(inline(datatype, &[2, 2], &sent)).unwrap();
                let back = value.download(datatype, inline_max).unwrap();
                assert_eq!((back.datatype, &back.shape), (datatype, &vec![2, 2]));
                assert_eq!(matches!(back.contents, TensorBytes::Inline(_)), inline_max > 0, "{datatype}");
                // A downloaded tensor can be uploaded again, inline or as a file.
                let again = upload(back).unwrap().download(datatype, 64).unwrap();
                assert_eq!(bytes(again), sent, "{datatype}");
            }
        }
    }

    #[test]
    fn an_int64_outside_32_bits_is_refused_with_its_index() {
        let sent = [0i64, 1 << 31].map(i64::to_le_bytes).concat();
        let error = upload(inline(DataType::Int64, &[2], &sent)).unwrap_err().to_string();
        assert!(error.contains("element 1 is 2147483648"), "{error}");
    }

    #[test]
    fn a_shape_that_does_not_match_its_bytes_is_refused() {
        for shape in [&[3][..], &[usize::MAX, 2], &[]] {
            let refused = upload(inline(DataType::Fp32, shape, &[0; 8]));
            assert!(matches!(refused, Err(Error::Tensor(_))), "{shape:?}");
        }
        assert!(upload(inline(DataType::Fp32, &[0, 4], &[])).is_ok());
        assert!(upload(inline(DataType::Fp32, &[], &[0; 4])).is_ok());
    }

    #[test]
    fn unsupported_datatypes_and_mismatched_outputs_are_refused() {
        let refused = upload(inline(DataType::Fp64, &[1], &[0; 8]));
        assert!(matches!(refused, Err(Error::DataType(DataType::Fp64, _))));
        let value = upload(inline(DataType::Fp32, &[1], &[0; 4])).unwrap();
        let error = value.download(DataType::Int64, 64).unwrap_err().to_string();
        assert!(error.contains("declared INT64"), "{error}");
    }
}
