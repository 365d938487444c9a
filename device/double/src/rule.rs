//! Refusals of calls, the rules that callers break, and the clock.
#![allow(unsafe_code, reason = "writes results through pointers of callers in C")]

use cudarc::driver::sys::CUresult;

pub(crate) const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
pub(crate) const BAD_HANDLE: CUresult = CUresult::CUDA_ERROR_INVALID_HANDLE;

/// Refusal of a call.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) code: CUresult,
    /// Rule that the caller broke, if the answer alone does not say which.
    pub(crate) rule: Option<String>,
}

impl From<CUresult> for Refusal {
    fn from(code: CUresult) -> Self {
        Self { code, rule: None }
    }
}

/// Returns the refusal for a broken rule, which is also printed.
pub(crate) fn broken(code: CUresult, rule: impl Into<String>) -> Refusal {
    Refusal { code, rule: Some(rule.into()) }
}

/// Refuses a call unless a rule is kept.
pub(crate) fn require(kept: bool, code: CUresult, rule: &str) -> Result<(), Refusal> {
    if kept { Ok(()) } else { Err(broken(code, rule)) }
}

pub(crate) fn print(call: &str, rule: &str) {
    eprintln!("cuda double: {call}: {rule}");
}

/// Ends the process, because on a GPU this call would corrupt memory or hang.
pub(crate) fn abort(call: &str, rule: &str) -> ! {
    print(call, rule);
    std::process::abort()
}

/// Returns the refusal for a failed system call.
pub(crate) fn system(what: &'static str) -> impl FnOnce(rustix::io::Errno) -> Refusal {
    move |errno| broken(CUresult::CUDA_ERROR_OPERATING_SYSTEM, format!("{what}: {errno}"))
}

/// Stores a result of a call.
///
/// # Safety
/// `to` is null, or may be written.
pub(crate) unsafe fn store<T>(to: *mut T, value: T) -> Result<(), Refusal> {
    require(!to.is_null(), INVALID, "the address for the result is null")?;
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    Ok(())
}

/// Returns the time of a clock that never goes back, in nanoseconds.
pub(crate) fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // The clock counts from boot, so it is never negative.
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

pub(crate) fn sleep(nanos: u64) {
    if nanos > 0 {
        let span = std::time::Duration::from_nanos(nanos);
        let span =
            rustix::time::Timespec { tv_sec: span.as_secs() as i64, tv_nsec: span.subsec_nanos().into() };
        // A signal only shortens the delay.
        _ = rustix::thread::nanosleep(&span);
    }
}
