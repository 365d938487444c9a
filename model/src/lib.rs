//! What a model file is. Pure: no I/O, no clock, no randomness but seeded.
//!
//! [`compile`] turns the bytes of an ONNX file into a [`Compiled`] model: its inputs and outputs, its
//! graph without weights, the weights' places in one region in the order of first use, and the
//! launches in which it runs while they are loaded. Whatever cannot be served is refused here, before
//! anything is stored. Nothing above this crate knows what a layer is.
//!
//! ```text
//!  file ── wire ── onnx ──┬─ signature ──────────────────────────► summary
//!        framing   decode ├─ tensors, operators, sizes: refuse
//!                         └─ constants ─ arrange ─ layout ─ cut ─► graph, weights, launches
//!                             hoist      order     place    launches
//! ```
//! [`program`] is the other thing that a function may be made of: a file to run, and what it declares.
//! [`synth`] writes ONNX networks with seeded random weights, for tests and measurements.

mod arrange;
mod compile;
mod constants;
mod cut;
pub mod elbow;
mod error;
mod layout;
mod onnx;
pub mod operators;
pub mod order;
pub mod program;
mod signature;
mod sizes;
pub mod synth;
mod tensors;
#[cfg(test)]
mod tests;
mod wire;

pub use arrange::{MAX_CHAIN, MAX_NODES};
pub use compile::{Compiled, Summary, compile, compile_grouped};
pub use cut::{GROUP_BYTES, Grouping, Launch, MAX_LAUNCHES};
pub use error::{ModelError, UnsupportedOperator};
pub use layout::{ALIGNMENT, MIN_PLACED_BYTES, Placement, WEIGHTS_FILE};
pub use signature::{MAX_IR_VERSION, MAX_OPSET, MAX_TENSORS, MIN_IR_VERSION, MIN_OPSET};
pub use sizes::OUTPUT_BYTES_MAX;
pub use tensors::Source;
pub use wire::{MAX_MESSAGES, MAX_NESTING};
