//! Sets of SMs and green contexts. A set's numbers travel in the private bytes of the resource.
#![allow(unsafe_code, reason = "exports C functions, and reads structures of the caller")]

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use cudarc::driver::sys::{
    CUcontext, CUdevResource, CUdevResourceDesc, CUdevResourceType, CUdevSmResource, CUdevice, CUgreenCtx,
    CUresult, CUresult::*, CUstream,
};

use crate::calls::{DriverCall, put};
use crate::context::Current;
use crate::state::{next_id, state};

/// SMs of a device: those of an H100.
pub(crate) const SMS: u32 = 132;
/// Fewest SMs of a part, and the number by which a part's SMs can be divided.
const STEP: u32 = 8;
/// Most resources of a description or a split.
const RESOURCES_MAX: c_uint = SMS;
/// First private bytes of a resource that the double made.
const MARK: [u8; 8] = *b"millrace";

/// Numbers of SMs, in ascending order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SmSet(Arc<[u32]>);

impl SmSet {
    pub(crate) fn all() -> Self {
        Self((0..SMS).collect())
    }

    /// Returns the SM of a block of a kernel.
    pub(crate) fn of_block(&self, block: u64) -> u32 {
        self.0[(block % self.0.len() as u64) as usize]
    }

    fn from_resource(resource: &CUdevResource) -> Option<Self> {
        let bits = resource._internal_padding.strip_prefix(&MARK)?;
        let is_set = |sm: &u32| bits[*sm as usize / 8] & (1 << (sm % 8)) != 0;
        let sms: Arc<[u32]> = (0..SMS).filter(is_set).collect();
        let is_known = resource.type_ == CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM && !sms.is_empty();
        is_known.then_some(Self(sms))
    }

    fn to_resource(sms: &[u32]) -> CUdevResource {
        let mut padding = [0; 92];
        padding[..MARK.len()].copy_from_slice(&MARK);
        for &sm in sms {
            padding[MARK.len() + sm as usize / 8] |= 1 << (sm % 8);
        }
        let mut resource = CUdevResource {
            type_: CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM,
            _internal_padding: padding,
            __bindgen_anon_1: cudarc::driver::sys::CUdevResource_st__bindgen_ty_1 { _oversize: [0; 48] },
        };
        resource.__bindgen_anon_1.sm = CUdevSmResource {
            smCount: sms.len() as c_uint,
            minSmPartitionSize: STEP,
            smCoscheduledAlignment: STEP,
        };
        resource
    }
}

#[derive(Debug)]
pub(crate) struct GreenContext {
    pub(crate) device: CUdevice,
    /// Name of the context that a thread can enter.
    pub(crate) context: usize,
    pub(crate) sms: SmSet,
}

/// Reads a resource of the caller.
///
/// # Safety
/// `at` is null, or the caller's resource.
unsafe fn read(call: &DriverCall, at: *const CUdevResource) -> Result<SmSet, CUresult> {
    let not_known = || call.broken(CUDA_ERROR_INVALID_RESOURCE_TYPE, "not SMs that this driver returned");
    if at.is_null() {
        return Err(not_known());
    }
    // SAFETY: the caller's promise.
    SmSet::from_resource(&unsafe { at.read() }).ok_or_else(not_known)
}

/// Cuts a set into parts of the same size. Returns the parts and the rest.
fn split(sms: &[u32], least: u32, most_parts: usize) -> (Vec<&[u32]>, &[u32]) {
    let size = least.max(STEP).next_multiple_of(STEP) as usize;
    let parts: Vec<_> = sms.chunks_exact(size).take(most_parts).collect();
    let rest = &sms[parts.len() * size..];
    (parts, rest)
}

