//! The order in which an apply is stored, found before anything is sent. Pure: what the server has
//! comes in.
//!
//! Functions go first, and a workflow after those that it runs. But a server refuses what a workflow
//! that it has could not run, so that each item is tried beside what is there by then: of those that
//! wait, the first that would be taken is next. A workflow that no longer runs a function goes before
//! that function's change. Where nothing would be taken, the set cannot be applied.

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::WorkflowSpec;
use millrace_types::workflow::{Fit, NESTING_MAX, Run};

use super::{Callee, Wanted};
use crate::failure::Failure;

/// One item of what is wanted, by its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Function(usize),
    Workflow(usize),
}

/// What something that can be run is.
#[derive(Debug, Clone)]
pub(super) enum Known {
    Function(Fit),
    Workflow(WorkflowSpec),
}

/// What there is, as far as the apply touches it.
#[derive(Debug, Default)]
pub(super) struct World {
    known: BTreeMap<Callee, Known>,
}

/// Why something would not be taken.
#[derive(Debug)]
struct Unfit {
    /// The workflow that could not run.
    workflow: Callee,
    problem: String,
}

/// Every item, in an order that a server with that world takes.
pub(super) fn plan(wanted: &Wanted, mut world: World) -> Result<Vec<Step>, Failure> {
    let functions = (0..wanted.functions.len()).map(Step::Function);
    let mut waiting: Vec<_> = functions.chain((0..wanted.workflows.len()).map(Step::Workflow)).collect();
    let mut order = Vec::with_capacity(waiting.len());
    while !waiting.is_empty() {
        let mut refused = None;
        let taken = waiting.iter().position(|step| {
            let (callee, known) = step.change(wanted);
            match world.take(&callee, known) {
                Ok(()) => true,
                Err(unfit) => {
                    refused.get_or_insert((*step, unfit));
                    false
                }
            }
        });
        match (taken, refused) {
            (Some(taken), _) => order.push(waiting.remove(taken)),
            (None, Some((step, unfit))) => return Err(step.refused(wanted, unfit)),
            (None, None) => break,
        }
    }
    Ok(order)
}

impl Step {
    fn change(self, wanted: &Wanted) -> (Callee, Known) {
        match self {
            Self::Function(at) => {
                let function = &wanted.functions[at];
                let known = Known::Function(function.fit());
                (Callee::function(&function.item.spec.key), known)
            }
            Self::Workflow(at) => {
                let spec = &wanted.workflows[at].spec;
                (Callee::workflow(&spec.key), Known::Workflow(spec.clone()))
            }
        }
    }

    fn refused(self, wanted: &Wanted, Unfit { workflow, problem }: Unfit) -> Failure {
        let (callee, _) = self.change(wanted);
        let source = match self {
            Self::Function(at) => &wanted.functions[at].item.source,
            Self::Workflow(at) => &wanted.workflows[at].source,
        };
        let title = match &callee.run {
            Run::Function(name) => format!("function {name}"),
            Run::Workflow(name) => format!("workflow {name}"),
        };
        let about = format!("{}: {title}", source.display());
        if callee == workflow {
            return Failure::usage(problem).about(about);
        }
        let user = workflow.run.name();
        Failure::usage(format!(
            "workflow {user}, as the server has it, runs this and could not run it so: {problem}"
        ))
        .about(about)
        .hint(format!(
            "apply it under another name and let the workflow run that, or delete the workflow first: millrace delete workflow {user}"
        ))
    }
}

impl World {
    pub(super) fn insert(&mut self, callee: Callee, known: Known) {
        self.known.insert(callee, known);
    }

    /// The functions without which these workflows, and those of the server that run any of
    /// `changed`, cannot be checked.
    pub(super) fn functions_of(&self, wanted: &Wanted) -> BTreeSet<Callee> {
        let functions = wanted.functions.iter().map(|it| Callee::function(&it.item.spec.key));
        let workflows = wanted.workflows.iter().map(|it| Callee::workflow(&it.spec.key));
        let mut rest: Vec<Callee> = self.above(functions.chain(workflows).collect()).into_iter().collect();
        let inside = wanted.workflows.iter().flat_map(|it| callees(&it.spec));
        rest.extend(inside);
        let (mut seen, mut found) = (BTreeSet::new(), BTreeSet::new());
        while let Some(callee) = rest.pop() {
            match (&callee.run, self.known.get(&callee)) {
                (Run::Function(_), _) => {
                    found.insert(callee);
                }
                (_, Some(Known::Workflow(spec))) if seen.insert(callee.clone()) => rest.extend(callees(spec)),
                _ => {}
            }
        }
        found
    }

