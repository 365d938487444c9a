//! Tests of models that are copied from another GPU over a direct link (T22, T25).

use std::time::Duration;

use millrace_memory::eviction::Eviction;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};
use millrace_worker::node::NodeConfig;
use millrace_worker::port::model::ExecutorBehaviour;
use millrace_worker::snapshot::NodeSnapshot;

use crate::world::{START, World, behaviour, gpus, in_virtual_time, request, revision};

const NVLINK: LinkId = LinkId(2);

/// Returns a topology of two GPUs with an NVLink of twice the rate of their links to the host.
fn joined() -> Topology {
    let mut topology = gpus(2);
    let kind = LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(1) };
    topology.links.push(TopologyLink { kind, rate: BytesPerSec::gb(20) });
    topology
}

fn config() -> NodeConfig {
    NodeConfig { dispatch: "torpor".parse().unwrap(), ..NodeConfig::new(joined()) }
}

fn start(behaviour: &ExecutorBehaviour) -> World {
    // The copy rate does not limit the links.
    let behaviour = ExecutorBehaviour { copy_rate: BytesPerSec::gb(1000), ..behaviour.clone() };
    World::start_with(config(), &behaviour, 1, |machine| Box::new(machine))
}

/// Starts a node where GPU 0 runs function 0 for 50 ms and holds its whole model of 40 MiB.
async fn busy_holder() -> World {
    let world = start(&behaviour(&[50, 5]));
    world.install(0, Bytes::mib(40)).await;
    world.install(1, Bytes::mib(60)).await;
    world.pass_ms(20).await;
    drop(world.ask(request(0)));
    world.pass_ms(10).await;
    world
}

fn carried(snapshot: &NodeSnapshot, link: LinkId) -> Bytes {
    snapshot.links[link.0 as usize].carried
}

#[test]
fn a_model_of_a_busy_gpu_is_copied_over_the_nvlink_faster_than_from_the_host() {
    in_virtual_time(async {
        let world = start(&behaviour(&[50]));
        world.install(0, Bytes::mib(40)).await;
        world.pass_ms(20).await;
        let first = world.ask(request(0));
        world.pass_ms(10).await;
        let second = world.node.invoke(request(0)).await.unwrap();
        let first = first.await.unwrap().unwrap();
        assert_eq!((first.gpu, second.gpu), (Some(GpuIndex(0)), Some(GpuIndex(1))));
        assert!(second.split.swap < first.split.swap, "{:?} and {:?}", second.split, first.split);
        let snapshot = world.node.snapshot().await;
        assert_eq!(carried(&snapshot, NVLINK), Bytes::mib(40));
        assert_eq!(carried(&snapshot, LinkId(1)), Bytes::ZERO);
        let swaps: Vec<_> = snapshot.gpus.iter().map(|gpu| (gpu.swaps, gpu.peer_swaps)).collect();
        assert_eq!(swaps, [(1, 0), (1, 1)]);
    });
}

#[test]
fn a_source_that_dies_in_the_middle_of_a_copy_leaves_the_rest_to_the_host() {
    in_virtual_time(async {
        let world = busy_holder().await;
        let asked = world.ask(request(0));
        world.pass(Duration::from_micros(400)).await;
        world.machine.kill(GpuIndex(0));
        // The whole model has arrived before the dead executor is back.
        world.pass(START - Duration::from_millis(1)).await;
        let snapshot = world.node.snapshot().await;
        let peer = carried(&snapshot, NVLINK);
        let host = carried(&snapshot, LinkId(1));
        assert!(peer > Bytes::ZERO && host > Bytes::ZERO, "{peer} and {host}");
        assert_eq!(peer + host, Bytes::mib(40), "no byte is copied twice");
        assert_eq!(snapshot.gpus[1].peer_swaps, 0, "the model was not copied whole from the peer");
        let done = asked.await.unwrap().unwrap();
        assert_eq!((done.gpu, done.attempts), (Some(GpuIndex(1)), 1));
    });
}

#[test]
fn a_source_may_be_evicted_again_after_the_destination_died() {
    in_virtual_time(async {
        let world = busy_holder().await;
        let asked = world.ask(request(0));
        world.pass(Duration::from_micros(800)).await;
        world.machine.kill(GpuIndex(1));
        asked.await.unwrap().unwrap();
        // The other model fits only on an otherwise empty GPU: the test uses each GPU in turn.
        for gpu in [1, 0] {
            world.pass_ms(100).await;
            world.machine.kill(GpuIndex(gpu));
            let done = world.node.invoke(request(1)).await.unwrap();
            assert_eq!(done.gpu, Some(GpuIndex(1 - gpu)));
        }
    });
}

/// T24, compared with LRU.
#[test]
fn a_replica_is_evicted_before_an_older_last_copy() {
    let left_on_gpu_1 = |eviction: Eviction| {
        in_virtual_time(async move {
            let config = NodeConfig { eviction, ..config() };
            let world = World::start_with(config, &behaviour(&[50, 5, 5]), 1, |machine| Box::new(machine));
            let sizes = [20, 20, 40].map(Bytes::mib);
            for (number, size) in sizes.into_iter().enumerate() {
                world.install(number, size).await;
            }
            world.pass_ms(20).await;
            let first = world.ask(request(0));
            world.pass_ms(10).await;
            assert_eq!(world.node.invoke(request(1)).await.unwrap().gpu, Some(GpuIndex(1)));
            let replica = world.node.invoke(request(0)).await.unwrap();
            assert_eq!(
                (first.await.unwrap().unwrap().gpu, replica.gpu),
                (Some(GpuIndex(0)), Some(GpuIndex(1)))
            );
            // GPU 0 is busy, so the third model is loaded on the GPU of the other two.
            drop(world.ask(request(0)));
            world.pass_ms(1).await;
            assert_eq!(world.node.invoke(request(2)).await.unwrap().gpu, Some(GpuIndex(1)));
            let models = world.node.snapshot().await.gpus.remove(1).models;
            let mut functions: Vec<_> = models.into_iter().flat_map(|model| model.functions).collect();
            functions.sort();
            functions
        })
    };
    assert_eq!(left_on_gpu_1(Eviction::Lru), [revision(0), revision(2)]);
    assert_eq!(left_on_gpu_1(Eviction::Torpor), [revision(1), revision(2)]);
}

#[test]
fn copies_from_a_peer_that_fail_are_made_from_the_host() {
    in_virtual_time(async {
        let mut failing = behaviour(&[50]);
        // The last of the four copies of each transfer fails.
        failing.copy_fails_every = Some(4);
        let world = start(&failing);
        world.install(0, Bytes::mib(40)).await;
        world.pass_ms(20).await;
        let first = world.ask(request(0));
        world.pass_ms(30).await;
        let second = world.node.invoke(request(0)).await.unwrap();
        first.await.unwrap().unwrap();
        assert_eq!((second.gpu, second.attempts), (Some(GpuIndex(1)), 1));
        let snapshot = world.node.snapshot().await;
        let by_link = [NVLINK, LinkId(1)].map(|link| carried(&snapshot, link));
        assert_eq!(by_link, [Bytes::mib(30), Bytes::mib(10)]);
        assert!(snapshot.links.iter().all(|link| link.outstanding == 0));
    });
}
