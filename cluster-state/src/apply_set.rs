//! The dry run of a set: functions and workflows that a client applies together.
//!
//! In: a [`State`], and the items in the client's order. Out: an order in which the state accepts
//! all of them, with the effect of each, or the refusal of an item that no such order accepts.
//! Every item is tried on a copy, so the state does not change.
//!
//! ```text
//!   waiting: f g w ──▶ the first item that the copy takes ──▶ the copy after it ──┐
//!            ▲                                                                    │
//!            └──────────────── refused items wait, and are tried again ◀──────────┘
//! ```
//!
//! An item can need another item first. A workflow needs its functions, and the change of a
//! function needs the workflow that no longer runs the function. Only such refusals are tried
//! again. All others are final.

use std::collections::{BTreeMap, VecDeque};

use millrace_types::{Bytes, Digest, FunctionSpec, WorkflowSpec};

use crate::caller::CallerName;
use crate::command::{Proposal, StateCommand};
use crate::outcome::{CommandEffect, CommandRefusal};
use crate::record::{ControllerId, ModelSummary};
use crate::state::State;
use crate::time::UnixMillis;

/// Maximum number of refusals in the dry run of one set. The number of tries is thereby bounded
/// too, because each try that is not refused accepts an item. A set with more refusals is refused,
/// although a longer search may find an order.
const REFUSALS_MAX: usize = 10_000;

/// A function or workflow of a set.
#[derive(Debug, Clone, PartialEq)]
pub enum SetItem {
    /// A function with its model.
    Function {
        /// The function's spec.
        spec: FunctionSpec,
        /// The model's content address.
        digest: Digest,
    },
    /// A workflow of functions or other workflows.
    Workflow {
        /// The workflow's spec.
        spec: WorkflowSpec,
    },
}

/// A set of functions and workflows, with the inputs of its dry run besides the state.
#[derive(Debug, Clone, PartialEq)]
pub struct ApplySet {
    /// The items, in the client's order.
    pub items: Vec<SetItem>,
    /// Models that the client uploads before the items are applied. These models count as stored.
    pub models: BTreeMap<Digest, ModelSummary>,
    /// The voters, of which a majority must hold every other model.
    pub voters: Vec<ControllerId>,
    /// The client that applies the set.
    pub caller: CallerName,
    /// The time of the dry run.
    pub stamp: UnixMillis,
}

/// An item that the state accepts, and its effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetStep {
    /// The item's position in [`ApplySet::items`].
    pub item: usize,
    /// The effect of applying the item.
    pub applied: CommandEffect,
}

/// An item that no order accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SetRefusal {
    /// The item's position in [`ApplySet::items`].
    pub item: usize,
    /// The reason for the refusal.
    pub refusal: CommandRefusal,
}

impl SetItem {
    /// Whether another item of the set can make the state accept this one.
    fn depends_on_others(&self, refusal: &CommandRefusal) -> bool {
        match self {
            Self::Function { .. } => matches!(refusal, CommandRefusal::BreaksWorkflow { .. }),
            Self::Workflow { .. } => {
                matches!(refusal, CommandRefusal::BreaksWorkflow { .. } | CommandRefusal::InvalidSpec { .. })
            }
        }
    }
}

impl ApplySet {
    /// Returns the commands that apply an item, in order.
    fn commands(&self, item: &SetItem, state: &State) -> Vec<StateCommand> {
        match item {
            SetItem::Workflow { spec } => {
                vec![StateCommand::ApplyWorkflow { spec: spec.clone(), expected: None }]
            }
            SetItem::Function { spec, digest } => {
                let uploaded = self.models.get(digest).map(|model| StateCommand::AddArtifact {
                    digest: *digest,
                    // An artifact that the state knows keeps its size.
                    bytes: state.artifact(digest).map_or(Bytes::ZERO, |known| known.bytes),
                    model: model.clone(),
                    // An upload ends when the file is safe, as it is in the object store.
                    holder: ControllerId::OBJECT_STORE,
                });
                let applied = StateCommand::ApplyFunction {
                    spec: spec.clone(),
                    digest: *digest,
                    expected: None,
                    voters: self.voters.clone(),
                };
                uploaded.into_iter().chain([applied]).collect()
            }
        }
    }

