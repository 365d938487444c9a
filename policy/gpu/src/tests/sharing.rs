//! Tests of a shared GPU: seats launch under tokens, on SMs that no other seat has at the same time.

use millrace_slices::gate::{GateEvent, LaunchPermit, SeatGate, SeatToken};
use millrace_slices::tokens::TokenId;
use millrace_types::profile::TrialSetting;
use millrace_types::{ComputeCurve, Permille, SliceCompute, SliceId, SmShare, Terms, UnitSet};
use proptest::prelude::*;

use super::*;
use crate::executor_seat::{ExecutorSeat, RunTokens};
use crate::seat_tokens::SeatTokens;

const MS: u64 = 1_000_000;

fn block(first: u8, width: u8) -> SmShare {
    SmShare::Block(UnitSet::block(first, width).unwrap())
}

/// Returns a shared GPU that holds the models A, B and C.
fn shared() -> Bench {
    let mut bench = Bench::holding_three();
    assert_eq!(bench.step(Event::Sharing(Some(Config::SLICES))), []);
    bench
}

fn tokens_of(actions: &[Action]) -> Option<RunTokens> {
    actions.iter().find_map(|action| if let Action::Run { tokens, .. } = action { *tokens } else { None })
}

fn grants(actions: &[Action]) -> Vec<(ExecutorSeat, SmShare)> {
    let grant = |action: &Action| match action {
        Action::Grant { seat, token } => Some((*seat, token.on)),
        _ => None,
    };
    actions.iter().filter_map(grant).collect()
}

#[test]
fn a_run_alone_has_the_whole_gpu_and_sends_no_message() {
    let mut bench = shared();
    let actions = bench.assign(4, A);
    let RunTokens { anew: true, first: Some(first) } = tokens_of(&actions).unwrap() else {
        panic!("the run begins without a token: {actions:?}");
    };
    assert_eq!((first.on, first.busy), (block(0, 16), None));
    // The next run of the seat continues under the same token.
    let behind = bench.assign(5, A);
    assert_eq!(tokens_of(&behind), Some(RunTokens { anew: false, first: None }));
    assert!(grants(&bench.run_done(4, 100)).is_empty());
}

#[test]
fn a_second_run_shortens_the_token_of_the_first_and_both_get_half() {
    let mut bench = shared();
    let first = tokens_of(&bench.assign(4, A)).unwrap().first.unwrap();
    bench.now = Timestamp(bench.now.0 + 7 * MS);
    let actions = bench.assign_to(1, 5, B, None);
    assert_eq!(tokens_of(&actions), Some(RunTokens { anew: true, first: None }));
    let busy = Duration::from_millis(10);
    assert!(actions.contains(&Action::Shorten { seat: ExecutorSeat(0), token: first.token, busy }));
    let spent = Event::TokenSpent { seat: ExecutorSeat(0), token: first.token, busy, more: true };
    let granted = grants(&bench.step(spent));
    assert_eq!(granted.len(), 2, "{granted:?}");
    assert!(granted.iter().all(|(_, on)| on.units() == 8), "{granted:?}");
}

#[test]
fn a_seat_that_waits_for_weights_gives_its_sms_to_the_others() {
    let mut bench = shared();
    let first = tokens_of(&bench.assign(4, A)).unwrap().first.unwrap();
    bench.assign_to(1, 5, B, None);
    let busy = Duration::from_millis(1);
    let rests = Event::TokenSpent { seat: ExecutorSeat(0), token: first.token, busy, more: false };
    assert_eq!(grants(&bench.step(rests)), [(ExecutorSeat(1), block(0, 16))]);
    // The seat is not alone any longer.
    assert!(grants(&bench.step(Event::TokenAsked { seat: ExecutorSeat(0) })).is_empty());
}

