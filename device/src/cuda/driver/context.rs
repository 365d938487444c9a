//! GPUs and their primary contexts.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use cudarc::driver::sys;
use millrace_types::Bytes;

use super::{DriverMissing, check, open, released};
use crate::error::DriverError;

pub(crate) use sys::CUdevice_attribute as Attribute;

/// A GPU that the driver shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Gpu {
    pub(super) device: sys::CUdevice,
}

impl Gpu {
    /// Returns the GPUs of this process, in the driver's order.
    pub(crate) fn all() -> Result<Vec<Self>, DriverMissing> {
        open()?;
        let mut count = 0;
        // SAFETY: the driver writes an integer.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        let gpu = |ordinal| {
            let mut device = 0;
            // SAFETY: the driver writes an integer.
            check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, ordinal) })?;
            Ok(Self { device })
        };
        (0..count).map(gpu).collect()
    }

    /// Returns the number by which the driver knows the GPU.
    pub(crate) fn ordinal(self) -> i32 {
        self.device
    }

    pub(crate) fn name(self) -> Result<String, DriverError> {
        let mut name: [c_char; 256] = [0; 256];
        // SAFETY: the driver writes at most 255 bytes and a zero.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr(), 255, self.device) })?;
        // SAFETY: the last byte was zero before the call, and the driver did not write to it.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Returns the UUID in NVML's form, such as GPU-1b2c....
    pub(crate) fn uuid(self) -> Result<String, DriverError> {
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: the driver writes 16 bytes.
        check("cuDeviceGetUuid_v2", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, self.device) })?;
        let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", byte.cast_unsigned())).collect();
        let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        Ok(format!("GPU-{}", parts.join("-")))
    }

    pub(crate) fn attribute(self, attribute: Attribute) -> Result<i32, DriverError> {
        let mut value = 0;
        // SAFETY: the driver writes an integer.
        let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, self.device) };
        check("cuDeviceGetAttribute", result)?;
        Ok(value)
    }

    pub(crate) fn memory(self) -> Result<Bytes, DriverError> {
        let mut bytes = 0;
        // SAFETY: the driver writes an integer.
        check("cuDeviceTotalMem_v2", unsafe { sys::cuDeviceTotalMem_v2(&raw mut bytes, self.device) })?;
        Ok(Bytes(bytes as u64))
    }
}

/// How a thread waits for the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// The thread spins.
    Spin,
    /// The thread spins and offers its core to others.
    Yield,
    /// The thread sleeps.
    Block,
}

/// The primary context of a GPU. Clones are the same context, which ends with the last of them.
#[derive(Debug, Clone)]
pub(crate) struct Context(Arc<Retained>);

#[derive(Debug)]
struct Retained {
    gpu: Gpu,
    context: sys::CUcontext,
}

// SAFETY: the driver's contexts may be used from all threads.
unsafe impl Send for Retained {}
// SAFETY: as above.
unsafe impl Sync for Retained {}

impl Context {
    /// Opens the primary context, and makes it the context of this thread. The mode has an effect
    /// only if the context is not open yet.
    pub(crate) fn open(gpu: Gpu, mode: WaitMode) -> Result<Self, DriverError> {
        let flags = match mode {
            WaitMode::Spin => sys::CUctx_flags::CU_CTX_SCHED_SPIN,
            WaitMode::Yield => sys::CUctx_flags::CU_CTX_SCHED_YIELD,
            WaitMode::Block => sys::CUctx_flags::CU_CTX_SCHED_BLOCKING_SYNC,
        };
        // SAFETY: no pointers are passed.
        let result = unsafe { sys::cuDevicePrimaryCtxSetFlags_v2(gpu.device, flags as u32) };
        if result != sys::CUresult::CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE {
            check("cuDevicePrimaryCtxSetFlags_v2", result)?;
        }
        let mut context = std::ptr::null_mut();
        // SAFETY: the driver writes a context, which is released once, on drop.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, gpu.device) };
        check("cuDevicePrimaryCtxRetain", result)?;
        let context = Self(Arc::new(Retained { gpu, context }));
        context.enter()?;
        Ok(context)
    }

    pub(crate) fn gpu(&self) -> Gpu {
        self.0.gpu
    }

    /// Makes this the context of the calling thread.
    pub(crate) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.0.context) })
    }

    /// Waits for all work of the context.
    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        self.enter()?;
        // SAFETY: no pointers are passed.
        check("cuCtxSynchronize", unsafe { sys::cuCtxSynchronize() })
    }

    /// Returns the free and the whole memory of the GPU.
    pub(crate) fn memory(&self) -> Result<(Bytes, Bytes), DriverError> {
        self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two integers.
        check("cuMemGetInfo_v2", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((Bytes(free as u64), Bytes(total as u64)))
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: the context was retained once for this value.
        released("cuDevicePrimaryCtxRelease_v2", unsafe {
            sys::cuDevicePrimaryCtxRelease_v2(self.gpu.device)
        });
    }
}