    /// Returns the effect of an item on a state, and the state after the item.
    fn try_item(&self, item: &SetItem, state: &State) -> Result<(CommandEffect, State), CommandRefusal> {
        let mut after = state.clone();
        let mut effect = CommandEffect::Unchanged;
        for command in self.commands(item, state) {
            let caller = self.caller.clone();
            let proposal = Proposal { stamp: self.stamp, caller, idempotency: None, command };
            (effect, after) = after.admitted_dry_run(&proposal)?;
        }
        Ok((effect, after))
    }
}

/// The next item of a set, and the state after that item.
struct NextItem {
    /// The item's position among the waiting items.
    position: usize,
    step: SetStep,
    after: State,
}

/// The search for an order in which a state accepts a whole set.
struct OrderSearch<'a> {
    set: &'a ApplySet,
    refusals_left: usize,
}

impl OrderSearch<'_> {
    /// Returns the first waiting item that the state accepts; `None` if no item waits.
    fn next(&mut self, waiting: &VecDeque<usize>, state: &State) -> Result<Option<NextItem>, SetRefusal> {
        let mut first_refused = None;
        for (position, &item) in waiting.iter().enumerate() {
            let refusal = match self.set.try_item(&self.set.items[item], state) {
                Ok((applied, after)) => {
                    let step = SetStep { item, applied };
                    return Ok(Some(NextItem { position, step, after }));
                }
                Err(refusal) => refusal,
            };
            let is_final = !self.set.items[item].depends_on_others(&refusal);
            let refused = SetRefusal { item, refusal };
            self.refusals_left = self.refusals_left.saturating_sub(1);
            if is_final || self.refusals_left == 0 {
                return Err(refused);
            }
            first_refused.get_or_insert(refused);
        }
        first_refused.map_or(Ok(None), Err)
    }
}

impl State {
    /// Returns every item of the set once, in an order in which this state accepts all of them. The
    /// next item is the first in the client's order that is accepted after the items before it.
    ///
    /// # Errors
    /// [`SetRefusal`] of the first item that no order accepts.
    pub fn dry_run_set(&self, set: &ApplySet) -> Result<Vec<SetStep>, SetRefusal> {
        self.search_order(OrderSearch { set, refusals_left: REFUSALS_MAX })
    }

