//! Runs of loaded programs.
//!
//! | module | holds |
//! |---|---|
//! | `seats` | the seats: a run thread, its queue and its gate each |
//! | `run_thread` | a run thread, and a run from its command to its response |
//! | `gate` | the tokens under which the launches of a seat begin |
//! | `response` | the outputs of a run, and which of them stay on the GPU |
//! | `run_error` | the reasons why a run fails |
//! | `batch` | the inputs of a run, in parts: a part for each request of a batch |

pub(crate) mod batch;
pub(crate) mod gate;
mod response;
pub(crate) mod run_error;
pub(crate) mod run_thread;
pub(crate) mod seats;

pub use run_thread::RUNS_QUEUED_MAX;
pub use seats::SEATS_MAX;