#[test]
fn a_change_of_sharing_waits_for_the_runs_in_the_executor() {
    let mut bench = Bench::holding_three();
    bench.assign(4, A);
    bench.step(Event::Sharing(Some(Config::SLICES)));
    assert_eq!(tokens_of(&bench.assign_to(1, 5, B, None)), None, "the run waits");
    let actions = bench.run_done(4, 100);
    assert!(tokens_of(&actions).is_some(), "{actions:?}");
    bench.step(Event::Sharing(None));
    assert_eq!(bench.assign_to(1, 6, A, None), []);
    let actions = bench.run_done(5, 100);
    assert!(actions.iter().any(|it| matches!(it, Action::Run { tokens: None, .. })), "{actions:?}");
}

#[test]
fn a_run_beside_a_run_of_the_same_model_takes_memory_for_its_activations() {
    let mut bench = shared();
    let weights = Bytes::mib(4);
    let model = ModelId(9);
    bench.step(Event::Install { model, memory: Bytes::mib(10), weights });
    bench.assign(4, model);
    assert_eq!(bench.gpu.memory().data_blocks(), 0, "the region has room for the first run");
    bench.assign_to(1, 5, model, None);
    // The model has 5 blocks, 3 of them for activations.
    assert_eq!(bench.gpu.memory().data_blocks(), 3);
    bench.run_done(5, 100);
    assert_eq!(bench.gpu.memory().data_blocks(), 0);
}

fn slice_of(least: u16, request: u16, limit: u16) -> Terms {
    let share = |thousandths| Permille::new(thousandths).unwrap();
    Terms::new(share(least), share(least), share(request), share(limit)).unwrap()
}

impl Bench {
    fn set_slices(&mut self, slices: &[(u64, Terms)]) -> Vec<Action> {
        self.step(Event::Slices(
            slices.iter().map(|&(id, terms)| (SliceId(id), SliceCompute::unmeasured(terms))).collect(),
        ))
    }

    fn assign_slice(&mut self, seat: u32, key: u64, model: ModelId, slice: u64) -> Vec<Action> {
        self.step(Event::Assign {
            seat: SeatIndex(seat),
            key: RequestKey(key),
            model,
            incarnation: FIRST,
            from: None,
            deadline: None,
            right: ComputeRight::Slice(SliceId(slice)),
        })
    }
}

fn trial(units: u8, quota: u16) -> ComputeRight {
    ComputeRight::Trial(TrialSetting::new(units, Permille::new(quota).unwrap()).unwrap())
}

impl Bench {
    fn assign_trial(&mut self, seat: u32, key: u64, right: ComputeRight) -> Vec<Action> {
        self.step(Event::Assign {
            seat: SeatIndex(seat),
            key: RequestKey(key),
            model: A,
            incarnation: FIRST,
            from: None,
            deadline: None,
            right,
        })
    }

    /// Ends a run that computed for some time under its last token.
    fn done_under(&mut self, run: u64, token: TokenId, busy: Duration) -> Vec<Action> {
        let (zero, started) = (Duration::ZERO, self.now);
        self.now = self.now + busy;
        let token = Some((token, busy));
        let finished = self.now;
        self.step(Event::RunDone {
            run: RunId(run),
            started,
            finished,
            waited: zero,
            held: zero,
            sm: busy,
            token,
        })
    }
}

/// Returns the SMs of the request that completed.
fn used(actions: &[Action]) -> Option<SmUse> {
    actions.iter().find_map(|action| match action {
        Action::Completed { spent, .. } => Some(spent.on),
        _ => None,
    })?
}

