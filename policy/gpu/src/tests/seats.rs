//! Tests of GPUs with several seats.

use millrace_core::{SEATS_MAX, SLOTS_MAX};
use proptest::prelude::*;

use super::*;
use crate::slots::RequestStage;

/// Returns a bench on which seat 0 runs request 1 for the resident model A.
fn seated() -> Bench {
    let mut bench = bench().shared().with_a();
    bench.step(Event::Tick);
    bench
}

fn running(bench: &Bench) -> Vec<u64> {
    bench.gpu.running().map(|key| key.0).collect()
}

#[test]
fn two_seats_run_two_models_at_once() {
    let mut bench = bench().shared();
    bench.assign_to(0, 1, A, None);
    let sent = [load(B), map(B, 2, 10), run_on(1, 2, 2, B, 2)];
    assert_eq!(bench.assign_to(1, 2, B, None), sent, "A has the link");
    assert_eq!(running(&bench), [1, 2]);
    assert_eq!(bench.arrive(A, 1, 1), [transfer(2, B, 2, 0..10)]);
    assert_eq!(bench.arrive(B, 2, 2), []);
    assert_eq!(bench.run_done(2, 100).last(), Some(&ended(2, Some(100))));
    assert_eq!(running(&bench), [1]);
    assert_eq!(bench.run_done(1, 500).last(), Some(&ended(1, Some(500))));
    assert_eq!(bench.gpu.requests(), 0);
}

#[test]
fn two_seats_run_one_model_after_one_transfer() {
    let mut bench = bench().shared();
    assert_eq!(bench.assign_to(3, 1, A, None)[3..], [transfer(1, A, 1, 0..10)]);
    assert_eq!(bench.assign_to(5, 2, A, None), [run_on(1, 2, 2, A, 1)]);
    assert_eq!(bench.arrive(A, 1, 1), []);
    assert_eq!(running(&bench), [1, 2]);
}

#[test]
fn a_head_without_room_does_not_stop_the_line_of_another_seat() {
    let mut bench = seated();
    assert_eq!(bench.assign_to(1, 2, LARGE, None), []);
    assert_eq!(bench.assign_to(2, 3, A, None), [run_on(2, 2, 3, A, 1)]);
    assert_eq!(bench.assign_to(1, 4, A, None), [], "behind the head without room");
    assert_eq!(bench.assign_to(2, 5, B, None)[2..], [run_on(2, 3, 5, B, 2), transfer(2, B, 2, 0..10)]);
    assert_eq!(running(&bench), [1, 2, 3]);
    bench.arrive(B, 2, 2);
    for done in [1, 2] {
        bench.run_done(done, 100);
    }
    let actions = bench.run_done(3, 100);
    assert!(actions.contains(&run_on(1, 4, 2, LARGE, 3)), "{actions:?}");
}

#[test]
fn the_earliest_deadline_has_the_link_once_the_begun_transfer_has_ended() {
    let mut bench = bench().shared();
    bench.assign_to(0, 1, A, None);
    bench.assign_to(1, 2, B, Some(9_000));
    assert_eq!(bench.assign_to(2, 3, C, Some(5_000)), [load(C), map(C, 3, 20), run_on(2, 3, 3, C, 3)]);
    assert_eq!(bench.arrive(A, 1, 1), [transfer(2, C, 3, 0..10)]);
    assert_eq!(bench.arrive(C, 3, 2), [transfer(3, B, 2, 0..10)]);
}

#[test]
fn a_transfer_that_no_line_waits_for_is_cancelled_for_the_earliest_deadline() {
    let mut bench = bench().shared();
    bench.assign_to(0, 1, A, None);
    bench.assign_to(1, 2, B, None);
    bench.cancel(1);
    let actions = bench.step(Event::RunCancelled { run: RunId(1) });
    assert_eq!(actions, [ended(1, None), cancel_transfer(1), transfer(2, B, 2, 0..10)]);
}

