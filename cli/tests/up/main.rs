//! The whole thing as a user has it: the binary, its processes, its ports. Every cluster here is on
//! free loopback ports and in a folder of its own.

#![allow(clippy::unwrap_used)]

mod again;
mod clients;
mod events;
mod functions;
mod group;
mod halt;
mod life;
mod memory;
mod metrics;
mod operators;
mod private;
mod reflection;
mod running;
mod serving;
mod table_one;
mod top;
mod traces;
mod uploads;
mod workflows;
