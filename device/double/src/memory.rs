//! Physical memory: handles, exports and imports. A handle is a memfd of its own, so the memory lives as
//! long as a handle, a mapping or a descriptor does, in any process.
#![allow(unsafe_code, reason = "exports C functions, and takes descriptors from the caller")]

use std::collections::BTreeMap;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{AsFd as _, BorrowedFd, IntoRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{
    CUdevice, CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp,
    CUmemAllocationType, CUmemGenericAllocationHandle, CUmemLocation, CUmemLocationType, CUresult,
    CUresult::*,
};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::calls::{CallOutcome, DriverCall, put};
use crate::config::{CONFIG, GRANULARITY};
use crate::mapping::Mapping;
use crate::state::{State, next_id, state};

/// Name of the memfds, by which an import knows them.
pub(crate) const FILE_NAME: &str = "millrace-cuda-double";

/// Value of every byte of new memory, so that a read of bytes that were never written shows.
const FRESH: u8 = 0xa5;

/// Descriptors are exported only from handles that were created for them.
const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) handles: BTreeMap<u64, Handle>,
    /// Sizes of reserved ranges by their first address.
    pub(crate) reservations: BTreeMap<u64, u64>,
    /// Mappings by their first address.
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    /// Sizes of ranges of `cuMemAlloc` by their first address. Each range is also a mapping.
    pub(crate) allocations: BTreeMap<u64, u64>,
}

#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) physical: Arc<Physical>,
}

/// Memory of a device. Handles and mappings share its ownership.
#[derive(Debug)]
pub(crate) struct Physical {
    pub(crate) file: OwnedFd,
    pub(crate) bytes: u64,
    exportable: bool,
    /// Count of used bytes of the device; `None` for imported memory, which another process uses.
    charged: Option<Arc<AtomicU64>>,
}

