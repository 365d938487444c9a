//! The edges between the functions of a workflow, and the bytes that cross each edge in a run.
//! Placement keeps the functions at the ends of heavy edges on the same node (D19). Nested
//! workflows are expanded.
//!
//! The size of an edge is the measured traffic, if the caller knows it. Otherwise the size is the
//! larger of the sizes that the two ends declare, with 1 for every free dimension, which is enough
//! to tell heavy edges from light ones. The tensor of a condition is sent to the controller and is
//! not an edge.

use std::collections::BTreeMap;

use super::{NESTING_MAX, Step, StepTarget, TensorSource, WorkflowSpec};
use crate::ids::FunctionName;
use crate::signature::SignatureRef;
use crate::tensor::{Dim, TensorSpec};
use crate::units::Bytes;

/// Maximum number of steps that are examined in a workflow, including the steps of nested workflows
/// and steps whose function is unknown. Steps beyond the maximum have no edges.
pub const EDGE_STEPS_MAX: usize = 1024;

/// Data that one function produces and another function consumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionEdge<'a> {
    /// The function that produces the data.
    pub from: &'a FunctionName,
    /// The function that consumes the data.
    pub to: &'a FunctionName,
    /// The size of the data in a run of the workflow: as measured, or the declared minimum, at
    /// least 1.
    pub bytes: Bytes,
    /// Whether the edge is on the critical path, which is the path through the workflow with the
    /// most bytes.
    pub is_critical: bool,
}

impl WorkflowSpec {
    /// Returns the edges from function to function, in an order in which they can occur. Requires a
    /// valid graph. A function without known `ports`, and a workflow that `inner` does not know,
    /// has no edges. `passed` returns the measured bytes from one function to another in a run,
    /// over all edges between the two, if known. Each of these edges gets an equal part.
    #[must_use]
    pub fn edges<'a>(
        &'a self,
        ports: impl Fn(&FunctionName) -> Option<SignatureRef<'a>>,
        inner: impl Fn(&FunctionName) -> Option<&'a WorkflowSpec>,
        passed: impl Fn(&FunctionName, &FunctionName) -> Option<Bytes>,
    ) -> Vec<FunctionEdge<'a>> {
        let mut flat = EdgeExpansion {
            ports: &ports,
            inner: &inner,
            looked_at: 0,
            functions: Vec::new(),
            edges: Vec::new(),
        };
        flat.expand(self, &BTreeMap::new(), 0);
        flat.measure(passed);
        flat.marked()
    }
}

/// A tensor, with the index of the function that produced the tensor.
#[derive(Debug, Clone, Copy)]
struct ProducedTensor {
    by: usize,
    bytes: u64,
}

/// The tensors that the steps of a workflow produced.
type Outputs<'a> = BTreeMap<(&'a FunctionName, &'a str), ProducedTensor>;

fn made_as<'a>(
    source: &'a TensorSource,
    given: &BTreeMap<&'a str, ProducedTensor>,
    made: &Outputs<'a>,
) -> Option<ProducedTensor> {
    match source {
        TensorSource::Input(name) => given.get(name.as_str()).copied(),
        TensorSource::Step { step, output } => made.get(&(step, output.as_str())).copied(),
    }
}

/// The steps of a workflow and of its nested workflows, in a single order.
struct EdgeExpansion<'a, 'f> {
    ports: &'f dyn Fn(&FunctionName) -> Option<SignatureRef<'a>>,
    inner: &'f dyn Fn(&FunctionName) -> Option<&'a WorkflowSpec>,
    /// The number of steps examined so far. Nested workflows multiply, so a few of them can mean
    /// millions of steps.
    looked_at: usize,
    functions: Vec<&'a FunctionName>,
    /// Edges as producer, consumer and bytes. Each edge follows the edges that lead to its
    /// producer.
    edges: Vec<(usize, usize, u64)>,
}

impl<'a> EdgeExpansion<'a, '_> {
    /// Adds a workflow with these inputs, and returns the workflow's outputs.
    fn expand(
        &mut self,
        spec: &'a WorkflowSpec,
        given: &BTreeMap<&'a str, ProducedTensor>,
        depth: usize,
    ) -> BTreeMap<&'a str, ProducedTensor> {
        let mut made = Outputs::new();
        for step in spec.in_order() {
            if self.looked_at == EDGE_STEPS_MAX {
                break;
            }
            self.looked_at += 1;
            let inputs = step.inputs.iter();
            let taken: BTreeMap<&str, ProducedTensor> = inputs
                .filter_map(|(input, from)| Some((input.as_str(), made_as(from, given, &made)?)))
                .collect();
            let outputs = match &step.run {
                StepTarget::Function(name) => self.step(name, &taken),
                StepTarget::Workflow(name) => match (self.inner)(name).filter(|_| depth < NESTING_MAX) {
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

    fn step(
        &mut self,
        function: &'a FunctionName,
        taken: &BTreeMap<&str, ProducedTensor>,
    ) -> BTreeMap<&'a str, ProducedTensor> {
        let by = self.functions.len();
        let Some(ports) = (self.ports)(function) else { return BTreeMap::new() };
        self.functions.push(function);
        for input in ports.inputs {
            if let Some(made) = taken.get(input.name.as_str()) {
                self.edges.push((made.by, by, made.bytes.max(bytes(input))));
            }
        }
        ports.outputs.iter().map(|it| (it.name.as_str(), ProducedTensor { by, bytes: bytes(it) })).collect()
    }

    /// Replaces declared sizes by measured sizes.
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

    /// Returns the edges, with those on the critical path marked.
    fn marked(self) -> Vec<FunctionEdge<'a>> {
        let mut before = vec![0u64; self.functions.len()];
        let mut after = vec![0u64; self.functions.len()];
        for &(from, to, bytes) in &self.edges {
            before[to] = before[to].max(before[from].saturating_add(bytes));
        }
        for &(from, to, bytes) in self.edges.iter().rev() {
            after[from] = after[from].max(after[to].saturating_add(bytes));
        }
        let longest = before.iter().copied().max().unwrap_or(0);
        let edge = |&(from, to, bytes): &(usize, usize, u64)| FunctionEdge {
            from: self.functions[from],
            to: self.functions[to],
            bytes: Bytes(bytes),
            is_critical: before[from].saturating_add(bytes).saturating_add(after[to]) == longest,
        };
        self.edges.iter().map(edge).collect()
    }
}

