//! Functions with slices.

use std::num::NonZeroU32;

use super::properties::World;
use super::suspects::seats_of;
use super::*;
use millrace_core::attempts::AttemptProgress;
use millrace_types::SliceId;

/// Seats of a GPU for all functions, and seats for slices.
const FREE: u32 = 4;
const SLICED: u32 = 3;
const EACH: u32 = FREE + SLICED;

fn config(policy: PolicyConfig, gpus: usize, open: u32) -> Config {
    let one = GpuConfig::new(Bytes::mib(64), BytesPerSec(1_000_000_000));
    let of = |seats| NonZeroU32::new(seats).unwrap();
    let config = Config::new(vec![one; gpus], 99).with_policy(policy, 1);
    config.with_seats(of(FREE)).with_slice_seats(SLICED).with_open_seats(of(open))
}

fn sliced_node(gpus: usize) -> Node {
    node_of(&config(PolicyConfig::Fifo, gpus, FREE))
}

fn slices(function: u32, model: ModelId, slices: Option<&[(u64, u32)]>) -> Event {
    let slice = |&(id, index): &(u64, u32)| (SliceId(id), gpu(index));
    let slices = slices.map(|slices| slices.iter().map(slice).collect());
    Event::SlicesChanged { function: FunctionIndex(function), model, slices }
}

impl Node {
    fn set_slices(&mut self, function: u32, model: ModelId, on: Option<&[(u64, u32)]>) -> Vec<(u64, u32)> {
        seats_of(&self.step(slices(function, model, on)))
    }

    fn asked(&mut self, key: u64, function: u32, model: ModelId) -> Vec<(u64, u32)> {
        seats_of(&self.ask(key, function, model))
    }
}

#[test]
fn a_function_with_a_slice_computes_on_the_seat_of_the_slice_alone() {
    let mut node = sliced_node(1);
    assert_eq!(node.set_slices(0, A, Some(&[(7, 0)])), []);
    assert_eq!(node.asked(1, 0, A), [(1, FREE)]);
    assert_eq!(node.dispatch.slice_on(SeatIndex(FREE)), Some(SliceId(7)));
    assert_eq!(node.asked(2, 0, A), [], "the slice is busy, and the open seats are of others");
    assert_eq!(node.asked(3, 1, B), [(3, 0)], "another function does not wait");
    assert_eq!(seats_of(&node.ended(0, 1, 5)), [(2, FREE)]);
    assert_eq!(node.dispatch.slice_on(SeatIndex(0)), None);
}

#[test]
fn a_slice_on_a_gpu_with_the_model_goes_first() {
    let mut node = sliced_node(2);
    assert_eq!(node.asked(1, 1, A), [(1, 0)]);
    assert_eq!(node.asked(2, 1, B), [(2, EACH)], "the emptier GPU");
    node.set_slices(0, B, Some(&[(1, 0), (2, 1)]));
    node.step(Event::ModelsEvicted { gpu: gpu(0), models: vec![B] });
    assert_eq!(node.asked(3, 0, B), [(3, EACH + FREE)]);
    assert_eq!(node.asked(4, 0, B), [(4, FREE)]);
}

#[test]
fn requests_wait_without_a_slice_and_go_to_a_slice_that_comes() {
    let mut node = sliced_node(1);
    assert_eq!(node.set_slices(0, A, Some(&[])), []);
    assert_eq!(node.asked(1, 0, A), []);
    assert_eq!(node.asked(2, 0, A), []);
    assert_eq!(node.set_slices(0, A, Some(&[(1, 0)])), [(1, FREE)]);
    assert_eq!(node.set_slices(0, A, Some(&[(1, 0), (2, 0)])), [(2, FREE + 1)]);
}

#[test]
fn waiting_requests_follow_their_function_to_slices_and_back() {
    for policy in [
        PolicyConfig::Fifo,
        PolicyConfig::Unified(crate::dispatch::config::UNIFIED),
        PolicyConfig::Lalb { overtakes_max: 2 },
    ] {
        let mut node = node_of(&config(policy, 1, 1));
        assert_eq!(node.asked(1, 1, B), [(1, 0)]);
        let behind: Vec<_> = (2..5).flat_map(|key| node.asked(key, 0, A)).collect();
        let waiting = 3 - behind.len();
        assert!(waiting >= 2, "{policy:?}: {behind:?}");
        let moved = node.set_slices(0, A, Some(&[(1, 0)]));
        assert_eq!(moved.len(), 1, "{policy:?}");
        assert_eq!(moved[0].1, FREE, "{policy:?}");
        // The slice goes while its request runs. The request ends there, and the others wait for the open
        // seat.
        assert_eq!(node.set_slices(0, A, None), [], "{policy:?}");
        let mut left: Vec<u64> = Vec::new();
        let mut running = vec![1, moved[0].0];
        while let Some(key) = running.pop() {
            left.push(key);
            running.extend(seats_of(&node.ended(0, key, 5)).iter().map(|&(key, _)| key));
            running.extend(behind.iter().map(|&(key, _)| key).filter(|key| !left.contains(key)));
            running.sort_unstable();
            running.dedup();
        }
        assert_eq!(node.dispatch.in_flight(), 0, "{policy:?}");
    }
}

