//! The way of every call: count, faults, required state, answer. Also the two ways to report a broken
//! rule: an error for the caller, and an abort.
#![allow(unsafe_code, reason = "writes through pointers of the caller")]

use std::backtrace::{Backtrace, BacktraceStatus};
use std::sync::atomic::{AtomicBool, Ordering};

use cudarc::driver::sys::CUresult;

use crate::config::CONFIG;
use crate::{context, faults, report};

pub(crate) type CallOutcome = Result<(), CUresult>;

/// State that a call requires. The header names `CUDA_ERROR_INVALID_CONTEXT` among the errors of those
/// functions that require a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Requires {
    /// The call works always, also in a context that an error has ended.
    Nothing,
    /// The call works before `cuInit`.
    NoStart,
    /// The call works after `cuInit`.
    Start,
    /// The call works on a thread with a current context.
    Context,
}

/// A call of the program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DriverCall {
    pub(crate) name: &'static str,
    /// Number of the call among those of the same name, from 1.
    pub(crate) nth: u64,
    /// Error with which the work of this call fails when a stream carries it out.
    pub(crate) late_fault: Option<CUresult>,
}

impl std::fmt::Display for DriverCall {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (call {})", self.name, self.nth)
    }
}

static STARTED: AtomicBool = AtomicBool::new(false);

/// Remembers that `cuInit` succeeded.
pub(crate) fn start() {
    STARTED.store(true, Ordering::Release);
}

pub(crate) fn has_started() -> bool {
    STARTED.load(Ordering::Acquire)
}

/// Carries out a call, unless a fault is due or the required state is missing.
pub(crate) fn answer(
    name: &'static str,
    requires: Requires,
    body: impl FnOnce(&DriverCall) -> CallOutcome,
) -> CUresult {
    let nth = report::count_call(name);
    let mut call = DriverCall { name, nth, late_fault: None };
    let outcome = admit(&mut call, requires).and_then(|()| body(&call));
    outcome.err().unwrap_or(CUresult::CUDA_SUCCESS)
}

fn admit(call: &mut DriverCall, requires: Requires) -> CallOutcome {
    if requires == Requires::Nothing {
        return Ok(());
    }
    if let Some(code) = faults::ended_by() {
        return Err(code);
    }
    if let Some(fault) = faults::due(call.name, call.nth) {
        eprintln!("cuda double: {call}: injected {:?}{}", fault.code, if fault.late { ", late" } else { "" });
        if !fault.late {
            faults::end_context(fault.code);
            return Err(fault.code);
        }
        call.late_fault = Some(fault.code);
    }
    if requires != Requires::NoStart && !has_started() {
        return Err(call.broken(CUresult::CUDA_ERROR_NOT_INITIALIZED, "cuInit was not called"));
    }
    if requires == Requires::Context && context::current().is_none() {
        return Err(call.broken(CUresult::CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread"));
    }
    Ok(())
}

impl DriverCall {
    /// Reports a broken rule, and returns the error for the caller.
    pub(crate) fn broken(&self, code: CUresult, rule: impl AsRef<str>) -> CUresult {
        eprintln!("cuda double: {self}: {}", rule.as_ref());
        report::count_broken_rule();
        code
    }

    /// Reports a wrong value.
    pub(crate) fn invalid(&self, rule: impl AsRef<str>) -> CUresult {
        self.broken(CUresult::CUDA_ERROR_INVALID_VALUE, rule)
    }

    /// Reports a handle that does not exist.
    pub(crate) fn unknown(&self, kind: &str, handle: usize) -> CUresult {
        let rule = format!("there is no {kind} {handle:#x}: destroyed, or never created");
        self.broken(CUresult::CUDA_ERROR_INVALID_HANDLE, rule)
    }

    /// Reports a call that a driver lets pass, although memory is corrupted or work is lost. Ends the
    /// process if the double is strict.
    pub(crate) fn dangerous(&self, rule: impl AsRef<str>) {
        eprintln!("cuda double: {self}: {}", rule.as_ref());
        report::count_broken_rule();
        if CONFIG.strict {
            let backtrace = Backtrace::capture();
            if backtrace.status() == BacktraceStatus::Captured {
                eprintln!("{backtrace}");
            }
            std::process::abort();
        }
    }
}

/// Writes a result for the caller.
///
/// # Safety
/// `at` is null, or an address of the caller's for a value of this type.
pub(crate) unsafe fn put<T>(at: *mut T, value: T) -> CallOutcome {
    if at.is_null() {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    unsafe { at.write(value) };
    Ok(())
}