#[test]
fn a_prefetch_that_a_later_line_waits_for_is_hastened_and_ends_first() {
    let mut bench = bench().shared();
    assert_eq!(bench.step(Event::Prefetch { model: B })[2..], [transfer(1, B, 1, 0..10)]);
    let hasten = Action::Hasten { transfer: TransferId(1), key: RequestKey(1) };
    assert_eq!(bench.assign_to(0, 1, B, None), [run(1, 1, B, 1), hasten]);
    assert_eq!(bench.assign_to(1, 2, A, Some(2_000)), [load(A), map(A, 2, 10), run_on(1, 2, 2, A, 2)]);
    assert_eq!(bench.arrive(B, 1, 1), [transfer(2, A, 2, 0..10)]);
}

#[test]
fn the_earliest_deadline_is_the_deadline_of_a_transfer_for_several_seats() {
    let mut bench = bench().shared();
    bench.assign_to(0, 1, A, None);
    assert_eq!(bench.gpu.reader_of(A), Some(RequestKey(1)));
    bench.assign_to(1, 2, A, Some(9_000));
    bench.assign_to(2, 3, A, Some(5_000));
    assert_eq!(bench.gpu.reader_of(A), Some(RequestKey(3)));
    // The same request is charged for the copied bytes.
    bench.arrive(A, 1, 1);
    let swapped = |actions: &[Action]| match actions {
        [Action::Completed { spent, .. }, ..] => spent.swapped,
        other => panic!("{other:?}"),
    };
    assert_eq!([1, 2, 3].map(|run| swapped(&bench.run_done(run, 10))), [0, 0, 20].map(Bytes::mib));
}

/// Returns a bench on which seat 0's request 1 for A waits for the rest of A, because the run found
/// no weights.
fn starved() -> Bench {
    let mut bench = bench().shared();
    bench.assign_to(0, 1, A, None);
    assert_eq!(bench.run_failed(1, RunFailure::NotThere), []);
    bench
}

#[test]
fn transfers_for_queued_requests_make_way_only_for_the_most_urgent_head() {
    let mut bench = starved();
    assert_eq!(bench.assign_to(1, 2, LARGE, None), [], "the other head is older");
    assert_eq!(bench.gpu.transfers(), 1);
    let mut bench = starved();
    assert_eq!(bench.assign_to(1, 2, LARGE, Some(2_000)), [cancel_transfer(1)]);
    let actions = bench.end_transfer(1, TransferOutcome::Cancelled);
    assert_eq!(actions[..4], [unmap(A, 1), load(LARGE), map(LARGE, 2, 0), run_on(1, 2, 2, LARGE, 2)]);
}

/// The sent run keeps its model on the GPU, so the end of the transfer would free no memory.
#[test]
fn a_transfer_for_a_sent_run_does_not_make_way_for_a_head_without_room() {
    let mut bench = bench().shared();
    bench.assign_to(0, 1, A, None);
    assert_eq!(bench.assign_to(1, 2, LARGE, Some(2_000)), []);
    assert_eq!(bench.arrive(A, 1, 1), []);
    assert!(bench.run_done(1, 500).contains(&run_on(1, 2, 2, LARGE, 2)));
}

#[test]
fn a_queued_request_is_recalled_while_another_seat_runs() {
    let mut bench = seated();
    bench.assign_to(1, 2, B, None);
    bench.assign_to(1, 3, B, None);
    assert_eq!(bench.recall(1), [], "first of its seat");
    assert_eq!(bench.recall(2), [], "first of its seat");
    assert_eq!(bench.recall(3), [cancel_run(3)]);
    let back = bench.step(Event::RunCancelled { run: RunId(3) });
    assert_eq!(back, [returned(3, ReturnReason::Recalled)]);
    assert_eq!(running(&bench), [1, 2]);
}

