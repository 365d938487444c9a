//! Controller streams.
pub mod desired;
