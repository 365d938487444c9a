//! Copies to the GPU and to the host.
//!
//! | module | holds |
//! |---|---|
//! | `copy_thread` | the copy threads, one for each direction |
//! | `copy_batch` | a batch of a transfer, copied under a grant |
//! | `host_copies` | copies of objects and kept outputs to the host |
//! | `peers` | other GPUs from which copies may read |
//! | `pieces` | a copy in pieces that the device accepts |

pub(crate) mod copy_batch;
pub(crate) mod copy_thread;
pub(crate) mod host_copies;
pub(crate) mod peers;
mod pieces;

pub use copy_thread::COPIES_QUEUED_MAX;
