//! Which functions pass data to each other when a workflow runs, and how much: what placement keeps on
//! one node (D19). Workflows inside it are looked through.
//!
//! How much is what was measured, where the caller knows that; else what the ends of an edge declare, the
//! larger of the two, with 1 for what neither fixes: enough to tell heavy edges from light ones. What a
//! step is only conditioned on goes to the controller, and is no edge.

use std::collections::BTreeMap;

use super::{NESTING_MAX, Ports, Run, Source, Step, WorkflowSpec};
use crate::ids::FunctionName;
use crate::tensor::{Dim, TensorSpec};
use crate::units::Bytes;

/// Steps that are looked at of one workflow, those of workflows inside it counted, whatever they run and
/// whether or not it is known: what comes after these has no edges.
pub const EDGE_STEPS_MAX: usize = 1024;

/// Data that one function makes and another takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Edge<'a> {
    /// Who makes it.
    pub from: &'a FunctionName,
    /// Who takes it.
    pub to: &'a FunctionName,
    /// How much it is in one run of the workflow, as measured or at least, and 1 where nothing is known.
    pub bytes: Bytes,
    /// Whether it lies on the workflow's critical path: of all ways through it, one that passes most.
    pub is_critical: bool,
}

impl WorkflowSpec {
    /// Its edges from function to function, in the order in which they may come to be. Trusts the graph.
    /// What `ports` of a function or `inner` workflow are not known has none. `passed` says what was seen to
    /// go from one function to another in one run, over all edges between them, where that is known: each
    /// has an equal part.
    #[must_use]
    pub fn edges<'a>(
        &'a self,
        ports: impl Fn(&FunctionName) -> Option<Ports<'a>>,
        inner: impl Fn(&FunctionName) -> Option<&'a WorkflowSpec>,
        passed: impl Fn(&FunctionName, &FunctionName) -> Option<Bytes>,
    ) -> Vec<Edge<'a>> {
        let mut flat =
            Flat { ports: &ports, inner: &inner, looked_at: 0, functions: Vec::new(), edges: Vec::new() };
        flat.expand(self, &BTreeMap::new(), 0);
        flat.measure(passed);
        flat.marked()
    }
}

/// A tensor by who made it.
#[derive(Debug, Clone, Copy)]
struct Made {
    by: usize,
    bytes: u64,
}

/// What the steps of one workflow made.
type Outputs<'a> = BTreeMap<(&'a FunctionName, &'a str), Made>;

fn made_as<'a>(source: &'a Source, given: &BTreeMap<&'a str, Made>, made: &Outputs<'a>) -> Option<Made> {
    match source {
        Source::Input(name) => given.get(name.as_str()).copied(),
        Source::Step { step, output } => made.get(&(step, output.as_str())).copied(),
    }
}

/// The steps of a workflow and of those inside it, in one order.
struct Flat<'a, 'f> {
    ports: &'f dyn Fn(&FunctionName) -> Option<Ports<'a>>,
    inner: &'f dyn Fn(&FunctionName) -> Option<&'a WorkflowSpec>,
    /// Steps so far: workflows in workflows multiply, so that a few applied ones can mean millions.
    looked_at: usize,
    functions: Vec<&'a FunctionName>,
    /// From, to and bytes: each after those that lead to its beginning.
    edges: Vec<(usize, usize, u64)>,
}

