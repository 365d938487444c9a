//! Copies and fills. All of them, the synchronous ones too, are work of a stream. Unpinned host memory is
//! read and written when the stream gets there, which a driver may do too.
#![allow(unsafe_code, reason = "exports C functions, and reads arrays of the caller")]

use std::ffi::{c_uchar, c_void};

use cudarc::driver::sys::{CUdeviceptr, CUmemcpyAttributes, CUmemcpySrcAccessOrder, CUresult, CUstream};

use crate::calls::{CallOutcome, DriverCall};
use crate::host::PinState;
use crate::mapping::Access;
use crate::report::{self, Direction};
use crate::state::{State, state};
use crate::stream::{DeviceStream, enqueue};
use crate::work::{Touch, Work};

/// Most copies of a batch: above that, the count is taken for a mistake.
const BATCH_MAX: usize = 1 << 20;

impl State {
    fn is_device_memory(&self, at: u64, bytes: u64) -> bool {
        self.memory.allows(at, bytes, 0, Access::None).is_some()
    }

    /// Checks host memory of a copy.
    fn host_touch(&self, call: &DriverCall, at: u64, bytes: u64, write: bool) -> Result<Touch, CUresult> {
        if self.is_device_memory(at, bytes) {
            return Err(call.invalid(format!("{at:#x} is memory of a device, not of the host")));
        }
        // A range that is pinned only in part is refused by `Touch::check`.
        let pageable = self.pinning(at, bytes) == PinState::Pageable;
        Ok(Touch { at, bytes, write, pageable })
    }

    /// Checks a copy.
    fn checked_copy(
        &self,
        call: &DriverCall,
        stream: &DeviceStream,
        direction: Direction,
        CopyRange { to, from, bytes }: CopyRange,
    ) -> Result<CheckedCopy, CUresult> {
        let to = match direction {
            Direction::ToHost => self.host_touch(call, to, bytes, true)?,
            Direction::ToDevice | Direction::Within => self.device_touch(call, Touch::write(to, bytes))?,
        };
        let from = match direction {
            Direction::ToDevice => self.host_touch(call, from, bytes, false)?,
            Direction::ToHost | Direction::Within => self.device_touch(call, Touch::read(from, bytes))?,
        };
        self.check_memory(call, stream, &[to, from])?;
        Ok(CheckedCopy { direction, to, from })
    }

    /// Checks device memory of a copy. Pinned memory has the same address on the device, but a copy within
    /// the device does not begin or end there.
    fn device_touch(&self, call: &DriverCall, touch: Touch) -> Result<Touch, CUresult> {
        if touch.bytes > 0 && !self.is_device_memory(touch.at, touch.bytes) {
            return Err(call.invalid(format!("{:#x} is not mapped memory of a device", touch.at)));
        }
        Ok(touch)
    }
}

/// Addresses and size of a copy.
#[derive(Debug, Clone, Copy)]
struct CopyRange {
    to: u64,
    from: u64,
    bytes: u64,
}

/// A copy that the double accepts.
#[derive(Debug)]
struct CheckedCopy {
    direction: Direction,
    to: Touch,
    from: Touch,
}

impl CheckedCopy {
    /// Queues the copy, and counts its bytes.
    fn queue(self, call: &DriverCall, stream: &DeviceStream) -> CallOutcome {
        let Self { direction, to, from } = self;
        report::count_bytes(direction, to.bytes, to.pageable || from.pageable);
        stream.push(call, Work::Copy { to, from })
    }
}

fn copy(
    call: &DriverCall,
    direction: Direction,
    to: u64,
    from: u64,
    bytes: usize,
    stream: CUstream,
) -> CallOutcome {
    let mut state = state();
    let stream = state.stream(call, stream)?;
    let range = CopyRange { to, from, bytes: bytes as u64 };
    state.checked_copy(call, &stream, direction, range)?.queue(call, &stream)
}

/// Copies on the default stream, and waits for the copy.
fn copy_now(call: &DriverCall, direction: Direction, to: u64, from: u64, bytes: usize) -> CallOutcome {
    copy(call, direction, to, from, bytes, std::ptr::null_mut())?;
    let stream = state().stream(call, std::ptr::null_mut())?;
    stream.finish(call)
}

