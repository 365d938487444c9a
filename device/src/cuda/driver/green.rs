//! Shares of a GPU's SMs (green contexts).
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::mem::MaybeUninit;

use cudarc::driver::sys;

use super::{Context, Gpu, RawStream, check, released};
use crate::error::DriverError;

/// A set of SMs.
#[derive(Clone, Copy)]
pub(crate) struct SmSet(sys::CUdevResource);

impl std::fmt::Debug for SmSet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SmSet({})", self.sms())
    }
}

/// The number of SMs of a set, and the steps in which the driver cuts the set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SmShape {
    pub(crate) sms: u32,
    /// Fewest SMs of a part.
    pub(crate) least: u32,
    /// Number by which the SMs of a part can be divided.
    pub(crate) step: u32,
}

impl SmSet {
    /// Returns all SMs of a GPU.
    pub(crate) fn of(gpu: Gpu) -> Result<Self, DriverError> {
        let mut set = MaybeUninit::<sys::CUdevResource>::zeroed();
        let kind = sys::CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
        // SAFETY: the driver fills in the resource.
        let result = unsafe { sys::cuDeviceGetDevResource(gpu.device, set.as_mut_ptr(), kind) };
        check("cuDeviceGetDevResource", result)?;
        // SAFETY: the driver has filled in the resource, and all its bit patterns are valid.
        Ok(Self(unsafe { set.assume_init() }))
    }

    pub(crate) fn shape(&self) -> SmShape {
        // SAFETY: a set is always a resource of SMs.
        let sm = unsafe { self.0.__bindgen_anon_1.sm };
        SmShape { sms: sm.smCount, least: sm.minSmPartitionSize, step: sm.smCoscheduledAlignment }
    }

    pub(crate) fn sms(&self) -> u32 {
        self.shape().sms
    }

    /// Cuts parts of at least `sms` SMs each, at most `parts` of them, and returns them and the rest.
    pub(crate) fn split(&self, sms: u32, parts: u32) -> Result<(Vec<Self>, Option<Self>), DriverError> {
        let mut count = parts;
        let mut found = vec![self.0; parts as usize];
        let mut rest = MaybeUninit::<sys::CUdevResource>::zeroed();
        // SAFETY: the driver reads the set, and writes at most `count` sets and the rest.
        let result = unsafe {
            sys::cuDevSmResourceSplitByCount(
                found.as_mut_ptr(),
                &raw mut count,
                &raw const self.0,
                rest.as_mut_ptr(),
                0,
                sms,
            )
        };
        check("cuDevSmResourceSplitByCount", result)?;
        found.truncate(count as usize);
        // SAFETY: zeroed at first, and all its bit patterns are valid.
        let rest = Self(unsafe { rest.assume_init() });
        Ok((found.into_iter().map(Self).collect(), Some(rest).filter(|rest| rest.sms() > 0)))
    }
}

/// A context that runs kernels only on a set of SMs.
#[derive(Debug)]
pub(crate) struct GreenContext {
    green: sys::CUgreenCtx,
    context: Context,
}

// SAFETY: the driver's contexts may be used from all threads.
unsafe impl Send for GreenContext {}
// SAFETY: as above.
unsafe impl Sync for GreenContext {}

impl GreenContext {
    pub(crate) fn new(context: &Context, sms: &SmSet) -> Result<Self, DriverError> {
        let mut set = sms.0;
        let mut description = std::ptr::null_mut();
        // SAFETY: the driver reads one set and writes a description.
        let result = unsafe { sys::cuDevResourceGenerateDesc(&raw mut description, &raw mut set, 1) };
        check("cuDevResourceGenerateDesc", result)?;
        let mut green = std::ptr::null_mut();
        let flags = sys::CUgreenCtxCreate_flags::CU_GREEN_CTX_DEFAULT_STREAM as u32;
        // SAFETY: the driver writes a context, which is destroyed once, on drop.
        let result =
            unsafe { sys::cuGreenCtxCreate(&raw mut green, description, context.gpu().device, flags) };
        check("cuGreenCtxCreate", result)?;
        Ok(Self { green, context: context.clone() })
    }

    /// Creates a stream whose kernels run on the SMs of this context.
    pub(crate) fn stream(&self) -> Result<RawStream, DriverError> {
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes a stream, which the returned value destroys once.
        let result = unsafe { sys::cuGreenCtxStreamCreate(&raw mut stream, self.green, flags, 0) };
        check("cuGreenCtxStreamCreate", result)?;
        // SAFETY: the stream is new.
        Ok(unsafe { RawStream::of_driver(stream, &self.context) })
    }
}

impl Drop for GreenContext {
    fn drop(&mut self) {
        // SAFETY: the context is this value's own, and its owner drops it after its streams.
        released("cuGreenCtxDestroy", unsafe { sys::cuGreenCtxDestroy(self.green) });
    }
}
