//! Brings a graph's nodes into an order in which they can run, and says which values each reads.
//!
//! The file's order is kept as far as it is one (ONNX asks for that, exporters differ). A node with
//! subgraphs (`If`, `Loop`) reads what they capture from the graph around them, so it is ordered and
//! cut like any other node and never split. What no output needs is dropped.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};

use crate::error::ModelError;
use crate::onnx::GraphProto;

/// Nodes in one graph: rten's planning takes time with the square of it where the graph is wide.
pub const MAX_NODES: usize = 32_768;
/// Nodes in a row, each reading the one before. rten plans by recursion along this chain: between
/// 4,096 and 8,192 nodes overflow the 2 MiB stack of a thread, which kills the process. BERT-base has
/// under 400, a 32-layer decoder about 1,300.
pub const MAX_CHAIN: usize = 2_048;

/// Who provides a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Maker {
    /// An input or a weight.
    Given,
    /// The node at this place.
    Node(usize),
}

/// Names a subgraph can see: of the graph around it, and of those around that.
pub(crate) struct Scope<'a> {
    names: &'a HashMap<String, Maker>,
    outer: Option<&'a Scope<'a>>,
}

impl Scope<'_> {
    fn has(&self, name: &str) -> bool {
        self.names.contains_key(name) || self.outer.is_some_and(|outer| outer.has(name))
    }
}

/// What ordering found out.
pub(crate) struct Arranged {
    /// For each node, in its new order, the values of this graph or of one around it that it or its
    /// subgraphs read. Each once, in the order met.
    pub(crate) reads: Vec<Vec<String>>,
    /// Values of the graphs around this one that it reads.
    captures: BTreeSet<String>,
}

/// Orders the nodes of `graph` and of every subgraph in it.
///
/// # Errors
/// For a value without a maker or with two, a nameless one, a cycle, and the bounds above.
pub(crate) fn arrange(graph: &mut GraphProto, outer: Option<&Scope<'_>>) -> Result<Arranged, ModelError> {
    if graph.node.len() > MAX_NODES {
        return Err(ModelError::TooMany { what: "nodes", limit: MAX_NODES });
    }
    let names = name_makers(graph, outer)?;
    let scope = Scope { names: &names, outer };
    let mut captures = BTreeSet::new();
    let mut reads = Vec::with_capacity(graph.node.len());
    for node in &mut graph.node {
        let mut read: Vec<String> = node.input.iter().filter(|name| !name.is_empty()).cloned().collect();
        for subgraph in node.attribute.iter_mut().filter_map(|attribute| attribute.g.as_mut()) {
            read.extend(arrange(subgraph, Some(&scope))?.captures);
        }
        let mut seen = HashSet::new();
        read.retain(|name| seen.insert(name.clone()));
        for value in read.iter().filter(|value| !names.contains_key(*value)) {
            if !outer.is_some_and(|outer| outer.has(value)) {
                return Err(ModelError::DanglingInput { node: node.label(), value: value.clone() });
            }
            captures.insert(value.clone());
        }
        reads.push(read);
    }
    let order = order(graph, &names, &reads)?;
    let mut nodes: Vec<_> = std::mem::take(&mut graph.node).into_iter().map(Some).collect();
    graph.node = order.iter().filter_map(|&index| nodes[index].take()).collect();
    let reads = order.iter().map(|&index| std::mem::take(&mut reads[index])).collect();
    Ok(Arranged { reads, captures })
}

/// Who provides each value of a graph. A name that a graph around it has already would be another
/// value by the same name, which ONNX forbids and the runtime mistakes for the outer one.
fn name_makers(graph: &GraphProto, outer: Option<&Scope<'_>>) -> Result<HashMap<String, Maker>, ModelError> {
    let mut names = HashMap::new();
    let mut add = |what, name: &str, maker| {
        if name.is_empty() {
            return Err(ModelError::Unnamed { what });
        }
        let shadows = outer.is_some_and(|outer| outer.has(name));
        if shadows || names.insert(name.to_owned(), maker).is_some() {
            return Err(ModelError::DuplicateName { name: name.to_owned() });
        }
        Ok(())
    };
    for input in &graph.input {
        add("an input", input.name(), Maker::Given)?;
    }
    for weight in &graph.initializer {
        add("a weight", weight.name(), Maker::Given)?;
    }
    for (index, node) in graph.node.iter().enumerate() {
        for output in node.output.iter().filter(|name| !name.is_empty()) {
            add("a node's output", output, Maker::Node(index))?;
        }
    }
    let mut outputs = HashSet::new();
    for output in &graph.output {
        let value = output.name();
        if value.is_empty() {
            return Err(ModelError::Unnamed { what: "an output" });
        }
        if !names.contains_key(value) {
            return Err(ModelError::DanglingOutput { value: value.to_owned() });
        }
        if !outputs.insert(value) {
            return Err(ModelError::DuplicateName { name: value.to_owned() });
        }
    }
    Ok(names)
}

/// The nodes' places in an order in which each comes after those it reads: of those that can run, the
/// first in the file (Kahn).
fn order(
    graph: &GraphProto,
    names: &HashMap<String, Maker>,
    reads: &[Vec<String>],
) -> Result<Vec<usize>, ModelError> {
    let count = graph.node.len();
    let mut readers = vec![Vec::new(); count];
    let mut waits_for = vec![0usize; count];
    for (reader, read) in reads.iter().enumerate() {
        for maker in read.iter().filter_map(|value| names.get(value)) {
            if let Maker::Node(maker) = *maker {
                readers[maker].push(reader);
                waits_for[reader] += 1;
            }
        }
    }
    let mut ready: BinaryHeap<_> = (0..count).filter(|&node| waits_for[node] == 0).map(Reverse).collect();
    let mut chain = vec![1usize; count];
    let mut order = Vec::with_capacity(count);
    while let Some(Reverse(node)) = ready.pop() {
        order.push(node);
        for &reader in &readers[node] {
            chain[reader] = chain[reader].max(chain[node] + 1);
            waits_for[reader] -= 1;
            if waits_for[reader] == 0 {
                ready.push(Reverse(reader));
            }
        }
    }
    if let Some(stuck) = waits_for.iter().position(|&waits| waits > 0) {
        return Err(ModelError::Cycle { node: graph.node[stuck].label() });
    }
    if chain.iter().any(|&length| length > MAX_CHAIN) {
        return Err(ModelError::TooDeep { what: "nodes in a row", limit: MAX_CHAIN });
    }
    Ok(order)
}

/// Drops the nodes and weights that no output needs, and their entries in `reads`.
///
/// # Errors
/// [`ModelError::NothingToRun`] when no node is left.
pub(crate) fn prune(graph: &mut GraphProto, reads: Vec<Vec<String>>) -> Result<Vec<Vec<String>>, ModelError> {
    let mut needed: HashSet<String> = graph.output.iter().map(|output| output.name().to_owned()).collect();
    let mut kept = Vec::with_capacity(reads.len());
    for (node, read) in std::mem::take(&mut graph.node).into_iter().zip(reads).rev() {
        if node.output.iter().any(|output| needed.contains(output)) {
            needed.extend(read.iter().cloned());
            kept.push((node, read));
        }
    }
    kept.reverse();
    let reads;
    (graph.node, reads) = kept.into_iter().unzip();
    graph.initializer.retain(|weight| needed.contains(weight.name()));
    if graph.node.is_empty() { Err(ModelError::NothingToRun) } else { Ok(reads) }
}
