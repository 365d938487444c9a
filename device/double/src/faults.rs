//! The errors that a test asks for with `MILLRACE_DOUBLE_FAULT`.
//!
//! A sticky code, such as 700, loses the context: streams do no more work, and calls that queue work or
//! wait answer the code from then on. As on a GPU, the call that queues the failing work succeeds, and
//! the error shows at the next call or wait.

use cudarc::driver::sys::CUresult;

use crate::rule::abort;

#[derive(Debug)]
pub(crate) struct Faults {
    /// None before the first call.
    planned: Option<Vec<Fault>>,
    /// Error of the work that the current call queues.
    pub(crate) of_work: Option<CUresult>,
}

#[derive(Debug)]
struct Fault {
    call: String,
    nth: u64,
    code: CUresult,
}

impl Faults {
    pub(crate) const NEW: Self = Self { planned: None, of_work: None };

    /// Returns the error that is due at the nth call of a name.
    pub(crate) fn due(&mut self, call: &str, nth: u64) -> Option<CUresult> {
        let planned = self.planned.get_or_insert_with(|| {
            let text = std::env::var("MILLRACE_DOUBLE_FAULT").unwrap_or_default();
            text.split(',').filter(|part| !part.is_empty()).map(parse).collect()
        });
        planned.iter().find(|fault| fault.call == call && fault.nth == nth).map(|fault| fault.code)
    }
}

fn parse(text: &str) -> Fault {
    let parts: Vec<_> = text.split(':').collect();
    let fault = match parts[..] {
        [call, nth, code] => nth.parse().ok().zip(code.parse().ok().and_then(result)).map(|(nth, code)| {
            let call = call.to_owned();
            Fault { call, nth, code }
        }),
        _ => None,
    };
    fault.unwrap_or_else(|| abort("MILLRACE_DOUBLE_FAULT", "expected NAME:N:CODE with a known code"))
}

/// Returns the result with this number, if tests use it.
fn result(code: u32) -> Option<CUresult> {
    use CUresult::{
        CUDA_ERROR_ALREADY_MAPPED, CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_ILLEGAL_INSTRUCTION, CUDA_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_HANDLE,
        CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_MISALIGNED_ADDRESS, CUDA_ERROR_NO_DEVICE, CUDA_ERROR_NOT_PERMITTED,
        CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_UNKNOWN,
    };
    let known = [
        CUDA_ERROR_INVALID_VALUE,
        CUDA_ERROR_OUT_OF_MEMORY,
        CUDA_ERROR_NO_DEVICE,
        CUDA_ERROR_INVALID_CONTEXT,
        CUDA_ERROR_ALREADY_MAPPED,
        CUDA_ERROR_ECC_UNCORRECTABLE,
        CUDA_ERROR_OPERATING_SYSTEM,
        CUDA_ERROR_INVALID_HANDLE,
        CUDA_ERROR_ILLEGAL_ADDRESS,
        CUDA_ERROR_LAUNCH_TIMEOUT,
        CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
        CUDA_ERROR_HARDWARE_STACK_ERROR,
        CUDA_ERROR_ILLEGAL_INSTRUCTION,
        CUDA_ERROR_MISALIGNED_ADDRESS,
        CUDA_ERROR_LAUNCH_FAILED,
        CUDA_ERROR_NOT_PERMITTED,
        CUDA_ERROR_NOT_SUPPORTED,
        CUDA_ERROR_UNKNOWN,
    ];
    known.into_iter().find(|known| *known as u32 == code)
}

/// Returns whether a call queues work that can fail later.
pub(crate) fn queues_work(call: &str) -> bool {
    call.starts_with("cuMemcpy") || matches!(call, "cuMemsetD8Async" | "cuLaunchKernel" | "cuGraphLaunch")
}

/// Returns whether an error loses the context.
pub(crate) fn is_sticky(code: CUresult) -> bool {
    matches!(code as u32, 214 | 700 | 702 | 710 | 714..=719 | 999)
}