#[test]
fn a_trial_has_the_sms_of_its_setting_also_on_the_seat_of_a_slice() {
    let mut bench = shared();
    bench.set_slices(&[(7, slice_of(500, 0, 1000))]);
    let (_, first) = first_token(&bench.assign_trial(8, 4, trial(4, 1000)));
    assert_eq!((first.on.units(), first.busy), (4, None));
    let ended = bench.done_under(4, first.token, Duration::from_millis(3));
    assert_eq!(used(&ended), Some(SmUse { sms: first.on, alone: true }));
    assert!(
        ended.contains(&Action::Ended { key: RequestKey(4), ran: None }),
        "nothing is learned: {ended:?}"
    );
    assert_eq!(bench.gpu.slice_uses(bench.now).count(), 1, "the trial is no slice");
    let (_, first) = first_token(&bench.assign_trial(8, 5, trial(16, 1000)));
    assert_eq!(first.on.units(), 16);
}

#[test]
fn a_trial_that_met_another_request_was_not_alone() {
    let mut bench = shared();
    let (_, first) = first_token(&bench.assign_trial(8, 4, trial(4, 1000)));
    bench.assign_to(1, 5, B, None);
    let ended = bench.done_under(4, first.token, Duration::from_millis(3));
    assert_eq!(used(&ended).map(|on| on.alone), Some(false), "{ended:?}");
}

#[test]
fn a_request_behind_a_trial_waits_for_terms_of_its_own() {
    let mut bench = shared();
    let (seat, first) = first_token(&bench.assign_trial(0, 4, trial(1, 1000)));
    assert_eq!(bench.assign_to(0, 5, A, None), [], "the seat has the terms of the trial");
    let actions = bench.done_under(4, first.token, Duration::from_millis(3));
    let (next, token) = first_token(&actions);
    assert_eq!((next, token.on.units()), (seat, 16));
}

/// Returns the seat of a run and its first token.
fn first_token(actions: &[Action]) -> (ExecutorSeat, SeatToken) {
    let run = actions.iter().find_map(|action| match action {
        Action::Run { seat, tokens: Some(RunTokens { first: Some(first), .. }), .. } => Some((*seat, *first)),
        _ => None,
    });
    run.expect("a run with a token")
}

#[test]
fn a_run_of_a_slice_has_the_sms_of_the_slice_and_ends_at_its_limit() {
    let mut bench = shared();
    bench.set_slices(&[(7, slice_of(120, 0, 500))]);
    let (seat, first) = first_token(&bench.assign_slice(8, 4, A, 7));
    assert_eq!(first.on.units(), 2, "12% are two of 16 units, although all others are free");
    let busy = first.busy.expect("a slice with a limit has no token without an end");
    assert!(busy <= Duration::from_secs(1), "{busy:?}");
    // The bucket of half a second is empty then, and the seat waits for the time that it owes.
    bench.now = Timestamp(bench.now.0 + busy.as_nanos() as u64);
    let spent = Event::TokenSpent { seat, token: first.token, busy, more: true };
    assert_eq!(grants(&bench.step(spent)), []);
    let wake = bench.gpu.tokens_wake().expect("the slice waits for its limit");
    bench.now = wake;
    assert_eq!(grants(&bench.step(Event::Tick)), [(seat, first.on)]);
    let used = bench.gpu.slice_uses(bench.now).next().unwrap();
    assert_eq!((used.0, used.1.busy, used.1.sm), (SliceId(7), busy, busy / 8));
}

#[test]
fn a_slice_is_widened_only_as_far_as_its_model_gains() {
    let share = |thousandths| Permille::new(thousandths).unwrap();
    let terms = Terms::new(share(60), Permille::ALL, Permille::ZERO, Permille::ALL).unwrap();
    let saturates_at_a_quarter = ComputeCurve::new(share(250), 0.9).unwrap();
    for (curve, units) in [(ComputeCurve::PROPORTIONAL, 16), (saturates_at_a_quarter, 4)] {
        let mut bench = shared();
        bench.step(Event::Slices([(SliceId(7), SliceCompute { terms, curve })].into()));
        let (_, first) = first_token(&bench.assign_slice(8, 4, A, 7));
        assert_eq!(first.on.units(), units, "{curve:?}");
    }
}

