//! Servers and channels: the one place where a port is served and where a connection to another
//! process is made. Limits and timeouts live here.
//!
//! ```text
//!   Listener ──▶ accept loop ──▶ ConnectionTable: slots of the port, cap by address
//!                    │
//!                    ▼ one task per connection; of distrusted addresses, on a thread of low priority
//!   socket ─ Opening ─ PacedWrites ─ Coalesce ─ hyper (HTTP/1.1 or HTTP/2) ─ handler ─ answer body (counted)
//!                    │
//!                    └─ watchdog: silent, slow to start and idle connections end
//! ```
//!
//! Bounds: connections of a port and of an address on it ([`PortLimits`]), streams and bytes on
//! their way of a connection ([`ServerConfig`]), bytes of the messages that are arriving at a port for
//! other processes ([`ArrivingMessages`]), descriptors of the process ([`descriptors`]). Deliberately
//! absent: what a request is, who sends it, and how many bytes one may have. The services decide that.

mod accepted;
mod arriving;
pub mod channel;
mod coalesce;
mod conduct;
mod connection;
pub mod descriptors;
mod opening;
pub mod pace;
mod priority;
mod reading;
pub mod server;
mod shared;
mod table;

pub use arriving::{ArrivingMessages, HeldBack, PREFIX_LEN, Refuse};
pub use connection::{Peer, Tracked};
pub use pace::{DeadlineTimer, MinimumRate, ProgressClock};
pub use priority::low_priority_runtime;
pub use server::{
    AnswerBody, Listener, PortLimits, ServerConfig, Serving, StreamListener, listen, serve, serve_service,
    serve_while_polled,
};
pub use shared::SharedResult;
