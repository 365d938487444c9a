//! Pinned host memory: registered by the program, or allocated here.
#![allow(unsafe_code, reason = "exports C functions, and maps memory")]

use std::ffi::{c_uint, c_void};

use cudarc::driver::sys::{
    CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_WRITECOMBINED,
    CU_MEMHOSTREGISTER_DEVICEMAP, CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_READ_ONLY, CUdeviceptr,
    CUresult, CUresult::*,
};
use rustix::mm::{MapFlags, ProtFlags};

use crate::calls::{CallOutcome, DriverCall, put};
use crate::mapping::overlap;
use crate::maps;
use crate::state::{State, state};
use crate::work::nap;

/// Pinned host memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostRange {
    pub(crate) bytes: u64,
    /// Whether the GPU may only read.
    pub(crate) read_only: bool,
    /// Whether the double allocated the memory, so that `cuMemFreeHost` frees it.
    pub(crate) allocated: bool,
}

/// The state of host memory that work names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PinState {
    Pageable,
    Pinned {
        read_only: bool,
    },
    /// Some bytes are pinned, and others are not.
    Mixed,
}

impl State {
    pub(crate) fn pinning(&self, at: u64, bytes: u64) -> PinState {
        let before = self.host.range(..at.saturating_add(bytes.max(1))).next_back();
        let found = before.filter(|(start, range)| overlap((**start, range.bytes), (at, bytes.max(1))));
        let Some((&start, range)) = found else { return PinState::Pageable };
        let inside = start <= at && at.checked_add(bytes).is_some_and(|end| end <= start + range.bytes);
        if inside { PinState::Pinned { read_only: range.read_only } } else { PinState::Mixed }
    }
}

fn register(call: &DriverCall, at: u64, bytes: u64, flags: c_uint) -> CallOutcome {
    let known = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_READ_ONLY;
    if at == 0 || bytes == 0 || flags & !known != 0 {
        return Err(call.invalid(format!("{at:#x}+{bytes:#x} with the flags {flags:#x}")));
    }
    let lines = maps::lines(at, bytes);
    let lines = lines.ok_or_else(|| call.invalid(format!("{at:#x}+{bytes:#x} is not all mapped")))?;
    let read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY != 0;
    if lines.iter().any(|line| line.has_file && !line.shared) {
        return Err(
            call.invalid("a private mapping of a file: pinning would copy each page; map the file shared")
        );
    }
    if !read_only && lines.iter().any(|line| !line.writable) {
        return Err(call.invalid("memory that is mapped read-only: CU_MEMHOSTREGISTER_READ_ONLY is required"));
    }
    let mut state = state();
    if state.pinning(at, bytes) != PinState::Pageable {
        let rule = format!("a byte of {at:#x}+{bytes:#x} is registered or allocated already");
        return Err(call.broken(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, rule));
    }
    if state.memory.allows(at, bytes, 0, crate::mapping::Access::None).is_some() {
        return Err(call.invalid("memory of a device"));
    }
    state.host.insert(at, HostRange { bytes, read_only, allocated: false });
    Ok(())
}

/// Removes pinned memory that no queued work uses, and returns its size. `unknown` is the answer for
/// memory that is not of this kind.
fn remove(call: &DriverCall, at: u64, allocated: bool, unknown: CUresult) -> Result<u64, CUresult> {
    let mut reported = false;
    loop {
        let mut state = state();
        let found = state.host.get(&at).copied().filter(|range| range.allocated == allocated);
        let Some(HostRange { bytes, .. }) = found else {
            let kind = if allocated { "allocated here" } else { "registered" };
            return Err(call.broken(unknown, format!("{at:#x} is not the start of memory that was {kind}")));
        };
        if let Some(work) = state.queued_use(at, bytes) {
            if !reported {
                call.dangerous(format!("{at:#x}+{bytes:#x} is given back, and {work} is still queued"));
            }
            reported = true;
            drop(state);
            nap(50_000);
            continue;
        }
        state.host.remove(&at);
        return Ok(bytes);
    }
}

fn allocate(call: &DriverCall, bytes: usize, flags: c_uint) -> Result<*mut c_void, CUresult> {
    let known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    if bytes == 0 || flags & !known != 0 {
        return Err(call.invalid(format!("{bytes} bytes with the flags {flags:#x}")));
    }
    let rights = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the system chooses free addresses.
    let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, rights, MapFlags::SHARED) };
    let at = at.map_err(|errno| call.broken(CUDA_ERROR_OUT_OF_MEMORY, format!("mmap: {errno}")))?;
    // SAFETY: the memory was mapped just now. The value shows reads of bytes that were never written.
    unsafe { at.cast::<u8>().write_bytes(0xa5, bytes) };
    let range = HostRange { bytes: bytes as u64, read_only: false, allocated: true };
    state().host.insert(at.expose_provenance() as u64, range);
    Ok(at)
}

driver! {
    Context fn cuMemHostAlloc(at: *mut *mut c_void, bytes: usize, flags: c_uint) |call| {
        if at.is_null() {
            return Err(call.invalid("the address for the address is null"));
        }
        let memory = allocate(call, bytes, flags)?;
        // SAFETY: the caller's address for an address.
        unsafe { put(at, memory) }
    }

    Context fn cuMemFreeHost(at: *mut c_void) |call| {
        let bytes = remove(call, at.addr() as u64, true, CUDA_ERROR_INVALID_VALUE)?;
        // SAFETY: the memory was allocated above, and no queued work uses it.
        unsafe { rustix::mm::munmap(at, bytes as usize) }.map_err(|_| CUDA_ERROR_UNKNOWN)
    }

    Context fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: c_uint) |call| {
        register(call, at.expose_provenance() as u64, bytes as u64, flags)
    }

    Context fn cuMemHostUnregister(at: *mut c_void) |call| {
        let at = at.addr() as u64;
        let bytes = remove(call, at, false, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)?;
        if maps::lines(at, bytes).is_none() {
            return Err(call.invalid(format!("{at:#x}+{bytes:#x} was unmapped while it was registered")));
        }
        Ok(())
    }

    Context fn cuMemHostGetDevicePointer_v2(device: *mut CUdeviceptr, at: *mut c_void, flags: c_uint) |call| {
        let at = at.addr() as u64;
        if flags != 0 || !matches!(state().pinning(at, 1), PinState::Pinned { .. }) {
            return Err(call.invalid(format!("{at:#x} is not pinned, or flags are set")));
        }
        // SAFETY: the caller's address for an address.
        unsafe { put(device, at) }
    }
}
