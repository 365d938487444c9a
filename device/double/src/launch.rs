//! Modules, functions and launches.
#![allow(unsafe_code, reason = "reads the texts and arguments of callers in C")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUfunction, CUmodule, CUresult, CUstream};

use crate::kernels::{KERNELS, Launch};
use crate::rule::{BAD_HANDLE, INVALID, broken, require, store};
use crate::state::call;
use crate::work::Work;

/// Returns the kernels of a PTX text, with the sizes of their parameters.
fn entries(text: &str) -> BTreeMap<String, Vec<usize>> {
    let entry = |text: &str| {
        let (name, rest) = text.split_once('(')?;
        let (parameters, _) = rest.split_once(')')?;
        // Such as ".param .u64 at".
        let size = |parameter: &str| {
            let kind = parameter.split_whitespace().nth(1)?;
            kind.trim_start_matches(|c: char| !c.is_ascii_digit()).parse::<usize>().ok().map(|bits| bits / 8)
        };
        Some((name.trim().to_owned(), parameters.split(',').filter_map(size).collect()))
    };
    text.split(".entry ").skip(1).filter_map(entry).collect()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadData(to: *mut CUmodule, image: *const c_void) -> CUresult {
    call("cuModuleLoadData", |mut state| {
        state.current()?;
        // SAFETY: the caller gives a C string.
        let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) }.to_string_lossy();
        let is_ptx = text.contains(".version") && text.contains(".target");
        require(is_ptx, CUresult::CUDA_ERROR_INVALID_PTX, "not a PTX text")?;
        let number = state.number();
        state.modules.all.insert(number, entries(&text));
        // SAFETY: the caller's address.
        unsafe { store(to, number as CUmodule) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuModuleUnload(module: CUmodule) -> CUresult {
    call("cuModuleUnload", |mut state| {
        let known = state.modules.all.remove(&(module as usize)).is_some();
        state.modules.functions.retain(|_, (of, _)| *of != module as usize);
        require(known, BAD_HANDLE, "not a module")
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    to: *mut CUfunction,
    module: CUmodule,
    name: *const c_char,
) -> CUresult {
    call("cuModuleGetFunction", |mut state| {
        // SAFETY: the caller gives a C string.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let entries = state.modules.all.get(&(module as usize));
        let entries = entries.ok_or_else(|| broken(BAD_HANDLE, "not a module"))?;
        let missing = || broken(CUresult::CUDA_ERROR_NOT_FOUND, format!("no kernel {name}"));
        let parameters = entries.get(&*name).ok_or_else(missing)?;
        let kernel = KERNELS.iter().find(|kernel| kernel.name == name).ok_or_else(missing)?;
        require(kernel.parameters == parameters, INVALID, "other parameters than the double's kernel")?;
        let number = state.number();
        state.modules.functions.insert(number, (module as usize, kernel));
        // SAFETY: the caller's address.
        unsafe { store(to, number as CUfunction) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: CUfunction,
    grid: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared: c_uint,
    stream: CUstream,
    args: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> CUresult {
    call("cuLaunchKernel", |mut state| {
        let known = state.modules.functions.get(&(function as usize));
        let (_, kernel) = *known.ok_or_else(|| broken(BAD_HANDLE, "not a function of a loaded module"))?;
        let flat = [grid_y, grid_z, block_y, block_z] == [1; 4];
        require(flat && grid > 0 && (1..=1024).contains(&block), INVALID, "not a valid grid")?;
        let read = |(at, size): (usize, &usize)| {
            // SAFETY: the caller gives an address for each parameter, of the parameter's size.
            unsafe {
                let arg = *args.add(at);
                if *size == 4 { u64::from(arg.cast::<u32>().read()) } else { arg.cast::<u64>().read() }
            }
        };
        let args = kernel.parameters.iter().enumerate().map(read).collect();
        state.queue(stream, Work::Kernel(Arc::new(Launch { kernel, args, grid, block })))
    })
}
