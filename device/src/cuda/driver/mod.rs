//! The CUDA driver API behind owned values. The driver is opened once, at the first use, and all
//! names are resolved then, so that no later call can panic.
//!
//! Work that is queued on a stream uses memory after the call that queued it has returned. The
//! functions that queue such work are unsafe: the caller keeps the memory until the work has finished.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

pub(crate) mod context;
pub(crate) mod green;
pub(crate) mod host;
pub(crate) mod kernels;
pub(crate) mod memory;
pub(crate) mod stream;

use std::ffi::CStr;
use std::sync::OnceLock;

use cudarc::driver::sys;

pub(crate) use context::{Attribute, Context, Gpu};
pub(crate) use host::{PinnedBuffer, Registration};
pub(crate) use kernels::Kernels;
pub(crate) use memory::{AddressRange, MemoryHandle};
pub(crate) use stream::{RawEvent, RawStream};

use crate::error::{DriverError, Error};

/// Oldest driver that Millrace asks for, as [`DRIVER_MIN`](crate::nvml::DRIVER_MIN), for the error text.
const OLDEST_DRIVER: &str = "580";

/// Names that every use of the device needs.
const REQUIRED: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetAttribute",
    "cuDeviceTotalMem_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxSetFlags_v2",
    "cuCtxSetCurrent",
    "cuCtxGetStreamPriorityRange",
    "cuCtxSynchronize",
    "cuMemGetInfo_v2",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetAllocationGranularity",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemHostGetDevicePointer_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD8Async",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventElapsedTime_v2",
    "cuEventDestroy_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
];

/// Names for shares of a GPU's SMs, of driver 555 and newer.
const GREEN: &[&str] = &[
    "cuDeviceGetDevResource",
    "cuDevSmResourceSplitByCount",
    "cuDevResourceGenerateDesc",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxStreamCreate",
];

/// Names for the capture of graphs.
const GRAPHS: &[&str] = &[
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
];

/// Reason why this machine has no usable driver.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DriverMissing {
    /// The driver's library cannot be opened.
    #[error("no NVIDIA driver on this machine: libcuda.so.1 cannot be opened")]
    NoLibrary,
    /// The driver lacks a function.
    #[error("{0}: the NVIDIA driver on this machine is too old: install {OLDEST_DRIVER} or newer")]
    TooOld(&'static str),
    /// The driver found no GPU, or its start failed.
    #[error("the NVIDIA driver cannot be used: {0}")]
    Refused(#[from] DriverError),
}

impl From<DriverMissing> for Error {
    fn from(missing: DriverMissing) -> Self {
        match missing {
            DriverMissing::Refused(error) => error.into(),
            DriverMissing::NoLibrary | DriverMissing::TooOld(_) => Self::Lost(missing.to_string()),
        }
    }
}

/// Opens the driver, checks its functions and starts it. Later calls return the first outcome.
pub(crate) fn open() -> Result<(), DriverMissing> {
    static OPENED: OnceLock<Result<(), DriverMissing>> = OnceLock::new();
    OPENED.get_or_init(open_once).clone()
}

fn open_once() -> Result<(), DriverMissing> {
    // SAFETY: opening the driver's library runs its initialisers, which are the vendor's.
    if !unsafe { sys::is_culib_present() } {
        return Err(DriverMissing::NoLibrary);
    }
    if let Some(missing) = REQUIRED.iter().find(|name| !has(name)) {
        return Err(DriverMissing::TooOld(missing));
    }
    // SAFETY: the name was resolved above.
    check("cuInit", unsafe { sys::cuInit(0) })?;
    Ok(())
}

/// Returns whether the driver has a function. The library must be present.
fn has(name: &str) -> bool {
    // SAFETY: the symbol is only looked up, and neither called nor read.
    unsafe { sys::culib().get::<*const ()>(name.as_bytes()).is_ok() }
}

/// Returns whether the driver offers shares of SMs.
pub(crate) fn has_green_contexts() -> bool {
    GREEN.iter().all(|name| has(name))
}

/// Returns whether the driver captures graphs.
pub(crate) fn has_graphs() -> bool {
    GRAPHS.iter().all(|name| has(name))
}

/// Returns the version of CUDA that the driver supports, such as 13000 for 13.0.
pub(crate) fn cuda_version() -> Result<i32, DriverError> {
    let mut version = 0;
    // SAFETY: the driver writes an integer.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version)
}

/// Turns the result of a call into an error with the driver's own text.
fn check(call: &'static str, result: sys::CUresult) -> Result<(), DriverError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut name = std::ptr::null();
    let mut text = std::ptr::null();
    // SAFETY: the driver stores pointers to static strings, or leaves them null for an unknown error.
    let (name, text) = unsafe {
        let _ = sys::cuGetErrorName(result, &raw mut name);
        let _ = sys::cuGetErrorString(result, &raw mut text);
        (owned(name), owned(text))
    };
    Err(DriverError { call, code: result as u32, name, text })
}

/// Copies a C string of the driver.
///
/// # Safety
/// `text` is null, or a C string that lives during the call.
unsafe fn owned(text: *const std::ffi::c_char) -> String {
    if text.is_null() {
        return "unknown".to_owned();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Reports a refused release. The value is gone in any case, so nobody can act on the error.
fn released(call: &'static str, result: sys::CUresult) {
    if let Err(error) = check(call, result) {
        report(&error);
    }
}

/// Reports an error that nobody can act on.
fn report(error: &DriverError) {
    // A context that is lost refuses every release, and its end releases all. A driver that is shut
    // down at the end of the process has released all.
    if error.code < 700 && error.code != sys::CUresult::CUDA_ERROR_DEINITIALIZED as u32 {
        eprintln!("millrace: {error}");
    }
}