impl Drop for Physical {
    fn drop(&mut self) {
        if let Some(used) = &self.charged {
            used.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

impl Physical {
    /// Takes memory of a device. `bytes` is a multiple of the granularity.
    pub(crate) fn take(
        state: &State,
        call: &DriverCall,
        device: CUdevice,
        bytes: u64,
        exportable: bool,
    ) -> Result<Arc<Self>, CUresult> {
        let used = Arc::clone(&state.device(call, device)?.used);
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= CONFIG.memory);
        // The device is full. This is no fault of the program, so there is no message.
        used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map_err(|_| CUDA_ERROR_OUT_OF_MEMORY)?;
        let charged = Some(Arc::clone(&used));
        match fresh_file(bytes) {
            Ok(file) => Ok(Arc::new(Self { file, bytes, exportable, charged })),
            Err(errno) => {
                used.fetch_sub(bytes, Ordering::Relaxed);
                Err(call.broken(CUDA_ERROR_OUT_OF_MEMORY, format!("no memfd of {bytes} bytes: {errno}")))
            }
        }
    }
}

fn fresh_file(bytes: u64) -> rustix::io::Result<OwnedFd> {
    static FRESH_BYTES: [u8; GRANULARITY as usize] = [FRESH; GRANULARITY as usize];
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create(FILE_NAME, flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    let mut at = 0;
    while at < bytes {
        let rest = usize::try_from(bytes - at).unwrap_or(usize::MAX).min(FRESH_BYTES.len());
        at += rustix::io::pwrite(&file, &FRESH_BYTES[..rest], at)? as u64;
    }
    // An importer maps the file: a shorter file would fault there.
    rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// Returns the device of a location.
pub(crate) fn device_of(call: &DriverCall, location: CUmemLocation) -> Result<CUdevice, CUresult> {
    if location.type_ == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE {
        return Ok(location.id);
    }
    Err(call.invalid(format!("the location is {:?}, not a device", location.type_)))
}

/// Reads a properties structure of the caller.
fn properties(call: &DriverCall, at: *const CUmemAllocationProp) -> Result<(CUdevice, bool), CUresult> {
    if at.is_null() {
        return Err(call.invalid("the properties are null"));
    }
    // SAFETY: not null, so the caller's properties.
    let properties = unsafe { at.read() };
    if properties.type_ != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED {
        return Err(call.invalid("the type is not CU_MEM_ALLOCATION_TYPE_PINNED"));
    }
    let exportable = match properties.requestedHandleTypes {
        CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE => false,
        DESCRIPTOR => true,
        other => return Err(call.broken(CUDA_ERROR_NOT_SUPPORTED, format!("handles of type {other:?}"))),
    };
    Ok((device_of(call, properties.location)?, exportable))
}

fn create(
    call: &DriverCall,
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    at: *const CUmemAllocationProp,
    flags: c_ulonglong,
) -> CallOutcome {
    let (device, exportable) = properties(call, at)?;
    let bytes = bytes as u64;
    if flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(call.invalid(format!("{bytes} bytes are not whole units of 2 MiB, or flags are set")));
    }
    let mut state = state();
    let physical = Physical::take(&state, call, device, bytes, exportable)?;
    let id = next_id() as u64;
    // SAFETY: the caller's address for a handle.
    unsafe { put(handle, id)? };
    state.memory.handles.insert(id, Handle { physical });
    Ok(())
}

impl Memory {
    pub(crate) fn handle(&self, call: &DriverCall, handle: u64) -> Result<&Handle, CUresult> {
        let missing = || call.invalid(format!("there is no handle {handle:#x}: released, or never created"));
        self.handles.get(&handle).ok_or_else(missing)
    }
}

fn export(
    call: &DriverCall,
    descriptor: *mut c_void,
    handle: u64,
    kind: CUmemAllocationHandleType,
) -> CallOutcome {
    let state = state();
    let physical = &state.memory.handle(call, handle)?.physical;
    if kind != DESCRIPTOR || !physical.exportable {
        return Err(call.invalid("the handle was not created for export as a descriptor"));
    }
    let copy = rustix::io::fcntl_dupfd_cloexec(&physical.file, 0);
    let copy = copy.map_err(|errno| call.broken(CUDA_ERROR_OPERATING_SYSTEM, format!("dup: {errno}")))?;
    if descriptor.is_null() {
        return Err(call.invalid("the address for the descriptor is null"));
    }
    // SAFETY: not null, so the caller's address for a descriptor, which the caller closes.
    unsafe { put(descriptor.cast::<c_int>(), copy.into_raw_fd()) }
}

/// Checks that a descriptor is memory of a double, and returns a copy of the descriptor and the size.
fn imported_file(descriptor: usize) -> Option<(OwnedFd, u64)> {
    let descriptor = c_int::try_from(descriptor).ok().filter(|&descriptor| descriptor >= 0)?;
    let link = std::fs::read_link(format!("/proc/self/fd/{descriptor}")).ok()?;
    if !link.to_str()?.starts_with(&format!("/memfd:{FILE_NAME}")) {
        return None;
    }
    // SAFETY: the descriptor was open just now, and the caller keeps it open during the call.
    let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let seals = rustix::fs::fcntl_get_seals(file).ok()?;
    let bytes = u64::try_from(rustix::fs::fstat(file).ok()?.st_size).ok()?;
    if !seals.contains(SealFlags::SHRINK) || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return None;
    }
    let copy = rustix::io::fcntl_dupfd_cloexec(file.as_fd(), 0).ok()?;
    Some((copy, bytes))
}

fn import(
    call: &DriverCall,
    handle: *mut CUmemGenericAllocationHandle,
    descriptor: *mut c_void,
    kind: CUmemAllocationHandleType,
) -> CallOutcome {
    let found = (kind == DESCRIPTOR).then(|| imported_file(descriptor.addr())).flatten();
    let (file, bytes) = found.ok_or_else(|| call.invalid("not a descriptor of exported memory"))?;
    let physical = Arc::new(Physical { file, bytes, exportable: true, charged: None });
    let id = next_id() as u64;
    // SAFETY: the caller's address for a handle.
    unsafe { put(handle, id)? };
    state().memory.handles.insert(id, Handle { physical });
    Ok(())
}

driver! {
    Start fn cuMemGetAllocationGranularity(bytes: *mut usize, at: *const CUmemAllocationProp, _option: CUmemAllocationGranularity_flags) |call| {
        let (device, _) = properties(call, at)?;
        state().device(call, device)?;
        // SAFETY: the caller's address for a size.
        unsafe { put(bytes, GRANULARITY as usize) }
    }

    Start fn cuMemCreate(handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: c_ulonglong) |call| {
        create(call, handle, bytes, properties, flags)
    }

    Start fn cuMemRelease(handle: CUmemGenericAllocationHandle) |call| {
        let mut state = state();
        state.memory.handle(call, handle)?;
        // Mappings keep the memory.
        state.memory.handles.remove(&handle);
        Ok(())
    }

    Start fn cuMemExportToShareableHandle(descriptor: *mut c_void, handle: CUmemGenericAllocationHandle, kind: CUmemAllocationHandleType, flags: c_ulonglong) |call| {
        if flags != 0 {
            return Err(call.invalid("the flags are not 0"));
        }
        export(call, descriptor, handle, kind)
    }

    Start fn cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, descriptor: *mut c_void, kind: CUmemAllocationHandleType) |call| {
        import(call, handle, descriptor, kind)
    }
}