#[test]
fn the_first_requests_of_all_seats_may_have_begun_beside_each_other_when_the_executor_is_lost() {
    let mut bench = seated();
    bench.assign_to(4, 2, A, None);
    bench.assign_to(2, 3, A, None);
    bench.assign_to(2, 4, A, None);
    let lost = [
        (1, AttemptProgress::BegunBeside),
        (3, AttemptProgress::BegunBeside),
        (4, AttemptProgress::Waiting),
        (2, AttemptProgress::BegunBeside),
    ];
    assert_eq!(bench.step(Event::Down), [down(&lost)]);
    assert_eq!(bench.gpu.requests(), 0);
}

#[test]
fn a_seat_takes_the_place_of_a_seat_without_requests() {
    let mut bench = seated();
    for seat in 1..40 {
        let key = u64::from(seat) + 1;
        let number = 1 + ((seat - 1) % (SEATS_MAX as u32 - 1)) as u8;
        assert_eq!(bench.assign_to(seat, key, A, None), [run_on(number, key, key, A, 1)]);
        assert_eq!(running(&bench), [1, key]);
        bench.run_done(key, 10);
    }
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Assign { seat: u32, model: u32, deadline: Option<u64> },
    Recall(usize),
    Cancel(usize),
    Prefetch(u32),
    Pin(u32),
    Unpin(u32),
    Lock(u32),
    Unlock,
    Arrive { which: usize, chunks: u32 },
    TransferEnds { which: usize, outcome: TransferOutcome },
    RunEnds(usize),
    RunFails { which: usize, why: RunFailure },
    RunIsDropped(usize),
    ProgramLoaded,
    ProgramFails(u32),
    ProgramDies(u32),
    MapFails(u32),
    ExecutorLost,
    ContextLost,
    DeviceFails,
    Wait(u64),
    WakeUp,
}

fn step() -> impl Strategy<Value = Step> {
    let model = || 0..CHUNKS.len() as u32;
    let which = any::<usize>;
    let outcome = prop_oneof![
        6 => Just(TransferOutcome::Complete),
        3 => Just(TransferOutcome::Cancelled),
        1 => Just(TransferOutcome::Failed),
    ];
    let why = prop_oneof![
        4 => Just(RunFailure::NotThere),
        1 => Just(RunFailure::Model),
        1 => Just(RunFailure::OutOfMemory),
        1 => Just(RunFailure::InputLost),
    ];
    // HUGE fits on no GPU and LARGE only alone, so both are rare.
    let asked = prop_oneof![12 => 0..3u32, 3 => Just(LARGE.0), 1 => Just(HUGE.0)];
    let deadline = prop::option::of(0..1_000_000u64);
    prop_oneof![
        30 => (0..8u32, asked, deadline)
            .prop_map(|(seat, model, deadline)| Step::Assign { seat, model, deadline }),
        4 => which().prop_map(Step::Recall),
        4 => which().prop_map(Step::Cancel),
        2 => model().prop_map(Step::Prefetch),
        1 => model().prop_map(Step::Pin),
        1 => model().prop_map(Step::Unpin),
        2 => model().prop_map(Step::Lock),
        3 => Just(Step::Unlock),
        12 => (which(), 1..12u32).prop_map(|(which, chunks)| Step::Arrive { which, chunks }),
        12 => (which(), outcome).prop_map(|(which, outcome)| Step::TransferEnds { which, outcome }),
        20 => which().prop_map(Step::RunEnds),
        4 => (which(), why).prop_map(|(which, why)| Step::RunFails { which, why }),
        4 => which().prop_map(Step::RunIsDropped),
        4 => Just(Step::ProgramLoaded),
        1 => model().prop_map(Step::ProgramFails),
        2 => model().prop_map(Step::ProgramDies),
        1 => model().prop_map(Step::MapFails),
        1 => prop_oneof![
            2 => Just(Step::ExecutorLost),
            1 => Just(Step::ContextLost),
            1 => Just(Step::DeviceFails),
        ],
        3 => (1..100_000u64).prop_map(Step::Wait),
        2 => Just(Step::WakeUp),
    ]
}

