//! The worker: the process that serves functions on the GPUs of one machine. Actors on a single
//! thread schedule requests and transfers; executor processes carry out both. Requests enter the
//! actors through [`handle`], and the actors reach the executor processes through [`port`].
//!
//! | module | contents |
//! |---|---|
//! | [`handle`] | requests and commands to the actors, from any thread |
//! | [`groups`] | the measured size of a weight group: the weights that are copied and awaited together |
//! | [`request`], [`install`], [`snapshot`] | the types of requests, of functions to serve, and of state reports |
//! | `actors`, `actor_runtime` | the actors, and the actor runtime that keeps actix replaceable |
//! | [`node`] | the configuration of a node and the start of its actors |
//! | [`clock`] | the real clock and the virtual clock |
//! | [`port`] | the interface of the actors to executor processes |
//! | [`process_port`] | the implementation of that interface with real processes |
//! | [`programs`] | processes of users' own programs, beside the GPUs |
//! | [`host_tier`] | the models in host memory, prepared from artifacts |
//! | [`control`] | the streams to the controllers |
//! | `prewarming` | prewarming: loading the functions that workflows are likely to call next |
//! | `objects` | intermediate data of workflows: local objects, and objects fetched from other workers |
//! | `sequences` | the state of functions that keep state between requests |
//! | [`service`] | the gRPC service for gateways |
//! | `activity`, `meters` | counters for `millrace top` and for Prometheus |
//! | [`policy`] | the scheduling policy in force |
//! | [`start`] | the start and the shutdown of a whole worker |

mod activity;
mod actor_runtime;
mod actors;
pub mod clock;
pub mod control;
pub mod data_dir;
pub mod groups;
pub mod handle;
pub mod host_tier;
pub mod install;
mod meters;
pub mod node;
mod objects;
pub mod policy;
pub mod port;
mod prewarming;
pub mod process_port;
mod profile_store;
pub mod programs;
mod registry;
pub mod request;
mod sequences;
pub mod service;
pub mod snapshot;
pub mod start;
mod supervisor;
mod tenants;
