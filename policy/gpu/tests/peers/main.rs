//! Copies between GPUs under any order of events (T22, T25): real Gpu cores and a real fabric, with
//! executors that record the content of every block.

#![allow(clippy::unwrap_used, reason = "a test that meets the unexpected ends")]

mod properties;
mod world;
