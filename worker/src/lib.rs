//! The worker: a machine with GPUs. Actors on one thread decide what runs where ([`handle`] is the
//! way in); executor processes run it ([`port`] is the way out).
//!
//! | module | holds |
//! |---|---|
//! | [`handle`] | the way into the actors, from any thread |
//! | [`groups`] | how much of a model's weights travels together, as measured |
//! | [`request`], [`install`], [`snapshot`] | what goes in and comes out there |
//! | `actors`, `seams` | the actors of DESIGN §3, and what keeps actix replaceable |
//! | [`node`] | what a node is made of, and how it is started |
//! | [`clock`] | where time comes from |
//! | [`port`] | executor processes, seen from the actors |
//! | [`process_port`] | real ones |
//! | [`programs`] | processes of users' own programs, beside the GPUs |
//! | [`host_tier`] | artifacts become models in host memory |
//! | [`control`] | the streams to the controllers |
//! | `hints` | what workflows are likely to ask for next |
//! | `objects` | intermediate data of workflows: what is held here, and what comes from other workers |
//! | `sequences` | the state of functions that keep some from one request to the next |
//! | [`service`] | the gRPC service for gateways |
//! | `activity`, `meters` | what is counted, for whoever asks and for Prometheus |
//! | [`policy`] | how the node schedules now |
//! | [`start`] | all of it put together |

mod activity;
mod actors;
pub mod clock;
pub mod control;
pub mod data_dir;
pub mod groups;
pub mod handle;
mod hints;
pub mod host_tier;
pub mod install;
mod learned;
mod meters;
pub mod node;
mod objects;
pub mod policy;
pub mod port;
pub mod process_port;
pub mod programs;
mod registry;
pub mod request;
mod seams;
mod sequences;
pub mod service;
pub mod snapshot;
pub mod start;
mod supervisor;
mod tenants;