    fn search_order(&self, mut search: OrderSearch<'_>) -> Result<Vec<SetStep>, SetRefusal> {
        let mut state = self.clone();
        let mut waiting: VecDeque<usize> = (0..search.set.items.len()).collect();
        let mut steps = Vec::with_capacity(waiting.len());
        while let Some(next) = search.next(&waiting, &state)? {
            waiting.remove(next.position);
            steps.push(next.step);
            state = next.after;
        }
        Ok(steps)
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::sequences::{IDLE_DEFAULT, StatePair};
    use millrace_types::workflow::{NESTING_MAX, StepTarget};
    use millrace_types::{Dim, SequenceSpec};

    use super::*;
    use crate::commands::testing::{
        TestLog, apply, apply_workflow, chain, digest, key, model, model_of, run_function, run_workflow,
        spec, tensor,
    };

    /// Returns a cluster with the functions `f` and `g` of the model "y", and these workflows. The output
    /// of the model "y" is `y`, and the output of the model "z" is `z`.
    fn cluster(workflows: &[WorkflowSpec]) -> TestLog {
        let mut log = TestLog::with_artifacts(&["y"]);
        log.add_model("z", model_of(tensor("x", 64), tensor("z", 64)));
        for name in ["f", "g"] {
            log.apply(apply(name, "y")).unwrap();
        }
        for workflow in workflows {
            log.apply(apply_workflow(workflow.clone())).unwrap();
        }
        log
    }

    fn function(name: &str, model: &str) -> SetItem {
        SetItem::Function { spec: spec(name), digest: digest(model) }
    }

    /// Returns a workflow of these steps.
    fn workflow(name: &str, runs: &[StepTarget]) -> SetItem {
        SetItem::Workflow { spec: chain(name, runs) }
    }

    /// Returns a workflow whose first step runs a function of the model "z".
    fn workflow_of_z(name: &str, runs: &[StepTarget]) -> SetItem {
        let mut spec = chain(name, runs);
        spec.outputs[0].from = "s0.z".parse().unwrap();
        SetItem::Workflow { spec }
    }

    fn set(items: Vec<SetItem>) -> ApplySet {
        ApplySet {
            items,
            models: BTreeMap::new(),
            voters: Vec::new(),
            caller: CallerName("alice".into()),
            stamp: UnixMillis(2_000_000),
        }
    }

    fn key_of(item: &SetItem) -> String {
        match item {
            SetItem::Function { spec, .. } => spec.key.name.to_string(),
            SetItem::Workflow { spec } => spec.key.name.to_string(),
        }
    }

    /// Returns the names in the order of the steps, each with `+` if it is created and `=` if it is
    /// unchanged.
    fn order(log: &TestLog, set: &ApplySet) -> Result<String, SetRefusal> {
        let before = log.state.clone();
        let steps = log.state.dry_run_set(set)?;
        assert_eq!(log.state, before, "a dry run changes nothing");
        let word = |step: SetStep| {
            let mark = match step.applied {
                CommandEffect::Created { .. } => "+",
                CommandEffect::Unchanged => "=",
                _ => "",
            };
            format!("{}{mark}", key_of(&set.items[step.item]))
        };
        Ok(steps.into_iter().map(word).collect::<Vec<_>>().join(" "))
    }

    fn refused(log: &TestLog, items: Vec<SetItem>) -> (String, CommandRefusal) {
        let set = set(items);
        let SetRefusal { item, refusal } = log.state.dry_run_set(&set).unwrap_err();
        (key_of(&set.items[item]), refusal)
    }

    #[test]
    fn items_keep_their_order_unless_an_item_needs_another_first() {
        let runs_f = || chain("w", &[run_function("f")]);
        for (stored, items, expected) in [
            (vec![], vec![function("h", "y"), workflow("w", &[run_function("h")])], "h+ w+"),
            (vec![], vec![workflow("w", &[run_function("h")]), function("h", "y")], "h+ w+"),
            (vec![runs_f()], vec![function("f", "y"), workflow("w", &[run_function("f")])], "f= w="),
            // The workflow stops running the function, then the function changes.
            (vec![runs_f()], vec![function("f", "z"), workflow("w", &[run_function("g")])], "w f"),
            (
                vec![runs_f()],
                vec![function("f", "z"), function("h", "z"), workflow_of_z("w", &[run_function("h")])],
                "h+ w f",
            ),
        ] {
            assert_eq!(order(&cluster(&stored), &set(items)), Ok(expected.into()));
        }
    }

    #[test]
    fn a_change_that_a_stored_workflow_cannot_run_is_refused_in_every_order() {
        let log = cluster(&[chain("w", &[run_function("f")])]);
        for items in [
            vec![function("f", "z")],
            // The workflow would fit the function afterwards, but neither can be applied first.
            vec![function("f", "z"), workflow_of_z("w", &[run_function("f")])],
        ] {
            let (name, refusal) = refused(&log, items);
            assert_eq!(name, "f");
            assert!(
                matches!(refusal, CommandRefusal::BreaksWorkflow { workflow, .. } if workflow == key("w"))
            );
        }
    }

    #[test]
    fn a_function_that_starts_to_keep_state_waits_until_its_workflow_runs_another() {
        let mut fixed = model();
        for tensor in fixed.inputs.iter_mut().chain(&mut fixed.outputs) {
            tensor.shape[0] = Dim::Fixed(1);
        }
        let mut log = cluster(&[]);
        log.add_model("fixed", fixed);
        log.apply(apply("f", "fixed")).unwrap();
        log.apply(apply_workflow(chain("w", &[run_function("f")]))).unwrap();
        let state = vec![StatePair { input: "x".into(), output: "y".into() }];
        let sequences = Some(SequenceSpec { state, idle: IDLE_DEFAULT, max: 1 });
        let keeping = |name: &str| {
            let spec = FunctionSpec { sequences: sequences.clone(), ..spec(name) };
            SetItem::Function { spec, digest: digest("fixed") }
        };
        let leaves = workflow("w", &[run_function("g")]);
        assert_eq!(order(&log, &set(vec![keeping("f"), leaves])), Ok("w f".into()));
        let (name, refusal) = refused(&log, vec![keeping("h"), workflow("v", &[run_function("h")])]);
        assert_eq!(name, "v");
        assert!(
            refusal.to_string().contains("has sequences, and a step belongs to no sequence"),
            "{refusal}"
        );
    }

    #[test]
    fn nesting_counts_the_workflows_of_the_state_and_of_the_set() {
        let level = |level: usize| match level {
            0 => chain("n0", &[run_function("f")]),
            level => chain(&format!("n{level}"), &[run_workflow(&format!("n{}", level - 1))]),
        };
        let item = |of: usize| SetItem::Workflow { spec: level(of) };
        let stored = |count: usize| cluster(&(0..count).map(level).collect::<Vec<_>>());
        let whole = |depth: usize| (0..=depth).map(item).collect::<Vec<_>>();
        assert_eq!(order(&cluster(&[]), &set(whole(NESTING_MAX))), Ok("n0+ n1+ n2+ n3+ n4+".into()));
        for (log, items) in
            [(cluster(&[]), whole(NESTING_MAX + 1)), (stored(NESTING_MAX + 1), vec![item(NESTING_MAX + 1)])]
        {
            let (name, refusal) = refused(&log, items);
            assert_eq!(name, "n5");
            assert!(refusal.to_string().contains("nests workflows 4 deep"), "{refusal}");
        }
        let deeper = || vec![workflow("base", &[run_function("f")]), workflow("n0", &[run_workflow("base")])];
        assert_eq!(order(&stored(NESTING_MAX), &set(deeper())), Ok("base+ n0".into()));
        let (name, refusal) = refused(&stored(NESTING_MAX + 1), deeper());
        assert_eq!(name, "n0");
        assert!(matches!(refusal, CommandRefusal::BreaksWorkflow { workflow, .. } if workflow == key("n4")));
        let (_, looped) = refused(&stored(3), vec![workflow("n0", &[run_workflow("n2")])]);
        assert!(looped.to_string().contains("workflows run each other: n0 -> n2 -> n1 -> n0"), "{looped}");
    }

    #[test]
    fn a_model_that_will_be_uploaded_counts_as_stored_by_a_majority() {
        let log = cluster(&[]);
        let voters = || (1..=3).map(ControllerId).collect();
        let items = || vec![function("h", "new"), workflow("w", &[run_function("h")])];
        let missing = ApplySet { voters: voters(), ..set(items()) };
        let refusal = CommandRefusal::ArtifactNotFound { digest: digest("new") };
        assert_eq!(log.state.dry_run_set(&missing), Err(SetRefusal { item: 0, refusal }));
        let models = BTreeMap::from([(digest("new"), model())]);
        assert_eq!(order(&log, &ApplySet { models, ..missing }), Ok("h+ w+".into()));
        // The state knows this model, and controller 1 alone holds its file.
        let held_by_one = ApplySet { voters: voters(), ..set(vec![function("f", "y")]) };
        assert_eq!(order(&log, &held_by_one), Ok("f=".into()), "an unchanged function stores nothing");
        let held_by_one = ApplySet { voters: voters(), ..set(vec![function("h", "y")]) };
        let SetRefusal { refusal, .. } = log.state.dry_run_set(&held_by_one).unwrap_err();
        assert!(matches!(refusal, CommandRefusal::ArtifactNotHeld { held: 1, needed: 2, .. }), "{refusal}");
        let models = BTreeMap::from([(digest("y"), model())]);
        assert_eq!(order(&log, &ApplySet { models, ..held_by_one }), Ok("h+".into()));
    }

    #[test]
    fn a_refusal_that_no_other_item_can_lift_ends_the_search() {
        let log = cluster(&[chain("w", &[run_function("f")])]);
        let (name, refusal) = refused(&log, vec![function("f", "z"), function("w", "y")]);
        assert_eq!(name, "w");
        assert!(matches!(refusal, CommandRefusal::NameTaken { .. }), "{refusal}");
    }

    #[test]
    fn the_search_for_an_order_is_bounded() {
        let log = cluster(&[]);
        let waits = |name: &str| workflow(name, &[run_function("h")]);
        let set = set(vec![waits("v"), waits("w"), function("h", "y")]);
        let search = |refusals_left| log.state.search_order(OrderSearch { set: &set, refusals_left });
        assert_eq!(search(3).unwrap().iter().map(|step| step.item).collect::<Vec<_>>(), [2, 0, 1]);
        assert_eq!(search(2).unwrap_err().item, 1);
    }
}
