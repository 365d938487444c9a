//! The front door over real sockets: raw tonic and hyper clients, a backend in memory.
#![allow(clippy::unwrap_used, unreachable_pub, missing_docs, reason = "tests")]

mod decoding;
mod door;
mod echo;
mod grpc_infer;
mod grpc_models;
mod grpc_stream;
mod harness;
mod limits;
mod python;
mod rest_infer;
mod rest_models;
mod waiting;