#[test]
fn a_seat_is_given_to_another_slice_only_after_its_last_request() {
    let mut node = sliced_node(1);
    node.set_slices(0, A, Some(&[(1, 0), (2, 0), (3, 0)]));
    assert_eq!(node.asked(1, 0, A), [(1, FREE)]);
    assert_eq!(node.set_slices(1, B, Some(&[(4, 0)])), []);
    assert_eq!(node.asked(2, 1, B), [], "all seats for slices are taken");
    assert_eq!(node.set_slices(0, A, Some(&[(2, 0), (3, 0)])), [], "request 1 still runs");
    assert_eq!(seats_of(&node.ended(0, 1, 5)), [(2, FREE)]);
    assert_eq!(node.dispatch.slice_on(SeatIndex(FREE)), Some(SliceId(4)));
}

#[test]
fn a_higher_priority_goes_first() {
    let mut node = sliced_node(1);
    node.set_slices(0, A, Some(&[(1, 0)]));
    node.asked(1, 0, A);
    node.asked(2, 0, A);
    let urgent = QueuedRequest {
        key: RequestKey(3),
        function: F,
        model: A,
        attempts: AttemptRecord::new(3, Idempotence::Yes),
        priority: Priority::new(1).unwrap(),
        inputs: InputLocations::NONE,
    };
    node.step(Event::Enqueue(urgent));
    assert_eq!(seats_of(&node.ended(0, 1, 5)), [(3, FREE)]);
}

#[test]
fn a_suspect_leaves_its_slice_and_runs_alone() {
    let mut node = sliced_node(1);
    node.set_slices(0, A, Some(&[(1, 0)]));
    assert_eq!(node.asked(1, 0, A), [(1, FREE)]);
    node.asked(2, 1, B);
    node.down(0, &[(1, AttemptProgress::BegunBeside), (2, AttemptProgress::Waiting)]);
    let up = seats_of(&node.step(Event::Up { gpu: gpu(0), incarnation: Incarnation(2) }));
    assert_eq!(up.len(), 1, "{up:?}");
    assert!(up[0].1 < FREE, "{up:?}");
    assert_eq!(node.asked(3, 0, A), [], "nobody runs beside a suspect");
    let first = up[0].0;
    let next = seats_of(&node.ended(0, first, 5));
    assert!(next.contains(&(3, FREE)) || first == 2, "{next:?}");
}

#[test]
fn a_slice_keeps_a_copy_of_the_model_on_its_gpu() {
    let mut node = sliced_node(2);
    let kept = |actions: &[Action], gpu: u32, model: ModelId, keep: bool| {
        actions.contains(&Action::SetWarmCopy { gpu: GpuIndex(gpu), model, kept: keep })
    };
    let set = node.step(slices(0, A, Some(&[(1, 1)])));
    assert!(kept(&set, 1, A, true) && set.contains(&Action::Prefetch { gpu: gpu(1), model: A }), "{set:?}");
    let moved = node.step(slices(0, A, Some(&[(2, 0)])));
    assert!(kept(&moved, 1, A, false) && kept(&moved, 0, A, true), "{moved:?}");
    let second = node.step(slices(1, A, Some(&[(3, 1)])));
    assert!(kept(&second, 1, A, true), "{second:?}");
    let gone = node.step(slices(0, A, None));
    assert!(
        kept(&gone, 0, A, false) && !kept(&gone, 1, A, false),
        "the other function's copy stays: {gone:?}"
    );
}

#[derive(Debug, Clone)]
enum Step {
    Enqueue { function: u32 },
    Withdraw(usize),
    End(usize),
    Down(u32),
    Up(u32),
    Slices { function: u32, on: Option<Vec<u32>> },
    Open(u32),
    Change(bool),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..3u32).prop_map(|function| Step::Enqueue { function }),
        1 => any::<usize>().prop_map(Step::Withdraw),
        6 => any::<usize>().prop_map(Step::End),
        1 => (0..2u32).prop_map(Step::Down),
        2 => (0..2u32).prop_map(Step::Up),
        3 => (0..3u32, prop::option::of(prop::collection::vec(0..2u32, 0..4)))
            .prop_map(|(function, on)| Step::Slices { function, on }),
        1 => (1..=FREE).prop_map(Step::Open),
        1 => any::<bool>().prop_map(Step::Change),
    ]
}

const MODELS: [ModelId; 3] = [A, B, LARGE];

