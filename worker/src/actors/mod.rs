//! The actors of a worker. Each actor translates messages into events, calls its core in
//! one of the crates in `policy`, and carries out the actions that the core returns. Actors decide nothing themselves.
//!
//! ```text
//! service ──Invoke──► Function ──Enqueue──► Node ──Assign──► Gpu ──commands──► Executor ──► port
//!                        ▲                  │ ▲               │ ▲                 ▲   │
//!                        └───── answers ────┼─┼───────────────┘ └──── events ─────┼───┘
//!                                           │ └─ transfers, batches               │
//!                                           └──────── grants ────► Link ──copies──┘
//! ```
//!
//! A request has one owner at a time: Function → Node → Gpu. Its inputs and its answer's address
//! ([`work::RequestWork`]) travel along, so that the Node can assign the request to another GPU when one is lost.

pub(crate) mod batch;
pub(crate) mod driven;
pub(crate) mod executor;
mod extents;
pub(crate) mod function;
pub(crate) mod gpu;
pub(crate) mod link;
pub(crate) mod node;
mod spans;
mod tenancy_errors;
pub(crate) mod work;

pub(crate) use spans::fetch_attributes;
