//! Virtual memory: reserved addresses, mappings and access. Also `cuMemAlloc`, which is all of these in
//! a single call.
#![allow(unsafe_code, reason = "exports C functions, and maps memory")]

use std::ffi::{c_ulonglong, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUdevice, CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemGenericAllocationHandle, CUresult,
    CUresult::*,
};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::calls::{CallOutcome, DriverCall, put};
use crate::config::{CONFIG, DEVICES_MAX, GRANULARITY};
use crate::memory::{Memory, Physical, device_of};
use crate::state::state;
use crate::work::nap;

/// A handle at an address.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) physical: Arc<Physical>,
    /// Access of each device.
    access: [Access; DEVICES_MAX],
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Access {
    #[default]
    None,
    Read,
    ReadWrite,
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

fn system(call: &DriverCall, code: CUresult) -> impl Fn(rustix::io::Errno) -> CUresult {
    let call = *call;
    move |errno| call.broken(code, format!("mmap: {errno}"))
}

/// Reserves addresses, at the hint if they are free.
fn reserve(call: &DriverCall, bytes: u64, hint: u64) -> Result<u64, CUresult> {
    let none = ProtFlags::empty();
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    if hint != 0 && hint.is_multiple_of(GRANULARITY) {
        // SAFETY: the flag refuses addresses that are in use.
        let at = unsafe {
            rustix::mm::mmap_anonymous(pointer(hint), bytes as usize, none, flags | MapFlags::FIXED_NOREPLACE)
        };
        if let Ok(at) = at {
            return Ok(at.expose_provenance() as u64);
        }
    }
    // One unit more, so that an aligned range is within.
    let more = bytes.checked_add(GRANULARITY).ok_or_else(|| call.invalid("too many bytes"))?;
    // SAFETY: the system chooses free addresses.
    let at = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), more as usize, none, flags) };
    let start = at.map_err(system(call, CUDA_ERROR_OUT_OF_MEMORY))?.expose_provenance() as u64;
    let base = start.next_multiple_of(GRANULARITY);
    for (at, bytes) in [(start, base - start), (base + bytes, start + more - base - bytes)] {
        if bytes > 0 {
            // SAFETY: the range was mapped just now, and no other code has its address.
            unsafe { rustix::mm::munmap(pointer(at), bytes as usize) }
                .map_err(system(call, CUDA_ERROR_OUT_OF_MEMORY))?;
        }
    }
    Ok(base)
}

/// Maps a file without access over reserved addresses.
fn map_file(call: &DriverCall, at: u64, physical: &Physical) -> CallOutcome {
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    let bytes = physical.bytes as usize;
    // SAFETY: the addresses are reserved by the program, and nothing is mapped there.
    let mapped =
        unsafe { rustix::mm::mmap(pointer(at), bytes, ProtFlags::empty(), flags, &physical.file, 0) };
    mapped.map(|_| ()).map_err(system(call, CUDA_ERROR_OUT_OF_MEMORY))
}

/// Puts a reservation in the place of mappings.
fn unmap_file(call: &DriverCall, at: u64, bytes: u64) -> CallOutcome {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the addresses are mappings of the program, and no queued work uses them.
    let reserved =
        unsafe { rustix::mm::mmap_anonymous(pointer(at), bytes as usize, ProtFlags::empty(), flags) };
    reserved.map(|_| ()).map_err(system(call, CUDA_ERROR_UNKNOWN))
}

fn protect(call: &DriverCall, at: u64, bytes: u64, access: Access) -> CallOutcome {
    let flags = match access {
        Access::None => MprotectFlags::empty(),
        Access::Read => MprotectFlags::READ,
        Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the addresses are mappings of the program, which asks for the change.
    unsafe { rustix::mm::mprotect(pointer(at), bytes as usize, flags) }
        .map_err(system(call, CUDA_ERROR_UNKNOWN))
}

fn free_range(at: u64, bytes: u64) -> rustix::io::Result<()> {
    // SAFETY: the range is a reservation of the program, without mappings and without queued work.
    unsafe { rustix::mm::munmap(pointer(at), bytes as usize) }
}

/// Returns whether two ranges have a byte in common.
pub(crate) fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    one.0 < other.0.saturating_add(other.1) && other.0 < one.0.saturating_add(one.1)
}