/// A transfer that the fabric carries out.
#[derive(Debug)]
struct Flying {
    transfer: TransferId,
    model: ModelId,
    generation: Generation,
    missing: Vec<u32>,
    cancelled: bool,
}

/// A run that the executor has.
#[derive(Debug)]
struct Sent {
    run: RunId,
    seat: u32,
    model: ModelId,
    generation: Generation,
    cancelled: bool,
}

/// A GPU's core with an executor and a fabric, which carry out each action when the test says so.
struct World {
    bench: Bench,
    incarnation: Incarnation,
    last_key: u64,
    last_lock: u64,
    /// The seat of each request that was assigned and has not left.
    seats: BTreeMap<RequestKey, u32>,
    cancelled: BTreeSet<RequestKey>,
    loading: VecDeque<ModelId>,
    flying: Vec<Flying>,
    sent: Vec<Sent>,
    locks: BTreeSet<TransferId>,
    /// Events that follow from actions.
    mail: VecDeque<Event>,
}

impl World {
    fn new(isolation: ExecutorIsolation) -> Self {
        let memory = MemoryMap::new(Bytes::mib(64), BlockSize::DEFAULT);
        Self {
            bench: installed(GpuCore::new(GpuIndex(0), memory).with_isolation(isolation)).shared(),
            incarnation: FIRST,
            last_key: 0,
            last_lock: 0,
            seats: BTreeMap::new(),
            cancelled: BTreeSet::new(),
            loading: VecDeque::new(),
            flying: Vec::new(),
            sent: Vec::new(),
            locks: BTreeSet::new(),
            mail: VecDeque::new(),
        }
    }

    fn event(&mut self, event: Event) {
        self.mail.push_back(event);
        while let Some(event) = self.mail.pop_front() {
            if let Event::ProgramLost { model } = event {
                self.drop_program(model);
            }
            let actions = self.bench.step(event);
            let begun: Vec<ModelId> = actions.iter().filter_map(begun_transfer).collect();
            for action in actions {
                self.carry_out(action);
            }
            self.check(&begun);
        }
    }

    fn carry_out(&mut self, action: Action) {
        match action {
            Action::LoadProgram { model } => self.loading.push_back(model),
            Action::UnloadProgram { model } => {
                assert!(self.sent.iter().all(|sent| sent.model != model), "{model} is unloaded in a run");
                self.loading.retain(|&loading| loading != model);
            }
            Action::Run { run, key, model, generation, .. } => {
                let seat = self.seats[&key];
                self.sent.push(Sent { run, seat, model, generation, cancelled: false });
            }
            Action::CancelRun { run } => {
                let runs = self.sent.iter_mut().filter(|sent| sent.run == run);
                runs.for_each(|sent| sent.cancelled = true);
            }
            Action::Transfer { transfer, weights, chunks, .. } => {
                let WeightsCargo { model, generation, .. } = weights;
                assert!(
                    self.flying.iter().all(|flying| flying.generation != generation),
                    "chunks are in flight twice"
                );
                let missing = chunks.into_iter().flatten().collect();
                self.flying.push(Flying { transfer, model, generation, missing, cancelled: false });
            }
            Action::CancelTransfer { transfer } => {
                let named = self.flying.iter_mut().filter(|flying| flying.transfer == transfer);
                named.for_each(|flying| flying.cancelled = true);
            }
            Action::EndProgram { model } => self.mail.push_back(Event::ProgramLost { model }),
            Action::Replace => self.lose_executor(),
            Action::Down { lost } => {
                let lost: BTreeSet<RequestKey> = lost.into_iter().map(|(key, _)| key).collect();
                let uncancelled = self.seats.keys().filter(|key| !self.cancelled.contains(key)).copied();
                assert_eq!(lost, uncancelled.collect(), "requests that a client waits for");
                self.seats.clear();
            }
            Action::Ended { key, .. } | Action::RequestReturned { key, .. } => {
                assert!(self.seats.remove(&key).is_some(), "{key} leaves twice");
            }
            Action::Locked { transfer, .. } => assert!(self.locks.insert(transfer)),
            Action::LockLost { transfer } => {
                assert!(self.locks.remove(&transfer));
                self.mail.push_back(Event::Unlock { transfer });
            }
            _ => {}
        }
    }

