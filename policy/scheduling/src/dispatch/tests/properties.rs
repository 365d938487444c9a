//! Properties of every policy under random events, with one seat or several on each GPU: no request
//! is lost, no request runs twice or on two seats, and no seat idles while a request waits.

use std::num::NonZeroU32;

use super::*;
use crate::dispatch::config::UNIFIED;
use millrace_core::attempts::{DEATHS_MAX, ReturnReason};
use millrace_core::{GPU_REQUESTS_MAX, SLOTS_MAX};
use millrace_memory::eviction::CopyKind;

/// Next step of a random node; numbers are taken modulo the number of candidates.
#[derive(Debug, Clone, Copy)]
enum Step {
    Enqueue { model: u32, data: Option<(u32, u32)> },
    Withdraw(usize),
    End(usize),
    GiveBack(usize),
    Down(u32),
    Up(u32),
    Loaded(usize),
    Evict { gpu: u32, model: u32 },
    Score { model: u32, in_time: bool },
    Move { key: u64, data: Option<(u32, u32)> },
    OpenSeats(u32),
    Pass,
}

fn step() -> impl Strategy<Value = Step> {
    // The GPU that has the inputs, and their size in MiB.
    let data = || prop::option::of((0..3u32, 1..40u32));
    prop_oneof![
        8 => (0..3u32, data()).prop_map(|(model, data)| Step::Enqueue { model, data }),
        2 => any::<usize>().prop_map(Step::Withdraw),
        8 => any::<usize>().prop_map(Step::End),
        1 => any::<usize>().prop_map(Step::GiveBack),
        1 => (0..3u32).prop_map(Step::Down),
        3 => (0..3u32).prop_map(Step::Up),
        2 => any::<usize>().prop_map(Step::Loaded),
        2 => (0..3u32, 0..3u32).prop_map(|(gpu, model)| Step::Evict { gpu, model }),
        2 => (0..3u32, any::<bool>()).prop_map(|(model, in_time)| Step::Score { model, in_time }),
        2 => (0..60u64, data()).prop_map(|(key, data)| Step::Move { key, data }),
        2 => (1..=20u32).prop_map(Step::OpenSeats),
        1 => Just(Step::Pass),
    ]
}

pub(super) fn policy() -> impl Strategy<Value = PolicyConfig> {
    let limits = [1, 3].map(|overtakes_max| PolicyConfig::Lalb { overtakes_max });
    let unified = [0, 2].map(|overtakes_max| {
        let free_overtakes_max = overtakes_max.min(1);
        let limits = UnifiedConfig { overtakes_max, free_overtakes_max, ..UNIFIED };
        PolicyConfig::Unified(UnifiedConfig { aged_every: 1, ..limits })
    });
    let bound =
        [BindingLifetime::ForGood, BindingLifetime::KeepAlive(Duration::from_millis(1))].map(|binding| {
            let runtime = Bytes::mib(4);
            let cold_start = Duration::from_micros(700);
            PolicyConfig::Bound(BoundConfig { binding, runtime, cold_start })
        });
    let artifact =
        TorporConfig { alpha: AlphaRule::Artifact, counts: ScoreWindow::Last(8), ..TorporConfig::default() };
    let arrival = TorporConfig { order: TorporOrder::Arrival, ..TorporConfig::default() };
    let others = [artifact, arrival].map(PolicyConfig::Torpor);
    let named = POLICIES.map(|(_, policy)| policy);
    prop::sample::select([&named[..], &limits, &others, &unified, &bound].concat())
}

