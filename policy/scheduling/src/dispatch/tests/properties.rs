//! Properties of every policy under random events, with one seat or several on each GPU: no request
//! is lost, no request runs twice or on two seats, and no open seat idles while a request waits. The
//! number of open seats changes at random, and no request comes to a closed seat.

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
    OpenSeats(NonZeroU32),
    Pass,
}

impl Step {
    /// Returns the time from the step before.
    fn elapsed(self) -> Duration {
        let pause = if matches!(self, Self::Pass) { Duration::from_secs(30) } else { Duration::ZERO };
        Duration::from_micros(150) + pause
    }
}

/// Returns a number of open seats: of up to 16 seats, all are open in some cases.
pub(super) fn open_seats() -> impl Strategy<Value = NonZeroU32> {
    let count = |seats| NonZeroU32::new(seats).unwrap_or(NonZeroU32::MIN);
    prop_oneof![2 => Just(NonZeroU32::MIN), 3 => (2..=16u32).prop_map(count), 1 => Just(NonZeroU32::MAX)]
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
        2 => open_seats().prop_map(Step::OpenSeats),
        1 => Just(Step::Pass),
    ]
}

fn policy() -> impl Strategy<Value = PolicyConfig> {
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
    /// Number of seats of each GPU; 0 counts as one.
    pub(super) seats_each: u32,
    /// Number of each GPU's open seats; `None` if all are open.
    pub(super) open: Option<NonZeroU32>,
    /// Number of requests so far.
    pub(super) enqueued: u64,
    pub(super) scores: [SloCounts; 3],
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
                    assert_eq!(seat.0 / self.seats_each.max(1), gpu.0, "{seat} is not on {gpu}");
                    assert!(self.is_open(seat), "{seat} is closed");
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
                Action::SetEvictionRank { gpu, model, standing } => {
                    self.copies.insert((gpu, model), standing.copy);
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

    fn is_open(&self, seat: SeatIndex) -> bool {
        self.open.is_none_or(|open| seat.0 % self.seats_each.max(1) < open.get())
    }

    /// Whether an open seat of a GPU has no request.
    fn has_idle_seat(&self, index: u32) -> bool {
        let seats = self.seats_each.max(1);
        let open = self.open.map_or(seats, |open| open.get().min(seats));
        let busy = self.busy_seats(index).into_iter().filter(|&seat| self.is_open(seat));
        busy.count() < open as usize
    }

    /// Returns the seats of a GPU that have requests.
    fn busy_seats(&self, index: u32) -> BTreeSet<SeatIndex> {
        let on = self.on.iter().filter(|(_, on)| on.0 == index);
        on.map(|(key, _)| self.seats[key]).collect()
    }

    /// Changes the number of open seats.
    pub(super) fn open_seats(&mut self, seats: NonZeroU32) -> Event {
        self.open = Some(seats);
        Event::SeatsOpened { seats }
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
        let seats = self.busy_seats(index).len();
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

    /// Returns the event of a step, if the step is possible now. With `levels`, requests have different
    /// priorities.
    fn event(&mut self, step: Step, levels: bool) -> Option<Event> {
        let inputs = |data: Option<(u32, u32)>| {
            InputLocations::of(data.map(|(gpu, mib)| (GpuIndex(gpu), Bytes::mib(mib.into()))))
        };
        Some(match step {
            Step::Enqueue { model, data } => {
                self.enqueued += 1;
                let key = RequestKey(self.enqueued);
                self.waiting.insert(key);
                let attempts = AttemptRecord::new(3, Idempotence::Yes);
                let level = if levels { 1 + self.enqueued % 3 * 3 } else { 0 };
                let priority = Priority::new(level).unwrap_or_default();
                let function = FunctionIndex(model);
                let model = ModelId(model);
                let inputs = inputs(data);
                Event::Enqueue(QueuedRequest { key, function, model, attempts, priority, inputs })
            }
            Step::Withdraw(number) => self.withdraw(number)?,
            Step::End(number) => self.end(number)?,
            Step::GiveBack(number) => {
                let (key, gpu) = self.pick(number)?;
                self.on.remove(&key);
                self.waiting.insert(key);
                Event::RequestReturned { gpu, key, why: ReturnReason::Failed(AttemptProgress::Preparing) }
            }
            Step::Down(index) => self.lose(index, AttemptProgress::Begun),
            Step::Up(index) => self.revive(index)?,
            Step::Loaded(number) => {
                let (_, gpu) = self.pick(number)?;
                Event::ModelLoaded { gpu, model: ModelId(number as u32 % 3), from: None }
            }
            Step::Evict { gpu, model } => {
                Event::ModelsEvicted { gpu: GpuIndex(gpu), models: vec![ModelId(model)] }
            }
            Step::Score { model, in_time } => {
                let counts = &mut self.scores[model as usize];
                *counts = counts.plus(SloCounts { m: u64::from(in_time), n: 1 });
                Event::SloCountsChanged { function: FunctionIndex(model), counts: *counts }
            }
            Step::Move { key, data } => Event::InputsMoved { key: RequestKey(key), inputs: inputs(data) },
            Step::OpenSeats(seats) => self.open_seats(seats),
            Step::Pass => Event::Tick,
        })
    }

    /// Brings up a GPU that was lost.
    pub(super) fn revive(&mut self, index: u32) -> Option<Event> {
        let event = Event::Up { gpu: gpu(index), incarnation: Incarnation(1) };
        self.up.insert(index).then_some(event)
    }
}

/// Returns a node of a small GPU and two large GPUs, and of three functions with objectives.
fn random_node(policy: PolicyConfig, seats: u32, open: NonZeroU32, together: bool) -> Node {
    let seats = NonZeroU32::new(seats).unwrap_or(NonZeroU32::MIN);
    let sizes = [16, 64, 64]
        .map(|mib| GpuConfig { seats, ..GpuConfig::new(Bytes::mib(mib), BytesPerSec(1_000_000_000)) });
    let peer =
        |(a, b, mb): (u32, u32, u64)| PeerLink { a: gpu(a), b: gpu(b), rate: BytesPerSec(mb * 1_000_000) };
    let config = Config {
        peers: [(0, 1, 500), (1, 2, 4000), (0, 2, 8000)].map(peer).to_vec(),
        ways: both_ways(0, 1, BytesPerSec::gb(4)).to_vec(),
        ..Config::new(sizes.to_vec(), 4).with_policy(policy, 1).with_open_seats(open)
    };
    let mut node = node_of(&config.with_eviction(Eviction::Torpor));
    for model in 0..3 {
        let objective = LatencyObjective::from_billionths(900_000_000 - model * 100_000_000);
        // The third function has no deadline.
        let within =
            |objective: LatencyObjective| objective.within(Duration::from_millis(2)).together(together);
        let objective = if model < 2 { objective.map(within) } else { objective };
        node.step(Event::Objective { function: FunctionIndex(model), objective });
    }
    node
}

proptest! {
    #[test]
    fn no_request_is_lost_or_doubled_and_no_seat_idles_while_requests_wait(
        policy in policy(),
        levels in any::<bool>(),
        together in any::<bool>(),
        kept in prop::collection::vec(0..4u32, 3),
        seats in prop_oneof![1 => Just(1), 1 => 2..=16u32],
        open in open_seats(),
        steps in prop::collection::vec(step(), 1..200)
    ) {
        let mut node = random_node(policy, seats, open, together);
        let mut world = World { up: (0..3).collect(), seats_each: seats, open: Some(open), ..World::default() };
        for (model, &copies) in (0..).map(ModelId).zip(&kept) {
            world.take(&node.step(Event::WarmCopiesRequired { model, copies }));
        }
        for step in steps {
            node.now = node.now + step.elapsed();
            let Some(event) = world.event(step, levels) else { continue };
            let queued = shared_queue(&node.dispatch);
            let actions = node.step(event);
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
            prop_assert_eq!(node.dispatch.queued(), world.waiting.len());
            prop_assert_eq!(node.dispatch.in_flight(), world.waiting.len() + world.on.len());
            let accepts = |index: u32| node.dispatch.fleet.get(gpu(index)).accepts_requests();
            let large_idle =
                world.up.iter().any(|&index| index > 0 && accepts(index) && world.has_idle_seat(index));
            let waits = !shared_queue(&node.dispatch).is_empty();
            prop_assert!(policy.binds_early() || !large_idle || !waits, "a seat idles while a request waits");
        }
        prop_assert!(node.dispatch.stats().overtaken_max <= lalb::limit(policy).unwrap_or(0));
        // All requests are answered once every GPU is up and no more events interfere.
        for index in 0..3 {
            if let Some(event) = world.revive(index) {
                world.take(&node.step(event));
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
            world.take(&node.step(event));
        }
        prop_assert_eq!((node.dispatch.in_flight(), world.waiting.len(), world.pinned.len()), (0, 0, 0));
        prop_assert!(node.dispatch.inputs.is_empty());
    }

    /// A GPU with a single open seat costs as much as a GPU with a single seat, and gets the same
    /// requests.
    #[test]
    fn gpus_with_one_open_seat_of_several_act_as_gpus_with_one_seat(
        policy in policy(),
        levels in any::<bool>(),
        together in any::<bool>(),
        // A GPU with more seats lets fewer requests wait behind each.
        seats in 2..=8u32,
        steps in prop::collection::vec(step(), 1..200)
    ) {
        let one_seat = |action: Action| match action {
            Action::Assign { gpu, key, model, incarnation, attempt, from, .. } => {
                Action::Assign { gpu, seat: SeatIndex(gpu.0), key, model, incarnation, attempt, from }
            }
            action => action,
        };
        let mut shareable = random_node(policy, seats, NonZeroU32::MIN, together);
        let mut single = random_node(policy, 1, NonZeroU32::MIN, together);
        let mut world = World { up: (0..3).collect(), ..World::default() };
        for step in steps {
            single.now = single.now + step.elapsed();
            shareable.now = single.now;
            if matches!(step, Step::OpenSeats(_)) {
                continue;
            }
            let Some(event) = world.event(step, levels) else { continue };
            let expected = single.step(event.clone());
            let actions: Vec<_> = shareable.step(event).into_iter().map(one_seat).collect();
            prop_assert_eq!(&actions, &expected);
            prop_assert_eq!(shareable.dispatch.next_wake(), single.dispatch.next_wake());
            world.take(&expected);
            let examined = shareable.dispatch.fleet.all_seats().count();
            prop_assert_eq!(examined, 3, "an event examines one seat of each GPU");
        }
        prop_assert_eq!(shareable.dispatch.stats(), single.dispatch.stats());
    }
}