driver! {
    Start fn cuDeviceGetDevResource(device: CUdevice, resource: *mut CUdevResource, kind: CUdevResourceType) |call| {
        state().device(call, device)?;
        if kind != CUdevResourceType::CU_DEV_RESOURCE_TYPE_SM {
            return Err(call.broken(CUDA_ERROR_INVALID_RESOURCE_TYPE, format!("resources of type {kind:?}")));
        }
        // SAFETY: the caller's address for a resource.
        unsafe { put(resource, SmSet::to_resource(&SmSet::all().0)) }
    }

    Start fn cuDevSmResourceSplitByCount(result: *mut CUdevResource, count: *mut c_uint, input: *const CUdevResource, rest: *mut CUdevResource, flags: c_uint, least: c_uint) |call| {
        if flags != 0 {
            return Err(call.broken(CUDA_ERROR_NOT_SUPPORTED, format!("the flags {flags:#x}")));
        }
        // SAFETY: the caller's resource.
        let set = unsafe { read(call, input)? };
        if count.is_null() || least > SMS {
            return Err(call.invalid(format!("parts of {least} SMs, or no address for their number")));
        }
        // SAFETY: not null, so the caller's number of parts.
        let wanted = if result.is_null() { RESOURCES_MAX } else { unsafe { count.read() } };
        let (parts, left) = split(&set.0, least, wanted.min(RESOURCES_MAX) as usize);
        if parts.is_empty() {
            let rule = format!("{} SMs have no part of {least}", set.0.len());
            return Err(call.broken(CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, rule));
        }
        // SAFETY: the caller has room for as many parts as were asked for, and for the number.
        unsafe {
            put(count, parts.len() as c_uint)?;
            for (at, part) in parts.iter().enumerate().filter(|_| !result.is_null()) {
                put(result.add(at), SmSet::to_resource(part))?;
            }
        }
        if !rest.is_null() {
            // SAFETY: not null, so the caller's address for the rest.
            unsafe { put(rest, SmSet::to_resource(left))? };
        }
        Ok(())
    }

    Start fn cuDevResourceGenerateDesc(description: *mut CUdevResourceDesc, resources: *mut CUdevResource, count: c_uint) |call| {
        if count == 0 || count > RESOURCES_MAX || resources.is_null() {
            return Err(call.invalid(format!("{count} resources")));
        }
        let mut sms = Vec::new();
        for at in 0..count as usize {
            // SAFETY: the caller passes this many resources.
            let set = unsafe { read(call, resources.add(at))? };
            sms.extend(set.0.iter());
        }
        sms.sort_unstable();
        sms.dedup();
        let id = next_id();
        // SAFETY: the caller's address for a description.
        unsafe { put(description, id as CUdevResourceDesc)? };
        state().resource_descriptions.insert(id, SmSet(sms.into()));
        Ok(())
    }

    Start fn cuGreenCtxCreate(green: *mut CUgreenCtx, description: CUdevResourceDesc, device: CUdevice, flags: c_uint) |call| {
        let mut state = state();
        state.device(call, device)?;
        let sms = state.resource_descriptions.get(&description.addr()).cloned();
        let sms = sms.ok_or_else(|| call.invalid("there is no such description"))?;
        if flags != 1 {
            return Err(call.invalid("CU_GREEN_CTX_DEFAULT_STREAM is required"));
        }
        let id = next_id();
        // SAFETY: the caller's address for a context.
        unsafe { put(green, id as CUgreenCtx)? };
        state.green_contexts.insert(id, GreenContext { device, context: next_id(), sms });
        Ok(())
    }

    Start fn cuGreenCtxDestroy(green: CUgreenCtx) |call| {
        let mut state = state();
        let Some(GreenContext { context, .. }) = state.green_contexts.remove(&green.addr()) else {
            return Err(call.unknown("green context", green.addr()));
        };
        state.default_streams.remove(&context).inspect(|stream| stream.end());
        let of_context = |stream: &&Arc<_>| is_busy_stream_of(stream, green.addr());
        if let Some(stream) = state.streams.values().find(of_context) {
            let rule = format!("the green context ends, and {} is still queued", stream.first_queued());
            call.dangerous(rule);
        }
        Ok(())
    }

    Start fn cuCtxFromGreenCtx(context: *mut CUcontext, green: CUgreenCtx) |call| {
        let state = state();
        let found = state.green_contexts.get(&green.addr());
        let found = found.ok_or_else(|| call.unknown("green context", green.addr()))?;
        // SAFETY: the caller's address for a context.
        unsafe { put(context, found.context as CUcontext) }
    }

    Start fn cuGreenCtxStreamCreate(stream: *mut CUstream, green: CUgreenCtx, flags: c_uint, _priority: c_int) |call| {
        if flags != 1 {
            return Err(call.invalid("CU_STREAM_NON_BLOCKING is required"));
        }
        let mut state = state();
        let found = state.green_contexts.get(&green.addr());
        let found = found.ok_or_else(|| call.unknown("green context", green.addr()))?;
        let context = Current { context: found.context, device: found.device, green: Some(green.addr()) };
        let new = state.new_stream(call, context)?;
        // SAFETY: the caller's address for a stream.
        unsafe { put(stream, new.id as CUstream)? };
        state.streams.insert(new.id, new);
        Ok(())
    }
}

fn is_busy_stream_of(stream: &crate::stream::DeviceStream, green: usize) -> bool {
    stream.green == Some(green) && !stream.is_idle()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_survives_the_way_through_a_resource() {
        let sms: Vec<u32> = (8..24).collect();
        let resource = SmSet::to_resource(&sms);
        assert_eq!(SmSet::from_resource(&resource), Some(SmSet(sms.into())));
        assert_eq!(SmSet::from_resource(&SmSet::to_resource(&[])), None);
    }

    #[test]
    fn parts_are_rounded_up_and_the_rest_stays() {
        let all = SmSet::all();
        let (parts, rest) = split(&all.0, 9, 99);
        assert_eq!((parts.len(), parts[1][0], rest.len()), (8, 16, 4));
        let (parts, rest) = split(&all.0, 0, 2);
        assert_eq!((parts.len(), parts[0].len(), rest.len()), (2, 8, 116));
    }
}
