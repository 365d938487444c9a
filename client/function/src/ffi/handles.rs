//! What crosses the boundary: handles, text and messages, each checked once.

#![allow(unsafe_code, reason = "pointers come from the caller, as the header asks")]

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use millrace_types::DataId;

use super::{FAILED, OK};
use crate::error::Error;
use crate::ids;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
    static REASON: Cell<&'static CStr> = const { Cell::new(c"") };
}

/// The last message of this thread, for as long as it is.
pub(super) fn message() -> *const c_char {
    MESSAGE.with_borrow(|message| message.as_ptr())
}

/// The name of what failed last on this thread.
pub(super) fn reason() -> *const c_char {
    REASON.get().as_ptr()
}

pub(super) fn note(reason: &'static CStr, message: &str) {
    REASON.set(reason);
    // A zero byte would end it early.
    let text = CString::new(message.replace('\0', "?")).unwrap_or_default();
    MESSAGE.with_borrow_mut(|last| *last = text);
}

/// Carries a function out. What fails, or panics, is noted and returned as `FAILED`.
pub(super) fn guarded(work: impl FnOnce() -> Result<c_int, Error>) -> c_int {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            note(error.c_reason(), &error.to_string());
            FAILED
        }
        Err(_panic) => {
            note(c"INTERNAL", "a bug in millrace: this function panicked");
            FAILED
        }
    }
}

pub(super) fn bad(what: &str) -> Error {
    Error::Function(what.to_owned())
}

/// Borrows what a handle points to.
///
/// # Safety
/// The handle is null, or came from here and was not given back.
pub(super) unsafe fn handle<'a, T>(handle: *const T, what: &str) -> Result<&'a T, Error> {
    // SAFETY: the caller's promise, which the header asks for.
    unsafe { handle.as_ref() }.ok_or_else(|| bad(what))
}

/// # Safety
/// The pointer is null, or a C string.
pub(super) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str, Error> {
    if text.is_null() {
        return Err(bad(what));
    }
    // SAFETY: the caller's promise, which the header asks for.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| bad(what))
}

/// # Safety
/// As [`text`].
pub(super) unsafe fn data_id(id: *const c_char) -> Result<DataId, Error> {
    // SAFETY: the same promise.
    let id = unsafe { text(id, "the id is null, or no text") }?;
    ids::parse(id).ok_or_else(|| Error::NotAnId(id.to_owned()))
}

/// Gives a value to C as a handle.
///
/// # Safety
/// `out` is null, or a place for a handle.
pub(super) unsafe fn give<T>(
    out: *mut *mut T,
    value: impl FnOnce() -> Result<T, Error>,
) -> Result<c_int, Error> {
    if out.is_null() {
        return Err(bad("the place for the result is null"));
    }
    let value = Box::new(value()?);
    // SAFETY: not null, and the caller's promise that it is a place for a handle.
    unsafe { out.write(Box::into_raw(value)) };
    Ok(OK)
}

/// Takes a handle back.
///
/// # Safety
/// The handle is null, or came from here and was not given back.
pub(super) unsafe fn take<T>(handle: *mut T, what: &str) -> Result<Box<T>, Error> {
    if handle.is_null() {
        return Err(bad(what));
    }
    // SAFETY: every handle is a box of ours, and the caller's promise that it is used no more.
    Ok(unsafe { Box::from_raw(handle) })
}

/// Takes a handle back and drops what it was. Null is nothing, and no failure: a function that failed
/// gives back what it has and what it has not before it says why.
///
/// # Safety
/// As [`take`].
pub(super) unsafe fn give_back<T>(handle: *mut T) {
    if handle.is_null() {
        return;
    }
    guarded(|| {
        // SAFETY: the same promise.
        drop(unsafe { take(handle, "the handle is null") }?);
        Ok(OK)
    });
}
