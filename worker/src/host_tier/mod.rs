//! Artifacts to host memory.
pub mod fetch;
pub mod plan;
pub mod store;
