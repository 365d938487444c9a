//! A driver whose tensors are numbers. A call's output is a hash of the function, the row and the
//! inputs, so that a tensor has a single right content in every run. The driver checks that every
//! action is legal.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Value {
    content: u64,
    facts: TensorFacts,
}

impl Value {
    const EMPTY: Self = Self { content: 0, facts: TensorFacts::EMPTY };

    fn joined(parts: &[Self]) -> Self {
        match parts {
            [only] => *only,
            parts => {
                let facts = parts.iter().map(|part| part.facts).reduce(TensorFacts::join).unwrap();
                Self { content: hash(parts), facts }
            }
        }
    }
}

fn hash(of: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// Makes the output of a function: 0 to 3 rows, and only zeros in a third of the cases.
fn make(seed: u64, slot: TensorIndex, row: usize, inputs: &[Value]) -> Value {
    let content = hash((seed, slot, row, inputs));
    let rows = [0, 1, 1, 1, 1, 2, 2, 3][usize::try_from(content % 8).unwrap()];
    let holds = rows > 0 && !(content >> 8).is_multiple_of(3);
    Value { content, facts: TensorFacts { rows, is_empty: rows == 0, holds: Some(holds) } }
}

/// The result of a workflow by its definition: all parts of every tensor, and the number of runs of
/// each step.
#[derive(Debug)]
pub(super) struct Meaning {
    parts: Vec<Vec<Value>>,
    runs: Vec<usize>,
}

impl Meaning {
    pub(super) fn of(plan: &WorkflowGraph, seed: u64) -> Self {
        let mut parts = vec![Vec::new(); plan.slots().len()];
        for (at, _) in plan.inputs().iter().enumerate() {
            let content = hash((seed, at));
            let rows = [0, 1, 1, 1, 2, 3, 3, 4][usize::try_from(content % 8).unwrap()];
            let facts = TensorFacts { rows, is_empty: rows == 0, holds: Some(rows > 0) };
            parts[at] = vec![Value { content, facts }];
        }
        let mut meaning = Self { parts, runs: Vec::new() };
        for step in plan.steps() {
            let inputs: Vec<_> = step.inputs.iter().map(|(_, slot)| meaning.whole(*slot)).collect();
            let condition = step.when.is_none_or(|when| meaning.whole(when).facts.holds == Some(true));
            let runs = match step.each {
                _ if !condition || inputs.iter().any(|input| input.facts.is_empty) => 0,
                Some(each) => usize::try_from(inputs[each].facts.rows).unwrap(),
                None => 1,
            };
            for slot in &step.outputs {
                let made = (0..runs).map(|row| make(seed, *slot, row, &inputs)).collect();
                meaning.parts[slot.0] = if runs == 0 { vec![Value::EMPTY] } else { made };
            }
            meaning.runs.push(runs);
        }
        meaning
    }

    fn whole(&self, slot: TensorIndex) -> Value {
        Value::joined(&self.parts[slot.0])
    }
}

#[derive(Debug)]
struct Out {
    step: StepIndex,
    row: usize,
    inputs: Vec<TensorIndex>,
    outputs: Vec<TensorIndex>,
    /// Losses of its inputs since the call was started.
    lost: Vec<TensorLoss>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    Answer,
    Fail(RunFailureCause),
}

/// A run and all resources of its driver.
pub(super) struct World {
    plan: Arc<WorkflowGraph>,
    engine: WorkflowEngine,
    meaning: Meaning,
    /// Existing tensors, by slot and part.
    held: BTreeMap<TensorIndex, BTreeMap<usize, Value>>,
    out: BTreeMap<CallId, Out>,
    calls: BTreeMap<(StepIndex, usize), u32>,
    answered: BTreeSet<(StepIndex, usize)>,
    pub(super) end: Option<End>,
    pub(super) losses: u32,
}

impl World {
    pub(super) fn begin(plan: Arc<WorkflowGraph>, seed: u64) -> Self {
        let meaning = Meaning::of(&plan, seed);
        let engine = WorkflowEngine::new(plan.clone());
        let mut world = Self {
            plan,
            engine,
            meaning,
            held: BTreeMap::new(),
            out: BTreeMap::new(),
            calls: BTreeMap::new(),
            answered: BTreeSet::new(),
            end: None,
            losses: 0,
        };
        let inputs: Vec<_> =
            (0..world.plan.inputs().len()).map(|at| world.meaning.whole(TensorIndex(at))).collect();
        for (at, value) in inputs.iter().enumerate() {
            world.held.insert(TensorIndex(at), BTreeMap::from([(0, *value)]));
        }
        world.tell(Event::Begin { inputs: inputs.iter().map(|value| value.facts).collect() });
        world
    }

    fn is_over(&self) -> bool {
        self.end.is_some()
    }

    /// Performs the next step by `choice`, and returns whether there was any.
    pub(super) fn go_on(&mut self, choice: u32, losses_max: u32) -> bool {
        if self.is_over() || self.out.is_empty() {
            return false;
        }
        let kind = choice % 16;
        let pick = (choice / 16) as usize;
        if kind < 4 && self.losses < losses_max && self.lose(pick) {
            return true;
        }
        let call = *self.out.keys().nth(pick % self.out.len()).unwrap();
        if kind.is_multiple_of(2) && !self.out[&call].lost.is_empty() {
            let lost = self.out.remove(&call).unwrap().lost;
            self.tell(Event::Failed { call, lost });
        } else {
            self.finish(call);
        }
        true
    }

    /// Loses a part that a call made, if any exists.
    fn lose(&mut self, pick: usize) -> bool {
        let made = self.held.iter().filter(|(slot, _)| !self.plan.is_input(**slot));
        let parts: Vec<_> = made.flat_map(|(slot, parts)| parts.keys().map(|part| (*slot, *part))).collect();
        let Some((slot, part)) = parts.get(pick % parts.len().max(1)).copied() else { return false };
        let is_all = pick.is_multiple_of(5);
        let loss = TensorLoss { slot, row: (!is_all).then_some(part as u64) };
        let held = self.held.get_mut(&slot).unwrap();
        held.retain(|at, _| !is_all && *at != part);
        if held.is_empty() {
            self.held.remove(&slot);
        }
        for out in self.out.values_mut().filter(|out| out.inputs.contains(&slot)) {
            out.lost.push(loss);
        }
        self.losses += 1;
        self.tell(Event::Lost { lost: vec![loss] });
        true
    }

    fn finish(&mut self, call: CallId) {
        let Out { step, row, outputs, .. } = self.out.remove(&call).unwrap();
        self.answered.insert((step, row));
        let mut facts = Vec::new();
        for slot in outputs {
            let value = self.meaning.parts[slot.0][row];
            let before = self.held.entry(slot).or_default().insert(row, value);
            assert_eq!(before, None, "{slot} was there when {call} made it");
            facts.push(value.facts);
        }
        self.tell(Event::Done { call, outputs: facts });
    }

    pub(super) fn fail(&mut self, pick: usize) {
        if let Some(call) = self.out.keys().nth(pick % self.out.len().max(1)).copied() {
            self.out.remove(&call);
            self.tell(Event::Failed { call, lost: Vec::new() });
            assert_eq!(self.end, Some(End::Fail(RunFailureCause::Failed)));
        }
    }

    fn tell(&mut self, event: Event) {
        let mut actions = Vec::new();
        self.engine.on_event(Timestamp::ZERO, event, &mut actions);
        let mut started = false;
        for action in actions {
            let frees = matches!(action, Action::Release { .. } | Action::Abandon { .. });
            assert!(frees || !self.is_over(), "{action:?} after the end");
            assert!(!(frees && started), "{action:?} after something was started");
            started |= matches!(action, Action::Call { .. });
            self.act(action);
        }
        assert_eq!(self.engine.is_over(), self.is_over());
        assert_eq!(
            self.engine.calls.keys().copied().collect::<Vec<_>>(),
            self.out.keys().copied().collect::<Vec<_>>()
        );
        if self.is_over() {
            self.check_nothing_left();
        } else {
            assert!(!self.out.is_empty(), "the run waits although no call is running");
            self.check_nothing_idle();
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Call { call, step, row, inputs, outputs } => self.call(call, step, row, inputs, outputs),
            Action::Empty { slot } => {
                assert!(self.plan.slot(slot).is_output);
                let before = self.held.insert(slot, BTreeMap::from([(0, Value::EMPTY)]));
                assert_eq!(before, None, "{slot} was there when it was to be made empty");
            }
            Action::Release { slot } => {
                assert!(!self.plan.is_input(slot));
                assert!(self.held.remove(&slot).is_some(), "{slot} is not there to be freed");
                let user = self.out.values().find(|out| out.inputs.contains(&slot));
                assert!(user.is_none(), "{slot} is freed under {user:?}");
            }
            Action::Abandon { call } => {
                let out = self.out.remove(&call);
                let Out { step, row, .. } = out.unwrap_or_else(|| panic!("{call} is not out"));
                // An abandoned call does not count.
                self.calls.entry((step, row)).and_modify(|calls| *calls -= 1);
            }
            Action::Answer { outputs } => {
                assert_eq!(outputs, self.plan.outputs());
                for slot in outputs {
                    assert_eq!(self.content(slot), Some(self.meaning.whole(slot)));
                }
                self.end = Some(End::Answer);
            }
            Action::Fail { cause, .. } => self.end = Some(End::Fail(cause)),
        }
    }

    fn call(
        &mut self,
        call: CallId,
        step: StepIndex,
        row: Option<u64>,
        inputs: Vec<TensorIndex>,
        outputs: Vec<TensorIndex>,
    ) {
        let planned = self.plan.step(step).clone();
        assert_eq!(row.is_some(), planned.each.is_some());
        let row = usize::try_from(row.unwrap_or(0)).unwrap();
        assert!(row < self.meaning.runs[step.0], "{step} does not run for row {row}");
        for slot in &inputs {
            assert_eq!(self.content(*slot), Some(self.meaning.whole(*slot)), "{call} has no {slot}");
        }
        assert!(!outputs.is_empty() && outputs.iter().all(|slot| planned.outputs.contains(slot)));
        assert!(
            !self.out.values().any(|out| (out.step, out.row) == (step, row)),
            "{step} is out for {row} already"
        );
        assert!(planned.is_idempotent || !self.answered.contains(&(step, row)), "{step} ran twice");
        let calls = self.calls.entry((step, row)).or_default();
        *calls += 1;
        assert!(*calls <= RUNS_MAX);
        self.out.insert(call, Out { step, row, inputs, outputs, lost: Vec::new() });
        assert!(self.out.len() <= CALLS_MAX);
    }

    /// Returns the content of a slot, if all its parts exist.
    fn content(&self, slot: TensorIndex) -> Option<Value> {
        let parts: Vec<_> = self.held.get(&slot)?.values().copied().collect();
        (parts.len() == self.meaning.parts[slot.0].len()).then(|| Value::joined(&parts))
    }

    /// Checks that every existing tensor still has a future or undecided consumer.
    fn check_nothing_idle(&self) {
        for slot in self.held.keys() {
            let planned = self.plan.slot(*slot);
            let may_take = |step: &StepIndex| {
                let runs = self.meaning.runs[step.0];
                let answered = self.answered.range((*step, 0)..=(*step, usize::MAX)).count();
                runs == 0 || answered < runs || self.losses > 0
            };
            let decides = |_: &StepIndex| self.content(*slot).is_none();
            let is_kept = planned.is_output || self.plan.is_input(*slot);
            assert!(
                is_kept || planned.takers.iter().any(may_take) || planned.conditions.iter().any(decides),
                "{slot} is held although it has no consumer left"
            );
        }
    }

    fn check_nothing_left(&self) {
        assert!(self.out.is_empty());
        let is_answer = self.end == Some(End::Answer);
        let may_stay = |slot: &&TensorIndex| {
            self.plan.is_input(**slot) || (is_answer && self.plan.slot(**slot).is_output)
        };
        assert!(self.held.keys().all(|slot| may_stay(&slot)), "left: {:?}", self.held);
        let progress = self.engine.progress();
        assert!(progress.done + progress.skipped <= progress.total && progress.calls_out == 0);
    }
}
