//! Functions that are programs of their owners (D10, D11). A worker that allows programs keeps their
//! processes running beside its GPUs. The processes see data and never a device, their requests do not
//! enter the GPUs' queue, and no GPU time is billed.
//!
//! ```text
//! Function ── Enqueue ─► pool ── Call ─► process   an actor each; gpu::process_pool decides
//!     ▲                   │ ▲              │
//!     └─── Computed ──────┘ └── Return ────┤
//!                 objects ◄── Store, Fetch ┘              memfds: sealed data is not copied
//! ```
//! A process runs a file that the function's owner uploaded, so a worker runs programs only with the
//! operator's permission. The process runs as the worker's user without a sandbox: a client that may
//! publish programs may do everything that the worker may. The process gets few of the worker's
//! environment variables and, apart from its socket, none of its descriptors. The process dies with the
//! worker.
//!
//! | module | holds |
//! |---|---|
//! | [`store`] | the files of programs, and the state that the processes share |
//! | [`data`] | the data that a process names, stores and fetches |
//! | [`copies`] | copies of large data, off the actor thread |
//! | [`names`] | the data names of a process |
//! | [`outputs`] | the check of a process's outputs |
//! | [`health`] | the health and the restarts of programs, for status and metrics |
//! | [`reporter`] | the reports of process pools on both |
//! | [`launch`] | the steps of a child process before the program runs |
//!
//! The actor of a process pool is `actors::process_pool`.

mod copies;
pub(crate) mod data;
pub(crate) mod health;
mod launch;
mod names;
pub(crate) mod outputs;
pub(crate) mod reporter;
mod store;

pub(crate) use launch::PROGRAM_VARIABLE;
pub use launch::launch;
pub use store::ProgramLauncher;
pub(crate) use store::{HostedProgram, ProgramStore};