/// Checks all copies of a batch, and then queues them in order.
fn copy_batch(call: &DriverCall, ranges: &[CopyRange], stream: CUstream) -> CallOutcome {
    let mut state = state();
    let stream = state.stream(call, stream)?;
    let mut copies = Vec::with_capacity(ranges.len());
    for &range in ranges {
        let is_device = |at| state.is_device_memory(at, range.bytes);
        let direction = match (is_device(range.to), is_device(range.from)) {
            (true, true) => Direction::Within,
            (true, false) => Direction::ToDevice,
            (false, true) => Direction::ToHost,
            (false, false) => return Err(call.invalid("neither side of a copy is memory of a device")),
        };
        copies.push(state.checked_copy(call, &stream, direction, range)?);
    }
    copies.into_iter().try_for_each(|copy| copy.queue(call, &stream))
}

/// Checks the attributes of a batch: each applies from its index on.
fn check_attributes(
    call: &DriverCall,
    attributes: &[CUmemcpyAttributes],
    indices: &[usize],
    count: usize,
) -> CallOutcome {
    let ascends = indices.windows(2).all(|pair| pair[0] < pair[1]);
    if indices.first() != Some(&0) || !ascends || indices.last().is_some_and(|&last| last >= count) {
        return Err(call.invalid("the indices of the attributes do not ascend from 0"));
    }
    let order = CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_INVALID;
    if attributes.iter().any(|attributes| attributes.srcAccessOrder == order) {
        return Err(call.invalid("attributes without an order of access"));
    }
    Ok(())
}

fn host(at: *const c_void) -> u64 {
    at.expose_provenance() as u64
}

driver! {
    Context fn cuMemcpyHtoD_v2(to: CUdeviceptr, from: *const c_void, bytes: usize) |call| {
        copy_now(call, Direction::ToDevice, to, host(from), bytes)
    }

    Context fn cuMemcpyDtoH_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize) |call| {
        copy_now(call, Direction::ToHost, host(to), from, bytes)
    }

    Context fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream) |call| {
        copy(call, Direction::ToDevice, to, host(from), bytes, stream)
    }

    Context fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream) |call| {
        copy(call, Direction::ToHost, host(to), from, bytes, stream)
    }

    Context fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream) |call| {
        copy(call, Direction::Within, to, from, bytes, stream)
    }

    Context fn cuMemsetD8Async(at: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream) |call| {
        enqueue(call, stream, Work::Fill { at, bytes: count as u64, value })
    }

    // The header lists no CUDA_ERROR_INVALID_CONTEXT here, but the same copies one by one require a context.
    Context fn cuMemcpyBatchAsync_v2(to: *mut CUdeviceptr, from: *mut CUdeviceptr, bytes: *mut usize, count: usize, attributes: *mut CUmemcpyAttributes, indices: *mut usize, attribute_count: usize, stream: CUstream) |call| {
        let arrays = [to.cast::<c_void>(), from.cast(), bytes.cast(), attributes.cast(), indices.cast()];
        if arrays.iter().any(|array| array.is_null()) || stream.is_null() {
            return Err(call.invalid("an array or the stream is null"));
        }
        if count == 0 || count > BATCH_MAX || attribute_count > count {
            return Err(call.invalid(format!("{count} copies with {attribute_count} attributes")));
        }
        // SAFETY: the caller passes three arrays of `count` items, and two of `attribute_count` items.
        let (to, from, bytes, attributes, indices) = unsafe {
            (
                std::slice::from_raw_parts(to, count),
                std::slice::from_raw_parts(from, count),
                std::slice::from_raw_parts(bytes, count),
                std::slice::from_raw_parts(attributes, attribute_count),
                std::slice::from_raw_parts(indices, attribute_count),
            )
        };
        check_attributes(call, attributes, indices, count)?;
        let range = |((&to, &from), &bytes): ((&u64, &u64), &usize)| CopyRange { to, from, bytes: bytes as u64 };
        let ranges: Vec<_> = to.iter().zip(from).zip(bytes).map(range).collect();
        copy_batch(call, &ranges, stream)
    }
}