impl<'a> Flat<'a, '_> {
    /// Adds a workflow that is given this; says what it gives.
    fn expand(
        &mut self,
        spec: &'a WorkflowSpec,
        given: &BTreeMap<&'a str, Made>,
        depth: usize,
    ) -> BTreeMap<&'a str, Made> {
        let mut made = Outputs::new();
        for step in spec.in_order() {
            if self.looked_at == EDGE_STEPS_MAX {
                break;
            }
            self.looked_at += 1;
            let inputs = step.inputs.iter();
            let taken: BTreeMap<&str, Made> = inputs
                .filter_map(|(input, from)| Some((input.as_str(), made_as(from, given, &made)?)))
                .collect();
            let outputs = match &step.run {
                Run::Function(name) => self.step(name, &taken),
                Run::Workflow(name) => match (self.inner)(name).filter(|_| depth < NESTING_MAX) {
                    Some(inner) => self.expand(inner, &taken, depth + 1),
                    None => BTreeMap::new(),
                },
            };
            let Step { name, .. } = step;
            made.extend(outputs.into_iter().map(|(output, it)| ((name, output), it)));
        }
        let outputs = spec.outputs.iter();
        outputs.filter_map(|it| Some((it.name.as_str(), made_as(&it.from, given, &made)?))).collect()
    }

    fn step(&mut self, function: &'a FunctionName, taken: &BTreeMap<&str, Made>) -> BTreeMap<&'a str, Made> {
        let by = self.functions.len();
        let Some(ports) = (self.ports)(function) else { return BTreeMap::new() };
        self.functions.push(function);
        for input in ports.inputs {
            if let Some(made) = taken.get(input.name.as_str()) {
                self.edges.push((made.by, by, made.bytes.max(bytes(input))));
            }
        }
        ports.outputs.iter().map(|it| (it.name.as_str(), Made { by, bytes: bytes(it) })).collect()
    }

    /// Puts what was measured in place of what is declared.
    fn measure(&mut self, passed: impl Fn(&FunctionName, &FunctionName) -> Option<Bytes>) {
        let mut between = BTreeMap::new();
        let ends = |from: usize, to: usize| (self.functions[from], self.functions[to]);
        for &(from, to, _) in &self.edges {
            *between.entry(ends(from, to)).or_insert(0u64) += 1;
        }
        let each = |(&(from, to), edges): (&(&'a FunctionName, &'a FunctionName), &u64)| {
            Some(((from, to), (passed(from, to)?.0 / edges).max(1)))
        };
        let measured: BTreeMap<_, _> = between.iter().filter_map(each).collect();
        for (from, to, bytes) in &mut self.edges {
            *bytes = measured.get(&(self.functions[*from], self.functions[*to])).copied().unwrap_or(*bytes);
        }
    }

    /// The edges, those on the critical path marked.
    fn marked(self) -> Vec<Edge<'a>> {
        let (mut before, mut after) = (vec![0u64; self.functions.len()], vec![0u64; self.functions.len()]);
        for &(from, to, bytes) in &self.edges {
            before[to] = before[to].max(before[from].saturating_add(bytes));
        }
        for &(from, to, bytes) in self.edges.iter().rev() {
            after[from] = after[from].max(after[to].saturating_add(bytes));
        }
        let longest = before.iter().copied().max().unwrap_or(0);
        let edge = |&(from, to, bytes): &(usize, usize, u64)| Edge {
            from: self.functions[from],
            to: self.functions[to],
            bytes: Bytes(bytes),
            is_critical: before[from].saturating_add(bytes).saturating_add(after[to]) == longest,
        };
        self.edges.iter().map(edge).collect()
    }
}

