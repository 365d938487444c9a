//! Tensors of ONNX Runtime, in memory that ONNX Runtime allocated or in place in a region.
#![allow(unsafe_code, reason = "a tensor over bytes of a region lives beside their pin")]

use std::ops::Range;
use std::os::fd::AsFd as _;
use std::ptr::NonNull;

use bytes::Bytes as Buffer;
use millrace_device::{Error as DeviceError, memfd};
use millrace_types::DataType;
use ort::memory::{Allocator, MemoryInfo};
use ort::value::{DynTensor, Shape, TensorElementType, ValueType};
use ort::{AsPointer as _, sys};

use super::memory::{DeviceAddress, OrtDevice};
use crate::api::{HostTensor, TensorBytes, TensorPart};
use crate::error::Error;

#[cfg(target_endian = "big")]
compile_error!("tensors are little-endian on the wire and are not swapped");

/// Datatypes that this engine supports, for messages. Text is missing, because its bytes have no fixed place.
const SUPPORTED: &str = "a number or BOOL, and not BYTES";

/// Most bytes that a download to a file reads at a time.
const READ_MAX: usize = 4 << 20;

/// A tensor of ONNX Runtime.
#[derive(Debug)]
pub struct OrtValue<D: OrtDevice> {
    // Declared before the pin so that it is dropped first: it may refer to the pinned bytes.
    tensor: DynTensor,
    /// Pin of the bytes that the tensor reads in place.
    pin: Option<D::Pin>,
}

impl<D: OrtDevice> OrtValue<D> {
    pub(super) fn own(tensor: DynTensor) -> Self {
        Self { tensor, pin: None }
    }

    pub(super) fn tensor(&self) -> &DynTensor {
        &self.tensor
    }

    /// Creates a value from the concatenation of these parts.
    pub(super) fn gather(
        allocator: &Allocator,
        stream: &mut D::Stream,
        datatype: DataType,
        shape: &[usize],
        parts: Vec<TensorPart<'_, D::Region>>,
    ) -> Result<Self, Error> {
        let sizes = parts.iter().map(part_bytes::<D>).collect::<Result<Vec<_>, _>>()?;
        let element = element(datatype)?;
        // Checked first, so that no memory is allocated for bytes that did not arrive.
        check_size(datatype, shape, sizes.iter().fold(0, |all, &size| all.saturating_add(size)))?;
        let value = Self::own(allocate(allocator, element, shape)?);
        let mut to = value.address();
        for (part, size) in parts.into_iter().zip(sizes) {
            let host = match part {
                TensorPart::Region(region, bytes) if datatype == DataType::Bool => {
                    Some(region_bytes::<D>(stream, region, bytes)?)
                }
                TensorPart::Region(region, bytes) => {
                    let _pin = pin::<D>(stream, region, &bytes)?;
                    let from = D::address(region).after(bytes.start);
                    // SAFETY: the bytes at `to` are part of the value, because `check_size` compared the sum
                    // of all parts with the value's size. The bytes at `from` are pinned.
                    unsafe { D::copy(stream, to, from, size)? };
                    None
                }
                TensorPart::Host(TensorBytes::Inline(bytes)) if datatype != DataType::Bool => {
                    // SAFETY: as above.
                    unsafe { D::write(stream, to, bytes)? };
                    None
                }
                TensorPart::Host(TensorBytes::Inline(bytes)) => Some(bytes.to_vec()),
                TensorPart::Host(TensorBytes::File(file)) => {
                    let mut bytes = vec![0; size as usize];
                    memfd::read_at(file.as_fd(), &mut bytes, 0)?;
                    Some(bytes)
                }
            };
            if let Some(mut bytes) = host {
                if datatype == DataType::Bool {
                    // An operator may rely on 0 and 1, which a client need not have sent.
                    bytes.iter_mut().for_each(|byte| *byte = u8::from(*byte != 0));
                }
                // SAFETY: as above.
                unsafe { D::write(stream, to, &bytes)? };
            }
            to = to.after(size);
        }
        Ok(value)
    }

