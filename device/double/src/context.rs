//! Devices and contexts.
#![allow(unsafe_code, reason = "exports C functions, and writes through pointers of the caller")]

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUdevice_P2PAttribute, CUdevice_attribute, CUresult, CUresult::*, CUuuid,
};
use rustix::process::{Resource, Rlimit};

use crate::calls::{self, CallOutcome, DriverCall, put};
use crate::config::{self, CONFIG};
use crate::green::SMS;
use crate::state::{State, next_id, state};
use crate::stream;

/// A visible device with its primary context.
#[derive(Debug)]
pub(crate) struct VisibleDevice {
    /// Index among all devices.
    index: usize,
    /// Primary context. The context exists while `retained` is above 0.
    context: usize,
    pub(crate) retained: u64,
    /// Bytes in use.
    pub(crate) used: Arc<AtomicU64>,
}

/// A context of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Current {
    pub(crate) context: usize,
    pub(crate) device: CUdevice,
    /// Green context, if the context is that of one.
    pub(crate) green: Option<usize>,
}

thread_local! {
    static CURRENT: Cell<usize> = const { Cell::new(0) };
}

/// Returns the context of this thread, if there is one and it exists.
pub(crate) fn current() -> Option<Current> {
    state().context(CURRENT.get())
}

impl State {
    /// Returns an existing context.
    fn context(&self, context: usize) -> Option<Current> {
        let primary = self.devices.iter().position(|device| device.retained > 0 && device.context == context);
        if let Some(device) = primary {
            return Some(Current { context, device: device as CUdevice, green: None });
        }
        let (&green, found) = self.green_contexts.iter().find(|(_, green)| green.context == context)?;
        Some(Current { context, device: found.device, green: Some(green) })
    }

