//! Puts a graph's nodes into an order in which they can run, and lists the values that each node reads.
//!
//! The file's order is kept as far as it is valid: ONNX requires a valid order, but some exporters
//! violate that. A node with subgraphs (`If`, `Loop`) also reads the values that its subgraphs
//! capture from the graph around them. Such a node is ordered and cut like any other node, and is
//! never split. Nodes that no output needs are dropped.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, HashSet};

use crate::error::ModelError;
use crate::onnx::GraphProto;

/// Most nodes in a graph. rten's planning time grows with the square of the node count if the graph is wide.
pub const MAX_NODES: usize = 32_768;
/// Most nodes in a row, each of which reads the previous one. rten plans by recursion along this
/// chain: between 4,096 and 8,192 nodes overflow the 2 MiB stack of a thread, which kills the
/// process. BERT-base has fewer than 400 nodes in a row, and a 32-layer decoder about 1,300.
pub const MAX_CHAIN: usize = 2_048;

/// The origin of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueOrigin {
    /// The value is an input or a weight.
    Given,
    /// The value is an output of the node at this index.
    Node(usize),
}

/// Names that a subgraph can see: those of the graph around the subgraph, and of all graphs further out.
pub(crate) struct Scope<'a> {
    names: &'a HashMap<String, ValueOrigin>,
    outer: Option<&'a Scope<'a>>,
}

impl Scope<'_> {
    fn has(&self, name: &str) -> bool {
        self.names.contains_key(name) || self.outer.is_some_and(|outer| outer.has(name))
    }
}

/// The result of ordering a graph.
pub(crate) struct OrderedGraph {
    /// For each node in the new order: values of this graph or of an outer one that the node or its
    /// subgraphs read. Each value appears once, in the order of its first read.
    pub(crate) reads: Vec<Vec<String>>,
    /// Values of outer graphs that this graph reads.
    captures: BTreeSet<String>,
}

/// Orders the nodes of `graph` and of every subgraph in it.
///
/// # Errors
/// Fails for a value without a maker or with two, a value without a name, a cycle, and a graph beyond
/// the bounds above.
pub(crate) fn arrange(graph: &mut GraphProto, outer: Option<&Scope<'_>>) -> Result<OrderedGraph, ModelError> {
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
    Ok(OrderedGraph { reads, captures })
}

/// Returns the maker of each value of a graph. A name that an outer graph already uses is refused:
/// ONNX forbids such a name, and the runtime would confuse the value with the outer one.
fn name_makers(
    graph: &GraphProto,
    outer: Option<&Scope<'_>>,
) -> Result<HashMap<String, ValueOrigin>, ModelError> {
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
        add("an input", input.name(), ValueOrigin::Given)?;
    }
    for weight in &graph.initializer {
        add("a weight", weight.name(), ValueOrigin::Given)?;
    }
    for (index, node) in graph.node.iter().enumerate() {
        for output in node.output.iter().filter(|name| !name.is_empty()) {
            add("a node's output", output, ValueOrigin::Node(index))?;
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

/// Returns the nodes' indices in an order in which each node follows the nodes that it reads (Kahn).
/// Among the nodes that can run, the first in the file is next.
fn order(
    graph: &GraphProto,
    names: &HashMap<String, ValueOrigin>,
    reads: &[Vec<String>],
) -> Result<Vec<usize>, ModelError> {
    let count = graph.node.len();
    let mut readers = vec![Vec::new(); count];
    let mut waits_for = vec![0usize; count];
    for (reader, read) in reads.iter().enumerate() {
        for maker in read.iter().filter_map(|value| names.get(value)) {
            if let ValueOrigin::Node(maker) = *maker {
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
/// Returns [`ModelError::NothingToRun`] if no node is left.
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
