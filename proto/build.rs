//! Compiles the `.proto` files with protox, so that the build needs no `protoc`. Server reflection
//! uses the same descriptor set.

use std::path::PathBuf;

use prost::Message as _;

const FILES: &[&str] = &[
    "proto/inference/grpc_service.proto",
    "proto/millrace/admin/v1/admin.proto",
    "proto/millrace/executor/v1/executor.proto",
    "proto/millrace/fault/v1/fault.proto",
    "proto/millrace/function/v1/function.proto",
    "proto/millrace/raft/v1/raft.proto",
    "proto/millrace/worker/v1/worker.proto",
];
/// Files that several of the others import. They are compiled once, into a module each.
const SHARED: &[&str] = &[
    "proto/millrace/activity/v1/activity.proto",
    "proto/millrace/log/v1/log.proto",
    "proto/millrace/policy/v1/policy.proto",
    "proto/millrace/slices/v1/slices.proto",
    "proto/millrace/trace/v1/trace.proto",
];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let descriptors = protox::compile(FILES, ["proto"])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // `bytes` lets tensor bytes stay in the buffer of their arrival. `btree_map` gives
    // small maps a stable encoding.
    let configured = || tonic_prost_build::configure().bytes(".").codec_path("crate::decoding::CheckedCodec");
    // The codec finds a message's shape by the name of the message type.
    let named = || {
        let mut config = tonic_prost_build::Config::new();
        config.enable_type_names();
        config
    };
    let shapes = protox::compile(SHARED, ["proto"])?;
    configured().btree_map(".").compile_fds_with_config(shapes, named())?;
    let shared = configured()
        .extern_path(".millrace.activity.v1", "crate::activity")
        .extern_path(".millrace.log.v1", "crate::log")
        .extern_path(".millrace.policy.v1", "crate::policy")
        .extern_path(".millrace.slices.v1", "crate::slices")
        .extern_path(".millrace.trace.v1", "crate::trace::wire");
    let ordered = [".inference", ".millrace.worker.v1", ".millrace.admin.v1.Node.alphas"];
    let shared = ordered.into_iter().fold(shared, tonic_prost_build::Builder::btree_map);
    shared.compile_fds_with_config(descriptors, named())?;
    Ok(())
}
