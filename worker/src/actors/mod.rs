//! The actors of DESIGN §3. Each translates messages into events, calls its core in
//! `millrace-policy`, and carries out the actions that come back; it decides nothing itself.
//!
//! ```text
//! service ──Invoke──► Function ──Enqueue──► Node ──Assign──► Gpu ──commands──► Executor ──► port
//!                        ▲                  │ ▲               │ ▲                 ▲   │
//!                        └───── answers ────┼─┼───────────────┘ └──── events ─────┼───┘
//!                                           │ └─ transfers, batches               │
//!                                           └──────── grants ────► Link ──copies──┘
//! ```
//!
//! A request has one owner at a time: Function → Node → Gpu. What it carries ([`work::Work`])
//! travels along, so that whoever loses a GPU can give the request to another.

pub(crate) mod batch;
pub(crate) mod driven;
pub(crate) mod executor;
mod extents;
pub(crate) mod function;
mod gate;
pub(crate) mod gpu;
pub(crate) mod link;
pub(crate) mod node;
mod spans;
pub(crate) mod work;

pub(crate) use spans::fetch_attributes;
