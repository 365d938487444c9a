//! The front door: the Open Inference Protocol over gRPC and REST on one port, for any [`Backend`].
//!
//! | module | holds |
//! |---|---|
//! | [`backend`] | the seam: what whoever has the models provides |
//! | [`auth`] | who is calling |
//!
//! [`Backend`]: backend::Backend

pub mod auth;
pub mod backend;