    fn drop_program(&mut self, model: ModelId) {
        self.sent.retain(|sent| sent.model != model);
        self.loading.retain(|&loading| loading != model);
    }

    fn lose_executor(&mut self) {
        self.loading.clear();
        self.flying.clear();
        self.sent.clear();
        self.locks.clear();
        self.incarnation = Incarnation(self.incarnation.0 + 1);
        self.mail.push_back(Event::Down);
        self.mail.push_back(Event::Up { incarnation: self.incarnation });
    }

    fn complete(&self, model: ModelId, generation: Generation) -> bool {
        let region = self.bench.gpu.memory().region(model);
        region.is_some_and(|region| region.generation() == generation && region.loaded().complete())
    }

    /// Checks the invariants after an event. `begun` has the models of the transfers that the event began.
    fn check(&self, begun: &[ModelId]) {
        let gpu = &self.bench.gpu;
        let memory = gpu.memory();
        let held: u32 = memory.regions().map(|(_, region)| region.blocks()).sum();
        assert_eq!(memory.used_blocks(), held);
        assert!(held <= memory.total_blocks());

        let here: Vec<RequestKey> = gpu.lines.iter().map(|slot| slot.key).collect();
        let distinct: BTreeSet<RequestKey> = here.iter().copied().collect();
        assert_eq!(here.len(), distinct.len(), "a request is on two seats");
        assert!(distinct.iter().eq(self.seats.keys()), "requests on the GPU");
        assert_eq!(gpu.requests(), here.len());

        // The executor has the runs of each seat in the order of the seat's line, so the run that it
        // may begin is that of the first request.
        for seat in self.seats.values() {
            let line = gpu.lines.iter().filter(|slot| self.seats[&slot.key] == *seat);
            let runs: Vec<Option<RunId>> = line.map(|slot| slot.run()).collect();
            assert!(
                runs.is_sorted_by_key(|run| run.is_none()),
                "a request is sent before a request ahead of it"
            );
            let sent = self.sent.iter().filter(|sent| sent.seat == *seat).map(|sent| sent.run);
            assert!(runs.into_iter().flatten().eq(sent), "runs of seat {seat}");
        }

        let on_link = |flying: &&Flying| !flying.cancelled && !self.complete(flying.model, flying.generation);
        assert!(self.flying.iter().filter(on_link).count() <= 1, "{:?}", self.flying);
        let lacks = |slot: &&crate::slots::AssignedRequest| {
            slot.stage != RequestStage::Waiting && !slot.doomed && !gpu.complete(slot.model)
        };
        if let Some(candidate) = gpu.lines.most_urgent(lacks) {
            let others = begun.iter().filter(|&&model| model != candidate.model).count();
            assert_eq!(others, 0, "{begun:?} have the link before {candidate:?}");
        }
    }

    /// Lets chunks of a transfer arrive.
    fn arrive(&mut self, which: usize, chunks: u32) {
        let Some(flying) = self.flying.get_mut(which) else { return };
        let model = flying.model;
        let generation = flying.generation;
        for _ in 0..chunks {
            if self.flying[which].missing.is_empty() {
                return;
            }
            let chunk = self.flying[which].missing.remove(0);
            self.event(Event::Arrived { model, generation, chunks: chunk..chunk + 1 });
            // The event may have ended the transfer.
            if self.flying.get(which).is_none_or(|flying| flying.generation != generation) {
                return;
            }
        }
    }

