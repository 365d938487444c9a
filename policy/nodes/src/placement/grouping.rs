//! Forms groups of functions that belong on one node because workflows pass data between them (D19).
//! As in FaasFlow, groups grow along edges. Pairs are visited by traffic, the greatest first; of
//! equals the smaller pair, then the pair on a critical path. The groups of a pair merge if some
//! node could hold the result in its host memory and its GPU time. FaasFlow visits critical paths
//! before all other pairs. With that order, workflows that fit no node pass more than necessary,
//! the examples among them (`policy/nodes/tests/placement/groups.rs` compares every assignment of
//! functions to nodes).
//!
//! Each plan derives the groups again from the view alone. A group says where copies would best be,
//! so no state has to be stored.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::groups::{FunctionGroups, GroupRow};
use super::table::PlanningTable;
use super::view::DataFlow;

impl PlanningTable<'_> {
    /// Derives the groups from the flows.
    pub(super) fn group(&mut self, flows: &[DataFlow]) {
        let pairs = self.pairs(flows);
        if pairs.is_empty() {
            return;
        }
        let mut groups =
            FunctionGroups { near: vec![Vec::new(); self.functions.len()], ..FunctionGroups::default() };
        for (&(a, b), pair) in &pairs {
            groups.near[a].push((b, pair.bytes));
            groups.near[b].push((a, pair.bytes));
        }
        let merged = Merge::of(self, pairs).groups();
        groups.of = vec![None; self.functions.len()];
        for group in merged {
            for &member in &group.members {
                groups.of[member] = Some(groups.rows.len());
            }
            let first = group.members.iter().copied().min().unwrap_or(0);
            let Group { bytes, load, .. } = group;
            groups.rows.push(GroupRow { first, bytes, load, copies: BTreeMap::new() });
        }
        for (function, row) in self.functions.iter().enumerate() {
            row.staying_on().for_each(|node| groups.came(function, node));
        }
        self.groups = groups;
    }

    /// Returns every two wanted functions that pass data, with their total traffic.
    fn pairs(&self, flows: &[DataFlow]) -> BTreeMap<(usize, usize), PairFlow> {
        let mut pairs: BTreeMap<(usize, usize), PairFlow> = BTreeMap::new();
        let wanted = |key| {
            let found = self.functions.binary_search_by_key(&key, |row| &row.of.key).ok();
            found.filter(|&function| self.functions[function].wanted > 0)
        };
        for flow in flows {
            let (Some(a), Some(b)) = (wanted(&flow.from), wanted(&flow.to)) else { continue };
            if a != b {
                let pair = pairs.entry((a.min(b), a.max(b))).or_default();
                pair.bytes = pair.bytes.saturating_add(flow.bytes.0);
                pair.is_critical |= flow.is_critical;
            }
        }
        pairs
    }
}

/// Traffic of two functions in all workflows.
#[derive(Debug, Clone, Copy, Default)]
struct PairFlow {
    bytes: u64,
    is_critical: bool,
}

/// A group under construction.
#[derive(Debug, Default)]
struct Group {
    members: Vec<usize>,
    models: BTreeSet<usize>,
    bytes: u64,
    load: u64,
    /// Memory of one GPU that its most demanding function needs.
    gpu: u64,
}

/// Capacity of a node: host memory, GPU memory and load.
type NodeCapacity = (u64, u64, u64);

struct Merge<'t, 'v> {
    table: &'t PlanningTable<'v>,
    /// Pairs in merge order.
    pairs: Vec<(usize, usize)>,
    /// Distinct capacities of the nodes that take functions.
    shapes: BTreeSet<NodeCapacity>,
}

impl<'t, 'v> Merge<'t, 'v> {
    fn of(table: &'t PlanningTable<'v>, pairs: BTreeMap<(usize, usize), PairFlow>) -> Self {
        let mut pairs: Vec<_> = pairs.into_iter().collect();
        // Small pairs come first, and leave room for others.
        let needed = |(a, b): (usize, usize)| table.needed(a).saturating_add(table.needed(b));
        pairs.sort_by_key(|&(ends, pair)| (Reverse(pair.bytes), needed(ends), !pair.is_critical, ends));
        let open = table.nodes.iter().filter(|node| node.is_open());
        let shapes = open.map(|node| (node.of.host.0, node.of.gpu.0, node.load_max())).collect();
        Self { table, pairs: pairs.into_iter().map(|(ends, _)| ends).collect(), shapes }
    }

    /// Returns the groups of more than one function.
    fn groups(self) -> Vec<Group> {
        let mut groups: Vec<Group> = Vec::new();
        let mut of: BTreeMap<usize, usize> = BTreeMap::new();
        for &(a, b) in &self.pairs {
            let [a, b] = [a, b].map(|function| {
                *of.entry(function).or_insert_with(|| {
                    groups.push(self.alone(function));
                    groups.len() - 1
                })
            });
            // The smaller group joins the larger, so that each function changes its group only a
            // few times.
            let (into, from) =
                if groups[a].members.len() < groups[b].members.len() { (b, a) } else { (a, b) };
            if into == from || !self.fits(&groups[into], &groups[from]) {
                continue;
            }
            let joins = std::mem::take(&mut groups[from]);
            of.extend(joins.members.iter().map(|&member| (member, into)));
            let group = &mut groups[into];
            group.bytes = group.bytes.saturating_add(self.added(group, &joins));
            group.load = group.load.saturating_add(joins.load);
            group.gpu = group.gpu.max(joins.gpu);
            group.members.extend(joins.members);
            group.models.extend(joins.models);
        }
        groups.retain(|group| group.members.len() > 1);
        groups
    }

    fn alone(&self, function: usize) -> Group {
        let row = &self.table.functions[function];
        Group {
            members: vec![function],
            models: row.models.iter().copied().collect(),
            bytes: self.table.needed(function),
            load: row.load,
            gpu: row.of.gpu.0,
        }
    }

    /// Returns the bytes that a group adds to another: shared models count once.
    fn added(&self, to: &Group, group: &Group) -> u64 {
        let new = group.models.difference(&to.models);
        new.fold(0, |sum: u64, &model| sum.saturating_add(self.table.model_bytes(model)))
    }

    /// Returns whether some node, if empty, could hold both groups.
    fn fits(&self, a: &Group, b: &Group) -> bool {
        let bytes = a.bytes.saturating_add(self.added(a, b));
        let gpu = a.gpu.max(b.gpu);
        let load = a.load.saturating_add(b.load);
        let holds = |&(host, memory, time): &NodeCapacity| bytes <= host && gpu <= memory && load <= time;
        self.shapes.iter().any(holds)
    }
}
