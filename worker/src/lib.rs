//! Millrace: worker.
mod backoff;
pub mod control;
pub mod data_dir;
pub mod host_tier;