    fn end_transfer(&mut self, which: usize, outcome: TransferOutcome) {
        let Some(flying) = self.flying.get(which) else { return };
        let transfer = flying.transfer;
        if outcome == TransferOutcome::Cancelled && !flying.cancelled {
            return;
        }
        if outcome == TransferOutcome::Complete {
            self.arrive(which, u32::MAX);
        }
        self.flying.retain(|flying| flying.transfer != transfer);
        self.event(Event::TransferEnded { transfer, outcome, from: None });
    }

    /// Ends the first run of the seat of a run. Returns false if weights of that run are missing.
    fn end_run(&mut self, which: usize) -> bool {
        let Some(seat) = self.sent.get(which).map(|sent| sent.seat) else { return false };
        let Some(first) = self.sent.iter().position(|sent| sent.seat == seat) else { return false };
        let sent = &self.sent[first];
        let run = sent.run;
        let region = self.bench.gpu.memory().region(sent.model);
        let mapped = region.is_some_and(|region| region.generation() == sent.generation);
        if mapped && !self.complete(sent.model, sent.generation) {
            return false;
        }
        self.sent.remove(first);
        let started = Timestamp(self.bench.now.0 - 10);
        let finished = self.bench.now;
        self.event(if mapped {
            run_done(run, started, finished)
        } else {
            Event::RunFailed { run, why: RunFailure::NotThere }
        });
        true
    }

    fn drop_run(&mut self, which: usize) {
        if self.sent.get(which).is_some_and(|sent| sent.cancelled) {
            let run = self.sent.remove(which).run;
            self.event(Event::RunCancelled { run });
        }
    }

    fn load_program(&mut self) -> bool {
        let Some(model) = self.loading.pop_front() else { return false };
        self.event(Event::ProgramLoaded { model });
        true
    }

    fn unlock(&mut self) -> bool {
        let Some(transfer) = self.locks.pop_first() else { return false };
        self.event(Event::Unlock { transfer });
        true
    }

    fn wake_up(&mut self) -> bool {
        let Some(at) = self.bench.gpu.next_wake() else { return false };
        self.bench.now = self.bench.now.max(at);
        self.event(Event::Tick);
        true
    }

    fn key(&self, which: usize) -> Option<RequestKey> {
        self.seats.keys().nth(which % self.seats.len().max(1)).copied()
    }

    fn take(&mut self, step: Step, seats: u32) {
        self.bench.now = Timestamp(self.bench.now.0 + 1_000);
        match step {
            Step::Assign { seat, model, deadline } => {
                // The seats of a GPU need not have the first numbers.
                let seat = 3 * (seat % seats) + 1;
                if self.seats.values().filter(|&&other| other == seat).count() < SLOTS_MAX {
                    self.last_key += 1;
                    let key = RequestKey(self.last_key);
                    self.seats.insert(key, seat);
                    self.event(Event::Assign {
                        seat: SeatIndex(seat),
                        key,
                        model: ModelId(model),
                        incarnation: self.incarnation,
                        from: None,
                        deadline: deadline.map(Timestamp),
                        right: ComputeRight::Free,
                    });
                }
            }
            Step::Recall(which) => {
                if let Some(key) = self.key(which) {
                    self.event(Event::Recall { key });
                }
            }
            Step::Cancel(which) => {
                if let Some(key) = self.key(which) {
                    self.cancelled.insert(key);
                    self.event(Event::Cancel { key });
                }
            }
            Step::Prefetch(model) => self.event(Event::Prefetch { model: ModelId(model) }),
            Step::Pin(model) => self.event(Event::Pin { model: ModelId(model) }),
            Step::Unpin(model) => self.event(Event::Unpin { model: ModelId(model) }),
            Step::Lock(model) => {
                self.last_lock += 1;
                let transfer = TransferId((1 << 50) + self.last_lock);
                self.event(Event::Lock { transfer, model: ModelId(model) });
            }
            Step::Unlock => drop(self.unlock()),
            Step::Arrive { which, chunks } => self.arrive(which % self.flying.len().max(1), chunks),
            Step::TransferEnds { which, outcome } => {
                self.end_transfer(which % self.flying.len().max(1), outcome);
            }
            Step::RunEnds(which) => drop(self.end_run(which % self.sent.len().max(1))),
            Step::RunFails { which, why } => {
                let which = which % self.sent.len().max(1);
                if which < self.sent.len() {
                    let run = self.sent.remove(which).run;
                    self.event(Event::RunFailed { run, why });
                }
            }
            Step::RunIsDropped(which) => self.drop_run(which % self.sent.len().max(1)),
            Step::ProgramLoaded => drop(self.load_program()),
            Step::ProgramFails(model) => {
                let model = ModelId(model);
                if self.loading.contains(&model) {
                    self.drop_program(model);
                    self.event(Event::ProgramFailed { model });
                }
            }
            Step::ProgramDies(model) => {
                if self.bench.gpu.isolation.per_model() {
                    self.event(Event::ProgramLost { model: ModelId(model) });
                }
            }
            Step::MapFails(model) => {
                let model = ModelId(model);
                let region = self.bench.gpu.memory().region(model);
                if let Some(generation) = region.map(|region| region.generation()) {
                    self.event(Event::MapFailed { model, generation });
                }
            }
            Step::ExecutorLost => {
                self.lose_executor();
                self.event(Event::Tick);
            }
            Step::ContextLost => self.event(Event::ContextLost),
            Step::DeviceFails => self.event(Event::DeviceFailed),
            Step::Wait(time) => {
                self.bench.now = Timestamp(self.bench.now.0 + time);
                self.event(Event::Tick);
            }
            Step::WakeUp => drop(self.wake_up()),
        }
    }