#[test]
fn a_slice_that_is_removed_stays_until_its_run_has_ended() {
    let mut bench = shared();
    let terms = slice_of(240, 0, 1000);
    bench.set_slices(&[(7, terms)]);
    let (seat, first) = first_token(&bench.assign_slice(8, 4, A, 7));
    bench.set_slices(&[]);
    let busy = Duration::from_millis(5);
    let spent = Event::TokenSpent { seat, token: first.token, busy, more: true };
    assert_eq!(grants(&bench.step(spent)), [(seat, first.on)]);
    bench.run_done(4, 100);
    assert_eq!(bench.gpu.slice_uses(bench.now).count(), 0);
    let (_, free) = first_token(&bench.assign_slice(8, 5, A, 7));
    assert_eq!(free.on.units(), 16, "the slice is gone");
}

#[test]
fn new_terms_hold_from_the_next_token_on() {
    let mut bench = shared();
    bench.set_slices(&[(7, slice_of(120, 0, 500))]);
    let (seat, first) = first_token(&bench.assign_slice(8, 4, A, 7));
    bench.set_slices(&[(7, slice_of(500, 0, 1000))]);
    let busy = Duration::from_millis(5);
    let spent = Event::TokenSpent { seat, token: first.token, busy, more: true };
    let granted = grants(&bench.step(spent));
    assert_eq!(granted.iter().map(|(_, on)| on.units()).collect::<Vec<_>>(), [8]);
}

#[test]
fn slices_outlive_the_executor_and_a_change_of_sharing() {
    let mut bench = shared();
    bench.set_slices(&[(7, slice_of(120, 0, 500))]);
    bench.step(Event::Sharing(None));
    bench.step(Event::Sharing(Some(Config::SLICES)));
    let (_, first) = first_token(&bench.assign_slice(8, 4, A, 7));
    assert_eq!(first.on.units(), 2);
}

#[test]
fn a_cancelled_run_that_waits_for_its_limit_is_not_hung() {
    let mut bench = shared();
    bench.set_slices(&[(7, slice_of(120, 0, 1))]);
    let (seat, first) = first_token(&bench.assign_slice(8, 4, A, 7));
    let busy = first.busy.unwrap();
    bench.now = Timestamp(bench.now.0 + busy.as_nanos() as u64);
    bench.step(Event::TokenSpent { seat, token: first.token, busy, more: true });
    bench.cancel(4);
    bench.now = bench.now + HANG_AFTER + Duration::from_secs(1);
    let late = bench.step(Event::Tick);
    assert!(!late.contains(&Action::Replace), "{late:?}");
    // With a token in its hands, the executor has to end the run in time.
    assert_eq!(grants(&late).len(), 1, "{late:?}");
    bench.now = bench.now + HANG_AFTER;
    assert!(bench.step(Event::Tick).contains(&Action::Replace));
}

/// A run in the modelled executor.
#[derive(Debug)]
struct ModelledRun {
    run: RunId,
    gated: bool,
    launches_left: u32,
    /// The SMs of the launch under way; an ungated launch has the whole GPU.
    launch: Option<(Option<LaunchPermit>, Timestamp)>,
    /// Whether the weights of the next launch are missing.
    waits: bool,
}

#[derive(Debug, Default)]
struct ModelledSeat {
    gate: SeatGate,
    runs: VecDeque<ModelledRun>,
}

/// A GPU's core, and an executor that gets commands and sends events with delays.
struct World {
    bench: Bench,
    seats: BTreeMap<ExecutorSeat, ModelledSeat>,
    to_executor: VecDeque<Action>,
    to_core: VecDeque<Event>,
    requests: BTreeMap<RequestKey, u32>,
    last_key: u64,
    /// The slices by their seats, from seat [`FREE_SEATS`] on.
    slices: BTreeMap<u32, (SliceId, Terms)>,
    last_slice: u64,
}

/// Seats of all functions; the other seats are for slices.
const FREE_SEATS: u32 = 3;