/// What a tensor is at least, and never nothing.
fn bytes(tensor: &TensorSpec) -> u64 {
    let element = tensor.datatype.size().map_or(1, |size| size as u64);
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => *size,
        Dim::Symbol(_) => 1,
    };
    tensor.shape.iter().map(size).fold(element, u64::saturating_mul).max(1)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::cell::Cell;

    use super::super::{Output, Signature};
    use super::*;
    use crate::ids::{FunctionKey, TenantName};
    use crate::limits::STEPS_MAX;
    use crate::tensor::DataType;

    fn name(name: &str) -> FunctionName {
        FunctionName::new(name).unwrap()
    }

    fn tensor(name: &str, dims: &[u64]) -> TensorSpec {
        // 0 stands for what is not fixed.
        let dim = |&size: &u64| if size == 0 { Dim::Symbol("n".into()) } else { Dim::Fixed(size) };
        TensorSpec { name: name.into(), datatype: DataType::Fp32, shape: dims.iter().map(dim).collect() }
    }

    fn step(step: &str, run: Run, inputs: &[(&str, &str)]) -> Step {
        let inputs = inputs.iter().map(|(input, from)| ((*input).to_owned(), from.parse().unwrap()));
        Step { name: name(step), run, inputs: inputs.collect(), each: None, when: None, deadline: None }
    }

    fn workflow(of: &str, steps: Vec<Step>, from: &str) -> WorkflowSpec {
        let key = FunctionKey { tenant: TenantName::default(), name: name(of) };
        let outputs = vec![Output { name: "y".into(), from: from.parse().unwrap() }];
        WorkflowSpec::new(key, vec!["x".into()], steps, outputs)
    }

    fn said(edges: &[Edge<'_>]) -> Vec<(String, u64, bool)> {
        let said = |it: &Edge<'_>| (format!("{}>{}", it.from, it.to), it.bytes.0, it.is_critical);
        edges.iter().map(said).collect()
    }

    /// x [n] -> y [n, out], of every function; `wide` takes 10 of a row.
    fn signature(function: &str) -> Signature {
        let (taken, given) = match function {
            "heavy" => (0, 1000),
            "wide" => (10, 2),
            _ => (0, 2),
        };
        Signature { inputs: vec![tensor("x", &[0, taken])], outputs: vec![tensor("y", &[0, given])] }
    }

    fn edges(spec: &WorkflowSpec, inner: Option<&WorkflowSpec>) -> Vec<(String, u64, bool)> {
        let signatures: BTreeMap<_, _> =
            ["light", "heavy", "wide", "last"].map(|it| (name(it), signature(it))).into();
        let inner = |of: &FunctionName| inner.filter(|it| it.key.name == *of);
        said(&spec.edges(|of| signatures.get(of).map(Ports::from), inner, |_, _| None))
    }

    #[test]
    fn an_edge_is_as_much_as_its_ends_fix_and_the_heaviest_way_is_critical() {
        let function = |of: &str| Run::Function(name(of));
        let steps = vec![
            step("a", function("light"), &[("x", "input.x")]),
            step("b", function("heavy"), &[("x", "a.y")]),
            step("c", function("wide"), &[("x", "a.y")]),
            Step { when: "c.y".parse().ok(), ..step("d", function("last"), &[("x", "b.y")]) },
        ];
        let expected = [("light>heavy", 8, true), ("light>wide", 40, false), ("heavy>last", 4000, true)];
        assert_eq!(
            edges(&workflow("w", steps, "d.y"), None),
            expected.map(|(of, b, c)| (of.to_owned(), b, c))
        );
    }

    #[test]
    fn what_was_measured_counts_and_is_shared_out_among_the_edges_of_two_functions() {
        let function = |of: &str| Run::Function(name(of));
        let steps = vec![
            step("a", function("light"), &[("x", "input.x")]),
            step("b", function("heavy"), &[("x", "a.y")]),
            step("c", function("heavy"), &[("x", "a.y")]),
            step("d", function("last"), &[("x", "b.y")]),
            step("e", function("wide"), &[("x", "c.y")]),
        ];
        let spec = workflow("w", steps, "d.y");
        let passed = |from: &FunctionName, to: &FunctionName| match (from.as_str(), to.as_str()) {
            ("light", "heavy") => Some(Bytes(9_000)),
            ("heavy", "wide") => Some(Bytes::ZERO),
            _ => None,
        };
        let signatures = ["light", "heavy", "wide", "last"].map(|it| (name(it), signature(it)));
        let signatures: BTreeMap<_, _> = signatures.into();
        let edges = spec.edges(|of| signatures.get(of).map(Ports::from), |_| None, passed);
        let expected = [
            ("light>heavy", 4_500, true),
            ("light>heavy", 4_500, false),
            ("heavy>last", 4_000, true),
            ("heavy>wide", 1, false),
        ];
        assert_eq!(said(&edges), expected.map(|(of, b, c)| (of.to_owned(), b, c)));
    }

    #[test]
    fn workflows_inside_are_looked_through() {
        let function = |of: &str| Run::Function(name(of));
        let inside = vec![
            step("a", function("light"), &[("x", "input.x")]),
            step("b", function("heavy"), &[("x", "a.y")]),
        ];
        let inner = workflow("inner", inside, "b.y");
        let steps = vec![
            step("s", function("wide"), &[("x", "input.x")]),
            step("t", Run::Workflow(name("inner")), &[("x", "s.y")]),
            step("u", function("last"), &[("x", "t.y")]),
        ];
        let outer = workflow("outer", steps, "u.y");
        let expected = [("wide>light", 8, true), ("light>heavy", 8, true), ("heavy>last", 4000, true)];
        assert_eq!(edges(&outer, Some(&inner)), expected.map(|(of, b, c)| (of.to_owned(), b, c)));
        assert_eq!(edges(&outer, None), []);
    }

    #[test]
    fn workflows_in_workflows_are_looked_at_up_to_a_bound() {
        let level = |level: usize| {
            let run = match level {
                NESTING_MAX => Run::Function(name("unknown")),
                _ => Run::Workflow(name(&format!("w{}", level + 1))),
            };
            let steps = (0..STEPS_MAX).map(|at| step(&format!("s{at}"), run.clone(), &[("x", "input.x")]));
            workflow(&format!("w{level}"), steps.collect(), "s0.y")
        };
        let levels: Vec<_> = (0..=NESTING_MAX).map(level).collect();
        let looked_at = Cell::new(0);
        let count = || looked_at.set(looked_at.get() + 1);
        let ports = |_: &FunctionName| {
            count();
            None
        };
        let inner = |of: &FunctionName| {
            count();
            levels.iter().find(|it| it.key.name == *of)
        };
        assert_eq!(levels[0].edges(ports, inner, |_, _| None), []);
        assert_eq!(looked_at.get(), EDGE_STEPS_MAX);
    }
}
