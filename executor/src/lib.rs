//! The executor process: owns one GPU's context and does what its worker says.
//!
//! ```text
//!              ┌─ control:    loads, maps, unmaps ─┐
//! socket ──────┼─ copies:     one batch after another, in its window
//!   ▲          ├─ copies out: the same, to the host
//!   │          └─ runs:       one after another, each launch waiting for what it reads
//!   └────────────── events, from all of them ─────┘
//! ```
//! Four ordered streams, a thread each; a short run that waits for nothing is carried out by the
//! control thread itself, in its turn. Crash-only: it holds nothing that its worker cannot send
//! again, or make again by a run, ends when its worker ends, and decides nothing. `executor.proto` is the contract.
//!
//! | module | holds |
//! |---|---|
//! | `control` | commands, in the order sent |
//! | `copies` | the copy threads |
//! | `copy_out` | copies to the host, on a thread of their own |
//! | `objects` | tensors in the GPU's memory that runs read in place |
//! | `kept` | outputs that stay here after their run |
//! | `runs` | the run thread |
//! | `batch`, `answer` | a run's inputs, in parts; its outputs, and which of them stay |
//! | `program` | a loaded model: its launches, and the memory under it |
//! | `mapping` | the memory under a program or an object: its region, its residency |
//! | `residency` | what mapping there is, and who uses it. Pure |
//! | `peers` | other GPUs whose memory copies may read |
//! | `plan` | launches with their values numbered. Pure |
//! | `wire` | what messages mean here |
//! | `events`, `queue`, `process` | the way back, the bounded queues, the tie to the worker |

mod answer;
mod batch;
mod control;
mod copies;
mod copy_out;
mod error;
mod events;
mod kept;
mod mapping;
mod objects;
mod peers;
mod plan;
mod process;
mod program;
mod queue;
mod residency;
mod runs;
mod wire;

use std::os::fd::{AsFd as _, OwnedFd};
use std::process::ExitCode;

pub use copies::COPIES_QUEUED_MAX;
pub use error::Error;
pub use kept::RUNS_KEPT_MAX;
pub use objects::OBJECTS_MAX;
pub use process::{MEMORY_BESIDE_GPU, PROGRAMS_MAX, run};
pub use runs::RUNS_QUEUED_MAX;
pub use wire::INLINE_BYTES_MAX;

/// What `millrace executor` does: serves the worker whose socket is standard input, until the worker
/// says so or ends.
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
