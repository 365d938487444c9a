//! Which functions belong on one node: those that pass data to each other in workflows (D19). As in
//! FaasFlow, groups grow along edges: the pair that passes most comes first, of equals the smaller one and
//! then the one on a critical path, and the groups of its two become one as long as some node could hold
//! that, in its host memory and in the time of its GPUs. FaasFlow takes critical paths before all else:
//! so workflows that fit no node pass more than they have to, the examples' among them
//! (`policy/tests/placement/groups.rs` tries every way).
//!
//! Derived anew for each plan, from the view alone: a group is where copies would best be, and nothing
//! that anyone has to keep.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use super::table::Table;
use super::view::Flow;

/// The groups, and who passes how much to whom. Without flows there is nothing in it.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// Each function's group, where it is not alone.
    of: Vec<Option<usize>>,
    /// Those that each function passes data to or from, and how much.
    near: Vec<Vec<(usize, u64)>>,
    rows: Vec<Row>,
}

/// One group.
#[derive(Debug)]
pub(super) struct Row {
    /// The first of its functions.
    pub(super) first: usize,
    /// Host memory that its models need where none of them is.
    pub(super) bytes: u64,
    /// Expected load of one copy of each.
    pub(super) load: u64,
    /// Copies that stay, by node.
    copies: BTreeMap<usize, u32>,
}

impl Groups {
    /// A function's group.
    pub(super) fn row_of(&self, function: usize) -> Option<&Row> {
        Some(&self.rows[self.number_of(function)?])
    }

    fn number_of(&self, function: usize) -> Option<usize> {
        self.of.get(function).copied().flatten()
    }

    /// Whether two functions are of one group.
    pub(super) fn are_one(&self, a: usize, b: usize) -> bool {
        self.number_of(a).is_some_and(|group| self.number_of(b) == Some(group))
    }

    /// Those that a function passes data to or from, and how much.
    pub(super) fn near(&self, function: usize) -> &[(usize, u64)] {
        self.near.get(function).map_or(&[], Vec::as_slice)
    }

    /// A copy is placed that stays.
    pub(super) fn came(&mut self, function: usize, node: usize) {
        if let Some(group) = self.number_of(function) {
            *self.rows[group].copies.entry(node).or_insert(0) += 1;
        }
    }

    /// It does not stay any more.
    pub(super) fn left(&mut self, function: usize, node: usize) {
        if let Some(group) = self.number_of(function) {
            self.rows[group].copies.entry(node).and_modify(|copies| *copies -= 1);
        }
    }
}

impl Row {
    /// Copies of its functions that stay on a node.
    pub(super) fn on(&self, node: usize) -> u32 {
        self.copies.get(&node).copied().unwrap_or(0)
    }
}

impl Table<'_> {
    /// Takes in who passes what to whom.
    pub(super) fn group(&mut self, flows: &[Flow]) {
        let pairs = self.pairs(flows);
        if pairs.is_empty() {
            return;
        }
        let mut groups = Groups { near: vec![Vec::new(); self.functions.len()], ..Groups::default() };
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
            groups.rows.push(Row { first, bytes, load, copies: BTreeMap::new() });
        }
        for (function, row) in self.functions.iter().enumerate() {
            row.staying_on().for_each(|node| groups.came(function, node));
        }
        self.groups = groups;
    }

    /// Every two functions that are wanted and pass data, with all that they pass.
    fn pairs(&self, flows: &[Flow]) -> BTreeMap<(usize, usize), Pair> {
        let mut pairs: BTreeMap<(usize, usize), Pair> = BTreeMap::new();
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

/// What two functions pass, in all workflows.
#[derive(Debug, Clone, Copy, Default)]
struct Pair {
    bytes: u64,
    is_critical: bool,
}

/// A group in the making.
#[derive(Debug, Default)]
struct Group {
    members: Vec<usize>,
    models: BTreeSet<usize>,
    bytes: u64,
    load: u64,
    /// Memory of one GPU that the largest of them needs.
    gpu: u64,
}

/// What a node can hold at most: host memory, GPU memory and load.
type Shape = (u64, u64, u64);

struct Merge<'t, 'v> {
    table: &'t Table<'v>,
    /// The pairs, those that are to be together most first.
    pairs: Vec<(usize, usize)>,
    /// The kinds of nodes that take functions.
    shapes: BTreeSet<Shape>,
}

impl<'t, 'v> Merge<'t, 'v> {
    fn of(table: &'t Table<'v>, pairs: BTreeMap<(usize, usize), Pair>) -> Self {
        let mut pairs: Vec<_> = pairs.into_iter().collect();
        // What is small leaves room for others.
        let needed = |(a, b): (usize, usize)| table.needed(a).saturating_add(table.needed(b));
        pairs.sort_by_key(|&(ends, pair)| (Reverse(pair.bytes), needed(ends), !pair.is_critical, ends));
        let open = table.nodes.iter().filter(|node| node.is_open());
        let shapes = open.map(|node| (node.of.host.0, node.of.gpu.0, node.load_max())).collect();
        Self { table, pairs: pairs.into_iter().map(|(ends, _)| ends).collect(), shapes }
    }

    /// The groups of more than one function.
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
            // The smaller joins the larger, so that nobody is moved more than a few times.
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
        let (bytes, gpu) = (self.table.needed(function), row.of.gpu.0);
        Group {
            members: vec![function],
            models: row.models.iter().copied().collect(),
            bytes,
            load: row.load,
            gpu,
        }
    }

    /// Bytes that one group adds to another: what they share is there once.
    fn added(&self, to: &Group, group: &Group) -> u64 {
        let new = group.models.difference(&to.models);
        new.fold(0, |sum: u64, &model| sum.saturating_add(self.table.model_bytes(model)))
    }

    /// Whether some node could hold both, if it were empty.
    fn fits(&self, a: &Group, b: &Group) -> bool {
        let bytes = a.bytes.saturating_add(self.added(a, b));
        let (gpu, load) = (a.gpu.max(b.gpu), a.load.saturating_add(b.load));
        let holds = |&(host, memory, time): &Shape| bytes <= host && gpu <= memory && load <= time;
        self.shapes.iter().any(holds)
    }
}
