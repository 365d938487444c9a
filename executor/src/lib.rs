//! The executor process: owns the context of a GPU, and carries out the commands of its worker.
//!
//! ```text
//!              ┌─ control:    loads, maps, unmaps ─┐
//! socket ──────┼─ copies:     one batch after another, in its window
//!   ▲          ├─ copies out: the same, to the host
//!   │          └─ seats:      runs one after another, each launch waits for its reads and a token
//!   └────────────── events, from all of them ─────┘
//! ```
//! Each stream is ordered and has a thread: control, copies in each direction, and the runs of each seat.
//! The control thread itself carries out a short run that waits for nothing.
//!
//! The executor is crash-only. The process has no state that the worker cannot send again or compute again
//! with a run, exits when the worker ends, and decides nothing. `executor.proto` is the
//! contract.
//!
//! Each module uses only modules below it in this table:
//!
//! | module | holds |
//! |---|---|
//! | `process` | the process, its limits and threads, and the commands in the order sent |
//! | `copies`, `runs` | the work of the copy threads, and of the run threads |
//! | `programs` | loaded models, and the plans of their launches |
//! | `memory` | mappings of the GPU's memory, objects in it, and kept outputs |
//! | `socket` | messages of the worker, and events to it |
//! | `queue`, `thread`, `error` | the bounded queues between the threads, and their start; errors that end the process |

mod copies;
mod error;
mod memory;
mod process;
mod programs;
mod queue;
mod runs;
mod socket;
mod thread;

use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;

pub use copies::COPIES_QUEUED_MAX;
pub use error::Error;
pub use memory::{OBJECTS_MAX, RUNS_KEPT_MAX};
pub use millrace_engine::ort::library::{LIBRARY_VARIABLE, check_cuda_library, check_library};
pub use process::{MEMORY_BESIDE_GPU, PROGRAMS_MAX, run};
pub use runs::{RUNS_QUEUED_MAX, SEATS_MAX};
pub use socket::INLINE_BYTES_MAX;

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