proptest! {
    /// Requests of functions with slices are on seats of their slices alone, and no slice idles while
    /// its function's requests wait.
    #[test]
    fn slices_serve_their_functions_alone_and_never_idle(
        policy in super::properties::policy(),
        steps in prop::collection::vec(step(), 1..200),
    ) {
        prop_assume!(!policy.binds_early());
        let mut node = node_of(&config(policy, 2, FREE));
        let mut world = World { up: (0..2).collect(), seats_each: FREE, slice_seats: SLICED, open_each: FREE, ..World::default() };
        let mut own: [Option<Vec<(u64, u32)>>; 3] = Default::default();
        let mut functions = BTreeMap::new();
        let mut next_key = 0;
        let mut next_slice = 0;
        for step in steps {
            node.now = node.now + Duration::from_micros(150);
            let actions = match step {
                Step::Enqueue { function } => {
                    next_key += 1;
                    world.waiting.insert(RequestKey(next_key));
                    functions.insert(RequestKey(next_key), function);
                    node.ask(next_key, function, MODELS[function as usize])
                }
                Step::Withdraw(number) => world.withdraw(number).map(|event| node.step(event)).unwrap_or_default(),
                Step::End(number) => world.end(number).map(|event| node.step(event)).unwrap_or_default(),
                Step::Down(index) => node.step(world.lose(index, AttemptProgress::Begun)),
                Step::Up(index) => world.revive(index).map(|event| node.step(event)).unwrap_or_default(),
                Step::Slices { function, on } => {
                    let on = on.map(|gpus| gpus.into_iter().map(|gpu| { next_slice += 1; (next_slice, gpu) }).collect::<Vec<_>>());
                    // A part of the slices stands.
                    let stands = own[function as usize].take().unwrap_or_default().into_iter().step_by(2);
                    let on = on.map(|new| stands.chain(new).take(3).collect::<Vec<_>>());
                    own[function as usize].clone_from(&on);
                    node.step(slices(function, MODELS[function as usize], on.as_deref()))
                }
                Step::Open(open) => {
                    world.open_each = open;
                    node.step(Event::SeatsOpened { seats: NonZeroU32::new(open).unwrap() })
                }
                Step::Change(fifo) => {
                    let policy = if fifo { PolicyConfig::Fifo } else { PolicyConfig::Unified(crate::dispatch::config::UNIFIED) };
                    node.step(Event::PolicyChanged { policy, eviction: Eviction::Lru, functions: Vec::new() })
                }
            };
            world.take(&actions);
            for action in &actions {
                let Action::Assign { seat, key, attempt, .. } = *action else { continue };
                let function = functions[&key] as usize;
                match node.dispatch.slice_on(seat) {
                    Some(SliceId(id)) => {
                        let has = own[function].iter().flatten().any(|&(own, _)| own == id);
                        prop_assert!(has, "{key} of function {function} is on slice {id}");
                        let here = world.on.keys().filter(|key| world.seats[key] == seat).count();
                        prop_assert_eq!(here, 1);
                    }
                    None => prop_assert!(own[function].is_none() || attempt > 1, "{key} is on {seat}"),
                }
            }
            prop_assert_eq!(node.dispatch.queued(), world.waiting.len());
            prop_assert_eq!(node.dispatch.in_flight(), world.waiting.len() + world.on.len());
            let waits = |function: &u32| {
                let mut own = world.waiting.iter().filter(|key| functions[key] == *function);
                own.any(|key| !world.suspects.contains(key) && !world.deaths_alone.contains_key(key))
            };
            for function in (0..3u32).filter(|&function| own[function as usize].is_some()).filter(waits) {
                let seats = (0..2 * EACH).map(SeatIndex);
                let of_function = |seat: &SeatIndex| {
                    let slice = node.dispatch.slice_on(*seat);
                    slice.is_some_and(|id| own[function as usize].iter().flatten().any(|&(own, _)| own == id.0))
                };
                let free = seats.filter(of_function).find(|&seat| node.dispatch.fleet.is_free_slice_seat(seat));
                prop_assert_eq!(free, None, "requests of function {} wait", function);
            }
        }
        for function in 0..3u32 {
            world.take(&node.step(slices(function, MODELS[function as usize], None)));
        }
        for index in 0..2 {
            if let Some(event) = world.revive(index) {
                world.take(&node.step(event));
            }
        }
        while let Some(event) = world.end(0) {
            world.take(&node.step(event));
        }
        prop_assert_eq!((node.dispatch.in_flight(), world.waiting.len(), world.pinned.len()), (0, 0, 0));
        let seats_for_slices = node.dispatch.fleet.get(gpu(0)).seats().len();
        prop_assert!(seats_for_slices <= FREE as usize, "seats that are not in use cost nothing");
    }
}
