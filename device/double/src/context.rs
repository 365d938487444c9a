//! The start, the GPU and its primary context. Which calls need a current context was tried on an
//! H100: those that make values do, and those that name a stream, an event or host memory do not.
#![allow(unsafe_code, reason = "exports functions of the driver, which write through pointers")]

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_uint};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute, CUresult, CUuuid};

use crate::rule::{INVALID, Refusal, require, store, system};
use crate::state::{CURRENT, Locked, SMS, call, wait_while};

fn device(ordinal: CUdevice) -> Result<(), Refusal> {
    require(ordinal == 0, CUresult::CUDA_ERROR_INVALID_DEVICE, "there is only device 0")
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(flags: c_uint) -> CUresult {
    call("cuInit", |mut state| {
        require(flags == 0, INVALID, "the flags are not 0")?;
        state.context.started = true;
        // Each handle is a descriptor, and the usual limit is 1024.
        let mut files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        files.current = files.maximum;
        let raised = rustix::process::setrlimit(rustix::process::Resource::Nofile, files);
        raised.map_err(system("setrlimit"))
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> CUresult {
    // SAFETY: the caller's address.
    call("cuDriverGetVersion", |_| unsafe { store(version, 13000) })
}

/// Returns a text for an error that stays for the life of the process.
fn text(error: CUresult, form: fn(String) -> String) -> *const c_char {
    static TEXTS: Mutex<BTreeMap<String, CString>> = Mutex::new(BTreeMap::new());
    let text = form(format!("{error:?}"));
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    // Texts are never removed, and moving a C string does not move its bytes.
    texts.entry(text.clone()).or_insert_with(|| CString::new(text).unwrap_or_default()).as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(error: CUresult, name: *mut *const c_char) -> CUresult {
    // SAFETY: the caller's address.
    call("cuGetErrorName", |_| unsafe { store(name, text(error, |name| name)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(error: CUresult, words: *mut *const c_char) -> CUresult {
    let form = |name: String| name.trim_start_matches("CUDA_ERROR_").to_lowercase().replace('_', " ");
    // SAFETY: the caller's address.
    call("cuGetErrorString", |_| unsafe { store(words, text(error, form)) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    // SAFETY: the caller's address.
    call("cuDeviceGetCount", |_| unsafe { store(count, 1) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(to: *mut CUdevice, ordinal: c_int) -> CUresult {
    call("cuDeviceGet", |_| {
        device(ordinal)?;
        // SAFETY: the caller's address.
        unsafe { store(to, ordinal) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, bytes: c_int, ordinal: CUdevice) -> CUresult {
    call("cuDeviceGetName", |_| {
        device(ordinal)?;
        let text = c"Millrace double".to_bytes_with_nul();
        let fits = usize::try_from(bytes).is_ok_and(|bytes| bytes >= text.len());
        require(fits, INVALID, "the name does not fit")?;
        // SAFETY: the caller has room for `bytes` bytes.
        unsafe { name.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len()) };
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: *mut CUuuid, ordinal: CUdevice) -> CUresult {
    call("cuDeviceGetUuid_v2", |_| {
        device(ordinal)?;
        // SAFETY: the caller's address.
        unsafe { store(uuid, CUuuid { bytes: b"Millrace double\0".map(|byte| byte as c_char) }) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(
    value: *mut c_int,
    attribute: CUdevice_attribute,
    ordinal: CUdevice,
) -> CUresult {
    use CUdevice_attribute as A;
    call("cuDeviceGetAttribute", |_| {
        device(ordinal)?;
        let found = match attribute {
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => SMS as c_int,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => 9,
            A::CU_DEVICE_ATTRIBUTE_WARP_SIZE => 32,
            A::CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK => 1024,
            A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
            A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => 50 << 20,
            A::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
            | A::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            | A::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED => 1,
            _ => 0,
        };
        // SAFETY: the caller's address.
        unsafe { store(value, found) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, ordinal: CUdevice) -> CUresult {
    call("cuDeviceTotalMem_v2", |mut state| {
        device(ordinal)?;
        // SAFETY: the caller's address.
        unsafe { store(bytes, state.memory.total() as usize) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxSetFlags_v2(ordinal: CUdevice, _flags: c_uint) -> CUresult {
    call("cuDevicePrimaryCtxSetFlags_v2", |_| device(ordinal))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, ordinal: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRetain", |mut state| {
        device(ordinal)?;
        if state.context.retained == 0 {
            state.context.context = state.number();
            state.context.lost = None;
        }
        state.context.retained += 1;
        // SAFETY: the caller's address.
        unsafe { store(context, state.context.context as CUcontext) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuDevicePrimaryCtxRelease_v2(ordinal: CUdevice) -> CUresult {
    call("cuDevicePrimaryCtxRelease_v2", |mut state| {
        device(ordinal)?;
        let retained = state.context.retained > 0;
        require(retained, CUresult::CUDA_ERROR_INVALID_CONTEXT, "the context is not retained")?;
        state.context.retained -= 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSetCurrent(context: CUcontext) -> CUresult {
    call("cuCtxSetCurrent", |state| {
        let known =
            context.is_null() || state.context.retained > 0 && context as usize == state.context.context;
        require(known, CUresult::CUDA_ERROR_INVALID_CONTEXT, "the context has ended, or never was one")?;
        CURRENT.set(context as usize);
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> CUresult {
    call("cuCtxGetStreamPriorityRange", |state| {
        state.current()?;
        // SAFETY: the caller's addresses.
        unsafe { store(least, 0).and_then(|()| store(greatest, -5)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCtxSynchronize() -> CUresult {
    call("cuCtxSynchronize", |state: Locked| {
        state.current()?;
        wait_while(state, |state| state.streams.is_busy()).alive()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> CUresult {
    call("cuMemGetInfo_v2", |mut state| {
        state.current()?;
        let all = state.memory.total();
        let used = state.memory.used();
        // SAFETY: the caller's addresses.
        unsafe { store(free, all.saturating_sub(used) as usize).and_then(|()| store(total, all as usize)) }
    })
}
