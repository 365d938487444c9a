//! Host memory that the GPU reads and writes directly.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::c_void;
use std::ptr::NonNull;

use cudarc::driver::sys;

use super::{check, released};
use crate::error::DriverError;

/// Pinned host memory that the driver allocated.
#[derive(Debug)]
pub(crate) struct PinnedBuffer {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the buffer is plain memory of the process.
unsafe impl Send for PinnedBuffer {}
// SAFETY: as above; writing needs a unique reference.
unsafe impl Sync for PinnedBuffer {}

impl PinnedBuffer {
    pub(crate) fn new(bytes: usize) -> Result<Self, DriverError> {
        let mut base = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: the driver writes an address, which is freed once, on drop.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut base, bytes, flags) })?;
        let base = NonNull::<u8>::new(base.cast()).expect("the driver gave memory");
        // SAFETY: the driver allocated this many bytes.
        unsafe { base.as_ptr().write_bytes(0, bytes) };
        Ok(Self { base, bytes })
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory was initialised, and copies into the buffer end before it is read.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, with a unique reference.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }

    /// Returns the address for copies into the buffer.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Returns the address by which kernels reach the buffer.
    pub(crate) fn device_address(&self) -> Result<u64, DriverError> {
        device_address(self.base.as_ptr().cast())
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        // SAFETY: the buffer is this value's own.
        released("cuMemFreeHost", unsafe { sys::cuMemFreeHost(self.base.as_ptr().cast()) });
    }
}

/// Host memory of this process that is registered with the driver, so that the GPU reads it in place.
#[derive(Debug)]
pub(crate) struct Registration {
    base: *mut c_void,
}

// SAFETY: the value only keeps an address.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Registers memory that the GPU may only read, or also write.
    ///
    /// # Safety
    /// The memory stays mapped until the value is dropped.
    pub(crate) unsafe fn new(memory: *const u8, bytes: usize, writable: bool) -> Result<Self, DriverError> {
        let base = memory.cast_mut().cast();
        let read_only = if writable { 0 } else { sys::CU_MEMHOSTREGISTER_READ_ONLY };
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | read_only;
        // SAFETY: the caller's promise.
        check("cuMemHostRegister_v2", unsafe { sys::cuMemHostRegister_v2(base, bytes, flags) })?;
        Ok(Self { base })
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // SAFETY: the memory was registered once for this value.
        released("cuMemHostUnregister", unsafe { sys::cuMemHostUnregister(self.base) });
    }
}

fn device_address(base: *mut c_void) -> Result<u64, DriverError> {
    let mut address = 0;
    // SAFETY: the driver writes an address, and refuses memory that it does not know.
    let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, base, 0) };
    check("cuMemHostGetDevicePointer_v2", result)?;
    Ok(address)
}
