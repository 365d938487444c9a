//! Sets of SMs, and green contexts, whose streams run kernels only on a set.
#![allow(unsafe_code, reason = "exports functions of the driver, which write through pointers")]

use std::ffi::{c_int, c_uint};

use cudarc::driver::sys::{
    CUdevResource, CUdevResourceDesc, CUdevResourceType, CUdevSmResource, CUdevice, CUgreenCtx, CUresult,
    CUstream,
};

use crate::rule::{BAD_HANDLE, INVALID, broken, require, store};
use crate::state::{SMS, call};
use crate::stream::add_stream;

/// Fewest SMs of a set, and the step of its size.
const STEP: u32 = 8;

/// Returns a resource with these SMs. The callers' copies keep the SMs as bits of the padding.
fn resource(sms: &[u32]) -> CUdevResource {
    // SAFETY: all zeros is a valid resource, of no type.
    let mut resource: CUdevResource = unsafe { std::mem::zeroed() };
    resource.type_ = CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM;
    for &sm in sms {
        resource._internal_padding[sm as usize / 8] |= 1 << (sm % 8);
    }
    let sms = sms.len() as u32;
    resource.__bindgen_anon_1.sm =
        CUdevSmResource { smCount: sms, minSmPartitionSize: STEP, smCoscheduledAlignment: STEP };
    resource
}

/// Returns the SMs of a resource.
fn sms(resource: &CUdevResource) -> Vec<u32> {
    (0..SMS).filter(|&sm| resource._internal_padding[sm as usize / 8] & (1 << (sm % 8)) != 0).collect()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetDevResource(
    _device: CUdevice,
    to: *mut CUdevResource,
    kind: CUdevResourceType,
) -> CUresult {
    call("cuDeviceGetDevResource", |_| {
        require(kind == CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM, INVALID, "not the type of SMs")?;
        // SAFETY: the caller's address.
        unsafe { store(to, resource(&(0..SMS).collect::<Vec<_>>())) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevSmResourceSplitByCount(
    parts: *mut CUdevResource,
    count: *mut c_uint,
    input: *const CUdevResource,
    rest: *mut CUdevResource,
    _flags: c_uint,
    least: c_uint,
) -> CUresult {
    call("cuDevSmResourceSplitByCount", |_| {
        // SAFETY: the caller's address.
        let all = sms(unsafe { input.as_ref() }.ok_or_else(|| broken(INVALID, "no set of SMs"))?);
        let size = least.max(1).next_multiple_of(STEP) as usize;
        require(size <= all.len(), INVALID, "a part is larger than the set")?;
        // SAFETY: the caller's address.
        let asked = unsafe { count.read() } as usize;
        let given = asked.min(all.len() / size);
        for (at, part) in all.chunks_exact(size).take(given).enumerate() {
            // SAFETY: the caller has room for the parts that it asked for.
            unsafe { parts.add(at).write(resource(part)) };
        }
        if !rest.is_null() {
            // SAFETY: the caller's address.
            unsafe { rest.write(resource(&all[given * size..])) };
        }
        // SAFETY: the caller's address.
        unsafe { store(count, given as c_uint) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevResourceGenerateDesc(
    to: *mut CUdevResourceDesc,
    resources: *mut CUdevResource,
    count: c_uint,
) -> CUresult {
    call("cuDevResourceGenerateDesc", |mut state| {
        require(count == 1, INVALID, "not a single set of SMs")?;
        // SAFETY: the caller's address.
        let set = sms(unsafe { resources.as_ref() }.ok_or_else(|| broken(INVALID, "no set of SMs"))?);
        require(!set.is_empty(), INVALID, "a set without SMs")?;
        let number = state.number();
        state.greens.descriptions.insert(number, set.into());
        // SAFETY: the caller's address.
        unsafe { store(to, number as CUdevResourceDesc) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGreenCtxCreate(
    to: *mut CUgreenCtx,
    description: CUdevResourceDesc,
    _device: CUdevice,
    _flags: c_uint,
) -> CUresult {
    call("cuGreenCtxCreate", |mut state| {
        let set = state.greens.descriptions.get(&(description as usize)).cloned();
        let set = set.ok_or_else(|| broken(BAD_HANDLE, "not a description"))?;
        let number = state.number();
        state.greens.contexts.insert(number, set);
        // SAFETY: the caller's address.
        unsafe { store(to, number as CUgreenCtx) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGreenCtxDestroy(context: CUgreenCtx) -> CUresult {
    call("cuGreenCtxDestroy", |mut state| {
        let number = context as usize;
        let used = state.streams.all.values().any(|stream| stream.green == Some(number));
        require(!used, INVALID, "the context still has streams")?;
        require(state.greens.contexts.remove(&number).is_some(), BAD_HANDLE, "not a green context")
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGreenCtxStreamCreate(
    to: *mut CUstream,
    context: CUgreenCtx,
    _flags: c_uint,
    _priority: c_int,
) -> CUresult {
    call("cuGreenCtxStreamCreate", |mut state| {
        let number = context as usize;
        let set = state.greens.contexts.get(&number).cloned();
        let set = set.ok_or_else(|| broken(BAD_HANDLE, "not a green context"))?;
        let stream = add_stream(&mut state, set, Some(number))?;
        // SAFETY: the caller's address.
        unsafe { store(to, stream) }
    })
}
