//! Tests of slices in virtual time: limits and guarantees of the time, and seats of slices.

use std::sync::Arc;
use std::time::Duration;

use millrace_types::policy::GpuSharingName;
use millrace_types::{Bytes, GpuIndex, Permille, SliceId, SliceOnGpu, Terms, Timestamp};
use millrace_worker::desired_state::{NodeSlices, PlacedSlices};
use millrace_worker::node::NodeConfig;

use crate::world::{World, behaviour, gpus, in_virtual_time, request, revision};

/// Run time of both functions.
const RUN: Duration = Duration::from_millis(20);

fn terms(sms: u16, request: u16, limit: u16) -> Terms {
    let share = |thousandths| Permille::new(thousandths).unwrap();
    Terms::new(share(sms), share(sms), share(request), share(limit)).unwrap()
}

/// Returns slices of functions, each with its terms and the ids of its slices on GPU 0.
fn slices(of: &[(usize, Terms, &[u64])]) -> Arc<NodeSlices> {
    let placed = |&(function, terms, ids): &(usize, Terms, &[u64])| {
        let on = ids.iter().map(|&id| SliceOnGpu::unmeasured(SliceId(id), GpuIndex(0))).collect();
        (revision(function), PlacedSlices { terms, on })
    };
    Arc::new(of.iter().map(placed).collect())
}

/// Starts a node with a shared GPU that holds both functions.
async fn shared() -> World {
    let config = NodeConfig { gpu_sharing: GpuSharingName::Slices, ..NodeConfig::new(gpus(1)) };
    let ms = RUN.as_millis() as u64;
    let world = World::start_with(config, &behaviour(&[ms, ms]), 1, |machine| Box::new(machine));
    for number in 0..2 {
        world.install(number, Bytes::mib(4)).await;
    }
    world.pass_ms(100).await;
    for number in 0..2 {
        world.ask(request(number)).await.unwrap().unwrap();
    }
    world
}

/// Keeps two requests of a function in the node, and returns the number of answers by `end`.
async fn flood(world: &World, function: usize, end: Timestamp) -> u32 {
    let mut answers = 0;
    let mut waiting = [world.ask(request(function)), world.ask(request(function))];
    while world.clock.now() < end {
        for place in &mut waiting {
            let oldest = std::mem::replace(place, world.ask(request(function)));
            oldest.await.unwrap().unwrap();
            answers += u32::from(world.clock.now() < end);
        }
    }
    answers
}

#[test]
fn a_slice_computes_for_no_more_than_its_limit_although_the_gpu_is_idle() {
    in_virtual_time(async {
        let world = shared().await;
        world.node.set_slices(slices(&[(0, terms(1000, 0, 500), &[1])]));
        let seconds = 10;
        let end = world.clock.now() + Duration::from_secs(seconds);
        let computed = RUN * flood(&world, 0, end).await;
        // Half of the time, and the half second that the bucket holds at the start.
        let limit = Duration::from_millis(500 * seconds + 500);
        assert!(computed <= limit + RUN, "{computed:?}");
        assert!(computed + Duration::from_millis(200) >= limit, "{computed:?}");
    });
}

#[test]
fn a_slice_gets_its_request_beside_a_flood_of_others() {
    in_virtual_time(async {
        let world = shared().await;
        world.node.set_slices(slices(&[(0, terms(1000, 300, 1000), &[1])]));
        let end = world.clock.now() + Duration::from_secs(10);
        let (sliced, others) = tokio::join!(flood(&world, 0, end), flood(&world, 1, end));
        let computed = RUN * sliced;
        assert!(computed >= Duration::from_millis(2_900), "{computed:?} of 10 s, others {others}");
        assert!(others >= 100, "{others} others");
        let used = world.node.snapshot().await.gpus[0].slices[0];
        assert_eq!((used.0, used.1.starved), (SliceId(1), 0));
    });
}