    /// Creates a value that reads bytes of a region in place. BOOL and unaligned elements are copied instead.
    pub(super) fn in_place(
        allocator: &Allocator,
        stream: &mut D::Stream,
        datatype: DataType,
        shape: &[usize],
        region: &D::Region,
        bytes: Range<u64>,
    ) -> Result<Self, Error> {
        let element = element(datatype)?;
        check_size(datatype, shape, bytes.end.saturating_sub(bytes.start))?;
        let address = D::address(region).after(bytes.start);
        let is_aligned = address.0.is_multiple_of(datatype.size().unwrap_or(1) as u64);
        if datatype == DataType::Bool || !is_aligned {
            return Self::gather(allocator, stream, datatype, shape, vec![TensorPart::Region(region, bytes)]);
        }
        let pin = pin::<D>(stream, region, &bytes)?;
        // SAFETY: the pin keeps the bytes valid and unchanged, and moves into the value with the tensor.
        let tensor = unsafe { over(allocator, address, bytes.end - bytes.start, element, shape)? };
        Ok(Self { tensor, pin: Some(pin) })
    }

    /// Copies a value that reads a region. Returns the value unchanged if no memory is left for the copy: the
    /// region then stays pinned for the value's life, which delays an eviction but breaks no value.
    pub(super) fn detached(self, allocator: &Allocator, stream: &mut D::Stream) -> Self {
        if self.pin.is_none() {
            return self;
        }
        let mut copy = || -> Result<Self, Error> {
            let (element, shape) = self.kind()?;
            let own = Self::own(allocate(allocator, element, &shape)?);
            // SAFETY: both values have the same type and shape, and the bytes of this one are pinned.
            unsafe { D::copy(stream, own.address(), self.address(), self.bytes())? };
            Ok(own)
        };
        copy().unwrap_or(self)
    }

    /// Returns the shape of the value, which is to be read as `datatype`.
    pub(super) fn shape(&self, datatype: DataType) -> Result<Vec<usize>, Error> {
        let expected = element(datatype)?;
        let (found, shape) = self.kind()?;
        if found != expected {
            return Err(Error::Tensor(format!("declared {datatype}, but the model makes {found}")));
        }
        Ok(shape)
    }

    /// Lends a part of the value's bytes to the device.
    pub(super) fn lend(&self, datatype: DataType, part: &Range<u64>) -> Result<D::Bytes<'_>, Error> {
        self.shape(datatype)?;
        if part.start > part.end || part.end > self.bytes() {
            let problem = "past the end of the value";
            let bytes = part.end.saturating_sub(part.start);
            return Err(DeviceError::BadExtent { offset: part.start, bytes, problem }.into());
        }
        // SAFETY: the bytes are part of the value, which is borrowed for as long as the lent bytes.
        Ok(unsafe { D::lend(self.address().after(part.start), part.end - part.start) })
    }

    /// Copies the value to host memory.
    pub(super) fn download(
        &self,
        stream: &mut D::Stream,
        datatype: DataType,
        inline_max: usize,
    ) -> Result<HostTensor, Error> {
        let shape = self.shape(datatype)?;
        let bytes = self.bytes() as usize;
        let mut read = |at: usize, to: &mut [u8]| {
            // SAFETY: the bytes are part of the value.
            unsafe { D::read(stream, self.address().after(at as u64), to) }
        };
        if bytes <= inline_max {
            let mut contents = vec![0; bytes];
            read(0, &mut contents)?;
            let contents = TensorBytes::Inline(Buffer::from(contents));
            return Ok(HostTensor { datatype, shape, contents });
        }
        let file = memfd::create("millrace-tensor", bytes as u64)?;
        let mut buffer = vec![0; bytes.min(READ_MAX)];
        for at in (0..bytes).step_by(READ_MAX) {
            let part = &mut buffer[..READ_MAX.min(bytes - at)];
            read(at, part)?;
            memfd::write_at(&file, part, at as u64)?;
        }
        Ok(HostTensor { datatype, shape, contents: TensorBytes::File(file) })
    }

    /// Returns the address of the value's first byte.
    fn address(&self) -> DeviceAddress {
        DeviceAddress(self.tensor.data_ptr() as u64)
    }

    /// Returns the size of the value in bytes.
    fn bytes(&self) -> u64 {
        self.tensor.size().unwrap_or(0) as u64
    }

    fn kind(&self) -> Result<(TensorElementType, Vec<usize>), Error> {
        let ValueType::Tensor { ty, shape, .. } = self.tensor.dtype() else {
            return Err(Error::Tensor("the value is not a tensor".to_owned()));
        };
        Ok((*ty, shape.iter().map(|&dim| dim as usize).collect()))
    }
}