    /// These, and the workflows that run one of them, themselves or through others.
    fn above(&self, of: BTreeSet<Callee>) -> BTreeSet<Callee> {
        let mut found = of;
        loop {
            let runs_one = |spec: &WorkflowSpec| callees(spec).any(|callee| found.contains(&callee));
            let more: Vec<_> = self
                .known
                .iter()
                .filter(|(callee, known)| match known {
                    Known::Workflow(spec) => !found.contains(callee) && runs_one(spec),
                    Known::Function(_) => false,
                })
                .map(|(callee, _)| callee.clone())
                .collect();
            if more.is_empty() {
                return found;
            }
            found.extend(more);
        }
    }

    /// Lets one become another, if it and every workflow above it can be run then.
    fn take(&mut self, callee: &Callee, known: Known) -> Result<(), Unfit> {
        let before = self.known.insert(callee.clone(), known);
        let mut fits = BTreeMap::new();
        let checked = self
            .above([callee.clone()].into())
            .iter()
            .try_for_each(|it| self.fit(it, 0, &mut fits).map(|_| ()));
        if checked.is_err() {
            match before {
                Some(before) => self.known.insert(callee.clone(), before),
                None => self.known.remove(callee),
            };
        }
        checked
    }

    /// What one takes and gives, `outside` workflows deep in others; `None` if it is not there.
    fn fit(
        &self,
        callee: &Callee,
        outside: usize,
        fits: &mut BTreeMap<Callee, Fit>,
    ) -> Result<Option<Fit>, Unfit> {
        if let Some(fit) = fits.get(callee) {
            return Ok(Some(fit.clone()));
        }
        let spec = match self.known.get(callee) {
            None => return Ok(None),
            Some(Known::Function(fit)) => return Ok(Some(fit.clone())),
            Some(Known::Workflow(spec)) => spec,
        };
        let unfit = |problem| Unfit { workflow: callee.clone(), problem };
        let mut inside = BTreeMap::new();
        for run in spec.runs() {
            // What was there lies no deeper than is allowed, and one more comes at a time: the rest
            // run each other.
            if outside > 2 * NESTING_MAX + 1 {
                return Err(unfit(format!("{run} comes to run itself, through others: workflows end")));
            }
            let of = Callee { tenant: callee.tenant.clone(), run: run.clone() };
            inside.extend(self.fit(&of, outside + 1, fits)?.map(|fit| (run, fit)));
        }
        let fit =
            spec.fit(|run| inside.get(run).map(Fit::by_ref)).map_err(|error| unfit(error.to_string()))?;
        fits.insert(callee.clone(), fit.clone());
        Ok(Some(fit))
    }
}