/// State around the dispatcher, as its actions imply: the requests on each GPU, the pins and the
/// copies.
#[derive(Default)]
pub(super) struct World {
    pub(super) waiting: BTreeSet<RequestKey>,
    pub(super) on: BTreeMap<RequestKey, GpuIndex>,
    /// Seat of each request that is on a GPU; may list requests that have left.
    pub(super) seats: BTreeMap<RequestKey, SeatIndex>,
    /// Times that a GPU was lost while a request was on its only busy seat.
    pub(super) deaths_alone: BTreeMap<RequestKey, u32>,
    /// Number of seats of each GPU; 0 counts as 1.
    pub(super) seats_each: u32,
    /// Number of seats for slices of each GPU, behind the others.
    pub(super) slice_seats: u32,
    /// Number of open seats of each GPU, at most [`Self::seats_each`]; 0 counts as 1.
    pub(super) open_each: u32,
    /// Requests that were on a GPU when that GPU was lost.
    pub(super) suspects: BTreeSet<RequestKey>,
    pub(super) up: BTreeSet<u32>,
    pub(super) pinned: BTreeSet<(GpuIndex, ModelId)>,
    pub(super) kept: BTreeSet<(GpuIndex, ModelId)>,
    /// Kind of each GPU's copy of a model, as last sent.
    pub(super) copies: BTreeMap<(GpuIndex, ModelId), CopyKind>,
}

impl World {
    pub(super) fn take(&mut self, actions: &[Action]) {
        for &action in actions {
            match action {
                Action::Assign { gpu, seat, key, attempt, .. } => {
                    assert!(self.waiting.remove(&key), "{key} was given out twice");
                    assert!(self.up.contains(&gpu.0), "{gpu} is down");
                    let seats_each = self.seats_each.max(1);
                    let all_each = seats_each + self.slice_seats;
                    assert_eq!(seat.0 / all_each, gpu.0, "{seat} is not on {gpu}");
                    let number = seat.0 % all_each;
                    assert!(number < self.open_each.max(1) || number >= seats_each, "{seat} is closed");
                    self.on.insert(key, gpu);
                    self.seats.insert(key, seat);
                    let on_gpu = self.on.values().filter(|&&on| on == gpu).count();
                    assert!(on_gpu <= GPU_REQUESTS_MAX, "{gpu} has {on_gpu} requests");
                    let here: Vec<_> = self.on.keys().filter(|key| self.seats[key] == seat).collect();
                    assert!(here.len() <= SLOTS_MAX, "{seat} has {here:?}");
                    if attempt > 1 {
                        self.suspects.insert(key);
                    }
                    let suspect = self.on.iter().any(|(key, on)| *on == gpu && self.suspects.contains(key));
                    assert!(!suspect || on_gpu == 1, "{gpu} has a suspect and {on_gpu} requests");
                }
                Action::SetWarmCopy { gpu, model, kept } => {
                    let changed =
                        if kept { self.kept.insert((gpu, model)) } else { self.kept.remove(&(gpu, model)) };
                    assert!(changed, "{model} on {gpu}: {kept} twice");
                }
                Action::Prefetch { gpu, .. } | Action::Prewarm { gpu, .. } => {
                    assert!(self.up.contains(&gpu.0), "{gpu} is down");
                }
                Action::SetEvictionRank { gpu, model, candidate } => {
                    self.copies.insert((gpu, model), candidate.copy);
                }
                Action::Pin { gpu, model } => assert!(self.pinned.insert((gpu, model)), "pinned twice"),
                Action::Unpin { gpu, model } => assert!(self.pinned.remove(&(gpu, model)), "was not pinned"),
                Action::Fail { key, reason, .. } => {
                    assert!(self.waiting.remove(&key), "{key} failed after its end");
                    let blamed = reason == Reason::Quarantined;
                    assert!(!blamed || self.deaths_alone[&key] >= DEATHS_MAX, "{key} is blamed for others");
                }
                Action::Cancel { gpu, key } | Action::Recall { gpu, key } => {
                    assert_eq!(self.on.get(&key), Some(&gpu));
                }
            }
        }
    }

    /// T24: of all holders of a model, exactly one has the original.
    fn check_originals(&self, dispatch: &Dispatcher) {
        for model in [A, B, LARGE] {
            let Some(slot) = dispatch.models.slot(model) else { continue };
            let holders = &dispatch.models.get(slot).holders;
            let originals = holders.iter().filter(|&gpu| self.copies[&(gpu, model)] == CopyKind::Original);
            assert_eq!(originals.count(), usize::from(!holders.is_empty()), "{model} on {holders:?}");
        }
    }

