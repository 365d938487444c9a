//! The fields of a call, each through a function of its own, for languages in which the struct
//! `millrace_tensor` is cumbersome.

#![allow(unsafe_code, reason = "pointers come from the caller, as the header asks")]

use std::ffi::{CStr, c_char};
use std::ptr;

use super::handles::note;
use super::{CInput, c_name, millrace_call};
use crate::call::Input;

/// Returns an input of a call, and the input's names as C strings.
///
/// # Safety
/// As `millrace.h` says.
unsafe fn input<'a>(call: *const millrace_call, index: usize) -> Option<(&'a Input, &'a CInput)> {
    // SAFETY: the header's promises.
    let call = unsafe { call.as_ref() };
    let input = call.and_then(|call| Some((call.call.inputs().get(index)?, call.inputs.get(index)?)));
    if input.is_none() {
        note(c"NO_INPUT", "there is no input with this index: see millrace_input_count");
    }
    input
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_input_name(call: *const millrace_call, index: usize) -> *const c_char {
    // SAFETY: the header's promises.
    unsafe { input(call, index) }.map_or(ptr::null(), |(_, names)| names.name.as_ptr())
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_input_id(call: *const millrace_call, index: usize) -> *const c_char {
    // SAFETY: the header's promises.
    unsafe { input(call, index) }.map_or(ptr::null(), |(_, names)| names.id.as_ptr())
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_input_datatype(call: *const millrace_call, index: usize) -> *const c_char {
    // SAFETY: the header's promises.
    unsafe { input(call, index) }.map_or(ptr::null(), |(input, _)| c_name(input.datatype).as_ptr())
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_input_rank(call: *const millrace_call, index: usize) -> usize {
    // SAFETY: the header's promises.
    unsafe { input(call, index) }.map_or(0, |(input, _)| input.shape.len())
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_input_shape(call: *const millrace_call, index: usize) -> *const i64 {
    // SAFETY: the header's promises.
    unsafe { input(call, index) }.map_or(ptr::null(), |(input, _)| input.shape.as_ptr())
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_request_id(call: *const millrace_call) -> *const c_char {
    // SAFETY: the header's promises.
    unsafe { call.as_ref() }.map_or(c"".as_ptr(), |call| call.request_id.as_ptr())
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_timeout_ms(call: *const millrace_call) -> u64 {
    // SAFETY: the header's promises.
    let timeout = unsafe { call.as_ref() }.map_or(0, |call| call.call.timeout().as_millis());
    u64::try_from(timeout).unwrap_or(u64::MAX)
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_wanted_count(call: *const millrace_call) -> usize {
    // SAFETY: the header's promises.
    unsafe { call.as_ref() }.map_or(0, |call| call.wanted.len())
}

/// # Safety
/// As `millrace.h` says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_wanted(call: *const millrace_call, index: usize) -> *const c_char {
    // SAFETY: the header's promises.
    let call = unsafe { call.as_ref() };
    let name: Option<&CStr> = call.and_then(|call| call.wanted.get(index)).map(AsRef::as_ref);
    name.map_or(ptr::null(), CStr::as_ptr)
}