/// Returns the minimum size of a tensor in bytes, at least 1.
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

    use super::super::WorkflowOutput;
    use super::*;
    use crate::ids::{FunctionKey, TenantName};
    use crate::limits::STEPS_MAX;
    use crate::signature::Signature;
    use crate::tensor::DataType;

    fn name(name: &str) -> FunctionName {
        FunctionName::new(name).unwrap()
    }

    fn tensor(name: &str, dims: &[u64]) -> TensorSpec {
        // 0 stands for a free dimension.
        let dim = |&size: &u64| if size == 0 { Dim::Symbol("n".into()) } else { Dim::Fixed(size) };
        TensorSpec { name: name.into(), datatype: DataType::Fp32, shape: dims.iter().map(dim).collect() }
    }

    fn step(step: &str, run: StepTarget, inputs: &[(&str, &str)]) -> Step {
        let inputs = inputs.iter().map(|(input, from)| ((*input).to_owned(), from.parse().unwrap()));
        Step { name: name(step), run, inputs: inputs.collect(), each: None, when: None, deadline: None }
    }

    fn workflow(of: &str, steps: Vec<Step>, from: &str) -> WorkflowSpec {
        let key = FunctionKey { tenant: TenantName::default(), name: name(of) };
        let outputs = vec![WorkflowOutput { name: "y".into(), from: from.parse().unwrap() }];
        WorkflowSpec::new(key, vec!["x".into()], steps, outputs)
    }

    fn displayed(edges: &[FunctionEdge<'_>]) -> Vec<(String, u64, bool)> {
        let displayed =
            |it: &FunctionEdge<'_>| (format!("{}>{}", it.from, it.to), it.bytes.0, it.is_critical);
        edges.iter().map(displayed).collect()
    }

    /// Returns x [n] -> y [n, out] for every function; `wide` reads rows of 10.
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
        displayed(&spec.edges(|of| signatures.get(of).map(SignatureRef::from), inner, |_, _| None))
    }

    #[test]
    fn an_edge_has_its_declared_size_and_the_heaviest_path_is_critical() {
        let function = |of: &str| StepTarget::Function(name(of));
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
    fn measured_bytes_are_divided_among_the_edges_of_two_functions() {
        let function = |of: &str| StepTarget::Function(name(of));
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
        let edges = spec.edges(|of| signatures.get(of).map(SignatureRef::from), |_| None, passed);
        let expected = [
            ("light>heavy", 4_500, true),
            ("light>heavy", 4_500, false),
            ("heavy>last", 4_000, true),
            ("heavy>wide", 1, false),
        ];
        assert_eq!(displayed(&edges), expected.map(|(of, b, c)| (of.to_owned(), b, c)));
    }

    #[test]
    fn nested_workflows_are_expanded() {
        let function = |of: &str| StepTarget::Function(name(of));
        let inside = vec![
            step("a", function("light"), &[("x", "input.x")]),
            step("b", function("heavy"), &[("x", "a.y")]),
        ];
        let inner = workflow("inner", inside, "b.y");
        let steps = vec![
            step("s", function("wide"), &[("x", "input.x")]),
            step("t", StepTarget::Workflow(name("inner")), &[("x", "s.y")]),
            step("u", function("last"), &[("x", "t.y")]),
        ];
        let outer = workflow("outer", steps, "u.y");
        let expected = [("wide>light", 8, true), ("light>heavy", 8, true), ("heavy>last", 4000, true)];
        assert_eq!(edges(&outer, Some(&inner)), expected.map(|(of, b, c)| (of.to_owned(), b, c)));
        assert_eq!(edges(&outer, None), []);
    }

    #[test]
    fn expansion_of_nested_workflows_stops_at_the_bound() {
        let level = |level: usize| {
            let run = match level {
                NESTING_MAX => StepTarget::Function(name("unknown")),
                _ => StepTarget::Workflow(name(&format!("w{}", level + 1))),
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