impl Memory {
    /// Returns the addresses of the mappings that make up exactly this range, without gaps.
    fn whole_mappings(&self, at: u64, bytes: u64) -> Option<Vec<u64>> {
        let end = at.checked_add(bytes).filter(|_| bytes > 0)?;
        let mut next = at;
        let mut found = Vec::new();
        for (&start, mapping) in self.mappings.range(at..end) {
            if start != next {
                return None;
            }
            found.push(start);
            next = start + mapping.physical.bytes;
        }
        (next == end).then_some(found)
    }

    fn is_mapped(&self, at: u64, bytes: u64) -> bool {
        let before = self.mappings.range(..at.saturating_add(bytes)).next_back();
        before.is_some_and(|(&start, mapping)| overlap((start, mapping.physical.bytes), (at, bytes)))
    }

    /// Returns whether the range is mapped, and the device has access. `None` if no byte is mapped.
    pub(crate) fn allows(&self, at: u64, bytes: u64, device: CUdevice, needed: Access) -> Option<bool> {
        if !self.is_mapped(at, bytes) {
            return None;
        }
        let end = at.checked_add(bytes)?;
        let first = self.mappings.range(..=at).next_back().map_or(at, |(&start, _)| start);
        let mut next = at;
        for (&start, mapping) in self.mappings.range(first..end) {
            let access = mapping.access.get(device as usize).copied().unwrap_or_default();
            if start > next || access < needed {
                return Some(false);
            }
            next = next.max(start + mapping.physical.bytes);
        }
        Some(next >= end)
    }
}

fn map(call: &DriverCall, at: u64, bytes: u64, offset: usize, handle: u64) -> CallOutcome {
    let mut state = state();
    let physical = Arc::clone(&state.memory.handle(call, handle)?.physical);
    if offset != 0 {
        return Err(
            call.invalid(format!("the offset is {offset}: a mapping begins at the start of a handle"))
        );
    }
    if bytes != physical.bytes {
        return Err(call.invalid(format!("{bytes} bytes: the handle has {}", physical.bytes)));
    }
    let reservation = state.memory.reservations.range(..=at).next_back();
    let inside = reservation
        .is_some_and(|(&start, &size)| at.checked_add(bytes).is_some_and(|end| end <= start + size));
    if !inside || !at.is_multiple_of(GRANULARITY) {
        return Err(call.invalid(format!("{at:#x}+{bytes:#x} is not within reserved addresses")));
    }
    if state.memory.is_mapped(at, bytes) {
        return Err(call.invalid(format!("{at:#x}+{bytes:#x} is mapped already")));
    }
    map_file(call, at, &physical)?;
    state.memory.mappings.insert(at, Mapping { physical, access: Default::default() });
    Ok(())
}

fn unmap(call: &DriverCall, at: u64, bytes: u64) -> CallOutcome {
    let mut reported = false;
    loop {
        let mut state = state();
        let inside_allocation = state.memory.allocations.contains_key(&at);
        let Some(found) = state.memory.whole_mappings(at, bytes).filter(|_| !inside_allocation) else {
            return Err(call.invalid(format!("{at:#x}+{bytes:#x} is not a row of whole mappings")));
        };
        if let Some(work) = state.queued_use(at, bytes) {
            if !reported {
                call.dangerous(format!("{at:#x}+{bytes:#x} is unmapped, and {work} is still queued"));
            }
            reported = true;
            drop(state);
            nap(50_000);
            continue;
        }
        unmap_file(call, at, bytes)?;
        for start in found {
            state.memory.mappings.remove(&start);
        }
        return Ok(());
    }
}

fn set_access(call: &DriverCall, at: u64, bytes: u64, descriptions: &[CUmemAccessDesc]) -> CallOutcome {
    let mut state = state();
    let Some(found) = state.memory.whole_mappings(at, bytes) else {
        return Err(call.invalid(format!("{at:#x}+{bytes:#x} is not a row of whole mappings")));
    };
    let mut changes = Vec::new();
    for description in descriptions {
        let device = device_of(call, description.location)?;
        state.device(call, device)?;
        let access = match description.flags {
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE => Access::None,
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ => Access::Read,
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE => Access::ReadWrite,
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_MAX => return Err(call.invalid("unknown access")),
        };
        changes.push((device as usize, access));
    }
    for start in found {
        let Some(mapping) = state.memory.mappings.get_mut(&start) else { continue };
        for &(device, access) in &changes {
            mapping.access[device] = access;
        }
        let widest = mapping.access.iter().copied().max().unwrap_or_default();
        protect(call, start, mapping.physical.bytes, widest)?;
    }
    Ok(())
}

