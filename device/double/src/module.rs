//! Modules: the entries of a PTX text with the sizes of their parameters, functions and launches.
#![allow(unsafe_code, reason = "exports C functions, and reads texts and arguments of the caller")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_uint, c_void};

use cudarc::driver::sys::{CUfunction, CUjit_option, CUmodule, CUresult, CUresult::*, CUstream};

use crate::calls::{CallOutcome, DriverCall, put};
use crate::kernels::{Kernel, Launch};
use crate::state::{State, next_id, state};
use crate::work::Work;

/// Most threads of a block.
const THREADS_MAX: c_uint = 1024;

/// A loaded module: the sizes of the parameters, by entry.
#[derive(Debug)]
pub(crate) struct Module {
    entries: BTreeMap<String, Vec<usize>>,
}

#[derive(Debug, Clone)]
pub(crate) struct Function {
    module: usize,
    kernel: &'static Kernel,
}

/// Returns the text without comments.
fn without_comments(text: &str) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find("//").into_iter().chain(rest.find("/*")).min() {
        let (before, comment) = rest.split_at(at);
        out.push_str(before);
        out.push(' ');
        rest = if comment.starts_with("//") {
            comment.find('\n').map_or("", |end| &comment[end..])
        } else {
            &comment[comment.find("*/")? + 2..]
        };
    }
    out.push_str(rest);
    Some(out)
}

/// Returns the size of a parameter such as `.param .u64 at` or `.param .align 8 .b8 at[16]`.
fn parameter_bytes(text: &str) -> Option<usize> {
    let mut words = text.split_whitespace();
    if words.next()? != ".param" {
        return None;
    }
    let bytes = words.find_map(|word| match word {
        ".u8" | ".s8" | ".b8" => Some(1),
        ".u16" | ".s16" | ".b16" | ".f16" => Some(2),
        ".u32" | ".s32" | ".b32" | ".f32" => Some(4),
        ".u64" | ".s64" | ".b64" | ".f64" => Some(8),
        _ => None,
    })?;
    match text.split_once('[') {
        None => Some(bytes),
        Some((_, count)) => {
            count.trim_end().strip_suffix(']')?.trim().parse::<usize>().ok()?.checked_mul(bytes)
        }
    }
}

/// Reads the entries of a PTX text. Returns `None` if the text is malformed.
fn parse(text: &str) -> Option<BTreeMap<String, Vec<usize>>> {
    let text = without_comments(text)?;
    if !text.trim_start().starts_with(".version") || !text.contains(".target") {
        return None;
    }
    let mut entries = BTreeMap::new();
    for entry in text.split(".entry").skip(1) {
        let end = entry.find(['(', '{', '\n', ';'])?;
        let (name, rest) = entry.split_at(end);
        let parameters = match rest.trim_start().strip_prefix('(') {
            Some(list) => list.split_once(')')?.0,
            None => "",
        };
        let parameters = parameters.split(',').map(str::trim).filter(|parameter| !parameter.is_empty());
        let sizes = parameters.map(parameter_bytes).collect::<Option<Vec<_>>>()?;
        entries.insert(name.trim().to_owned(), sizes);
    }
    Some(entries)
}

fn load(call: &DriverCall, module: *mut CUmodule, image: *const c_void) -> CallOutcome {
    if image.is_null() {
        return Err(call.invalid("the image is null"));
    }
    // SAFETY: the caller passes a text with a zero at its end, or machine code, and its first bytes have
    // a zero soon.
    let text = unsafe { CStr::from_ptr(image.cast::<c_char>()) };
    if text.to_bytes().starts_with(b"\x7fELF") || text.to_bytes().starts_with(&[0x50, 0xed, 0x55, 0xba]) {
        return Err(
            call.broken(CUDA_ERROR_NO_BINARY_FOR_GPU, "machine code: the double reads only PTX texts")
        );
    }
    let entries = text.to_str().ok().and_then(parse);
    let entries = entries.ok_or_else(|| call.broken(CUDA_ERROR_INVALID_PTX, "the text is no PTX"))?;
    let id = next_id();
    // SAFETY: the caller's address for a module.
    unsafe { put(module, id as CUmodule)? };
    state().modules.insert(id, Module { entries });
    Ok(())
}

impl State {
    fn function(&self, call: &DriverCall, module: usize, name: &str) -> Result<Function, CUresult> {
        let found = self.modules.get(&module).ok_or_else(|| call.unknown("module", module))?;
        let not_found = |rule: String| call.broken(CUDA_ERROR_NOT_FOUND, rule);
        let sizes = found.entries.get(name);
        let sizes = sizes.ok_or_else(|| not_found(format!("the text has no entry {name}")))?;
        let kernel = Kernel::named(name);
        let kernel = kernel.ok_or_else(|| not_found(format!("the double has no body for {name}")))?;
        if kernel.parameters != sizes {
            let rule =
                format!("{name} has parameters of {sizes:?} bytes; the double's has {:?}", kernel.parameters);
            return Err(call.invalid(rule));
        }
        Ok(Function { module, kernel })
    }
}

fn unload(call: &DriverCall, module: usize) -> CallOutcome {
    let mut state = state();
    if !state.modules.contains_key(&module) {
        return Err(call.unknown("module", module));
    }
    if let Some(work) = state.all_streams().find_map(|stream| stream.queued_launch(module)) {
        call.dangerous(format!("the module is unloaded, and {work} is still queued"));
    }
    state.modules.remove(&module);
    state.functions.retain(|_, function| function.module != module);
    Ok(())
}

/// Blocks and threads of a launch, in three dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    grid: [c_uint; 3],
    block: [c_uint; 3],
}

