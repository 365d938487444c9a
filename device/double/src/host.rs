//! Host memory that the GPU reads and writes: pinned by the driver, or registered.
#![allow(unsafe_code, reason = "allocates memory for callers in C")]

use std::alloc::Layout;
use std::ffi::{c_uint, c_void};
use std::ops::Range;

use cudarc::driver::sys::{self, CUdeviceptr, CUresult};

use crate::rule::{INVALID, Refusal, broken, require, store};
use crate::state::{call, unused};

const PAGE: usize = 4096;

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, _flags: c_uint) -> CUresult {
    call("cuMemHostAlloc", |mut state| {
        state.current()?;
        let layout = layout(bytes)?;
        // SAFETY: the size is not 0.
        let base = unsafe { std::alloc::alloc(layout) };
        if base.is_null() {
            return Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY.into());
        }
        state.host.pinned.insert(base as u64, bytes as u64);
        // SAFETY: the caller's address.
        unsafe { store(to, base.cast()) }
    })
}

fn layout(bytes: usize) -> Result<Layout, Refusal> {
    let layout = Layout::from_size_align(bytes, PAGE).ok().filter(|layout| layout.size() > 0);
    layout.ok_or_else(|| broken(INVALID, "no bytes, or too many"))
}

#[unsafe(no_mangle)]
extern "C" fn cuMemFreeHost(at: *mut c_void) -> CUresult {
    call("cuMemFreeHost", |mut state| {
        let bytes = state.host.pinned.remove(&(at as u64));
        let bytes = bytes.ok_or_else(|| broken(INVALID, "not memory of cuMemHostAlloc"))?;
        drop(unused(state, "cuMemFreeHost", &(at as u64..at as u64 + bytes)));
        // SAFETY: the memory was allocated with this layout, and is freed once.
        unsafe { std::alloc::dealloc(at.cast(), layout(bytes as usize)?) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: c_uint) -> CUresult {
    call("cuMemHostRegister_v2", |mut state| {
        state.current()?;
        let range = at as u64..(at as u64).saturating_add(bytes as u64);
        require(!range.is_empty(), INVALID, "no bytes")?;
        let before = state.host.registered.range(..range.end).next_back();
        let free = before.is_none_or(|(start, bytes)| start + bytes <= range.start);
        let twice = CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        require(free, twice, "the memory is registered already")?;
        check_maps(&range, flags & sys::CU_MEMHOSTREGISTER_READ_ONLY != 0)?;
        state.host.registered.insert(range.start, bytes as u64);
        Ok(())
    })
}

/// Refuses memory whose mappings cannot be registered, or would cost a copy of each page: pinning a
/// private mapping of a file copies the file.
fn check_maps(range: &Range<u64>, read_only: bool) -> Result<(), Refusal> {
    let maps = std::fs::read_to_string("/proc/self/maps");
    let maps = maps.map_err(|error| broken(INVALID, format!("/proc/self/maps: {error}")))?;
    let mut end = range.start;
    for line in maps.lines() {
        let mut words = line.split_whitespace();
        let bounds = words.next().and_then(|bounds| bounds.split_once('-'));
        let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
        let Some((first, last)) = bounds.map(|(first, last)| (number(first), number(last))) else { continue };
        if last <= end || first >= range.end {
            continue;
        }
        require(first <= end, INVALID, "the memory is not mapped")?;
        let access = words.next().unwrap_or_default();
        let is_file = words.nth(3).is_some_and(|name| name.starts_with('/'));
        require(!(is_file && access.ends_with('p')), INVALID, "a private mapping of a file")?;
        require(access.starts_with('r'), INVALID, "the memory cannot be read")?;
        let writable = access.as_bytes().get(1) == Some(&b'w');
        require(writable || read_only, INVALID, "a read-only mapping without READ_ONLY")?;
        end = last;
    }
    require(end >= range.end, INVALID, "the memory is not mapped")
}

#[unsafe(no_mangle)]
extern "C" fn cuMemHostUnregister(at: *mut c_void) -> CUresult {
    call("cuMemHostUnregister", |mut state| {
        let bytes = state.host.registered.remove(&(at as u64));
        let missing = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
        let bytes = bytes.ok_or_else(|| broken(missing, "the memory is not registered"))?;
        drop(unused(state, "cuMemHostUnregister", &(at as u64..at as u64 + bytes)));
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    to: *mut CUdeviceptr,
    at: *mut c_void,
    _flags: c_uint,
) -> CUresult {
    call("cuMemHostGetDevicePointer_v2", |state| {
        state.current()?;
        let reached = state.host.is_reached(&(at as u64..at as u64 + 1));
        require(reached, INVALID, "neither pinned nor registered memory")?;
        // SAFETY: the caller's address.
        unsafe { store(to, at as u64) }
    })
}
