//! The whole system as a user has it: the binary, its processes and its ports. Every cluster uses
//! free loopback ports and a separate folder.

#![allow(clippy::unwrap_used)]

mod again;
mod alphas;
mod clients;
mod engine;
mod events;
mod functions;
mod group;
mod halt;
mod life;
mod memory;
mod metrics;
mod operators;
mod private;
mod profiles;
mod reflection;
mod running;
mod serving;
mod table_one;
mod top;
mod traces;
mod uploads;
mod workflows;
