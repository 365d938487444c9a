//! The values that cross the C boundary: result codes, handles, texts and messages, each checked once.

#![allow(unsafe_code, reason = "pointers come from the caller, as the header asks")]

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use millrace_types::DataId;

use crate::error::Error;
use crate::ids;

pub(super) const OK: c_int = 0;
pub(super) const FAILED: c_int = -1;

thread_local! {
    static MESSAGE: RefCell<CString> = RefCell::default();
    static REASON: Cell<&'static CStr> = const { Cell::new(c"") };
}

/// Returns the last error message of this thread, valid until the thread's next failure.
pub(super) fn message() -> *const c_char {
    MESSAGE.with_borrow(|message| message.as_ptr())
}

/// Returns the stable name of the last error on this thread.
pub(super) fn reason() -> *const c_char {
    REASON.get().as_ptr()
}

pub(super) fn note(reason: &'static CStr, message: &str) {
    REASON.set(reason);
    // A zero byte would end the C string early.
    let text = CString::new(message.replace('\0', "?")).unwrap_or_default();
    MESSAGE.with_borrow_mut(|last| *last = text);
}

/// Runs the body of a C function. An error or a panic is stored and returned as `FAILED`.
pub(super) fn guarded(work: impl FnOnce() -> Result<c_int, Error>) -> c_int {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            note(error.c_reason(), &error.to_string());
            FAILED
        }
        Err(_panic) => {
            note(c"INTERNAL", "a bug in millrace: the function panicked");
            FAILED
        }
    }
}

pub(super) fn bad(what: &str) -> Error {
    Error::Function(what.to_owned())
}

/// Borrows the value of a handle.
///
/// # Safety
/// The handle is null, or was created by this library and not given back.
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
    let id = unsafe { text(id, "the id is null or not UTF-8") }?;
    ids::parse(id).ok_or_else(|| Error::NotAnId(id.to_owned()))
}

/// Moves a value into a handle for the caller in C.
///
/// # Safety
/// `out` is null, or points to memory for a handle.
pub(super) unsafe fn give<T>(
    out: *mut *mut T,
    value: impl FnOnce() -> Result<T, Error>,
) -> Result<c_int, Error> {
    if out.is_null() {
        return Err(bad("the pointer for the result is null"));
    }
    let value = Box::new(value()?);
    // SAFETY: not null, and the caller's promise that it points to memory for a handle.
    unsafe { out.write(Box::into_raw(value)) };
    Ok(OK)
}

/// Takes a handle back.
///
/// # Safety
/// The handle is null, or was created by this library and not given back.
pub(super) unsafe fn take<T>(handle: *mut T, what: &str) -> Result<Box<T>, Error> {
    if handle.is_null() {
        return Err(bad(what));
    }
    // SAFETY: every handle is a box of this library, and the caller promises not to use it again.
    Ok(unsafe { Box::from_raw(handle) })
}

/// Takes a handle back and drops its value. Null is no failure and keeps the last message: after an
/// error, a program releases all its handles, some of them still null, and then reads the message.
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
