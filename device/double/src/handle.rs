//! Handles of physical memory. A handle is a memfd of its own, so that memory which another process
//! imported outlives this one.
#![allow(unsafe_code, reason = "exports functions of the driver, which write through pointers")]

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd as _};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUmemAllocationGranularity_flags, CUmemAllocationHandleType, CUmemAllocationProp, CUmemAllocationType,
    CUmemGenericAllocationHandle, CUmemLocationType, CUresult,
};

use crate::mappings::{GRANULARITY, Physical};
use crate::memory::range;
use crate::rule::{BAD_HANDLE, INVALID, Refusal, broken, require, store, system};
use crate::state::{State, call};

/// Reads the properties of memory, and refuses those that no code of ours asks for.
///
/// # Safety
/// `properties` is null or can be read.
unsafe fn check(properties: *const CUmemAllocationProp) -> Result<(), Refusal> {
    // SAFETY: the caller's promise.
    let known = unsafe { properties.as_ref() }.is_some_and(|properties| {
        properties.type_ == CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED
            && properties.location.type_ == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE
            && properties.location.id == 0
    });
    require(known, INVALID, "not pinned memory of device 0")
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetAllocationGranularity(
    bytes: *mut usize,
    properties: *const CUmemAllocationProp,
    _option: CUmemAllocationGranularity_flags,
) -> CUresult {
    // SAFETY: the caller's addresses.
    call("cuMemGetAllocationGranularity", |_| unsafe {
        check(properties)?;
        store(bytes, GRANULARITY as usize)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemCreate(
    to: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    _flags: c_ulonglong,
) -> CUresult {
    call("cuMemCreate", |mut state| {
        range(0, bytes)?;
        // SAFETY: the caller's address.
        unsafe { check(properties)? };
        let memory = state.memory.make(bytes as u64)?;
        // SAFETY: the caller's address.
        unsafe { insert(&mut state, memory, to) }
    })
}

/// Makes a handle of memory.
///
/// # Safety
/// `to` is null or can be written.
unsafe fn insert(
    state: &mut State,
    memory: Physical,
    to: *mut CUmemGenericAllocationHandle,
) -> Result<(), Refusal> {
    let handle = state.number() as u64;
    state.memory.handles.insert(handle, Arc::new(memory));
    // SAFETY: the caller's promise.
    unsafe { store(to, handle) }
}

#[unsafe(no_mangle)]
extern "C" fn cuMemRelease(handle: CUmemGenericAllocationHandle) -> CUresult {
    call("cuMemRelease", |mut state| {
        let known = state.memory.handles.remove(&handle).is_some();
        require(known, INVALID, "not a handle")
    })
}

fn posix(kind: CUmemAllocationHandleType) -> Result<(), Refusal> {
    let posix = kind == CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    require(posix, INVALID, "not a POSIX descriptor")
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemExportToShareableHandle(
    to: *mut c_void,
    handle: CUmemGenericAllocationHandle,
    kind: CUmemAllocationHandleType,
    _flags: c_ulonglong,
) -> CUresult {
    call("cuMemExportToShareableHandle", |state| {
        posix(kind)?;
        let memory = state.memory.handles.get(&handle);
        let memory = memory.ok_or_else(|| broken(INVALID, "not a handle"))?;
        let file = rustix::io::fcntl_dupfd_cloexec(&memory.file, 0).map_err(system("fcntl"))?;
        // SAFETY: for this kind the caller gives the address of an integer.
        unsafe { store(to.cast::<c_int>(), file.into_raw_fd()) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemImportFromShareableHandle(
    to: *mut CUmemGenericAllocationHandle,
    descriptor: *mut c_void,
    kind: CUmemAllocationHandleType,
) -> CUresult {
    call("cuMemImportFromShareableHandle", |mut state| {
        posix(kind)?;
        let number = c_int::try_from(descriptor as usize).ok().filter(|number| *number >= 0);
        let number = number.ok_or_else(|| broken(BAD_HANDLE, "not a descriptor"))?;
        // SAFETY: the caller keeps the descriptor open during the call.
        let file = rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(number) }, 0);
        let file = file.map_err(|errno| broken(BAD_HANDLE, format!("not a descriptor: {errno}")))?;
        let stat = rustix::fs::fstat(&file).map_err(system("fstat"))?;
        let bytes = u64::try_from(stat.st_size).unwrap_or(0);
        range(0, bytes as usize)?;
        // SAFETY: the caller's address.
        unsafe { insert(&mut state, Physical { file, bytes, imported: true }, to) }
    })
}
