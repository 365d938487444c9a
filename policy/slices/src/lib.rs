//! The pure core of GPU sharing, after FaST-GShare: which run may launch on which SMs, and which slices fit on a
//! GPU. Nothing here reads a clock, draws a random number or does I/O; callers pass `now`.
//!
//! ```text
//! Terms, Ask, Spent ─► tokens ─► Grant, Shorten, Withdraw        one core for each GPU
//!                        ▲
//!                     dry_run    the same core over a virtual window: does the set fit?
//!                        ▲
//! orders ─► plan ─► pack (ours) and rectangles (the paper's) ─► GPU of each slice, refusals
//! wishes of functions ─► placing ─► GPU of each slice of the cluster
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`tokens`] | the token core: events in, actions out (F02, F09 to F12) |
//! | [`gate`] | the other end: launches begin only under a token (F07) |
//! | [`units`] | the SM units of a GPU: aligned blocks, or percentages (F23) |
//! | [`dry_run`] | whether a set of slices meets its requests |
//! | [`pack`] | slices to GPUs by dry runs, with moves |
//! | [`placing`] | the slices that functions ask for to the GPUs of a cluster |
//! | [`rectangles`] | the paper's Maximal Rectangles Algorithm (F15, F16) |
//! | [`plan`] | a list of orders, packed in both ways |
//! | [`scaling`] | the number of slices of a function: forecast, capacity, hysteresis (F13, F14, F18) |
//! | [`profiling`] | the trials that measure a model on parts of a GPU (F04, F05, F22) |
//!
//! Deliberately absent: which shares a slice should have.

pub mod dry_run;
pub mod gate;
pub mod pack;
pub mod placing;
pub mod plan;
pub mod profiling;
pub mod rectangles;
pub mod scaling;
pub mod tokens;
pub mod units;
