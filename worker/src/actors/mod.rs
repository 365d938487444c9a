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
//! ([`RequestWork`](crate::messages::work::RequestWork)) travel along, so that the Node can assign the
//! request to another GPU when one is lost. In place of the Node and the Gpu, a program has a process pool.
//! The Node starts the actors of functions through the function supervisor.

pub(crate) mod batch;
pub(crate) mod executor;
mod extents;
pub(crate) mod function;
pub(crate) mod function_supervisor;
pub(crate) mod gpu;
pub(crate) mod link;
pub(crate) mod node;
pub(crate) mod process_pool;
mod spans;
mod tenancy_errors;

pub(crate) use spans::fetch_attributes;
