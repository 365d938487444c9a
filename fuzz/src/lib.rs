//! A fuzz target for every reader of untrusted bytes. A target panics if its reader panics or breaks a
//! promise of its own. [`Target::run`] also checks the memory that the reader takes.

pub mod corpus;
pub mod mutate;

use bytes::Bytes;
use millrace_cluster_state::State;
use millrace_model::program::PackedProgram;
use millrace_proto::decoding::{self, WalkLimits};
use millrace_proto::frames::FrameDecoder;
use millrace_proto::parts::{ITEMS_MAX, ItemSet, PartAssembler, PartMessage};
use millrace_proto::{admin, convert, executor, function, raft, worker};
use millrace_types::{Digest, FunctionName, NodeName, TenantName, manifest};
use peak_alloc::PeakAlloc;
use prost::{Message, Name};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// The heap that a target may take for each byte of its input, in bytes.
pub const HEAP_RATIO_MAX: usize = 4;
/// The heap that a target may take beyond [`HEAP_RATIO_MAX`], in bytes.
pub const HEAP_MARGIN_BYTES: usize = 32 << 20;

/// A reader under test.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name of the target and of its corpus.
    pub name: &'static str,
    /// Reads an input.
    pub read: fn(&[u8]),
}

/// Every target.
pub const TARGETS: [Target; 14] = [
    Target { name: "rest_request", read: millrace_gateway::fuzz::rest_request },
    Target { name: "grpc_request", read: millrace_gateway::fuzz::grpc_request },
    Target { name: "grpc_framing", read: millrace_gateway::fuzz::grpc_framing },
    Target { name: "inflate", read: millrace_gateway::fuzz::inflate },
    Target { name: "messages", read: messages },
    Target { name: "part_sets", read: part_sets },
    Target { name: "frames", read: frames },
    Target { name: "executor_events", read: millrace_worker::fuzz::executor_events },
    Target { name: "manifest", read: manifests },
    Target { name: "onnx", read: onnx },
    Target { name: "program", read: program },
    Target { name: "snapshot", read: snapshot },
    Target { name: "log_records", read: millrace_raft_store::fuzz::log_records },
    Target { name: "raft_message", read: millrace_raft_store::fuzz::raft_message },
];

/// Returns the target of this name.
///
/// # Panics
/// Panics if no target has the name.
#[must_use]
pub fn target(name: &str) -> Target {
    TARGETS.into_iter().find(|target| target.name == name).unwrap_or_else(|| panic!("no target {name}"))
}

impl Target {
    /// Reads an input. Returns the peak of the heap in bytes. No other thread may allocate much meanwhile,
    /// because the peak is that of the process.
    ///
    /// # Panics
    /// Panics if the reader panics, breaks a promise, or takes too much of the heap.
    pub fn run(self, input: &[u8]) -> usize {
        HEAP.reset_peak_usage();
        let before = HEAP.current_usage();
        (self.read)(input);
        let peak = HEAP.peak_usage().saturating_sub(before);
        let max = HEAP_RATIO_MAX * input.len() + HEAP_MARGIN_BYTES;
        assert!(peak <= max, "{}: {peak} bytes of heap for {} of input, over {max}", self.name, input.len());
        peak
    }
}

/// Decodes a message of a service. The first byte of the input chooses the type.
fn messages(data: &[u8]) {
    let [kind, message @ ..] = data else { return };
    fn read<M: Message + Name + Default>(message: &[u8], limits: WalkLimits) -> Option<M> {
        decoding::decode(Bytes::copy_from_slice(message), limits).ok()
    }
    let (client, peer) = (WalkLimits::CLIENT, WalkLimits::PEER);
    match kind % 9 {
        0 => drop(read::<admin::FunctionSpec>(message, client).map(convert::function_spec)),
        1 => drop(read::<admin::WorkflowSpec>(message, client).map(convert::workflow_spec)),
        2 => drop(read::<admin::Quota>(message, client).map(|quota| convert::quota(&quota))),
        3 => drop(read::<worker::WorkerMessage>(message, peer)),
        4 => drop(read::<worker::ControllerMessage>(message, peer)),
        5 => drop(read::<worker::InvokeRequest>(message, peer)),
        6 => drop(read::<worker::DataId>(message, peer).map(|id| convert::data_id(&id))),
        7 => drop(read::<raft::Message>(message, peer)),
        _ => drop(read::<worker::DesiredFunction>(message, peer).map(|it| convert::placed_serving(&it))),
    }
}

