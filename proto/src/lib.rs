//! The wire formats, their generated code, and the conversions at the edge.
//!
//! | module | content |
//! |---|---|
//! | [`inference`] | the Open Inference Protocol, with Triton's service definition |
//! | [`admin`] | the admin API, `millrace.admin.v1` |
//! | [`worker`] | calls between controllers and workers, and between workers |
//! | [`executor`] | messages between a worker and its executors |
//! | [`function`] | messages between a worker and the processes of users' programs |
//! | [`raft`] | calls between controllers |
//! | [`fault`] | fault injection into a controller, for tests |
//! | [`activity`] | activity of functions and links, in several services |
//! | [`log`] | log lines and queries of log lines |
//! | [`logs`] | the ring of a process's last log lines |
//! | [`pages`] | the byte budget of a page |
//! | [`parts`] | sets split into messages below a limit, and assembled again |
//! | [`policy`] | the scheduling policy |
//! | [`slices`] | slices of GPUs |
//! | [`status`] | the mapping between failures and gRPC or HTTP status |
//! | [`convert`] | checked conversions between wire and domain types |
//! | [`decoding`] | bounds on the memory of a decoded message, checked before decoding |
//! | [`frames`] | messages and descriptors over the executor's Unix socket |
//! | [`browser`] | rules that keep web pages out of a server |
//! | [`metrics`] | metrics as text, in the negotiated format |
//! | [`trace`] | W3C trace context in gRPC metadata and HTTP headers, spans recorded later, stored spans |

#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod inference {
    tonic::include_proto!("inference");
}
#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod admin {
    tonic::include_proto!("millrace.admin.v1");
}
#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod worker {
    tonic::include_proto!("millrace.worker.v1");
}
#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod executor {
    tonic::include_proto!("millrace.executor.v1");
}
#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod function {
    tonic::include_proto!("millrace.function.v1");
}
#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod raft {
    tonic::include_proto!("millrace.raft.v1");
}

#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod fault {
    tonic::include_proto!("millrace.fault.v1");
}

#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod activity {
    tonic::include_proto!("millrace.activity.v1");
}

#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod log {
    tonic::include_proto!("millrace.log.v1");
}

#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod policy {
    tonic::include_proto!("millrace.policy.v1");
}

#[allow(clippy::all, clippy::pedantic, unreachable_pub, reason = "generated")]
pub mod slices {
    tonic::include_proto!("millrace.slices.v1");
}

pub mod browser;
pub mod convert;
pub mod decoding;
pub mod frames;
pub mod logs;
pub mod metrics;
pub mod pages;
pub mod parts;
pub mod status;
pub mod trace;

/// The descriptors of all services, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The paths of methods whose responses may wait as long as the request asks.
pub const WAITING_METHODS: [&str; 3] = [
    "/millrace.admin.v1.Admin/ListEvents",
    "/millrace.admin.v1.Admin/ListLogs",
    "/millrace.admin.v1.Admin/WaitOperation",
];

/// Returns the paths of the methods whose clients send several messages, from encoded descriptors.
///
/// # Panics
/// If the bytes are not descriptors. The descriptors are part of the build.
#[must_use]
pub fn client_streaming_methods(descriptors: &[u8]) -> Vec<String> {
    let set = <prost_types::FileDescriptorSet as prost::Message>::decode(descriptors);
    let mut paths = Vec::new();
    for file in set.expect("the descriptors are from the build").file {
        for service in &file.service {
            for method in service.method.iter().filter(|method| method.client_streaming()) {
                paths.push(format!("/{}.{}/{}", file.package(), service.name(), method.name()));
            }
        }
    }
    paths
}

/// The version of every internal protocol except that of users' programs. A handshake refuses a
/// peer with another version.
pub const PROTOCOL_VERSION: u32 = 11;

/// The version of the protocol between a worker and the processes of users' programs
/// ([`function`]). Programs are built apart from workers, so this version is independent of
/// [`PROTOCOL_VERSION`]. The numbers continue those of the once shared version, so that each number
/// has a single meaning.
pub const FUNCTION_PROTOCOL_VERSION: u32 = 7;

/// The `oom_score_adj` that an executor or program sets for itself. If the machine runs out of
/// memory, the kernel kills such a process before the worker, and the worker starts another.
pub const OOM_SCORE_ADJ: u16 = 800;

/// The version of this build, for handshakes and `millrace version`.
pub const BUILD: &str = env!("CARGO_PKG_VERSION");