#[derive(Debug, Clone)]
enum Step {
    Assign {
        seat: u32,
        model: u32,
        deadline: Option<u64>,
    },
    Cancel(usize),
    /// The executor gets its next commands.
    Command(usize),
    /// The core gets the executor's next events.
    Event(usize),
    /// A seat begins its next launch, or ends the launch under way.
    Work {
        seat: u8,
        weights_missing: bool,
    },
    Pass {
        micros: u64,
    },
    Share(bool),
    /// A seat for slices gets a slice with terms of this number, or loses its slice.
    Slice {
        seat: u32,
        terms: Option<u16>,
    },
}

/// Returns terms of 6% to 24% of the SMs and 20% to 80% of the time.
fn terms(number: u16) -> Terms {
    let share = |thousandths| Permille::new(thousandths).unwrap();
    let least = share(60 * (1 + number % 4));
    let limit = share(200 * (1 + number / 4 % 4));
    Terms::new(least, least, share(100), limit).unwrap()
}

fn step() -> impl Strategy<Value = Step> {
    let deadline = prop_oneof![Just(None), (0..50_000_000u64).prop_map(Some)];
    prop_oneof![
        3 => (0..6u32, 0..3u32, deadline)
            .prop_map(|(seat, model, deadline)| Step::Assign { seat, model, deadline }),
        1 => any::<usize>().prop_map(Step::Cancel),
        5 => (1..4usize).prop_map(Step::Command),
        5 => (1..4usize).prop_map(Step::Event),
        8 => (0..6u8, prop::bool::weighted(0.1))
            .prop_map(|(seat, weights_missing)| Step::Work { seat, weights_missing }),
        4 => (0..8_000u64).prop_map(|micros| Step::Pass { micros }),
        1 => prop::bool::weighted(0.8).prop_map(Step::Share),
        1 => (FREE_SEATS..6, prop::option::of(0..16u16))
            .prop_map(|(seat, terms)| Step::Slice { seat, terms }),
    ]
}

impl World {
    fn new() -> Self {
        let mut bench = Bench::holding_three();
        bench.step(Event::Sharing(Some(Config::SLICES)));
        Self {
            bench,
            seats: BTreeMap::new(),
            to_executor: VecDeque::new(),
            to_core: VecDeque::new(),
            requests: BTreeMap::new(),
            last_key: 100,
            slices: BTreeMap::new(),
            last_slice: 0,
        }
    }

    fn step(&mut self, event: Event) {
        for action in self.bench.step(event) {
            match action {
                Action::Ended { key, .. } | Action::RequestReturned { key, .. } => {
                    assert!(self.requests.remove(&key).is_some(), "{key} leaves twice");
                }
                Action::Run { .. }
                | Action::CancelRun { .. }
                | Action::Grant { .. }
                | Action::Shorten { .. }
                | Action::Withdraw { .. } => self.to_executor.push_back(action),
                Action::Transfer { .. } | Action::Unmap { .. } => panic!("all models are there: {action:?}"),
                _ => {}
            }
        }
    }

    fn say(to_core: &mut VecDeque<Event>, seat: ExecutorSeat, event: Option<GateEvent>) {
        to_core.extend(event.map(|event| match event {
            GateEvent::Asked => Event::TokenAsked { seat },
            GateEvent::Spent { token, busy, more } => Event::TokenSpent { seat, token, busy, more },
        }));
    }

