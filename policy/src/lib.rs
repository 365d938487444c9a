//! Every decision, as pure state machines: `on_event(now, event) -> actions`. They never read a
//! clock, draw a random number or do I/O: callers pass `now`, carry the actions out and report
//! back with events. The same events at the same times give the same actions, on the wall clock,
//! in virtual time and over a bare heap.
//!
//! | module | decides |
//! |---|---|
//! | [`admission`] | which requests a function takes, when they expire, what they score and cost |
//! | [`residence`] | how long functions are idle in host memory, and so what they cost |
//! | [`attempts`] | what becomes of a request that lost its GPU |
//! | [`dispatch`] | which request goes to which GPU |
//! | [`batching`] | which requests run as one |
//! | [`tenancy`] | which of a tenant's requests wait outside the queue, so that it keeps to its caps |
//! | [`gpu`] | what a GPU loads, evicts and runs |
//! | [`memory`] | who holds which blocks of a GPU, and who is evicted |
//! | [`elastic`] | which intermediate data a GPU holds, and how much memory stays allocated for it |
//! | [`fabric`] | which bytes cross which link when |
//! | [`rates`] | how fast each flow may go to be in time, and whose batch is next |
//! | [`index`] | what data a node holds, and whom to ask for what it does not |
//! | [`paths`] | which NVLinks bytes take from one GPU to another |
//! | [`sequences`] | which request of a sequence runs when, on which state, and when a sequence ends |
//! | [`lifecycle`], [`backoff`] | when an executor process is started again |
//! | [`crew`] | which process of a program gets which request, and when one is killed or started again |
//! | [`lease`] | which silent nodes are still believed alive |
//! | [`placement`] | which functions are kept on which nodes |
//! | [`preset`] | (nothing) bundles the settings of scheduling, and reads the ones that an operator set |
//! | [`prewarm`] | which hints of functions that come next are followed |
//! | [`scaling`] | how many nodes the cluster needs |
//! | [`router`] | which worker gets a request |
//! | [`retries`] | whether a request that a full worker refused is sent to another |
//! | [`workflow`] | which step of a workflow runs when, and what is freed or made again |
//! | [`checkpoint`] | what a worker tells the leader of its soft state, and when |
//! | [`decision_text`] | (nothing) writes decisions as a text that refactorings leave as it is |
//! | [`names`] | (nothing) reads what is chosen by name |
//! | [`trace`] | (nothing) folds what cores did into a number, to compare runs |

pub mod admission;
pub mod attempts;
pub mod backoff;
pub mod batching;
pub mod checkpoint;
pub mod core;
pub mod crew;
pub mod decision_text;
pub mod dispatch;
pub mod elastic;
pub mod fabric;
#[cfg(test)]
mod fixtures;
pub mod gpu;
pub mod ids;
pub mod index;
pub mod lease;
pub mod lifecycle;
pub mod memory;
pub mod names;
pub mod paths;
pub mod placement;
pub mod preset;
pub mod prewarm;
pub mod rates;
pub mod residence;
pub mod retries;
pub mod router;
pub mod scaling;
pub mod sequences;
pub mod tenancy;
pub mod trace;
pub mod workflow;
