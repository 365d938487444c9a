//! Tests of the durations of copies over modelled links, alone and shared.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{ByteRange, Copy, CopyDone, LoadProgram, Map};
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, Incarnation};
use millrace_worker::clock::{Clock, VirtualClock};
use millrace_worker::port::model::{ExecutorBehaviour, RunModel};
use millrace_worker::port::modelled::ModelledMachine;
use millrace_worker::port::{PortEventKind, PortFactory as _, PortSink};

const BATCH: Bytes = Bytes::mib(10);
/// Duration of a batch: 10 MiB at 12 GB/s.
const BATCH_TAKES: Duration = Duration::from_nanos(873_814);
const BATCHES: u64 = 40;

/// Returns a topology of GPUs that share one link of 12 GB/s to the host.
fn shared_link(gpus: u32) -> Topology {
    let gpu = |index| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "modelled".to_owned(),
        memory: Bytes::gib(1),
        host_path: vec![LinkId(0)],
    };
    let link = TopologyLink { kind: LinkKind::PcieUplink, rate: BytesPerSec::gb(12) };
    Topology { name: "test".to_owned(), gpus: (0..gpus).map(gpu).collect(), links: vec![link] }
}

/// Returns a topology of GPUs behind links of 12 GB/s of their own, each joined to the next by an
/// NVLink of 48 GB/s.
fn joined(gpus: u32) -> Topology {
    let mut topology = shared_link(gpus);
    topology.gpus.iter_mut().for_each(|gpu| gpu.host_path = vec![LinkId(gpu.index.0)]);
    let own = topology.links.remove(0);
    topology.links.resize(gpus as usize, own);
    let nvlink = |gpu| TopologyLink {
        kind: LinkKind::NvLink { a: GpuIndex(gpu - 1), b: GpuIndex(gpu) },
        rate: BytesPerSec::gb(48),
    };
    topology.links.extend((1..gpus).map(nvlink));
    topology
}

/// Orders batches for every GPU at once. Returns the reports of each executor, in order.
fn copy_on_all(gpus: u32) -> Vec<Vec<CopyDone>> {
    copy_by(&shared_link(gpus), &vec![&[][..]; gpus as usize])
}

/// Orders batches as [`copy_on_all`] does, by the GPUs that forward them, if any.
fn copy_by(topology: &Topology, via: &[&[u32]]) -> Vec<Vec<CopyDone>> {
    let gpus = topology.gpus.len() as u32;
    let runtime =
        || tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    actix_rt::System::with_tokio_rt(runtime).block_on(async move {
        let behaviour = ExecutorBehaviour {
            start: Duration::ZERO,
            process_start: Duration::ZERO,
            // The links alone limit the rate.
            copy_rate: BytesPerSec(u64::MAX),
            copy_fails_every: None,
            ties: 0,
            runs: [("m".to_owned(), RunModel::new(Duration::ZERO))].into(),
        };
        let clock: Arc<dyn Clock> = Arc::new(VirtualClock::starting_at(tokio::time::Instant::now()));
        let machine = ModelledMachine::new(Arc::clone(&clock), vec![behaviour; gpus as usize]);
        let mut machine = machine.with_links(topology);
        let done: Vec<Arc<Mutex<Vec<CopyDone>>>> = (0..gpus).map(|_| Arc::default()).collect();
        let port = |gpu: u32| {
            let done = Arc::clone(&done[gpu as usize]);
            let sink = PortSink::new(move |event| {
                if let PortEventKind::Event(Event::CopyDone(copy), _) = event.kind {
                    done.lock().unwrap().push(copy);
                }
            });
            machine.port(GpuIndex(gpu), sink)
        };
        let mut ports: Vec<_> = (0..gpus).map(port).collect();
        ports.iter_mut().for_each(|port| port.start(Incarnation(1)));
        tokio::time::sleep(clock.sleep_for(Duration::from_millis(10))).await;
        for (port, via) in ports.iter_mut().zip(via) {
            let load = LoadProgram { program: 1, name: "m".to_owned(), ..LoadProgram::default() };
            port.send(Command::LoadProgram(load), Vec::new());
            port.send(Command::Map(Map { program: 1, generation: 1, ..Map::default() }), Vec::new());
            for batch in 0..BATCHES {
                let copy = Copy {
                    transfer: 1,
                    batch,
                    program: 1,
                    generation: 1,
                    ranges: vec![ByteRange { bytes: BATCH.0, ..ByteRange::default() }],
                    not_after_ns: u64::MAX,
                    via: via.to_vec(),
                    ..Copy::default()
                };
                port.send(Command::Copy(copy), Vec::new());
            }
        }
        tokio::time::sleep(clock.sleep_for(Duration::from_secs(1))).await;
        done.iter().map(|done| done.lock().unwrap().clone()).collect()
    })
}

#[test]
fn each_batch_of_a_transfer_takes_the_time_of_the_links_rate() {
    let done = copy_on_all(1).remove(0);
    assert_eq!(done.len() as u64, BATCHES);
    for (batch, copy) in done.iter().enumerate() {
        let took = Duration::from_nanos(copy.finished_ns - copy.started_ns);
        assert_eq!(took.abs_diff(BATCH_TAKES).as_micros(), 0, "batch {batch}: {took:?}");
    }
    let whole = Duration::from_nanos(done[done.len() - 1].finished_ns - done[0].started_ns);
    let expected = BATCH_TAKES * BATCHES as u32;
    assert_eq!(whole.abs_diff(expected).as_micros(), 0, "{whole:?} of {expected:?}");
}

#[test]
fn two_gpus_behind_one_link_take_twice_as_long_each() {
    for done in copy_on_all(2) {
        assert_eq!(done.len() as u64, BATCHES);
        let whole = Duration::from_nanos(done[done.len() - 1].finished_ns - done[0].started_ns);
        let expected = 2 * BATCH_TAKES * BATCHES as u32;
        assert!(whole.abs_diff(expected).as_micros() < 2, "{whole:?} of {expected:?}");
    }
}

/// D05: the first chunk is forwarded before the last arrives, so each further link adds the time of
/// one chunk.
#[test]
fn a_forwarded_batch_takes_one_chunk_more_per_link() {
    let chunk = BytesPerSec::gb(48).time_for(Bytes::mib(2));
    for (via, links) in [(&[1, 0][..], 1), (&[2, 1, 0][..], 2)] {
        let done = copy_by(&joined(3), &[via]).remove(0);
        assert_eq!(done.len() as u64, BATCHES);
        let stored_and_forwarded = BATCH_TAKES + BytesPerSec::gb(48).time_for(BATCH) * links;
        for copy in &done {
            let took = Duration::from_nanos(copy.finished_ns - copy.started_ns);
            assert_eq!(took.abs_diff(BATCH_TAKES + chunk * links).as_micros(), 0, "{took:?}");
            assert!(took < stored_and_forwarded, "{took:?}");
        }
    }
}

/// GPU 1 copies for itself over the link on which it forwards to GPU 0.
#[test]
fn a_forwarded_batch_shares_the_neighbours_link() {
    for done in copy_by(&joined(2), &[&[1, 0], &[]]) {
        assert_eq!(done.len() as u64, BATCHES);
        let takes = Duration::from_nanos(done[0].finished_ns - done[0].started_ns);
        assert!(takes >= BATCH_TAKES * 19 / 10 && takes < BATCH_TAKES * 9 / 4, "{takes:?}");
    }
}
