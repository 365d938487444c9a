//! Circles of a directed graph.

use std::collections::{BTreeMap, BTreeSet};

/// The names that tie one node to another.
pub(crate) type Edges = BTreeMap<(String, String), BTreeSet<String>>;

/// Returns the sets of at least two nodes that all reach each other.
pub(crate) fn circles(edges: &Edges) -> Vec<BTreeSet<String>> {
    let mut next: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (from, to) in edges.keys() {
        next.entry(from).or_default().push(to);
    }
    let reached: BTreeMap<&str, BTreeSet<&str>> =
        next.keys().map(|&from| (from, reach(&next, from))).collect();
    let mut circles = BTreeSet::new();
    for (from, all) in &reached {
        let back = |to: &&&str| reached.get(**to).is_some_and(|others| others.contains(from));
        let circle: BTreeSet<String> = all.iter().filter(back).map(|&to| to.to_owned()).collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles.into_iter().collect()
}

fn reach<'a>(next: &BTreeMap<&'a str, Vec<&'a str>>, from: &'a str) -> BTreeSet<&'a str> {
    let mut seen = BTreeSet::new();
    let mut open = vec![from];
    while let Some(node) = open.pop() {
        open.extend(next.get(node).into_iter().flatten().copied().filter(|&to| seen.insert(to)));
    }
    seen
}

#[test]
fn a_circle_has_the_nodes_that_reach_each_other() {
    let edge = |from: &str, to: &str| ((from.to_owned(), to.to_owned()), BTreeSet::new());
    let edges = Edges::from([edge("a", "b"), edge("b", "c"), edge("c", "a"), edge("c", "d"), edge("d", "e")]);
    assert_eq!(circles(&edges), [["a", "b", "c"].map(str::to_owned).into()]);
}
