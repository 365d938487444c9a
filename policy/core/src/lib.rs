//! What the pure decision crates share: the trait of state machines, ids of one worker, attempts of
//! requests, waits between retries, settings with names, and digests that compare runs.
//!
//! | module | content |
//! |---|---|
//! | [`Core`] | the trait of state machines: `on_event(now, event) -> actions` |
//! | [`attempts`] | decides whether a request that lost its GPU runs again |
//! | [`backoff`] | decides how long to wait before the next try |
//! | [`ids`] | ids that are valid on one worker |
//! | [`names`] | parses settings that are chosen by name |
//! | [`decision_text`] | writes decisions as a text that refactorings leave as it is |
//! | [`trace`] | folds the cores' actions into a number, to compare runs |

pub mod attempts;
pub mod backoff;
pub mod decision_text;
mod fnv;
pub mod ids;
mod machine;
pub mod names;
pub mod trace;

pub use machine::Core;

/// Requests on a seat of a GPU at most: one runs, the others are queued on the busy seat. With
/// eight, the cost of waking an executor is spread well enough. Each further request would add to
/// the loss when an executor dies.
pub const SLOTS_MAX: usize = 8;

/// Seats of a GPU at most: 8 for requests of all functions, and 15 for slices. An executor has a run
/// thread for each seat that had a run.
pub const SEATS_MAX: usize = 24;

/// Requests on a GPU at most, over all seats.
pub const GPU_REQUESTS_MAX: usize = 80;
