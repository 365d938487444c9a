//! The worker: the process that serves functions on the GPUs of one machine. Actors on a single
//! thread schedule requests and transfers; executor processes carry out both. Requests enter the
//! actors through [`handle`], and the actors reach the executor processes through [`port`].
//!
//! | module | contents |
//! |---|---|
//! | [`handle`] | requests and commands to the actors, from any thread |
//! | [`groups`] | the measured size of a weight group: the weights that are copied and awaited together |
//! | [`request`], [`install`], [`snapshot`] | the types of requests, of functions to serve, and of state reports |
//! | [`signature`], [`tensors`] | the inputs and outputs of functions, and the conversion of tensors |
//! | `object_handle` | handles to objects on GPUs |
//! | `messages` | the messages to the actors |
//! | `actor_runtime` | the actor runtime that keeps actix replaceable |
//! | `traced_core` | a policy core inside an actor |
//! | `node_state`, `registry`, `tenants` | the state of a node that survives the restarts of its actors |
//! | `actors` | the actors |
//! | `supervisor` | the start of the actors, and their restart after a panic |
//! | [`node`], `node_config` | the start and the configuration of a node |
//! | [`clock`] | the real clock and the virtual clock |
//! | [`port`] | the interface of the actors to executor processes |
//! | [`process_port`] | the implementation of that interface with real processes |
//! | [`programs`] | processes of users' own programs, beside the GPUs |
//! | [`host_tier`] | the models in host memory, prepared from artifacts |
//! | [`desired_state`], `slo_scores` | the messages of controllers that the node obeys |
//! | [`registration`], [`index_feed`] | the node's registrations, and the reports of its data |
//! | [`control`] | the streams to the controllers |
//! | `prewarming` | prewarming: loading the functions that workflows are likely to call next |
//! | `objects` | intermediate data of workflows: local objects, and objects fetched from other workers |
//! | `sequences` | the state of functions that keep state between requests |
//! | [`service`] | the gRPC service for gateways |
//! | [`faults`] | faults that tests inject |
//! | `activity`, `meters` | counters for `millrace top` and for Prometheus |
//! | [`policy`] | the scheduling policy in force |
//! | [`start`] | the start and the shutdown of a whole worker |

mod activity;
mod actor_runtime;
mod actors;
pub mod clock;
pub mod control;
pub mod data_dir;
pub mod desired_state;
mod endpoint;
pub mod faults;
#[cfg(feature = "fuzz")]
#[doc(hidden)]
pub mod fuzz;
pub mod groups;
pub mod handle;
pub mod host_tier;
pub mod index_feed;
pub mod install;
mod messages;
mod meters;
pub mod node;
mod node_config;
mod node_state;
mod object_handle;
mod objects;
pub mod policy;
pub mod port;
mod prewarming;
pub mod process_port;
mod profile_store;
pub mod programs;
pub mod registration;
mod registry;
pub mod request;
mod sequences;
pub mod service;
pub mod signature;
mod slo_scores;
pub mod snapshot;
pub mod start;
mod supervisor;
mod tenants;
pub mod tensors;
mod traced_core;
