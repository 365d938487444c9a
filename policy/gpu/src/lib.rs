//! Decides which models a GPU loads, evicts and runs. The core of the Gpu actor is the only
//! authority over the GPU's memory, intermediate data included ([`data`]).
//!
//! ```text
//!            no program: LoadProgram     no region: evict, Map
//! Assign ──► Waiting ───────────────────────────────────────► Sent (Run) ──► done
//!               ▲  no room: wait for the other to end             │
//!               └───────────── sent again (bounded) ◄─────────────┘ weights, map or program failed
//! ```
//!
//! A request is sent to the executor at once, while the weights are still being copied. The
//! executor lets each launch wait for the weights that the launch reads, so computing overlaps the
//! transfer. The next request is prepared in the same way while the first runs.
//!
//! A GPU has one or more seats. The requests of a seat form a line, of which the first runs. A
//! request that cannot be sent stops only its own line. Lines compete for memory and for the link,
//! and there the earliest deadline is first. One transfer runs at a time. In each line only the
//! first request that lacks weights may have the link. With one line, that request has the link at
//! once, and other transfers make way. With several lines, a transfer that a line waits for ends
//! first.
//!
//! If the GPU is shared, the first requests of several lines run at once, each on the SMs of its seat's
//! tokens ([`millrace_slices::tokens`]). Runs of the same model read the same weights; each run beside the
//! first takes memory of its own for what it computes.
//!
//! A model is not evicted while another GPU copies it from this GPU (T25).
//!
//! When the executor is lost, everything on the GPU is lost: the memory map is cleared, and each
//! request is handed back with the request's progress. If each model has a process of its own
//! ([`isolation`]), a single process may be lost alone.
//!
//! | module | decides |
//! |---|---|
//! | [`GpuCore`] | which models a GPU loads, evicts and runs |
//! | [`lifecycle`] | when an executor process is started again |
//! | [`process_pool`] | which process of a program gets which request, and when a process is killed or started again |

mod completion;
mod data;
mod data_store;
mod events;
mod executor;
mod executor_seat;
mod gpu_core;
pub mod isolation;
pub mod lifecycle;
mod lines;
mod model_processes;
mod object_action;
mod peer_copy_lock;
mod prefetch;
mod preparation;
pub mod process_pool;
mod programs;
mod protocol;
mod residency;
mod seat_tokens;
mod sharing;
mod slice_use;
mod slots;
#[cfg(test)]
mod tests;

pub use self::completion::SENDS_MAX;
pub use self::executor::HANG_AFTER;
pub use self::executor_seat::{ExecutorSeat, RunTokens};
pub use self::gpu_core::{ExecutorHealth, GpuCore, GpuCounters};
pub use self::isolation::{ExecutorIsolation, PROCESSES_MAX};
pub use self::object_action::ObjectAction;
pub use self::programs::PROGRAMS_MAX;
pub use self::protocol::{Action, ComputeRight, Event, GpuTimes, RunFailure, SmUse};
pub use self::slice_use::SliceUse;
