//! Every wire format, its generated code, and the conversions at the edge.
//!
//! | module | holds |
//! |---|---|
//! | [`inference`] | the Open Inference Protocol, with Triton's service definition |
//! | [`admin`] | `millrace.admin.v1` |
//! | [`worker`] | controllers and workers |
//! | [`executor`] | a worker and its executors |
//! | [`function`] | a worker and the processes of its users' functions |
//! | [`raft`] | controllers among themselves |
//! | [`fault`] | faults of one controller, for tests |
//! | [`activity`] | what functions and links did, as all of them tell it |
//! | [`log`] | log lines, as they are asked for |
//! | [`logs`] | the last log lines of a process |
//! | [`pages`] | how much fits one answer |
//! | [`parts`] | sets cut into messages below a limit, and put together again |
//! | [`policy`] | how nodes schedule |
//! | [`status`] | the one mapping between failures and gRPC/HTTP status |
//! | [`convert`] | wire shapes to domain shapes, checked |
//! | [`decoding`] | the memory that decoding a message takes, bounded before the message is decoded |
//! | [`frames`] | messages and descriptors over the executor's Unix socket |
//! | [`browser`] | the rules that keep web pages out of a server |
//! | [`metrics`] | metrics as text, in the format asked for |
//! | [`trace`] | W3C trace context through gRPC metadata and HTTP headers, spans told after the fact, spans kept |

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

/// Every service's descriptors, for server reflection.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

/// The paths of the methods whose answers may wait for as long as the request asks.
pub const WAITING_METHODS: [&str; 3] = [
    "/millrace.admin.v1.Admin/ListEvents",
    "/millrace.admin.v1.Admin/ListLogs",
    "/millrace.admin.v1.Admin/WaitOperation",
];

/// The paths of the methods whose clients send several messages, as encoded descriptors have them.
///
/// # Panics
/// When the bytes are no descriptors: they are part of the build.
#[must_use]
pub fn client_streaming_methods(descriptors: &[u8]) -> Vec<String> {
    let set = <prost_types::FileDescriptorSet as prost::Message>::decode(descriptors);
    let mut paths = Vec::new();
    for file in set.expect("descriptors that the build wrote").file {
        for service in &file.service {
            for method in service.method.iter().filter(|method| method.client_streaming()) {
                paths.push(format!("/{}.{}/{}", file.package(), service.name(), method.name()));
            }
        }
    }
    paths
}

/// The version of every internal protocol but that of users' programs. A peer with another is refused at
/// its handshake.
pub const PROTOCOL_VERSION: u32 = 9;

/// The version of what a worker and the processes of its users' functions say to each other
/// ([`function`]): programs are built apart from workers, and need not change with what workers say to
/// others. Counted on from the one that it shared with those until then, so that no number means two
/// things.
pub const FUNCTION_PROTOCOL_VERSION: u32 = 7;

/// The `oom_score_adj` that a process started by a worker gives itself, be it an executor or a program: when
/// the machine runs out of memory, the kernel ends such a process before the worker, which starts another.
pub const OOM_SCORE_ADJ: u16 = 800;

/// This build, for handshakes and `millrace version`.
pub const BUILD: &str = env!("CARGO_PKG_VERSION");