impl Shape {
    /// Returns the number of blocks, and the threads of a block, if only the first dimension is used.
    fn linear(self) -> Option<(u32, u32)> {
        let [blocks, 1, 1] = self.grid else { return None };
        let [threads, 1, 1] = self.block else { return None };
        let in_range = blocks > 0 && blocks <= i32::MAX as u32 && threads > 0 && threads <= THREADS_MAX;
        in_range.then_some((blocks, threads))
    }
}

fn launch(
    call: &DriverCall,
    function: CUfunction,
    shape: Shape,
    stream: CUstream,
    parameters: *mut *mut c_void,
) -> CallOutcome {
    let mut state = state();
    let found = state.functions.get(&function.addr()).cloned();
    let Function { module, kernel } = found.ok_or_else(|| call.unknown("function", function.addr()))?;
    let Some((blocks, threads)) = shape.linear() else {
        return Err(call.invalid(format!("{shape:?}: the helper kernels have one dimension")));
    };
    if parameters.is_null() {
        return Err(call.invalid("the parameters are null"));
    }
    let mut arguments = Vec::new();
    for (at, &bytes) in kernel.parameters.iter().enumerate() {
        // SAFETY: the caller passes an address for each parameter of the function.
        let argument = unsafe { parameters.add(at).read() };
        if argument.is_null() {
            return Err(call.invalid(format!("parameter {at} is null")));
        }
        // SAFETY: not null, so the address of an argument that has the size of the parameter.
        arguments.push(unsafe {
            match bytes {
                4 => u64::from(argument.cast::<u32>().read_unaligned()),
                _ => argument.cast::<u64>().read_unaligned(),
            }
        });
    }
    let stream = state.stream(call, stream)?;
    stream.push(call, Work::Launch(Launch { module, kernel, arguments, blocks, threads }))
}

driver! {
    Context fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) |call| { load(call, module, image) }

    // The options change how a text is compiled, and the double compiles none.
    Context fn cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, _count: c_uint, _options: *mut CUjit_option, _values: *mut *mut c_void) |call| {
        load(call, module, image)
    }

    Context fn cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char) |call| {
        if name.is_null() {
            return Err(call.invalid("the name is null"));
        }
        // SAFETY: not null, so the caller's text.
        let name = unsafe { CStr::from_ptr(name) }.to_string_lossy();
        let mut state = state();
        let found = state.function(call, module.addr(), &name)?;
        let id = next_id();
        // SAFETY: the caller's address for a function.
        unsafe { put(function, id as CUfunction)? };
        state.functions.insert(id, found);
        Ok(())
    }

    Start fn cuFuncGetParamInfo(function: CUfunction, index: usize, offset: *mut usize, bytes: *mut usize) |call| {
        let state = state();
        let found = state.functions.get(&function.addr());
        let sizes = found.ok_or_else(|| call.unknown("function", function.addr()))?.kernel.parameters;
        // The end of the list is how a program learns the number of parameters, so there is no message.
        let &size = sizes.get(index).ok_or(CUDA_ERROR_INVALID_VALUE)?;
        // Each parameter is aligned to its size.
        let start = sizes[..index].iter().fold(0_usize, |end, &bytes| end.next_multiple_of(bytes) + bytes);
        // SAFETY: null, or the caller's addresses for sizes.
        unsafe {
            put(offset, start.next_multiple_of(size))?;
            // Null means that the caller does not ask for the size.
            put(bytes, size).ok();
        }
        Ok(())
    }

    Context fn cuModuleUnload(module: CUmodule) |call| { unload(call, module.addr()) }

    Context fn cuLaunchKernel(function: CUfunction, grid_x: c_uint, grid_y: c_uint, grid_z: c_uint, block_x: c_uint, block_y: c_uint, block_z: c_uint, _shared: c_uint, stream: CUstream, parameters: *mut *mut c_void, extra: *mut *mut c_void) |call| {
        if !extra.is_null() {
            return Err(call.broken(CUDA_ERROR_NOT_SUPPORTED, "arguments in a single buffer"));
        }
        let shape = Shape { grid: [grid_x, grid_y, grid_z], block: [block_x, block_y, block_z] };
        launch(call, function, shape, stream, parameters)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_have_the_sizes_of_their_parameters() {
        let text = "// .entry commented(.param .u64 a)\n.version 7.0\n.target sm_75\n\
            .visible .entry one(.param .u64 at, .param .u32 mask)\n{ ret; }\n\
            /* .entry two() */ .entry none { ret; }\n\
            .entry array(.param .align 8 .b8 a[16], .param .u64 .ptr .global .align 4 b) { ret; }";
        let expected = [("one", vec![8, 4]), ("none", vec![]), ("array", vec![16, 8])];
        let expected = expected.map(|(name, sizes)| (name.to_owned(), sizes)).into();
        assert_eq!(parse(text), Some(expected));
    }

    #[test]
    fn bodies_have_the_parameters_of_the_helper_kernels() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../src/cuda/kernels.ptx");
        let Ok(text) = std::fs::read_to_string(path) else {
            eprintln!("skipped: there is no {path}");
            return;
        };
        let entries = parse(&text).unwrap();
        assert_eq!(entries.len(), 10);
        for (name, sizes) in entries {
            let kernel = Kernel::named(&name).unwrap_or_else(|| panic!("no body for {name}"));
            assert_eq!(kernel.parameters, sizes, "{name}");
        }
    }

    #[test]
    fn malformed_texts_are_refused() {
        for text in ["", "hello", ".version 7.0", ".version 7.0\n.target sm_75\n.entry a(.param .u64 x"] {
            assert_eq!(parse(text), None, "{text:?}");
        }
    }
}
