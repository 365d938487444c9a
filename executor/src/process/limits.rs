//! The tie of this process to its worker, and the limits of the process.

use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};

use millrace_proto::OOM_SCORE_ADJ;
use millrace_types::Bytes;
use rustix::process::{Resource, Rlimit, Signal};

use crate::error::Error;

/// Memory that a process may use in addition to the size of the GPU's memory: for the graphs of its
/// programs, for threads, and for inputs and outputs in transit.
pub const MEMORY_BESIDE_GPU: Bytes = Bytes::gib(4);

/// Requests SIGKILL for the time when the worker ends. If the worker ended before this request, the
/// worker is no longer the parent process. The socket's peer credentials reveal the worker, because
/// the worker created the other end.
pub(super) fn die_with_worker(socket: &OwnedFd) -> Result<(), Error> {
    let worker =
        rustix::net::sockopt::socket_peercred(socket.as_fd()).map_err(|e| Error::Socket(e.into()))?.pid;
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|source| Error::Os { what: "tie this process to its worker", source: source.into() })?;
    if rustix::process::getppid() != Some(worker) {
        return Err(Error::Orphaned { worker: worker.as_raw_nonzero().get() });
    }
    Ok(())
}

/// Makes the kernel kill this process before the worker if the machine runs out of memory.
pub(super) fn raise_oom_score() {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", OOM_SCORE_ADJ.to_string()) {
        tracing::warn!(%error, "cannot raise the OOM score: the kernel may kill the worker before this process if memory runs out");
    }
}

/// Limits the memory that this process allocates. rten cannot be stopped within an operator, and the
/// size of an operator's output is known only when it allocates memory. So a run that needs too much
/// memory ends this process, and no other process of the machine. A run that a real GPU could not
/// hold may also fail on an emulated GPU.
pub(super) fn limit_memory(gpu: Bytes) {
    // RLIMIT_DATA counts private writable memory. The limit excludes the GPU's memory, which is shared with
    // the worker, and reserved address ranges.
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Data);
    let wanted = gpu.get().saturating_add(MEMORY_BESIDE_GPU.get());
    let limit = Some(maximum.map_or(wanted, |maximum| maximum.min(wanted)));
    let limit = Rlimit { current: limit, maximum: limit };
    if let Err(error) = rustix::process::setrlimit(Resource::Data, limit) {
        tracing::warn!(%error, "cannot limit the memory of this process");
    }
    // Core files are disabled, because a core file would contain the tensors of every function that ran here.
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    if let Err(error) = rustix::process::setrlimit(Resource::Core, none) {
        tracing::warn!(%error, "cannot disable core files: this process may write one when it dies");
    }
}

/// Raises the limit of open descriptors to the hard limit, because programs and large tensors need
/// descriptors.
pub(super) fn raise_descriptor_limit() {
    let Rlimit { maximum, .. } = rustix::process::getrlimit(Resource::Nofile);
    let raised = Rlimit { current: maximum, maximum };
    if let Err(error) = rustix::process::setrlimit(Resource::Nofile, raised) {
        // If the limit is ever reached, loading fails with a clear message.
        tracing::debug!(%error, "cannot raise the limit of open files");
    }
}