/// Creates a tensor over bytes that ONNX Runtime neither owns nor frees.
///
/// # Safety
/// The `bytes` bytes at `address` are device memory of the allocator's device, and are valid and unchanged
/// while anything reads the tensor.
pub(super) unsafe fn over(
    allocator: &Allocator,
    address: DeviceAddress,
    bytes: u64,
    element: TensorElementType,
    shape: &[usize],
) -> Result<DynTensor, Error> {
    let memory: &MemoryInfo<'_> = allocator.memory_info();
    let dims: Vec<i64> = shape.iter().map(|&dim| dim as i64).collect();
    let mut value: *mut sys::OrtValue = std::ptr::null_mut();
    // SAFETY: the dims live until the end of the call, which copies them. `value` receives the tensor.
    let status = unsafe {
        (ort::api().CreateTensorWithDataAsOrtValue)(
            memory.ptr(),
            address.pointer(),
            bytes as usize,
            dims.as_ptr(),
            dims.len(),
            element.into(),
            &raw mut value,
        )
    };
    // SAFETY: the status comes from the call above and is used once.
    unsafe { ort::Error::result_from_status(status) }.map_err(|error| Error::Tensor(error.to_string()))?;
    let value = NonNull::new(value).ok_or_else(|| Error::Tensor("no tensor was created".to_owned()))?;
    // SAFETY: the pointer is of a new tensor, which the returned value owns from now on.
    Ok(unsafe { DynTensor::from_ptr(value, Some(allocator)) })
}

/// Returns the element type of a datatype.
pub(super) fn element(datatype: DataType) -> Result<TensorElementType, Error> {
    Ok(match datatype {
        DataType::Bool => TensorElementType::Bool,
        DataType::Uint8 => TensorElementType::Uint8,
        DataType::Uint16 => TensorElementType::Uint16,
        DataType::Uint32 => TensorElementType::Uint32,
        DataType::Uint64 => TensorElementType::Uint64,
        DataType::Int8 => TensorElementType::Int8,
        DataType::Int16 => TensorElementType::Int16,
        DataType::Int32 => TensorElementType::Int32,
        DataType::Int64 => TensorElementType::Int64,
        DataType::Fp16 => TensorElementType::Float16,
        DataType::Bf16 => TensorElementType::Bfloat16,
        DataType::Fp32 => TensorElementType::Float32,
        DataType::Fp64 => TensorElementType::Float64,
        DataType::Bytes => return Err(Error::DataType(datatype, SUPPORTED)),
    })
}

pub(super) fn allocate(
    allocator: &Allocator,
    element: TensorElementType,
    shape: &[usize],
) -> Result<DynTensor, Error> {
    let memory = |error: ort::Error| DeviceError::OutOfMemory(error.to_string());
    Ok(DynTensor::new(allocator, element, Shape::from(shape)).map_err(memory)?)
}

fn pin<D: OrtDevice>(
    stream: &mut D::Stream,
    region: &D::Region,
    bytes: &Range<u64>,
) -> Result<D::Pin, Error> {
    if bytes.start > bytes.end || bytes.end > D::region_bytes(region) {
        let problem = "past the end of the region";
        let length = bytes.end.saturating_sub(bytes.start);
        return Err(DeviceError::BadExtent { offset: bytes.start, bytes: length, problem }.into());
    }
    Ok(D::pin(stream, region, std::slice::from_ref(bytes))?)
}

/// Reads bytes of a region to host memory.
fn region_bytes<D: OrtDevice>(
    stream: &mut D::Stream,
    region: &D::Region,
    bytes: Range<u64>,
) -> Result<Vec<u8>, Error> {
    let _pin = pin::<D>(stream, region, &bytes)?;
    let mut read = vec![0; (bytes.end - bytes.start) as usize];
    // SAFETY: the bytes are pinned until the method returns, which is after the copy.
    unsafe { D::read(stream, D::address(region).after(bytes.start), &mut read)? };
    Ok(read)
}

fn part_bytes<D: OrtDevice>(part: &TensorPart<'_, D::Region>) -> Result<u64, Error> {
    match part {
        TensorPart::Host(TensorBytes::Inline(bytes)) => Ok(bytes.len() as u64),
        TensorPart::Host(TensorBytes::File(file)) => Ok(memfd::size(file)?),
        TensorPart::Region(_, bytes) => Ok(bytes.end.saturating_sub(bytes.start)),
    }
}

/// Fails if a tensor does not have `found` bytes.
fn check_size(datatype: DataType, shape: &[usize], found: u64) -> Result<(), Error> {
    let size = datatype.size().ok_or(Error::DataType(datatype, SUPPORTED))?;
    let due = shape.iter().try_fold(size, |bytes, &dim| bytes.checked_mul(dim));
    if due.is_some_and(|due| due as u64 == found) {
        return Ok(());
    }
    Err(Error::Tensor(format!("{found} bytes are not a tensor of shape {shape:?} with elements of {size}")))
}
