//! The gateway: the Open Inference Protocol over gRPC and REST on a single port, for any [`Backend`].
//!
//! ```text
//! listener → connection (h2c or HTTP/1.1) → middleware: browser rules, id, caller, tenant, span, byte budget
//!     ├─ gRPC → inference.GRPCInferenceService, health, reflection, services added
//!     └─ REST → /v2/…, /metrics
//!                  both → handler: find, read and check, invoke within the timeout, count → Backend
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`backend`] | the interface to the component that has the models |
//! | [`serve`] | opening the gateway; the socket and the connections |
//! | [`config`] | limits, clock and seed |
//! | [`authentication`] | identification of the caller |
//! | `middleware` | middleware for every request, before any service |
//! | `closing` | the notification that the gateway is closing |
//! | `call`, `request_id` | properties of a call that are known before the body |
//! | `header_names` | names of headers that several modules use |
//! | `budget`, `framing`, `decompression` | bytes in memory: of all messages, of gRPC messages, of compressed messages |
//! | `compression` | compression of responses |
//! | `decoded` | the memory of decoded gRPC messages |
//! | `delivery` | responses, which stay charged until sent |
//! | `handler` | the path of an inference, the same for both protocols |
//! | `parameters` | the supported request parameters |
//! | `descriptions`, `metrics` | descriptions of models, counts and metrics |
//! | [`activity`] | the counts, for tools that show them live |
//! | `grpc`, `rest` | the two protocols |
//!
//! The gateway does not know Raft, workers or GPUs.
//!
//! [`Backend`]: backend::Backend

pub mod activity;
pub mod authentication;
pub mod backend;
mod budget;
mod bulk;
mod call;
mod closing;
mod compression;
pub mod config;
mod decoded;
mod decompression;
mod delivery;
mod descriptions;
mod framing;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod grpc;
mod handler;
mod header_names;
mod metrics;
mod middleware;
mod parameters;
mod request_id;
mod rest;
pub mod serve;

pub use authentication::{Authenticate, Caller};
pub use backend::Backend;
pub use config::{GatewayConfig, GatewayLimits};
pub use serve::{GatewayBuilder, OpenGateway};
