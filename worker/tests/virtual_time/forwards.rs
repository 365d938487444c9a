//! Tests of swaps over the links of other GPUs (D05).

use std::time::Duration;

use millrace_transfers::paths::HostLinks;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};
use millrace_worker::node::NodeConfig;
use millrace_worker::port::model::ExecutorBehaviour;

use crate::world::{World, behaviour, gpus, in_virtual_time, request};

const LARGE: Bytes = Bytes::mib(400);
const SMALL: Bytes = Bytes::mib(100);
/// Duration of a batch on a GPU's own link.
const BATCH: Duration = Duration::from_nanos(1_048_576);
/// Upper bound of the delays of messages: in virtual time each actor has separate microseconds.
const LITTLE: Duration = Duration::from_micros(700);
const NVLINK: LinkId = LinkId(2);

/// Returns a topology of two GPUs behind links of 10 GB/s of their own, with an NVLink of twice
/// that rate between them.
fn joined() -> Topology {
    let mut topology = gpus(2);
    topology.gpus.iter_mut().for_each(|gpu| gpu.memory = Bytes::gib(1));
    let kind = LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(1) };
    topology.links.push(TopologyLink { kind, rate: BytesPerSec::gb(20) });
    topology
}

async fn start(host_links: HostLinks) -> World {
    let config = NodeConfig { host_links, ..NodeConfig::new(joined()) };
    // The copy rate does not limit the links.
    let behaviour = ExecutorBehaviour { copy_rate: BytesPerSec::gb(1000), ..behaviour(&[1, 1]) };
    let world = World::start_with(config, &behaviour, 1, |machine| Box::new(machine));
    world.install(0, LARGE).await;
    world.install(1, SMALL).await;
    world.pass_ms(20).await;
    world
}

/// Requests the large model on an idle node. Returns the time until the answer and the bytes on
/// each link: the GPU's own, the neighbour's and the NVLink.
fn swap(host_links: HostLinks) -> (Duration, [Bytes; 3]) {
    in_virtual_time(async move {
        let world = start(host_links).await;
        let done = world.node.invoke(request(0)).await.unwrap();
        let own = done.gpu.unwrap().0;
        let links = world.node.snapshot().await.links;
        let carried = [LinkId(own), LinkId(1 - own), NVLINK].map(|link| links[link.0 as usize].carried);
        assert!(links.iter().all(|link| link.outstanding == 0));
        (done.split.total, carried)
    })
}

#[test]
fn a_model_is_also_copied_over_an_idle_neighbours_link() {
    let (alone, carried) = swap(HostLinks::Own);
    // The model computes while it arrives. The last of forty batches is copied as soon as its grant
    // permits.
    assert!(alone >= BATCH * 39 && alone < BATCH * 41, "{alone:?}");
    assert_eq!(carried, [LARGE, Bytes::ZERO, Bytes::ZERO]);
    let (took, [own, neighbour, nvlink]) = swap(HostLinks::All);
    // The last batches arrive one after the other, because no other path delivers them sooner.
    assert!(took >= BATCH * 19 && took < BATCH * 24, "{took:?} instead of {alone:?}");
    assert_eq!((own + neighbour, nvlink), (LARGE, neighbour), "each byte crosses one path");
}

/// D13, for a neighbour that needs its own link.
#[test]
fn a_neighbours_own_model_waits_for_at_most_one_batch() {
    let beside = |host_links| {
        in_virtual_time(async move {
            let world = start(host_links).await;
            let large = world.ask(request(0));
            world.pass(BATCH * 9 / 2).await;
            let small = world.node.invoke(request(1)).await.unwrap();
            let large = large.await.unwrap().unwrap();
            assert_ne!(large.gpu, small.gpu);
            (small.split.swap, large.split.swap)
        })
    };
    let (alone, slow) = beside(HostLinks::Own);
    let (small, large) = beside(HostLinks::All);
    assert!(small <= alone + BATCH + LITTLE, "{small:?} instead of {alone:?}");
    // The link serves the large model before and after the small one.
    assert!(large < slow * 3 / 4, "{large:?} instead of {slow:?}");
}
