//! All decisions of Millrace, as pure state machines: `on_event(now, event) -> actions`. The
//! machines never read a clock, draw a random number or do I/O: callers pass `now`, carry the
//! actions out and report back with events. The same events at the same times give the same
//! actions, on the wall clock, in virtual time and over a bare heap.
//!
//! | module | decides |
//! |---|---|
//! | [`admission`] | which requests a function accepts, when they expire, their score and their cost |
//! | [`residence`] | how long functions are idle in host memory, and so their cost |
//! | [`attempts`] | whether a request that lost its GPU is run again |
//! | [`dispatch`] | which request runs on which GPU |
//! | [`batching`] | which requests run as one |
//! | [`tenancy`] | which of a tenant's requests wait outside the queue, so that the tenant keeps to its caps |
//! | [`gpu`] | which models a GPU loads, evicts and runs |
//! | [`memory`] | which model holds which blocks of a GPU, and which is evicted |
//! | [`elastic`] | which intermediate data a GPU holds, and how much memory stays allocated for it |
//! | [`fabric`] | which bytes cross which link when |
//! | [`rates`] | the rate at which each flow meets its deadline, and which batch is next |
//! | [`index`] | which data a node holds, and which node to ask for other data |
//! | [`paths`] | which NVLinks bytes cross from one GPU to another |
//! | [`sequences`] | which request of a sequence runs when, on which state, and when a sequence ends |
//! | [`lifecycle`], [`backoff`] | when an executor process is started again |
//! | [`process_pool`] | which process of a program gets which request, and when a process is killed or started again |
//! | [`lease`] | which silent nodes are still believed alive |
//! | [`placement`] | which functions are placed on which nodes |
//! | [`preset`] | (nothing) bundles the scheduling settings, and reads those that an operator set |
//! | [`prewarm`] | which prewarming hints are followed |
//! | [`scaling`] | how many nodes the cluster needs |
//! | [`router`] | which worker gets a request |
//! | [`retries`] | whether a request that a full worker refused is sent to another |
//! | [`workflow`] | which step of a workflow runs when, and which outputs are freed or made again |
//! | [`checkpoint`] | which soft state a worker reports to the leader, and when |
//! | [`decision_text`] | (nothing) writes decisions as a text that refactorings leave as it is |
//! | [`names`] | (nothing) parses settings that are chosen by name |
//! | [`trace`] | (nothing) folds the cores' actions into a number, to compare runs |

pub mod admission;
pub mod attempts;
pub mod backoff;
pub mod batching;
pub mod checkpoint;
pub mod core;
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
pub mod process_pool;
pub mod rates;
pub mod residence;
pub mod retries;
pub mod router;
pub mod scaling;
pub mod sequences;
pub mod tenancy;
pub mod trace;
pub mod workflow;