/// Reads a stream of messages that carry parts of sets. The first byte chooses the kind of message. Each message
/// follows its length in two bytes.
fn part_sets(data: &[u8]) {
    let [kind, stream @ ..] = data else { return };
    if kind % 2 == 0 {
        assemble::<worker::DesiredState>(stream);
    } else {
        assemble::<worker::FunctionStatuses>(stream);
    }
}

/// Puts the sets of one stream together, as a worker and a leader do. Like them, it ends the stream at the
/// first error.
fn assemble<M: PartMessage + Name>(mut stream: &[u8]) {
    let mut assembler = PartAssembler::<M>::default();
    let mut set = ItemSet::<M>::default();
    while let [low, high, rest @ ..] = stream {
        let announced = usize::from(u16::from_le_bytes([*low, *high]));
        let (message, behind) = rest.split_at(announced.min(rest.len()));
        stream = behind;
        let Ok(message) = decoding::decode(Bytes::copy_from_slice(message), WalkLimits::PEER) else { return };
        match assembler.take(message) {
            Ok(None) => {}
            Ok(Some(update)) => {
                if set.apply(update).is_err() {
                    assert!(set.items().is_empty(), "a set that was refused leaves nothing behind");
                    return;
                }
                let keys_are_unique = set.items().is_sorted_by(|a, b| M::key(a) < M::key(b));
                assert!(keys_are_unique, "items are in the order of their keys, each once");
                assert!(set.items().len() <= ITEMS_MAX);
            }
            Err(_) => return,
        }
    }
}

/// Reads the bytes that a process writes into a worker's socket. The first byte says where the stream is cut.
fn frames(data: &[u8]) {
    let [piece, stream @ ..] = data else { return };
    let mut decoder = FrameDecoder::default();
    let mut taken = 0;
    for piece in stream.chunks(usize::from(*piece).pow(2).max(1)) {
        let fed = decoder.feed(piece, Vec::new());
        while let Some(frame) = decoder.next_frame() {
            taken += frame.message.len();
            drop(frame.decode::<executor::Event>());
            drop(frame.decode::<executor::Command>());
            drop(frame.decode::<function::FromProcess>());
        }
        if fed.is_err() {
            return;
        }
    }
    assert!(taken <= stream.len(), "frames hold at most the bytes that were sent");
    drop(decoder.close());
}

/// Parses a manifest, and the same text as each kind of name that users choose.
fn manifests(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    drop(manifest::parse(text));
    drop((FunctionName::new(text), TenantName::new(text), NodeName::new(text), text.parse::<Digest>()));
}

/// Compiles a user's model.
fn onnx(data: &[u8]) {
    let Ok(compiled) = millrace_model::compile(&Bytes::copy_from_slice(data)) else { return };
    let bytes = compiled.summary.weights_bytes;
    let max = 8 * (data.len() as u64 + millrace_model::ALIGNMENT);
    assert!(bytes <= max, "{bytes} bytes of weights of a file of {}", data.len());
    assert!((1..=millrace_model::MAX_LAUNCHES).contains(&compiled.launches.len()));
}

/// Unpacks a user's program, and packs an accepted program again.
fn program(data: &[u8]) {
    if let Ok(program) = PackedProgram::unpack(&Bytes::copy_from_slice(data)) {
        let packed = program.pack().expect("a program that was accepted");
        assert_eq!(PackedProgram::unpack(&packed), Ok(program));
    }
}

/// Reads the file of a snapshot, and the encoded state without the file's frame.
fn snapshot(data: &[u8]) {
    millrace_raft_store::fuzz::snapshot(data);
    if let Ok(state) = State::decode(data) {
        assert!(State::decode(&state.encode()).is_ok_and(|again| again == state), "a state comes back");
    }
}
