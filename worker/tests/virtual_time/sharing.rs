//! Swaps that share a link to their GPUs, by when they are wanted (D14, D15).

use std::time::Duration;

use millrace_policy::dispatch::PolicyConfig;
use millrace_policy::fabric::Counts;
use millrace_policy::rates::Sharing;
use millrace_types::topology::{Link, LinkId, LinkKind, Topology};
use millrace_types::{Batching, Bytes, BytesPerSec, Serving, Slo};
use millrace_worker::install::FunctionConfig;
use millrace_worker::node::NodeConfig;
use millrace_worker::request::Invocation;

use crate::batching::rows;
use crate::world::{World, behaviour, function, gpus, in_virtual_time, prepare, request};

/// Of the functions, and of the requests where these say so.
const TIGHT: Duration = Duration::from_millis(60);
const LOOSE: Duration = Duration::from_secs(5);

/// Two GPUs behind one link of 1 GB/s.
fn one_link() -> Topology {
    let mut topology = gpus(2);
    topology.gpus.iter_mut().for_each(|gpu| gpu.host_path = vec![LinkId(0)]);
    topology.links = vec![Link { kind: LinkKind::Pcie, rate: BytesPerSec::gb(1) }];
    topology
}

/// Function 0, whose model has 50 MiB, is asked for on one GPU; soon afterwards function 1 with 20 MiB
/// on the other. How long the second waited for its answer, whether that came first, and what the
/// transfers could count on.
fn tight_beside_loose(
    sharing: Sharing,
    slos: [Option<Duration>; 2],
    asked: [Option<Duration>; 2],
) -> (Duration, bool, Counts) {
    in_virtual_time(async move {
        let config = NodeConfig { sharing, ..NodeConfig::new(one_link()) };
        let world = World::start_with(config, &behaviour(&[1, 1]), 1, |machine| Box::new(machine));
        for (number, weights) in [(0, Bytes::mib(50)), (1, Bytes::mib(20))] {
            let slo = slos[number].map(|deadline| Slo { deadline, percentile: 0.98 });
            let config = FunctionConfig { slo, ..function(number) };
            world.node.install(config, prepare(number, weights)).await.unwrap();
        }
        world.pass_ms(50).await;
        let ask = |number: usize| world.ask(Invocation { objective: asked[number], ..request(number) });
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
fn a_swap_that_is_wanted_soon_overtakes_one_that_is_not() {
    let slos = [Some(LOOSE), Some(TIGHT)];
    let (took, first, counts) = tight_beside_loose(Sharing::FaasTube, slos, [None; 2]);
    assert!(first && took < TIGHT, "{took:?}");
    assert_eq!(counts, Counts { admitted: 2, ..Counts::default() });
    let (took, first, counts) = tight_beside_loose(Sharing::Fifo, slos, [None; 2]);
    assert!(!first && took > TIGHT, "{took:?}");
    assert_eq!(counts, Counts { unpromised: 2, ..Counts::default() });
}

/// As a workflow's steps are, which have its objective together.
#[test]
fn what_a_request_says_itself_comes_before_its_function_s_objective() {
    for slos in [[None; 2], [Some(TIGHT), Some(LOOSE)]] {
        let asked = [Some(LOOSE), Some(TIGHT)];
        let (took, first, counts) = tight_beside_loose(Sharing::FaasTube, slos, asked);
        assert!(first && took < TIGHT, "{took:?}");
        assert_eq!(counts, Counts { admitted: 2, ..Counts::default() });
    }
}

#[test]
fn what_nobody_wants_by_a_time_makes_way() {
    let (took, first, counts) = tight_beside_loose(Sharing::FaasTube, [None, Some(TIGHT)], [None; 2]);
    assert!(first && took < TIGHT, "{took:?}");
    assert_eq!(counts, Counts { admitted: 1, unpromised: 1, ..Counts::default() });
}

#[test]
fn a_swap_that_cannot_be_in_time_is_made_and_said() {
    let slos = [Some(LOOSE), Some(Duration::from_millis(5))];
    let (_, first, counts) = tight_beside_loose(Sharing::FaasTube, slos, [None; 2]);
    assert!(!first);
    assert_eq!(counts, Counts { admitted: 1, infeasible: 1, ..Counts::default() });
}

/// A run takes as long as its rows do, be they of one request.
#[test]
fn what_is_left_for_a_swap_goes_by_the_rows_of_the_run_behind_it() {
    in_virtual_time(async {
        let (sharing, dispatch) = (Sharing::FaasTube, PolicyConfig::Lb);
        let config = NodeConfig { sharing, dispatch, ..NodeConfig::new(gpus(1)) };
        let mut behaviour = behaviour(&[10, 1]);
        // Of eight rows: 80 ms.
        behaviour.runs.get_mut("model 0").unwrap().by_member = Duration::from_millis(10);
        let world = World::start_with(config, &behaviour, 1, |machine| Box::new(machine));
        let batching = Some(Batching { max_size: 8, max_wait: Duration::ZERO });
        for number in 0..2 {
            let serving = Serving { batching, ..Serving::default() };
            let config = FunctionConfig { slo: None, serving, ..function(number) };
            // There is room for one.
            world.node.install(config, prepare(number, Bytes::mib(40))).await.unwrap();
        }
        world.ask(rows(0, 1)).await.unwrap().unwrap();
        let alone = world.ask(rows(0, 1));
        world.pass_ms(1).await;
        let others: Vec<_> = (0..8).map(|_| world.ask(rows(0, 1))).collect();
        alone.await.unwrap().unwrap();
        for other in others {
            let share = other.await.unwrap().unwrap().share;
            assert_eq!(share.map(|share| share.of), Some(8));
        }
        world.ask(request(1)).await.unwrap().unwrap();
        let soon = Invocation { objective: Some(TIGHT), ..rows(0, 8) };
        world.ask(soon).await.unwrap().unwrap();
        let counts = world.node.snapshot().await.transfers.ended.to_gpu;
        assert_eq!(counts, Counts { unpromised: 2, infeasible: 1, ..Counts::default() });
    });
}
