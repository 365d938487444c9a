//! Decisions about requests on one node, as pure state machines: from admission to the GPU.
//!
//! | module | decides |
//! |---|---|
//! | [`admission`] | which requests a function accepts, when they expire, their score and their cost |
//! | [`residence`] | how long functions are idle in host memory, and so their cost |
//! | [`sequences`] | which request of a sequence runs when, on which state, and when a sequence ends |
//! | [`tenancy`] | which of a tenant's requests wait outside the queue, so that the tenant keeps to its caps |
//! | [`batching`] | which requests run as one |
//! | [`dispatch`] | which request runs on which GPU |
//! | [`preset`] | (nothing) bundles the scheduling settings, and reads those that an operator set |

pub mod admission;
pub mod batching;
pub mod dispatch;
pub mod preset;
pub mod residence;
pub mod sequences;
pub mod tenancy;