    /// Whether an open seat of a GPU has no request.
    fn has_idle_seat(&self, index: u32) -> bool {
        let first = index * self.seats_each.max(1);
        let busy: BTreeSet<SeatIndex> = self.on.keys().map(|key| self.seats[key]).collect();
        (first..first + self.open_each.max(1)).any(|seat| !busy.contains(&SeatIndex(seat)))
    }

    fn busy_seats(&self, index: u32) -> usize {
        let on = self.on.iter().filter(|(_, on)| on.0 == index);
        on.map(|(key, _)| self.seats[key]).collect::<BTreeSet<SeatIndex>>().len()
    }

    pub(super) fn pick(&self, number: usize) -> Option<(RequestKey, GpuIndex)> {
        let (&key, &gpu) = self.on.iter().nth(number % self.on.len().max(1))?;
        Some((key, gpu))
    }

    /// Withdraws a waiting request.
    pub(super) fn withdraw(&mut self, number: usize) -> Option<Event> {
        let key = *self.waiting.iter().nth(number % self.waiting.len().max(1))?;
        self.waiting.remove(&key);
        Some(Event::Withdraw { key })
    }

    /// Ends a run.
    pub(super) fn end(&mut self, number: usize) -> Option<Event> {
        let (key, gpu) = self.pick(number)?;
        self.on.remove(&key);
        // From microseconds, so that many requests are assigned to one GPU, to milliseconds.
        let ran = Duration::from_micros(1 << (number % 15));
        Some(Event::RequestEnded { gpu, key, ran: Some(ran) })
    }

    /// Loses a GPU; all requests on it have the given progress and wait again. Requests that had begun
    /// on several seats had begun beside each other.
    pub(super) fn lose(&mut self, index: u32, progress: AttemptProgress) -> Event {
        let seats = self.busy_seats(index);
        let began = progress == AttemptProgress::Begun;
        let progress = if began { AttemptProgress::begun(seats) } else { progress };
        self.up.remove(&index);
        let lost: Vec<_> = self.on.iter().filter(|(_, on)| on.0 == index).map(|(&key, _)| key).collect();
        for key in &lost {
            self.on.remove(key);
            self.waiting.insert(*key);
            *self.deaths_alone.entry(*key).or_default() += u32::from(seats == 1);
        }
        let lost = lost.into_iter().map(|key| (key, progress)).collect();
        Event::Down { gpu: gpu(index), lost }
    }

    /// Brings up a GPU that was lost.
    pub(super) fn revive(&mut self, index: u32) -> Option<Event> {
        let event = Event::Up { gpu: gpu(index), incarnation: Incarnation(1) };
        self.up.insert(index).then_some(event)
    }
}

/// Number of seats of each GPU of the twin node, with which a single seat is open.
const TWIN_SEATS: u32 = 8;

/// Sends an event to a node of GPUs with a single seat, and to its twin, if any: a node of GPUs with a
/// single open seat. Asserts that both return the same actions, apart from the numbers of the seats.
fn step_both(node: &mut Node, twin: Option<&mut Node>, event: Event) -> Vec<Action> {
    let expected = twin.map(|twin| {
        twin.now = node.now;
        // More seats would open on the twin alone.
        let opens = matches!(event, Event::SeatsOpened { .. });
        twin.step(if opens { Event::Tick } else { event.clone() })
    });
    let actions = node.step(event);
    if let Some(mut expected) = expected {
        for action in &mut expected {
            if let Action::Assign { seat, .. } = action {
                assert_eq!(seat.0 % TWIN_SEATS, 0, "{seat} is closed");
                seat.0 /= TWIN_SEATS;
            }
        }
        assert_eq!(expected, actions);
    }
    actions
}

