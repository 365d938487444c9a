//! Address ranges and mappings.
#![allow(unsafe_code, reason = "maps memory at addresses that this module reserved")]

use std::ffi::{c_ulonglong, c_void};
use std::ops::Range;

use cudarc::driver::sys::{
    CUdeviceptr, CUmemAccess_flags, CUmemAccessDesc, CUmemGenericAllocationHandle, CUresult,
};
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

use crate::mappings::{GRANULARITY, Mapping};
use crate::rule::{INVALID, Refusal, broken, require, store, system};
use crate::state::{call, unused};

pub(crate) fn range(at: u64, bytes: usize) -> Result<Range<u64>, Refusal> {
    let end = at.checked_add(bytes as u64);
    let whole = at.is_multiple_of(GRANULARITY) && (bytes as u64).is_multiple_of(GRANULARITY) && bytes > 0;
    end.filter(|_| whole).map(|end| at..end).ok_or_else(|| broken(INVALID, "not whole blocks of 2 MiB"))
}

/// Takes all access from a range, and all memory.
///
/// # Safety
/// The range is reserved, and no work uses it.
unsafe fn close(range: &Range<u64>) -> Result<(), Refusal> {
    let flags = MapFlags::FIXED | MapFlags::PRIVATE | MapFlags::NORESERVE;
    let bytes = (range.end - range.start) as usize;
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::mmap_anonymous(range.start as *mut c_void, bytes, ProtFlags::empty(), flags) }
        .map(drop)
        .map_err(system("mmap"))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemAddressReserve(
    to: *mut CUdeviceptr,
    bytes: usize,
    _alignment: usize,
    hint: CUdeviceptr,
    _flags: c_ulonglong,
) -> CUresult {
    call("cuMemAddressReserve", |mut state| {
        range(0, bytes)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        let map = |at: u64, bytes: usize| {
            // SAFETY: the kernel takes free addresses, whatever the hint is.
            unsafe { rustix::mm::mmap_anonymous(at as *mut c_void, bytes, ProtFlags::empty(), flags) }
                .map(|base| base as u64)
                .map_err(|_| Refusal::from(CUresult::CUDA_ERROR_OUT_OF_MEMORY))
        };
        let unmap = |at: u64, bytes: u64| {
            if bytes == 0 {
                return Ok(());
            }
            // SAFETY: the addresses were mapped here, and nobody knows them.
            unsafe { rustix::mm::munmap(at as *mut c_void, bytes as usize) }.map_err(system("munmap"))
        };
        let mut base = map(hint, bytes)?;
        if !base.is_multiple_of(GRANULARITY) {
            unmap(base, bytes as u64)?;
            // A block more, so that whole blocks are within.
            let wide = map(0, bytes + GRANULARITY as usize)?;
            base = wide.next_multiple_of(GRANULARITY);
            unmap(wide, base - wide)?;
            unmap(base + bytes as u64, wide + GRANULARITY - base)?;
        }
        state.memory.reservations.insert(base, bytes as u64);
        // SAFETY: the caller's address.
        unsafe { store(to, base) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemAddressFree(at: CUdeviceptr, bytes: usize) -> CUresult {
    call("cuMemAddressFree", |mut state| {
        let range = range(at, bytes)?;
        let reserved = state.memory.reservations.get(&at) == Some(&(bytes as u64));
        require(reserved, INVALID, "not a reserved range")?;
        let empty = state.memory.mappings.range(range).next().is_none();
        require(empty, INVALID, "the range still has mappings")?;
        // SAFETY: the range was reserved here, and nothing is mapped there.
        unsafe { rustix::mm::munmap(at as *mut c_void, bytes) }.map_err(system("munmap"))?;
        state.memory.reservations.remove(&at);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemMap(
    at: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    _flags: c_ulonglong,
) -> CUresult {
    call("cuMemMap", |mut state| {
        let memory = &mut state.memory;
        let physical = memory.handles.get(&handle).cloned();
        let physical = physical.ok_or_else(|| broken(INVALID, "not a handle"))?;
        require(offset == 0, INVALID, "the offset is not 0")?;
        require(bytes as u64 == physical.bytes, INVALID, "the size is not the handle's")?;
        let range = range(at, bytes)?;
        let reserved = memory.reservations.range(..=at).next_back();
        let within = reserved.is_some_and(|(start, bytes)| range.end <= start + bytes);
        require(within, INVALID, "outside a reserved range")?;
        let before = memory.mappings.range(..range.end).next_back();
        let free = before.is_none_or(|(start, mapping)| start + mapping.memory.bytes <= at);
        require(free, INVALID, "the addresses are mapped already")?;
        let flags = MapFlags::FIXED | MapFlags::SHARED;
        let base = at as *mut c_void;
        // SAFETY: the addresses are reserved and have no memory.
        unsafe { rustix::mm::mmap(base, bytes, ProtFlags::empty(), flags, &physical.file, 0) }
            .map_err(system("mmap"))?;
        memory.mappings.insert(at, Mapping { memory: physical, open: false });
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemUnmap(at: CUdeviceptr, bytes: usize) -> CUresult {
    call("cuMemUnmap", |mut state| {
        let range = range(at, bytes)?;
        let whole = state.memory.whole(&range);
        let starts = whole.ok_or_else(|| broken(INVALID, "not whole mappings"))?;
        state = unused(state, "cuMemUnmap", &range);
        // SAFETY: the range is reserved, and no work uses it.
        unsafe { close(&range)? };
        for start in starts {
            state.memory.mappings.remove(&start);
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemSetAccess(
    at: CUdeviceptr,
    bytes: usize,
    access: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    call("cuMemSetAccess", |mut state| {
        let range = range(at, bytes)?;
        // SAFETY: the caller's address.
        let known = count == 1
            && unsafe { access.as_ref() }.is_some_and(|access| {
                access.flags == CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                    && access.location.id == 0
            });
        require(known, INVALID, "not reading and writing by device 0")?;
        let whole = state.memory.whole(&range);
        let starts = whole.ok_or_else(|| broken(INVALID, "not whole mappings"))?;
        let flags = MprotectFlags::READ | MprotectFlags::WRITE;
        // SAFETY: the range is mapped by this module.
        unsafe { rustix::mm::mprotect(at as *mut c_void, bytes, flags) }.map_err(system("mprotect"))?;
        for start in starts {
            if let Some(mapping) = state.memory.mappings.get_mut(&start) {
                mapping.open = true;
            }
        }
        Ok(())
    })
}