    /// Answers every action as asked, until no action is left to answer.
    fn drain(&mut self) {
        for round in 0..5_000 {
            self.bench.now = Timestamp(self.bench.now.0 + 1_000);
            if self.load_program() || self.unlock() {
                continue;
            }
            if let Some(cancelled) = self.sent.iter().position(|sent| sent.cancelled) {
                self.drop_run(cancelled);
                continue;
            }
            let cancelled = self.flying.iter().position(|flying| flying.cancelled);
            let transfer = cancelled.or((!self.flying.is_empty()).then_some(0));
            let ends = |world: &mut Self| (0..world.sent.len()).any(|which| world.end_run(which));
            // Runs and transfers end in turns.
            let ended = match transfer {
                _ if round % 2 == 0 && ends(self) => true,
                Some(which) if cancelled.is_some() => {
                    self.end_transfer(which, TransferOutcome::Cancelled);
                    true
                }
                Some(which) => {
                    self.end_transfer(which, TransferOutcome::Complete);
                    true
                }
                None => ends(self),
            };
            if !ended && !self.wake_up() {
                return;
            }
        }
        panic!("the GPU does not come to rest: {:?}", self.bench.gpu.lines);
    }
}

fn begun_transfer(action: &Action) -> Option<ModelId> {
    match action {
        Action::Transfer { weights, .. } => Some(weights.model),
        _ => None,
    }
}

/// I8: for any events, a request is on one seat only, a seat runs its first request only, and memory
/// is never over its size. Each request leaves exactly once, after finitely many steps if the
/// executor and the fabric answer.
#[test]
fn every_request_on_any_seat_leaves_exactly_once() {
    let isolation = prop_oneof![
        2 => Just(ExecutorIsolation::Gpu),
        1 => Just(ExecutorIsolation::Model),
        1 => Just(ExecutorIsolation::Resident),
    ];
    proptest!(ProptestConfig::with_cases(256), |(
        seats in 1..=8u32,
        isolation in isolation,
        steps in prop::collection::vec(step(), 1..300),
    )| {
        let mut world = World::new(isolation);
        for step in steps {
            world.take(step, seats);
        }
        world.drain();
        prop_assert_eq!(world.bench.gpu.requests(), 0, "{:?}", world.bench.gpu.lines);
        prop_assert!(world.seats.is_empty());
        prop_assert_eq!(world.bench.gpu.transfers(), 0);
    });
}