proptest! {
    #[test]
    fn no_request_is_lost_or_doubled_and_no_seat_idles_while_requests_wait(
        policy in policy(),
        levels in any::<bool>(),
        together in any::<bool>(),
        kept in prop::collection::vec(0..4u32, 3),
        seats in prop_oneof![2 => Just(1), 2 => 2..=16u32],
        open in prop_oneof![1 => Just(u32::MAX), 1 => 1..=16u32],
        twin in any::<bool>(),
        steps in prop::collection::vec(step(), 1..200)
    ) {
        let each = NonZeroU32::new(seats).unwrap_or(NonZeroU32::MIN);
        let sizes = [16, 64, 64].map(|mib| GpuConfig {
            seats: each,
            ..GpuConfig::new(Bytes::mib(mib), BytesPerSec(1_000_000_000))
        });
        let peer = |(a, b, mb): (u32, u32, u64)| PeerLink { a: gpu(a), b: gpu(b), rate: BytesPerSec(mb * 1_000_000) };
        let config = Config {
            peers: [(0, 1, 500), (1, 2, 4000), (0, 2, 8000)].map(peer).to_vec(),
            ways: both_ways(0, 1, BytesPerSec::gb(4)).to_vec(),
            ..Config::new(sizes.to_vec(), 4).with_policy(policy, 1)
        };
        let config = config.with_eviction(Eviction::Torpor);
        let config = config.with_open_seats(NonZeroU32::new(open).unwrap_or(NonZeroU32::MIN));
        // GPUs with a single open seat get the same decisions as GPUs with a single seat.
        let mut twin = (twin && seats == 1).then(|| {
            let seats = NonZeroU32::new(TWIN_SEATS).unwrap_or(NonZeroU32::MIN);
            let gpus = config.gpus.iter().map(|&gpu| GpuConfig { seats, ..gpu }).collect();
            node_of(&Config { gpus, ..config.clone() }.with_open_seats(NonZeroU32::MIN))
        });
        let mut node = node_of(&config);
        for model in 0..3 {
            let objective = LatencyObjective::from_billionths(900_000_000 - model * 100_000_000);
            // The third function has no deadline.
            let within = |objective: LatencyObjective| objective.within(Duration::from_millis(2)).together(together);
            let objective = if model < 2 { objective.map(within) } else { objective };
            let event = Event::Objective { function: FunctionIndex(model), objective };
            step_both(&mut node, twin.as_mut(), event);
        }
        let mut world =
            World { up: (0..3).collect(), seats_each: seats, open_each: open.min(seats), ..World::default() };
        for (model, &copies) in (0..).map(ModelId).zip(&kept) {
            world.take(&step_both(&mut node, twin.as_mut(), Event::WarmCopiesRequired { model, copies }));
        }
        let mut scores = [SloCounts::default(); 3];
        let mut next_key = 0;
        for step in steps {
            node.now = node.now + Duration::from_micros(150);
            let event = match step {
                Step::Enqueue { model, data } => {
                    next_key += 1;
                    let key = RequestKey(next_key);
                    world.waiting.insert(key);
                    let attempts = AttemptRecord::new(3, Idempotence::Yes);
                    let level = if levels { 1 + next_key % 3 * 3 } else { 0 };
                    let priority = Priority::new(level).unwrap_or_default();
                    let function = FunctionIndex(model);
                    let model = ModelId(model);
                    let data = data.map(|(gpu, mib)| (GpuIndex(gpu), Bytes::mib(mib.into())));
                    Event::Enqueue(QueuedRequest { key, function, model, attempts, priority, inputs: InputLocations::of(data) })
                }
                Step::Withdraw(number) => {
                    let Some(event) = world.withdraw(number) else { continue };
                    event
                }
                Step::End(number) => {
                    let Some(event) = world.end(number) else { continue };
                    event
                }
                Step::GiveBack(number) => {
                    let Some((key, gpu)) = world.pick(number) else { continue };
                    world.on.remove(&key);
                    world.waiting.insert(key);
                    Event::RequestReturned { gpu, key, why: ReturnReason::Failed(AttemptProgress::Preparing) }
                }
                Step::Down(index) => world.lose(index, AttemptProgress::Begun),
                Step::Up(index) => {
                    let Some(event) = world.revive(index) else { continue };
                    event
                }
                Step::Loaded(number) => {
                    let Some((_, gpu)) = world.pick(number) else { continue };
                    Event::ModelLoaded { gpu, model: ModelId(number as u32 % 3), from: None }
                }
                Step::Evict { gpu, model } => {
                    Event::ModelsEvicted { gpu: GpuIndex(gpu), models: vec![ModelId(model)] }
                }
                Step::Score { model, in_time } => {
                    let counts = &mut scores[model as usize];
                    *counts = counts.plus(SloCounts { m: u64::from(in_time), n: 1 });
                    Event::SloCountsChanged { function: FunctionIndex(model), counts: *counts }
                }
                Step::Move { key, data } => {
                    let data = data.map(|(gpu, mib)| (GpuIndex(gpu), Bytes::mib(mib.into())));
                    Event::InputsMoved { key: RequestKey(key), inputs: InputLocations::of(data) }
                }
                Step::OpenSeats(open) => {
                    world.open_each = open.min(seats);
                    Event::SeatsOpened { seats: NonZeroU32::new(open).unwrap_or(NonZeroU32::MIN) }
                }
                Step::Pass => {
                    node.now = node.now + Duration::from_secs(30);
                    Event::Tick
                }
            };
            let queued = shared_queue(&node.dispatch);
            let actions = step_both(&mut node, twin.as_mut(), event);
            world.take(&actions);
            world.check_originals(&node.dispatch);
            for (model, &copies) in (0..).map(ModelId).zip(&kept) {
                let on = world.kept.iter().filter(|(_, on)| *on == model).count();
                prop_assert!(on <= copies as usize, "{on} copies of {model} are kept");
            }
            if !levels {
                lalb::check_order(policy, &queued, &node.dispatch);
            }
            glance::check(&node.dispatch, node.now);
            if let Some(twin) = &twin {
                let gpus = (0..3).map(gpu);
                prop_assert!(gpus.clone().all(|gpu| twin.dispatch.fleet.get(gpu).seats().len() == 1));
                prop_assert_eq!(twin.dispatch.next_wake(), node.dispatch.next_wake());
            }
            prop_assert_eq!(node.dispatch.queued(), world.waiting.len());
            prop_assert_eq!(node.dispatch.in_flight(), world.waiting.len() + world.on.len());
            let takes = |index: u32| !node.dispatch.fleet.get(gpu(index)).held_for_suspect;
            let large_idle =
                world.up.iter().any(|&index| index > 0 && takes(index) && world.has_idle_seat(index));
            let waits = !shared_queue(&node.dispatch).is_empty();
            prop_assert!(policy.binds_early() || !large_idle || !waits, "a seat idles while a request waits");
        }
        prop_assert!(node.dispatch.stats().overtaken_max <= lalb::limit(policy).unwrap_or(0));
        // All requests are answered once every GPU is up and no more events interfere.
        for index in 0..3 {
            if let Some(event) = world.revive(index) {
                world.take(&step_both(&mut node, twin.as_mut(), event));
            }
        }
        loop {
            let event = match (world.pick(0), node.dispatch.next_wake()) {
                (Some((key, gpu)), _) => {
                    world.on.remove(&key);
                    Event::RequestEnded { gpu, key, ran: Some(Duration::from_millis(1)) }
                }
                // A cold start, or a keep-alive time that still holds the memory.
                (None, Some(at)) if !world.waiting.is_empty() => {
                    node.now = node.now.max(at);
                    Event::Tick
                }
                (None, _) => break,
            };
            world.take(&step_both(&mut node, twin.as_mut(), event));
        }
        prop_assert_eq!((node.dispatch.in_flight(), world.waiting.len(), world.pinned.len()), (0, 0, 0));
        prop_assert!(node.dispatch.inputs.is_empty());
    }
}