    fn command(&mut self) {
        let Some(command) = self.to_executor.pop_front() else { return };
        match command {
            Action::Run { run, seat, tokens, .. } => {
                let here = self.seats.entry(seat).or_default();
                if let Some(RunTokens { anew: true, first }) = tokens {
                    assert!(here.runs.is_empty(), "a period begins while a run is under way");
                    here.gate.begin(first);
                }
                here.runs.push_back(ModelledRun {
                    run,
                    gated: tokens.is_some(),
                    launches_left: 1 + (run.0 % 4) as u32,
                    launch: None,
                    waits: false,
                });
            }
            Action::CancelRun { run } => {
                for here in self.seats.values_mut() {
                    let begun = |it: &ModelledRun| it.launch.is_some() || it.waits;
                    let at = here.runs.iter().position(|it| it.run == run);
                    if let Some(at) = at.filter(|&at| at > 0 || !begun(&here.runs[at])) {
                        here.runs.remove(at);
                        self.to_core.push_back(Event::RunCancelled { run });
                    }
                }
            }
            Action::Grant { seat, token } => {
                if let Some(here) = self.seats.get_mut(&seat) {
                    here.gate.grant(token);
                }
            }
            Action::Shorten { seat, token, busy } => {
                if let Some(here) = self.seats.get_mut(&seat) {
                    Self::say(&mut self.to_core, seat, here.gate.shorten(token, busy));
                }
            }
            Action::Withdraw { seat, token } => {
                if let Some(here) = self.seats.get_mut(&seat) {
                    Self::say(&mut self.to_core, seat, here.gate.withdraw(token));
                }
            }
            _ => {}
        }
    }

    fn work(&mut self, seat: ExecutorSeat, weights_missing: bool) {
        let now = self.bench.now;
        let Some(here) = self.seats.get_mut(&seat) else { return };
        let Some(run) = here.runs.front_mut() else { return };
        if let Some((permit, began)) = run.launch.take() {
            let took = now.since(began);
            if let Some(permit) = permit {
                Self::say(&mut self.to_core, seat, here.gate.leave(permit, took));
            }
            run.launches_left -= 1;
            if run.launches_left == 0 {
                let held = Duration::ZERO;
                let token = run.gated.then(|| here.gate.held()).flatten();
                let run = run.run;
                here.runs.pop_front();
                let times = (now, now, Duration::ZERO);
                let (started, finished, waited) = times;
                let sm = Duration::ZERO;
                self.to_core.push_back(Event::RunDone { run, started, finished, waited, held, sm, token });
            }
            return;
        }
        if run.gated && weights_missing && !run.waits {
            run.waits = true;
            return Self::say(&mut self.to_core, seat, here.gate.rest());
        }
        if run.gated {
            let (permit, event) = here.gate.enter();
            Self::say(&mut self.to_core, seat, event);
            if let Some(permit) = permit {
                run.launch = Some((Some(permit), now));
                run.waits = false;
            }
        } else {
            run.launch = Some((None, now));
        }
        self.check();
    }

    /// Checks that no SM unit has two launches.
    fn check(&self) {
        let mut taken = 0u16;
        for (seat, here) in &self.seats {
            let Some((permit, _)) = here.runs.front().and_then(|run| run.launch) else { continue };
            let on = match permit.map(|permit| permit.on) {
                None => u16::MAX,
                Some(SmShare::Block(block)) => block.bits(),
                Some(SmShare::Cap(_)) => panic!("blocks were asked for"),
            };
            assert_eq!(taken & on, 0, "seat {seat} launches on SMs of another seat");
            taken |= on;
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Assign { seat, model, deadline } => {
                let here = self.requests.values().filter(|&&other| other == seat).count();
                let slice = self.slices.get(&seat).map(|&(id, _)| id);
                // A seat for slices takes no request without a slice, and none behind another.
                let takes = if seat < FREE_SEATS { here < 4 } else { here == 0 && slice.is_some() };
                if takes {
                    self.last_key += 1;
                    let key = RequestKey(self.last_key);
                    self.requests.insert(key, seat);
                    let deadline = deadline.map(|after| Timestamp(self.bench.now.0 + after));
                    self.step(Event::Assign {
                        seat: SeatIndex(seat),
                        key,
                        model: ModelId(model),
                        incarnation: FIRST,
                        from: None,
                        deadline,
                        right: slice.map_or(ComputeRight::Free, ComputeRight::Slice),
                    });
                }
            }
            Step::Cancel(which) => {
                let key = self.requests.keys().nth(which % self.requests.len().max(1)).copied();
                key.into_iter().for_each(|key| self.step(Event::Cancel { key }));
            }
            Step::Command(count) => (0..count).for_each(|_| self.command()),
            Step::Event(count) => {
                for _ in 0..count {
                    self.to_core.pop_front().into_iter().for_each(|event| self.step(event));
                }
            }
            Step::Work { seat, weights_missing } => self.work(ExecutorSeat(seat), weights_missing),
            Step::Pass { micros } => self.bench.now = Timestamp(self.bench.now.0 + micros * 1_000),
            Step::Slice { seat, terms: None } => {
                self.slices.remove(&seat);
                self.step(Event::Slices(self.wanted()));
            }
            Step::Slice { seat, terms: Some(number) } => {
                self.last_slice += 1;
                let slice = self.slices.entry(seat).or_insert((SliceId(self.last_slice), terms(number)));
                slice.1 = terms(number);
                self.step(Event::Slices(self.wanted()));
            }
            Step::Share(on) => self.step(Event::Sharing(on.then_some(Config::SLICES))),
        }
    }