fn callees(spec: &WorkflowSpec) -> impl Iterator<Item = Callee> {
    let tenant = &spec.key.tenant;
    spec.steps.iter().map(move |step| Callee { tenant: tenant.clone(), run: step.run.clone() })
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::super::{Function, Model};
    use super::*;
    use crate::commands::apply::manifests::{Item, ModelAt, WorkflowItem};
    use millrace_types::manifest::{self, Manifest};
    use millrace_types::sequences::{IDLE_DEFAULT, StatePair};
    use millrace_types::workflow::Signature;
    use millrace_types::{
        DataType, Digest, Dim, FunctionKey, FunctionName, FunctionSpec, Sequences, TenantName, TensorSpec,
    };

    /// Rows of 4, out of rows of 4.
    fn signature(output: &str) -> Signature {
        let rows = |name: &str| {
            let shape = vec![Dim::Symbol("n".into()), Dim::Fixed(4)];
            TensorSpec { name: name.into(), datatype: DataType::Fp32, shape }
        };
        Signature { inputs: vec![rows("x")], outputs: vec![rows(output)] }
    }

    fn function(name: &str, output: &str) -> Function {
        let key = FunctionKey { tenant: TenantName::default(), name: FunctionName::new(name).unwrap() };
        let source = PathBuf::from(format!("{name}.yaml"));
        let digest = Digest::of(output.as_bytes());
        let item = Item { spec: FunctionSpec::new(key), model: ModelAt::Cluster(digest), source };
        let model = Model::of_cluster(digest, signature(output));
        Function { item, model }
    }

    /// One step, of which it gives this output.
    fn workflow(name: &str, runs: &str, output: &str) -> WorkflowItem {
        let text = format!(
            "apiVersion: millrace/v1\nkind: Workflow\nmetadata: {{name: {name}}}\nspec:\n  inputs: [x]\n  steps: [{{name: s, {runs}, inputs: {{x: input.x}}}}]\n  outputs: {{y: s.{output}}}\n"
        );
        let Manifest::Workflow(spec) = manifest::parse(&text).unwrap().remove(0) else {
            panic!("not a workflow")
        };
        WorkflowItem { spec, source: format!("{name}.yaml").into() }
    }

    /// A server with functions `f` and `g`, and these workflows.
    fn world(workflows: &[WorkflowItem]) -> World {
        let mut world = World::default();
        for name in ["f", "g"] {
            let key = function(name, "y").item.spec.key;
            world.insert(Callee::function(&key), Known::Function(Fit::of_function(signature("y"))));
        }
        for item in workflows {
            world.insert(Callee::workflow(&item.spec.key), Known::Workflow(item.spec.clone()));
        }
        world
    }

    fn order(
        functions: Vec<Function>,
        workflows: Vec<WorkflowItem>,
        world: World,
    ) -> Result<String, Failure> {
        let wanted = Wanted { functions, workflows };
        let steps = plan(&wanted, world)?;
        let names = steps.into_iter().map(|step| step.change(&wanted).0.run.name().to_string());
        Ok(names.collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn functions_go_first_and_what_stops_running_one_before_its_change() {
        let runs_f = || workflow("w", "function: f", "y");
        let new = order(vec![function("h", "y")], vec![workflow("w", "function: h", "y")], world(&[]));
        assert_eq!(new, Ok("h w".into()));
        let unchanged = order(vec![function("f", "y")], vec![runs_f()], world(&[runs_f()]));
        assert_eq!(unchanged, Ok("f w".into()));
        let leaves = vec![workflow("w", "function: g", "y")];
        assert_eq!(order(vec![function("f", "z")], leaves, world(&[runs_f()])), Ok("w f".into()));
        let to_a_new_one = vec![workflow("w", "function: h", "z")];
        let both = vec![function("f", "z"), function("h", "z")];
        assert_eq!(order(both, to_a_new_one, world(&[runs_f()])), Ok("h w f".into()));
    }

    #[test]
    fn what_no_order_allows_is_refused_by_what_to_do() {
        let runs_f = || workflow("w", "function: f", "y");
        for workflows in [vec![], vec![workflow("w", "function: f", "z")]] {
            let failure = order(vec![function("f", "z")], workflows, world(&[runs_f()])).unwrap_err();
            let message = failure.message.unwrap();
            let says =
                "f.yaml: function f: workflow w, as the server has it, runs this and could not run it so";
            assert!(message.starts_with(says), "{message}");
            assert!(failure.hint.unwrap().ends_with("millrace delete workflow w"));
        }
    }

    /// No step keeps state.
    #[test]
    fn what_comes_to_keep_state_is_run_by_no_workflow() {
        let keeping = |name: &str| {
            let mut it = function(name, "y");
            let state = vec![StatePair { input: "x".into(), output: "y".into() }];
            it.item.spec.sequences = Some(Sequences { state, idle: IDLE_DEFAULT, max: 1 });
            vec![it]
        };
        let runs = |name: &str| workflow("w", &format!("function: {name}"), "y");
        assert_eq!(order(keeping("f"), vec![runs("g")], world(&[runs("f")])), Ok("w f".into()));
        for (functions, workflows, there) in
            [(keeping("f"), vec![], world(&[runs("f")])), (keeping("h"), vec![runs("h")], world(&[]))]
        {
            let refused = order(functions, workflows, there).unwrap_err().message.unwrap();
            assert!(refused.contains("has sequences, and a step belongs to none"), "{refused}");
        }
    }

    #[test]
    fn nesting_counts_what_the_server_has() {
        let level = |level: usize| match level {
            0 => workflow("n0", "function: f", "y"),
            level => workflow(&format!("n{level}"), &format!("workflow: n{}", level - 1), "y"),
        };
        let there = |count| world(&(0..count).map(level).collect::<Vec<_>>());
        assert_eq!(order(vec![], vec![level(4)], there(4)), Ok("n4".into()));
        let refused = order(vec![], vec![level(5)], there(5)).unwrap_err().message.unwrap();
        assert!(refused.contains("n5.yaml: workflow n5: workflow \"n4\" has workflows 4 deep"), "{refused}");
        let base = vec![workflow("base", "function: f", "y"), workflow("n0", "workflow: base", "y")];
        let deeper = order(vec![], base.clone(), there(5)).unwrap_err().message.unwrap();
        assert!(deeper.contains("workflow n4, as the server has it, runs this"), "{deeper}");
        assert_eq!(order(vec![], base, there(4)), Ok("base n0".into()));
        // Those that run each other are not looked into for ever.
        let looped = workflow("n0", "workflow: n2", "y");
        assert!(order(vec![], vec![looped], there(3)).is_err());
    }

    #[test]
    fn the_functions_of_all_that_is_checked_are_asked_for() {
        let there = world(&[
            workflow("inner", "function: f", "y"),
            workflow("outer", "workflow: inner", "y"),
            workflow("apart", "function: g", "y"),
        ]);
        let key = |wanted: Wanted| {
            let found = there.functions_of(&wanted);
            found.into_iter().map(|it| it.run.name().to_string()).collect::<Vec<_>>()
        };
        let changed = Wanted { functions: vec![function("f", "z")], workflows: vec![] };
        assert_eq!(key(changed), ["f"]);
        let runs = Wanted { functions: vec![], workflows: vec![workflow("new", "workflow: outer", "y")] };
        assert_eq!(key(runs), ["f"]);
    }
}
