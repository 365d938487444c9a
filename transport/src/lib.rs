//! Servers and channels: all ports are served here, and all connections to other processes are opened
//! here. Limits and timeouts live here.
//!
//! ```text
//!   Listener ──▶ accept loop ──▶ ConnectionTable: slots of the port, cap by address
//!                    │
//!                    ▼ one task per connection; of distrusted addresses, on a thread of low priority
//!   socket ─ Replayed ─ PacedWrites ─ Coalesce ─ hyper (HTTP/1.1 or HTTP/2) ─ handler ─ Tracked response body
//!                    │
//!                    └─ watchdog: silent, slow to start and idle connections end
//! ```
//!
//! Bounds:
//! - connections of a port and of an address on the port ([`PortLimits`]);
//! - streams of a connection and their unread bytes ([`ServerConfig`]);
//! - bytes of the messages that are arriving at a port for other processes ([`ArrivingMessages`]);
//! - file descriptors of the process ([`descriptors`]).
//!
//! Deliberately absent: the meaning of a request, the sender's identity, and the size limit of a
//! request. The services decide these.

mod accepted;
pub mod channel;
mod coalesce;
mod connection;
pub mod descriptors;
mod listener;
mod message_limits;
mod opening;
pub mod pace;
mod port_limits;
mod priority;
mod response_body;
pub mod server;
mod server_config;
mod shared;
mod stream_timeout;
mod table;
mod violations;

pub use connection::PeerAddress;
pub use listener::{Listener, StreamListener, listen};
pub use message_limits::{ArrivingMessages, HeldBack, PREFIX_LEN, StatusBuilder};
pub use pace::{DeadlineTimer, MinimumRate, ProgressClock};
pub use port_limits::PortLimits;
pub use priority::low_priority_runtime;
pub use response_body::{ResponseBody, Tracked};
pub use server::{ServedPort, serve, serve_service, serve_while_polled};
pub use server_config::ServerConfig;
pub use shared::SharedResult;