    fn wanted(&self) -> BTreeMap<SliceId, SliceCompute> {
        self.slices.values().map(|&(id, terms)| (id, SliceCompute::unmeasured(terms))).collect()
    }

    /// Lets all requests end.
    fn drain(&mut self) {
        for _ in 0..2_000 {
            while !self.to_executor.is_empty() || !self.to_core.is_empty() {
                self.take(Step::Command(8));
                self.take(Step::Event(8));
            }
            if self.requests.is_empty() {
                return;
            }
            (0..6).for_each(|seat| self.work(ExecutorSeat(seat), false));
            let wake = self.bench.gpu.tokens_wake().unwrap_or(Timestamp(self.bench.now.0 + MS));
            self.bench.now = Timestamp(self.bench.now.0 + MS).max(wake);
            self.step(Event::Tick);
        }
        panic!("requests are stuck: {:?}, seats {:?}", self.requests, self.seats);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 200 }))]

    /// Under any delay of the messages, no SM has two launches, and every request ends.
    #[test]
    fn seats_never_share_an_sm_and_every_request_ends(
        steps in proptest::collection::vec(step(), 1..200),
    ) {
        let mut world = World::new();
        steps.into_iter().for_each(|step| world.take(step));
        world.drain();
        let known = world.bench.gpu.tokens.as_ref().map(SeatTokens::slices);
        prop_assert!(known.is_none_or(|known| *known == world.wanted()), "{known:?}");
        let sms_free = world.bench.gpu.tokens.as_ref().is_none_or(|tokens| tokens.is_idle());
        prop_assert!(sms_free, "SMs stay taken: {:?}", world.bench.gpu.tokens);
    }
}

/// The second run has no deadline and came later. Still, it waits for one token at most.
#[test]
fn a_run_that_began_alone_keeps_the_whole_gpu_no_longer_than_its_token() {
    for deadline in [None, Some(1_000)] {
        let mut bench = shared();
        let first = tokens_of(&bench.assign_to(0, 4, A, deadline)).unwrap().first.unwrap();
        bench.assign_to(1, 5, B, None);
        let asked = bench.step(Event::TokenAsked { seat: ExecutorSeat(0) });
        assert!(grants(&asked).is_empty(), "deadline {deadline:?}: the first run is promised {asked:?}");
        let busy = Duration::from_millis(5);
        let spent = Event::TokenSpent { seat: ExecutorSeat(0), token: first.token, busy, more: true };
        let granted = grants(&bench.step(spent));
        let seats: Vec<_> = granted.iter().map(|(seat, on)| (seat.0, on.units())).collect();
        assert!(seats.contains(&(0, 8)) && seats.contains(&(1, 8)), "deadline {deadline:?}: {granted:?}");
    }
}
