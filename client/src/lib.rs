//! The Rust SDK of Millrace.
//!
//! [`Endpoints`] holds one lazy connection to each controller. [`Admin`] publishes and inspects
//! functions and workflows. [`Inference`] runs functions and workflows over the Open Inference
//! Protocol, so it can also call other servers of that protocol.
//!
//! A call is sent to the endpoint that answered the previous call. If that endpoint is unreachable,
//! hangs, shuts down or has no leader, the call is sent to the other endpoints under the same id. A
//! write is therefore carried out once. An inference is sent again only if its function may run
//! twice ([`RetryPolicy`]).
//!
//! [`function`] is the library for programs that Millrace serves as functions.
//!
//! ```no_run
//! use bytes::Bytes;
//! use millrace_client::{Admin, Endpoints, InferRequest, Inference, ModelFile, Tensor};
//! use millrace_types::{DataType, FunctionKey, FunctionName, FunctionSpec, TenantName};
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let endpoints = Endpoints::new(vec!["127.0.0.1:8080".parse()?])?;
//! let admin = Admin::new(endpoints.clone());
//! let model = ModelFile::open("digits.onnx")?;
//! if admin.find_artifacts(&[model.digest()]).await?.is_empty() {
//!     admin.upload(&model, |sent| println!("{sent} bytes sent")).await?;
//! }
//! let key = FunctionKey { tenant: TenantName::default(), name: FunctionName::new("digits")? };
//! admin.apply(&FunctionSpec::new(key), model.digest(), Default::default()).await?;
//!
//! let input = Tensor::new("image", DataType::Fp32, vec![1, 1, 8, 8], Bytes::from(vec![0; 256]))?;
//! let response = Inference::new(endpoints).infer(InferRequest::new("digits", vec![input])).await?;
//! println!("{} took {:?}", response.request_id, response.split);
//! # Ok(())
//! # }
//! ```

#![warn(missing_docs)]

mod address;
mod admin;
mod endpoints;
mod error;
mod failover;
mod inference;
mod latency;
mod model_file;
mod tensor;

pub use address::{Address, AddressError};
pub use admin::{
    Admin, AppliedFunction, AppliedWorkflow, ApplyItem, ApplyOptions, ApplyOutcome, BrokenWorkflow,
    DeleteOptions, DryRun, DryRunStep, ItemRefusal, PendingModel, PolicyChange,
};
pub use endpoints::Endpoints;
pub use error::Error;
pub use failover::RetryPolicy;
pub use inference::{InferRequest, InferResponse, Inference, ModelMetadata, TENANT_HEADER, TensorMetadata};
pub use latency::LatencyBreakdown;
pub use model_file::ModelFile;
pub use tensor::{Tensor, TensorError};

/// The library for writing a function that is a program (`runtime: process`).
pub use millrace_function as function;
/// The messages of the admin API that [`Admin`] returns.
pub use millrace_proto::admin as messages;
/// The messages that [`Admin::logs`] accepts and returns.
pub mod log {
    pub use millrace_proto::log::*;
    pub use millrace_proto::logs::PAGE_MAX as PAGE_LINES;
}
/// The messages about slices in [`messages`].
pub mod slices {
    pub use millrace_proto::slices::*;
}
/// A span of a trace that [`Admin::trace`] returns.
pub use millrace_proto::trace::wire::{Span, SpanEvent};