#[test]
fn seconds_with_a_missed_guarantee_are_counted() {
    in_virtual_time(async {
        let world = shared().await;
        // The leader would place these slices on different GPUs.
        let all = terms(1000, 900, 1000);
        world.node.set_slices(slices(&[(0, all, &[1]), (1, all, &[2])]));
        let end = world.clock.now() + Duration::from_secs(5);
        tokio::join!(flood(&world, 0, end), flood(&world, 1, end));
        let starved =
            world.node.snapshot().await.gpus[0].slices.iter().map(|it| it.1.starved).collect::<Vec<_>>();
        assert!(starved.iter().all(|&seconds| seconds >= 3), "{starved:?}");
    });
}

#[test]
fn a_run_on_a_part_of_the_sms_is_billed_by_its_part() {
    in_virtual_time(async {
        let world = shared().await;
        let billed = async || world.node.snapshot().await.functions[0].score.billed_ms;
        let before = billed().await;
        world.node.set_slices(slices(&[(0, terms(250, 0, 1000), &[1])]));
        let answer = world.ask(request(0)).await.unwrap().unwrap();
        // On a quarter of the SMs the run takes four times as long, and is billed for a quarter of that.
        assert!(answer.split.run >= RUN * 3, "{:?}", answer.split);
        let whole = RUN.as_millis() as u64;
        assert!((whole..=whole + 1).contains(&(billed().await - before)));
        world.node.set_slices(Arc::default());
        let before = billed().await;
        world.ask(request(0)).await.unwrap().unwrap();
        let more = billed().await - before;
        assert!((whole..=whole + 1).contains(&more), "a lone run has all SMs: {more} ms");
    });
}

#[test]
fn the_parts_of_an_answer_show_the_wait_of_a_run_at_its_limit() {
    in_virtual_time(async {
        let world = shared().await;
        world.node.set_slices(slices(&[(0, terms(1000, 0, 50), &[1])]));
        let flooding: Vec<_> = (0..8).map(|_| world.ask(request(0))).collect();
        let mut waited = Duration::ZERO;
        for asked in flooding {
            let split = asked.await.unwrap().unwrap().split;
            let parts = split.queue + split.swap + split.run + split.token;
            assert!(parts <= split.total && split.total - parts < Duration::from_millis(1), "{split:?}");
            assert!(split.run <= RUN + Duration::from_millis(1), "{split:?}");
            waited = waited.max(split.token);
        }
        assert!(waited > Duration::from_millis(100), "{waited:?}");
    });
}

#[test]
fn a_function_without_slices_is_not_held_back_by_a_function_at_its_limit() {
    in_virtual_time(async {
        let world = shared().await;
        world.node.set_slices(slices(&[(0, terms(500, 0, 10), &[1])]));
        let flooding: Vec<_> = (0..200).map(|_| world.ask(request(0))).collect();
        world.pass_ms(2_000).await;
        for _ in 0..10 {
            let answer = world.ask(request(1)).await.unwrap().unwrap();
            assert!(answer.split.total <= RUN * 2, "{:?}", answer.split);
        }
        assert!(flooding.iter().filter(|asked| !asked.is_finished()).count() > 150);
        // Without slices, the function computes on any SMs again.
        world.node.set_slices(Arc::default());
        for asked in flooding {
            asked.await.unwrap().unwrap();
        }
    });
}

#[test]
fn slices_survive_a_restart_of_the_actors() {
    in_virtual_time(async {
        let world = shared().await;
        world.node.set_slices(slices(&[(0, terms(1000, 0, 500), &[1])]));
        world.pass_ms(1).await;
        world.machine.kill(GpuIndex(0));
        world.pass_ms(5_000).await;
        let end = world.clock.now() + Duration::from_secs(4);
        let computed = RUN * flood(&world, 0, end).await;
        assert!(computed <= Duration::from_millis(2_500) + RUN, "{computed:?}");
    });
}
