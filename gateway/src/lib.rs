//! The front door: the Open Inference Protocol over gRPC and REST on one port, for any [`Backend`].
//!
//! ```text
//! listener → connection (h2c or HTTP/1.1) → door: browser rules, id, caller, tenant, span, byte budget
//!     ├─ gRPC → inference.GRPCInferenceService, health, reflection, services added
//!     └─ REST → /v2/…, /metrics
//!                  both → front: find, read and check, invoke within the timeout, count → Backend
//! ```
//!
//! | module | holds |
//! |---|---|
//! | [`backend`] | the seam: what whoever has the models provides |
//! | [`serve`] | the front door's opening, its socket and connections |
//! | [`config`] | limits, clock and seed |
//! | [`auth`] | who is calling |
//! | `door` | what happens to every request before any service |
//! | `closing` | the news that the door is being closed |
//! | `call`, `request_id` | what is known of a call before its body |
//! | `budget`, `framing`, `inflate` | bytes in memory: of all messages, of gRPC's, of compressed ones |
//! | `decoded` | the memory that gRPC's messages take once they are decoded |
//! | `delivery` | answers, which stay charged until they have left |
//! | `front` | the way of one inference, the same for both protocols |
//! | `parameters` | the request parameters that mean something |
//! | `describe`, `meters` | what is said of models, what is counted |
//! | [`activity`] | what was counted, for people who watch |
//! | `grpc`, `rest` | the two protocols |
//!
//! It knows nothing of Raft, workers or GPUs.
//!
//! [`Backend`]: backend::Backend

pub mod activity;
pub mod auth;
pub mod backend;
mod budget;
mod bulk;
mod call;
mod closing;
pub mod config;
mod decoded;
mod delivery;
mod describe;
mod door;
mod framing;
mod front;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
mod grpc;
mod inflate;
mod meters;
mod parameters;
mod request_id;
mod rest;
pub mod serve;

pub use auth::{Authenticate, Caller};
pub use backend::Backend;
pub use config::{FrontDoorConfig, Limits};
pub use serve::{FrontDoor, Serving};
