//! Tests of the worker in virtual time: the real actors and cores, and modelled executors.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected ends")]

mod actors;
mod bare;
mod batching;
mod failures;
mod forwards;
mod links;
mod panics;
mod peers;
mod policies;
mod prewarm;
mod profiles;
mod requests;
mod scenario;
mod sharing;
mod slices;
mod two_times;
mod world;
