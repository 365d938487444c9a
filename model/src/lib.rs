//! Parses and checks model files. Pure code: no I/O, no clock, and only seeded randomness.
//!
//! [`compile`] turns the bytes of an ONNX file into a [`CompiledModel`], which has its inputs
//! and outputs, its graph without weights, the positions of the weights in a region in the order of
//! first use, and the launches that run while the weights are loaded. A model that cannot be served
//! is refused here, before anything is stored. Nothing above this crate knows what a layer is.
//!
//! ```text
//!  file ── wire ── onnx ──┬─ signature ──────────────────────────► summary
//!        framing   decode ├─ tensors, operators, sizes: refuse
//!                         └─ constants ─ arrange ─ layout ─ cut ─► graph, weights, launches
//!                             hoist      order     place    launches
//! ```
//! [`extract`] extracts the parts of a compiled graph that run as launches, for an engine that loads each
//! part alone. [`program`] is the alternative to a model: a file to run, and its declared inputs and outputs.
//! [`synth`] writes ONNX networks with seeded random weights, for tests and measurements.

mod compile;
mod constants;
mod cut;
pub mod elbow;
mod error;
pub mod extract;
mod layout;
mod node_order;
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
mod versions;
mod wire;

pub use compile::{CompiledModel, Summary, compile, compile_grouped};
pub use cut::{GROUP_BYTES, Grouping, Launch, MAX_LAUNCHES};
pub use error::{ModelError, UnsupportedOperator};
pub use layout::{ALIGNMENT, MIN_PLACED_BYTES, WEIGHTS_FILE, WeightPlacement};
pub use node_order::{MAX_CHAIN, MAX_NODES};
pub use signature::MAX_TENSORS;
pub use sizes::OUTPUT_BYTES_MAX;
pub use tensors::WeightSource;
pub use versions::{MAX_IR_VERSION, MAX_OPSET, MIN_IR_VERSION, MIN_OPSET};
pub use wire::{MAX_MESSAGES, MAX_NESTING};
