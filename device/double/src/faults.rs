//! Faults from the environment, and the error that ended the context.

use std::fs::OpenOptions;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys::CUresult;

use crate::codes;
use crate::config::CONFIG;

/// A fault at a certain call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedFault {
    call: String,
    /// Number of the call among those of the same name, from 1.
    nth: u64,
    pub(crate) code: CUresult,
    /// Whether the call succeeds, and its work fails when a stream carries it out.
    pub(crate) late: bool,
}

impl PlannedFault {
    /// Reads `CALL:NTH:CODE` or `CALL:NTH:CODE:late`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split(':');
        let call = parts.next().filter(|call| call.starts_with("cu"))?.to_owned();
        let nth = parts.next()?.parse().ok().filter(|&nth| nth > 0)?;
        let code = codes::from_number(parts.next()?.parse().ok()?)?;
        let late = match parts.next() {
            None => false,
            // Only an error that ends the context can show after the call.
            Some("late") if codes::is_sticky(code) => true,
            Some(_) => return None,
        };
        parts.next().is_none().then_some(Self { call, nth, code, late })
    }
}

/// Number of the code that ended the context; 0 while there is none.
static ENDED_BY: AtomicU32 = AtomicU32::new(0);

/// Returns the fault that is due at the `nth` call of a name.
pub(crate) fn due(call: &str, nth: u64) -> Option<PlannedFault> {
    let fault = CONFIG.faults.iter().find(|fault| fault.call == call && fault.nth == nth)?;
    if let Some(path) = &CONFIG.fault_once {
        // Only the process that creates the file has the fault.
        OpenOptions::new().write(true).create_new(true).open(path).ok()?;
        if fault.code == CUresult::CUDA_ERROR_UNKNOWN
            && let Err(error) = std::fs::write(path, "lost")
        {
            eprintln!("cuda double: cannot write {}: {error}", path.display());
        }
    }
    Some(fault.clone())
}

/// Returns whether another process lost the device.
pub(crate) fn is_lost_elsewhere() -> bool {
    let read = |path| std::fs::read_to_string(path).is_ok_and(|text| text == "lost");
    CONFIG.fault_once.as_ref().is_some_and(read)
}

/// Lets all later calls answer the code, if the code is of that kind.
pub(crate) fn end_context(code: CUresult) {
    if codes::is_sticky(code) {
        // The first error wins: later errors are its effects. Both outcomes are fine.
        ENDED_BY.compare_exchange(0, code as u32, Ordering::AcqRel, Ordering::Acquire).ok();
    }
}

/// Returns the code that ended the context.
pub(crate) fn ended_by() -> Option<CUresult> {
    codes::from_number(ENDED_BY.load(Ordering::Acquire)).filter(|&code| code != CUresult::CUDA_SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_name_a_call_its_number_and_a_code() {
        let fault = |late| PlannedFault {
            call: "cuMemcpyHtoDAsync_v2".to_owned(),
            nth: 3,
            code: CUresult::CUDA_ERROR_ILLEGAL_ADDRESS,
            late,
        };
        assert_eq!(PlannedFault::parse("cuMemcpyHtoDAsync_v2:3:700"), Some(fault(false)));
        assert_eq!(PlannedFault::parse(" cuMemcpyHtoDAsync_v2:3:700:late"), Some(fault(true)));
        for malformed in ["", "cuInit", "cuInit:0:2", "cuInit:1:31337", "cuInit:1:2:soon", "cuInit:1:2:late"]
        {
            assert_eq!(PlannedFault::parse(malformed), None, "{malformed:?}");
        }
    }
}