    /// Returns the context of this thread. Only calls that require one ask, and it was checked.
    pub(crate) fn current(&self, call: &DriverCall) -> Result<Current, CUresult> {
        let missing = || call.broken(CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread");
        self.context(CURRENT.get()).ok_or_else(missing)
    }

    pub(crate) fn device(&self, call: &DriverCall, device: CUdevice) -> Result<&VisibleDevice, CUresult> {
        let found = usize::try_from(device).ok().and_then(|at| self.devices.get(at));
        found.ok_or_else(|| call.broken(CUDA_ERROR_INVALID_DEVICE, format!("there is no device {device}")))
    }

    fn device_mut(&mut self, call: &DriverCall, device: CUdevice) -> Result<&mut VisibleDevice, CUresult> {
        self.device(call, device)?;
        Ok(&mut self.devices[device as usize])
    }
}

/// Creates the devices, and takes as many descriptors as the process may have: each handle is a file.
fn init(call: &DriverCall) -> CallOutcome {
    if crate::faults::is_lost_elsewhere() {
        crate::faults::end_context(CUDA_ERROR_UNKNOWN);
        return Err(call.broken(CUDA_ERROR_UNKNOWN, "the device was lost"));
    }
    if calls::has_started() {
        return Ok(());
    }
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    // A refusal shows as a failed cuMemCreate.
    rustix::process::setrlimit(Resource::Nofile, raised).ok();
    let mut state = state();
    if CONFIG.visible.is_empty() {
        return Err(CUDA_ERROR_NO_DEVICE);
    }
    if state.devices.is_empty() {
        let new =
            |&index: &usize| VisibleDevice { index, context: next_id(), retained: 0, used: Arc::default() };
        state.devices = CONFIG.visible.iter().map(new).collect();
    }
    calls::start();
    Ok(())
}

/// Returns the value of an attribute. Attributes that no test needs are 0.
fn attribute(attribute: CUdevice_attribute, index: usize) -> c_int {
    use CUdevice_attribute::*;
    match attribute {
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X => c_int::MAX,
        CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => SMS as c_int,
        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 50 << 20,
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => index as c_int + 1,
        CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        | CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED => 1,
        _ => 0,
    }
}

fn release_primary(call: &DriverCall, device: CUdevice) -> CallOutcome {
    let mut state = state();
    let found = state.device_mut(call, device)?;
    if found.retained == 0 {
        return Err(call.broken(CUDA_ERROR_INVALID_CONTEXT, "the primary context is not retained"));
    }
    found.retained -= 1;
    let ends = found.retained == 0;
    let context = found.context;
    if ends {
        state.default_streams.remove(&context);
        let busy = state.streams.values().find(|stream| stream.device == device && !stream.is_idle());
        if let Some(stream) = busy {
            let rule = format!("the context ends, and {} is still queued", stream.first_queued());
            call.dangerous(rule);
        }
    }
    Ok(())
}

/// Returns whether two different devices exist.
fn are_peers(state: &State, call: &DriverCall, one: CUdevice, other: CUdevice) -> Result<bool, CUresult> {
    state.device(call, one)?;
    state.device(call, other)?;
    Ok(one != other)
}

driver! {
    NoStart fn cuInit(flags: c_uint) |call| {
        if flags != 0 {
            return Err(call.invalid("the flags are not 0"));
        }
        init(call)
    }

    NoStart fn cuDriverGetVersion(version: *mut c_int) |_call| {
        // SAFETY: the caller's address for a version.
        unsafe { put(version, 13_000) }
    }

    Start fn cuDeviceGetCount(count: *mut c_int) |_call| {
        // SAFETY: the caller's address for a count.
        unsafe { put(count, state().devices.len() as c_int) }
    }

    Start fn cuDeviceGet(device: *mut CUdevice, ordinal: c_int) |call| {
        state().device(call, ordinal)?;
        // SAFETY: the caller's address for a device.
        unsafe { put(device, ordinal) }
    }

    Start fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: CUdevice) |call| {
        state().device(call, device)?;
        let text = b"Millrace CUDA double";
        let Some(room) = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_sub(1)) else {
            return Err(call.invalid("there is no room for a name"));
        };
        if name.is_null() {
            return Err(CUDA_ERROR_INVALID_VALUE);
        }
        let length = text.len().min(room);
        // SAFETY: the caller has room for `bytes` bytes, and the length is smaller.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), name.cast::<u8>(), length);
            name.add(length).write(0);
        }
        Ok(())
    }

    Start fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, device: CUdevice) |call| {
        let bytes = config::uuid(state().device(call, device)?.index).map(|byte| byte as c_char);
        // SAFETY: the caller's address for a UUID.
        unsafe { put(uuid, CUuuid { bytes }) }
    }

    Start fn cuDeviceGetAttribute(value: *mut c_int, wanted: CUdevice_attribute, device: CUdevice) |call| {
        let index = state().device(call, device)?.index;
        // SAFETY: the caller's address for a number.
        unsafe { put(value, attribute(wanted, index)) }
    }

    Start fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) |call| {
        state().device(call, device)?;
        // SAFETY: the caller's address for a size.
        unsafe { put(bytes, CONFIG.memory as usize) }
    }

    Start fn cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, peer: CUdevice) |call| {
        let peers = are_peers(&state(), call, device, peer)?;
        // SAFETY: the caller's address for a flag.
        unsafe { put(can, c_int::from(peers)) }
    }

    Start fn cuDeviceGetP2PAttribute(value: *mut c_int, wanted: CUdevice_P2PAttribute, from: CUdevice, to: CUdevice) |call| {
        let peers = are_peers(&state(), call, from, to)?;
        let is_access = wanted == CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED;
        // SAFETY: the caller's address for a number.
        unsafe { put(value, c_int::from(peers && is_access)) }
    }

    Start fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice) |call| {
        let mut state = state();
        let found = state.device_mut(call, device)?;
        // SAFETY: the caller's address for a context.
        unsafe { put(context, found.context as CUcontext)? };
        found.retained += 1;
        Ok(())
    }

    Start fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |call| { release_primary(call, device) }

    Start fn cuDevicePrimaryCtxSetFlags_v2(device: CUdevice, flags: c_uint) |call| {
        state().device(call, device)?;
        if flags & !0x1f != 0 {
            return Err(call.invalid(format!("unknown flags {flags:#x}")));
        }
        Ok(())
    }

    Start fn cuCtxSetCurrent(context: CUcontext) |call| {
        let context = context.addr();
        if context != 0 && state().context(context).is_none() {
            let rule = format!("there is no context {context:#x}: released, or never retained");
            return Err(call.broken(CUDA_ERROR_INVALID_CONTEXT, rule));
        }
        CURRENT.set(context);
        Ok(())
    }

    Start fn cuCtxGetCurrent(context: *mut CUcontext) |_call| {
        let current = current().map_or(0, |current| current.context);
        // SAFETY: the caller's address for a context.
        unsafe { put(context, current as CUcontext) }
    }

    // The header lists no CUDA_ERROR_INVALID_CONTEXT here, but a range without a context has no meaning.
    Context fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) |_call| {
        // SAFETY: null, or the caller's addresses for numbers.
        unsafe {
            // Null means that the caller does not ask for the number.
            put(least, 0).ok();
            put(greatest, stream::GREATEST_PRIORITY).ok();
        }
        Ok(())
    }

    Context fn cuCtxSynchronize() |call| {
        let streams: Vec<_> = {
            let state = state();
            let current = state.current(call)?;
            let of_context = |stream: &&Arc<stream::DeviceStream>| stream.device == current.device
                && current.green.is_none_or(|green| stream.green == Some(green));
            state.all_streams().filter(of_context).cloned().collect()
        };
        streams.iter().try_for_each(|stream| stream.finish(call))
    }

    Context fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |call| {
        let used = {
            let state = state();
            let current = state.current(call)?;
            state.device(call, current.device)?.used.load(Ordering::Relaxed)
        };
        // SAFETY: the caller's addresses for sizes.
        unsafe {
            put(free, CONFIG.memory.saturating_sub(used) as usize)?;
            put(total, CONFIG.memory as usize)
        }
    }
}
