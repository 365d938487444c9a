//! The executor process: owns the context of a GPU, and carries out the commands of its worker.
//!
//! ```text
//!              ┌─ control:    loads, maps, unmaps ─┐
//! socket ──────┼─ copies:     one batch after another, in its window
//!   ▲          ├─ copies out: the same, to the host
//!   │          └─ runs:       one after another, each launch waits for its reads
//!   └────────────── events, from all of them ─────┘
//! ```
//! There are four ordered streams with a thread each. The control thread itself carries out a short
//! run that waits for nothing.
//!
//! The executor is crash-only. The process has no state that the worker cannot send again or compute again
//! with a run, exits when the worker ends, and decides nothing. `executor.proto` is the
//! contract.
//!
//! | module | holds |
//! |---|---|
//! | `control` | commands, in the order sent |
//! | `copies` | the copy threads |
//! | `host_copies` | copies to the host, on a thread of their own |
//! | `objects` | tensors in the GPU's memory that runs read in place |
//! | `kept_outputs` | outputs that stay on the GPU after their run |
//! | `runs` | the run thread |
//! | `batch`, `response` | a run's inputs, in parts; its outputs, and which of them stay |
//! | `program` | a loaded model: its launches, and the memory under it |
//! | `mapping` | the memory under a program or an object: its region, its residency |
//! | `residency` | the state of a mapping, and its users. Pure |
//! | `peers` | other GPUs from which copies may read |
//! | `launch_plan` | launches with numbered values. Pure |
//! | `conversions` | conversion and checks of messages |
//! | `events`, `queue`, `process` | events to the worker, the bounded queues, the tie to the worker |

mod batch;
mod control;
mod conversions;
mod copies;
mod error;
mod events;
mod host_copies;
mod kept_outputs;
mod launch_plan;
mod mapping;
mod objects;
mod peers;
mod process;
mod program;
mod queue;
mod residency;
mod response;
mod runs;

use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;

pub use conversions::INLINE_BYTES_MAX;
pub use copies::COPIES_QUEUED_MAX;
pub use error::Error;
pub use kept_outputs::RUNS_KEPT_MAX;
pub use objects::OBJECTS_MAX;
pub use process::{MEMORY_BESIDE_GPU, PROGRAMS_MAX, run};
pub use runs::RUNS_QUEUED_MAX;

/// Runs `millrace executor`: serves the worker at the other end of standard input, until the worker
/// sends a shutdown or ends.
#[must_use]
pub fn main() -> ExitCode {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().map_err(Error::Socket);
    match socket.and_then(|socket: OwnedFd| run(socket)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("millrace executor: {error}");
            ExitCode::FAILURE
        }
    }
}
