//! Tests of swaps that share a link, by the deadlines of their requests (D14, D15).

use std::time::Duration;

use millrace_scheduling::dispatch::PolicyConfig;
use millrace_transfers::fabric::GuaranteeCounts;
use millrace_transfers::rates::TransferSharing;
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyLink};
use millrace_types::{BatchingOptions, Bytes, BytesPerSec, SchedulingOptions, Slo};
use millrace_worker::install::FunctionConfig;
use millrace_worker::node::NodeConfig;
use millrace_worker::request::Attempt;

use crate::batching::rows;
use crate::world::{World, behaviour, function, gpus, in_virtual_time, prepare, request};

/// Short deadline, of a function or of a request.
const TIGHT: Duration = Duration::from_millis(60);
/// Long deadline, of a function or of a request.
const LOOSE: Duration = Duration::from_secs(5);

/// Returns a topology of two GPUs behind one link of 1 GB/s.
fn one_link() -> Topology {
    let mut topology = gpus(2);
    topology.gpus.iter_mut().for_each(|gpu| gpu.host_path = vec![LinkId(0)]);
    topology.links = vec![TopologyLink { kind: LinkKind::Pcie, rate: BytesPerSec::gb(1) }];
    topology
}

/// Requests function 0, with a model of 50 MiB, on one GPU, and soon afterwards function 1, with 20
/// MiB, on the other. Returns the time until the second answer, whether the second answer was
/// first, and the counts of transfers by rate guarantee.
fn tight_beside_loose(
    sharing: TransferSharing,
    slos: [Option<Duration>; 2],
    asked: [Option<Duration>; 2],
) -> (Duration, bool, GuaranteeCounts) {
    in_virtual_time(async move {
        let config = NodeConfig { sharing, ..NodeConfig::new(one_link()) };
        let world = World::start_with(config, &behaviour(&[1, 1]), 1, |machine| Box::new(machine));
        for (number, weights) in [(0, Bytes::mib(50)), (1, Bytes::mib(20))] {
            let slo = slos[number].map(|deadline| Slo { deadline, percentile: 0.98 });
            let config = FunctionConfig { slo, ..function(number) };
            world.node.install(config, prepare(number, weights)).await.unwrap();
        }
        world.pass_ms(50).await;
        let ask = |number: usize| world.ask(Attempt { objective: asked[number], ..request(number) });
        let loose = ask(0);
        world.pass_ms(3).await;
        let tight = ask(1);
        let tight = tight.await.unwrap().unwrap();
        let first = !loose.is_finished();
        loose.await.unwrap().unwrap();
        (tight.split.total, first, world.node.snapshot().await.transfers.ended.to_gpu)
    })
}

#[test]
fn a_swap_with_a_short_deadline_overtakes_one_with_a_long_deadline() {
    let slos = [Some(LOOSE), Some(TIGHT)];
    let (took, first, counts) = tight_beside_loose(TransferSharing::FaasTube, slos, [None; 2]);
    assert!(first && took < TIGHT, "{took:?}");
    assert_eq!(counts, GuaranteeCounts { admitted: 2, ..GuaranteeCounts::default() });
    let (took, first, counts) = tight_beside_loose(TransferSharing::Fifo, slos, [None; 2]);
    assert!(!first && took > TIGHT, "{took:?}");
    assert_eq!(counts, GuaranteeCounts { unpromised: 2, ..GuaranteeCounts::default() });
}

/// Workflow steps carry such an objective, because the workflow has one for all steps.
#[test]
fn a_requests_objective_overrides_its_functions_objective() {
    for slos in [[None; 2], [Some(TIGHT), Some(LOOSE)]] {
        let asked = [Some(LOOSE), Some(TIGHT)];
        let (took, first, counts) = tight_beside_loose(TransferSharing::FaasTube, slos, asked);
        assert!(first && took < TIGHT, "{took:?}");
        assert_eq!(counts, GuaranteeCounts { admitted: 2, ..GuaranteeCounts::default() });
    }
}

#[test]
fn a_swap_without_a_deadline_yields_to_one_with_a_deadline() {
    let (took, first, counts) = tight_beside_loose(TransferSharing::FaasTube, [None, Some(TIGHT)], [None; 2]);
    assert!(first && took < TIGHT, "{took:?}");
    assert_eq!(counts, GuaranteeCounts { admitted: 1, unpromised: 1, ..GuaranteeCounts::default() });
}

#[test]
fn a_swap_that_cannot_meet_its_deadline_is_made_and_counted() {
    let slos = [Some(LOOSE), Some(Duration::from_millis(5))];
    let (_, first, counts) = tight_beside_loose(TransferSharing::FaasTube, slos, [None; 2]);
    assert!(!first);
    assert_eq!(counts, GuaranteeCounts { admitted: 1, infeasible: 1, ..GuaranteeCounts::default() });
}

/// The duration of a run depends on its rows, also if they are of one request.
#[test]
fn the_deadline_of_a_swap_depends_on_the_rows_of_its_run() {
    in_virtual_time(async {
        let sharing = TransferSharing::FaasTube;
        let config = NodeConfig { sharing, dispatch: PolicyConfig::Lb, ..NodeConfig::new(gpus(1)) };
        let mut behaviour = behaviour(&[10, 1]);
        // A run of eight rows takes 80 ms.
        behaviour.runs.get_mut("model 0").unwrap().by_member = Duration::from_millis(10);
        let world = World::start_with(config, &behaviour, 1, |machine| Box::new(machine));
        let batching = Some(BatchingOptions { max_size: 8, max_wait: Duration::ZERO });
        for number in 0..2 {
            let serving = SchedulingOptions { batching, ..SchedulingOptions::default() };
            let config = FunctionConfig { slo: None, serving, ..function(number) };
            // The GPU has room for one of the models.
            world.node.install(config, prepare(number, Bytes::mib(40))).await.unwrap();
        }
        world.ask(rows(0, 1)).await.unwrap().unwrap();
        let alone = world.ask(rows(0, 1));
        world.pass_ms(1).await;
        let others: Vec<_> = (0..8).map(|_| world.ask(rows(0, 1))).collect();
        alone.await.unwrap().unwrap();
        for other in others {
            let share = other.await.unwrap().unwrap().outputs.share;
            assert_eq!(share.map(|share| share.of), Some(8));
        }
        world.ask(request(1)).await.unwrap().unwrap();
        let soon = Attempt { objective: Some(TIGHT), ..rows(0, 8) };
        world.ask(soon).await.unwrap().unwrap();
        let counts = world.node.snapshot().await.transfers.ended.to_gpu;
        assert_eq!(counts, GuaranteeCounts { unpromised: 2, infeasible: 1, ..GuaranteeCounts::default() });
    });
}
