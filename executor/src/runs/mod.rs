//! Runs of loaded programs.
//!
//! | module | holds |
//! |---|---|
//! | `run_thread` | the run thread, and a run from its command to its response |
//! | `response` | the outputs of a run, and which of them stay on the GPU |
//! | `run_error` | the reasons why a run fails |
//! | `batch` | the inputs of a run, in parts: a part for each request of a batch |

pub(crate) mod batch;
mod response;
pub(crate) mod run_error;
pub(crate) mod run_thread;

pub use run_thread::RUNS_QUEUED_MAX;