fn allocate(call: &DriverCall, bytes: usize) -> Result<u64, CUresult> {
    let mut state = state();
    let device = state.current(call)?.device;
    let whole = (bytes as u64).checked_next_multiple_of(GRANULARITY).filter(|_| bytes > 0);
    let whole = whole.ok_or_else(|| call.invalid(format!("{bytes} bytes")))?;
    let physical = Physical::take(&state, call, device, whole, false)?;
    let at = reserve(call, whole, 0)?;
    map_file(call, at, &physical)?;
    protect(call, at, whole, Access::ReadWrite)?;
    let mut access = [Access::None; DEVICES_MAX];
    access[device as usize] = Access::ReadWrite;
    state.memory.mappings.insert(at, Mapping { physical, access });
    state.memory.allocations.insert(at, whole);
    Ok(at)
}

/// Frees memory of `cuMemAlloc`. As the driver's function does, waits for work that uses the memory.
fn free(call: &DriverCall, at: u64) -> CallOutcome {
    loop {
        let mut state = state();
        let Some(&bytes) = state.memory.allocations.get(&at) else {
            return Err(call.invalid(format!("{at:#x} is no memory of cuMemAlloc")));
        };
        if state.queued_use(at, bytes).is_some() {
            drop(state);
            nap(50_000);
            continue;
        }
        state.memory.allocations.remove(&at);
        state.memory.mappings.remove(&at);
        return free_range(at, bytes).map_err(system(call, CUDA_ERROR_UNKNOWN));
    }
}

driver! {
    Start fn cuMemAddressReserve(at: *mut CUdeviceptr, bytes: usize, alignment: usize, hint: CUdeviceptr, flags: c_ulonglong) |call| {
        let bytes = bytes as u64;
        if flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(call.invalid(format!("{bytes} bytes are not whole units of 2 MiB, or flags are set")));
        }
        if alignment as u64 > GRANULARITY || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(call.invalid(format!("the alignment is {alignment}")));
        }
        let base = reserve(call, bytes, hint)?;
        // SAFETY: the caller's address for an address.
        unsafe { put(at, base)? };
        state().memory.reservations.insert(base, bytes);
        Ok(())
    }

    Start fn cuMemAddressFree(at: CUdeviceptr, bytes: usize) |call| {
        let mut state = state();
        if state.memory.reservations.get(&at) != Some(&(bytes as u64)) {
            return Err(call.invalid(format!("{at:#x}+{bytes:#x} is not a whole reservation")));
        }
        if state.memory.is_mapped(at, bytes as u64) {
            return Err(call.invalid(format!("{at:#x}+{bytes:#x} is still mapped")));
        }
        state.memory.reservations.remove(&at);
        free_range(at, bytes as u64).map_err(system(call, CUDA_ERROR_UNKNOWN))
    }

    Start fn cuMemMap(at: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong) |call| {
        if flags != 0 {
            return Err(call.invalid("the flags are not 0"));
        }
        map(call, at, bytes as u64, offset, handle)
    }

    Start fn cuMemUnmap(at: CUdeviceptr, bytes: usize) |call| { unmap(call, at, bytes as u64) }

    Start fn cuMemSetAccess(at: CUdeviceptr, bytes: usize, descriptions: *const CUmemAccessDesc, count: usize) |call| {
        if descriptions.is_null() || count == 0 || count > CONFIG.visible.len() {
            return Err(call.invalid(format!("{count} descriptions of access")));
        }
        // SAFETY: the caller passes this many descriptions; the count is at most that of the devices.
        let descriptions = unsafe { std::slice::from_raw_parts(descriptions, count) };
        set_access(call, at, bytes as u64, descriptions)
    }

    Context fn cuMemAlloc_v2(at: *mut CUdeviceptr, bytes: usize) |call| {
        let base = allocate(call, bytes)?;
        // SAFETY: the caller's address for an address.
        unsafe { put(at, base) }
    }

    Context fn cuMemFree_v2(at: CUdeviceptr) |call| { free(call, at) }
}
