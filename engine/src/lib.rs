//! Loads and launches models on a device.
//!
//! | module | content |
//! |---|---|
//! | [`api`] | [`Engine`] and [`Queue`]: the interface that an executor uses |
//! | [`ort`] | [`OrtEngine`](ort::OrtEngine): runs ONNX models with ONNX Runtime on the memory of a device |
//! | [`rten`] | [`RtenEngine`](rten::RtenEngine): runs ONNX models with rten on the memory of an emulated GPU |
//!
//! A device moves bytes and knows no models; an engine owns modules, kernels and values, and lends
//! their bytes to the device for copies.

#![warn(missing_docs)]

pub mod api;
mod error;
pub mod ort;
pub mod rten;

pub use api::{
    DeviceEvent, Engine, HostTensor, KernelSpec, LaunchArg, LaunchThreads, LentBytes, ModelCode, Queue,
    Region, Stream, TensorBytes, TensorPart,
};
pub use error::Error;
