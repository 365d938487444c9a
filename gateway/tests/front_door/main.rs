//! Tests the gateway over real sockets, with raw tonic and hyper clients and a backend in memory.
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
