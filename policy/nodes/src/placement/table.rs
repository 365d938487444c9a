//! The view with dense numbers for names, and the state of every node including the steps planned
//! so far. Functions are sorted by key and nodes by name, so that plans do not depend on the order
//! of the view.

use std::collections::BTreeMap;

use millrace_types::node::FUNCTIONS_PER_NODE_MAX;
use millrace_types::{Bytes, Digest, NodeState, TenantName};

use super::draft::Draft;
use super::groups::FunctionGroups;
use super::rows::{CopyFate, FunctionRow, ModelRow, NodeRow, PlacedCopy, TenantRow, WHOLE};
use super::view::{
    ClusterSnapshot, DesiredReplicas, PlacementChange, PlacementPhase, Unplaced, UnplacedReason,
};

/// Maximum cost of placing a tenant's copies together on a node, against 1 for filling its memory
/// and 1 for filling its GPUs.
const TENANT_WEIGHT: u64 = WHOLE / 4;

pub(super) struct PlanningTable<'a> {
    pub(super) functions: Vec<FunctionRow<'a>>,
    pub(super) nodes: Vec<NodeRow<'a>>,
    pub(super) groups: FunctionGroups,
    models: Vec<ModelRow>,
    tenants: Vec<TenantRow>,
}

impl<'a> PlanningTable<'a> {
    /// Builds the table from the view. Unwanted placements are unplaced at once.
    pub(super) fn new(view: &'a ClusterSnapshot, draft: &mut Draft) -> Self {
        let mut functions: Vec<_> = view.functions.iter().collect();
        functions.sort_unstable_by_key(|function| &function.key);
        functions.dedup_by_key(|function| &function.key);
        let mut nodes: Vec<_> = view.nodes.iter().collect();
        nodes.sort_unstable_by_key(|node| &node.name);
        nodes.dedup_by_key(|node| &node.name);
        let empty = |of| NodeRow { of, used: 0, load: 0, copies: 0 };
        let mut table = Self {
            functions: Vec::with_capacity(functions.len()),
            nodes: nodes.into_iter().map(empty).collect(),
            groups: FunctionGroups::default(),
            models: Vec::new(),
            tenants: Vec::new(),
        };
        table.number(&functions);
        table.take_in(view, draft);
        table.relieve_overfull();
        table
    }

    fn number(&mut self, functions: &[&'a DesiredReplicas]) {
        let mut models: BTreeMap<Digest, usize> = BTreeMap::new();
        let mut tenants: BTreeMap<&TenantName, usize> = BTreeMap::new();
        for &of in functions {
            let tenant = *tenants.entry(&of.key.tenant).or_insert_with(|| {
                self.tenants.push(TenantRow { wanted: 0, copies: BTreeMap::new() });
                self.tenants.len() - 1
            });
            let mut numbers = Vec::with_capacity(of.models.len());
            for model in &of.models {
                let number = *models.entry(model.digest).or_insert_with(|| {
                    self.models.push(ModelRow { bytes: 0, holders: BTreeMap::new() });
                    self.models.len() - 1
                });
                self.models[number].bytes = self.models[number].bytes.max(model.host.0);
                numbers.push(number);
            }
            numbers.sort_unstable();
            numbers.dedup();
            let wanted = if of.enabled { of.replicas } else { 0 };
            self.tenants[tenant].wanted += u64::from(wanted);
            let load = of.load.0 / u64::from(wanted).max(1);
            self.functions.push(FunctionRow {
                of,
                tenant,
                models: numbers,
                wanted,
                load,
                copies: Vec::new(),
            });
        }
    }

    fn take_in(&mut self, view: &ClusterSnapshot, draft: &mut Draft) {
        let mut placements: Vec<_> = view.placements.iter().collect();
        placements.sort_unstable_by_key(|it| (&it.function, &it.node, it.phase));
        placements.dedup_by_key(|it| (&it.function, &it.node));
        for placement in placements {
            let function = self.functions.binary_search_by_key(&&placement.function, |row| &row.of.key).ok();
            let node = self.nodes.binary_search_by_key(&&placement.node, |row| &row.of.name).ok();
            let copy = function.zip(node).and_then(|(function, node)| {
                let fate = self.fate(function, node, placement.phase)?;
                Some((function, PlacedCopy { node, ready: placement.phase == PlacementPhase::Ready, fate }))
            });
            if let (Some(function), Some(node)) = (function, node) {
                // The copy's bytes are in use even if a step removes the copy: its room is free for
                // the next plan.
                self.count_in(function, node);
            }
            if let Some((function, copy)) = copy {
                self.functions[function].copies.push(copy);
            } else {
                let function = placement.function.clone();
                let node = placement.node.clone();
                draft.push(PlacementChange::Unplace { function, node });
            }
        }
    }

    /// Returns the fate of a copy, or `None` if the copy is removed at once.
    fn fate(&self, function: usize, node: usize, phase: PlacementPhase) -> Option<CopyFate> {
        let function = &self.functions[function];
        let node = &self.nodes[node];
        if function.wanted == 0 {
            return None;
        }
        let unfit = node.of.state == NodeState::Draining || node.of.gpu < function.of.gpu;
        match (node.of.state, phase) {
            (NodeState::Lost, _) => Some(CopyFate::Lost),
            (_, PlacementPhase::Failed) => (!unfit).then_some(CopyFate::Failed),
            (_, PlacementPhase::Ready | PlacementPhase::Preparing) => {
                Some(if unfit { CopyFate::Leave } else { CopyFate::Stay })
            }
        }
    }

    /// Marks copies to leave on nodes with more models than memory, after a loss of memory or a
    /// larger revision. Chooses the smallest model that suffices, or else the largest, and repeats.
    fn relieve_overfull(&mut self) {
        for node in 0..self.nodes.len() {
            let row = &self.nodes[node];
            let mut excess = row.used.saturating_sub(row.of.host.0);
            if excess == 0 || row.of.state == NodeState::Lost {
                continue;
            }
            let held = self.models.iter().enumerate().filter(|(_, model)| model.holders.contains_key(&node));
            let mut held: Vec<_> = held.map(|(number, model)| (model.bytes, number)).collect();
            held.sort_unstable();
            while excess > 0 && !held.is_empty() {
                let enough = held.partition_point(|(bytes, _)| *bytes < excess).min(held.len() - 1);
                let (bytes, model) = held.remove(enough);
                excess = excess.saturating_sub(bytes);
                self.send_away(node, model);
            }
        }
    }

    fn send_away(&mut self, node: usize, model: usize) {
        for function in self.functions.iter_mut().filter(|row| row.models.contains(&model)) {
            for copy in function.copies.iter_mut().filter(|copy| copy.node == node) {
                if copy.fate == CopyFate::Stay {
                    copy.fate = CopyFate::Leave;
                }
            }
        }
    }

    fn count_in(&mut self, function: usize, node: usize) {
        let added = self.added(function, node);
        let function = &self.functions[function];
        for &model in &function.models {
            *self.models[model].holders.entry(node).or_insert(0) += 1;
        }
        *self.tenants[function.tenant].copies.entry(node).or_insert(0) += 1;
        let row = &mut self.nodes[node];
        row.used = row.used.saturating_add(added);
        row.load += function.load;
        row.copies += 1;
    }

    fn count_out(&mut self, function: usize, node: usize) {
        let freed = self.freed(function, node);
        let function = &self.functions[function];
        for &model in &function.models {
            let holders = &mut self.models[model].holders;
            match holders.get_mut(&node) {
                Some(functions) if *functions > 1 => *functions -= 1,
                _ => drop(holders.remove(&node)),
            }
        }
        self.tenants[function.tenant].copies.entry(node).and_modify(|copies| *copies -= 1);
        let row = &mut self.nodes[node];
        row.used -= freed;
        row.load -= function.load;
        row.copies -= 1;
    }

    /// Returns the additional host memory that a node needs for a function.
    pub(super) fn added(&self, function: usize, node: usize) -> u64 {
        self.bytes(function, |model| !model.holders.contains_key(&node))
    }

    /// Returns the host memory that a node frees when a function leaves.
    pub(super) fn freed(&self, function: usize, node: usize) -> u64 {
        self.bytes(function, |model| model.holders.get(&node) == Some(&1))
    }

    /// Returns the host memory that a node gains for a function when another leaves: shared models
    /// stay.
    pub(super) fn freed_for(&self, homeless: usize, function: usize, node: usize) -> u64 {
        let kept = &self.functions[homeless].models;
        let models = self.functions[function].models.iter().filter(|model| !kept.contains(model));
        let models = models.map(|&model| &self.models[model]);
        models
            .filter(|model| model.holders.get(&node) == Some(&1))
            .fold(0, |sum, model| sum.saturating_add(model.bytes))
    }

    /// Returns the host memory that all models of a function need.
    pub(super) fn needed(&self, function: usize) -> u64 {
        self.bytes(function, |_| true)
    }

    /// Returns the host memory that a model needs.
    pub(super) fn model_bytes(&self, model: usize) -> u64 {
        self.models[model].bytes
    }

    fn bytes(&self, function: usize, counts: impl Fn(&ModelRow) -> bool) -> u64 {
        let models = self.functions[function].models.iter().map(|&model| &self.models[model]);
        models.filter(|model| counts(model)).fold(0, |sum, model| sum.saturating_add(model.bytes))
    }

    /// Returns the expected load of a function's copy.
    pub(super) fn load(&self, function: usize) -> u64 {
        self.functions[function].load
    }

    /// Returns the cost of a function on a node: the node's resulting fullness plus the share of
    /// the function's tenant on the node. Lower is better; ties go to the node with fewer copies.
    pub(super) fn cost(&self, function: usize, node: usize, added: u64) -> (u64, u64) {
        let function = &self.functions[function];
        let row = &self.nodes[node];
        let tenant = &self.tenants[function.tenant];
        let together = tenant.copies.get(&node).copied().unwrap_or(0);
        let load = row.load.saturating_add(row.unexpected()).saturating_add(function.load);
        let fullness = row.fullness_at(row.used.saturating_add(added), load);
        (fullness.saturating_add(together * TENANT_WEIGHT / tenant.wanted.max(1)), row.copies)
    }

    /// Returns the fullness of a node with an additional copy of a function.
    pub(super) fn fullness_with(&self, function: usize, node: usize) -> u64 {
        let row = &self.nodes[node];
        let used = row.used.saturating_add(self.added(function, node));
        row.fullness_at(used, row.load + self.functions[function].load)
    }

    /// Returns the fullness of a node without its copy of a function.
    pub(super) fn fullness_without(&self, function: usize, node: usize) -> u64 {
        let row = &self.nodes[node];
        row.fullness_at(row.used - self.freed(function, node), row.load - self.functions[function].load)
    }

    /// Places a function's copy on a node.
    pub(super) fn place(&mut self, function: usize, node: usize) -> PlacementChange {
        self.count_in(function, node);
        let row = &mut self.functions[function];
        row.copies.push(PlacedCopy { node, ready: false, fate: CopyFate::Stay });
        self.groups.came(function, node);
        PlacementChange::Place { function: row.of.key.clone(), node: self.nodes[node].of.name.clone() }
    }

    /// Unplaces a function's copy. Its bytes count as used until the next plan, so that no
    /// placement depends on a removal; only [`Self::give_up`] subtracts them.
    pub(super) fn unplace(&mut self, function: usize, node: usize) -> PlacementChange {
        let row = &mut self.functions[function];
        for copy in row.copies.iter_mut().filter(|copy| copy.node == node) {
            if std::mem::replace(&mut copy.fate, CopyFate::Gone) == CopyFate::Stay {
                self.groups.left(function, node);
            }
        }
        PlacementChange::Unplace { function: row.of.key.clone(), node: self.nodes[node].of.name.clone() }
    }

    /// Subtracts a copy's bytes and load from a node, to compare how full nodes will be.
    pub(super) fn give_up(&mut self, function: usize, node: usize) {
        self.count_out(function, node);
    }

    /// Returns whether no copy is being prepared and no copy is surplus.
    pub(super) fn is_settled(&self) -> bool {
        let settled = |row: &FunctionRow<'_>| row.ready() == row.staying() && row.staying() <= row.wanted;
        self.functions.iter().all(settled)
    }

    /// Returns functions that nodes failed to prepare, and for which no further node is tried.
    pub(super) fn failing(&self) -> impl Iterator<Item = Unplaced> {
        let failing = |row: &&FunctionRow<'_>| row.missing() == 0 && row.staying() < row.wanted;
        self.functions.iter().filter(failing).map(|row| Unplaced {
            function: row.of.key.clone(),
            copies: row.staying(),
            missing: row.wanted - row.staying(),
            why: UnplacedReason::Failing { nodes: row.failed() },
        })
    }

    /// Returns the reason why no node takes a copy.
    pub(super) fn why(&self, function: usize) -> UnplacedReason {
        let row = &self.functions[function];
        let open = || self.nodes.iter().enumerate().filter(|(_, node)| node.is_open());
        let nodes = u32::try_from(open().count()).unwrap_or(u32::MAX);
        let largest = open().map(|(_, node)| node.of.gpu).max();
        let fitting = || open().filter(|(_, node)| node.of.gpu >= row.of.gpu);
        let others = || fitting().filter(|(number, _)| !row.is_on(*number)).map(|(_, node)| node);
        let free = others().filter(|node| !node.is_full()).map(NodeRow::free).max();
        match (largest, free) {
            (None, _) => UnplacedReason::NoNode,
            (Some(largest), _) if largest < row.of.gpu => {
                UnplacedReason::GpuMemory { needs: row.of.gpu, largest }
            }
            (Some(_), None) if others().next().is_some() => {
                UnplacedReason::NodesFull { nodes, max: FUNCTIONS_PER_NODE_MAX }
            }
            (Some(_), None) => UnplacedReason::TooFewNodes { nodes },
            (Some(_), Some(free)) => {
                UnplacedReason::HostMemory { needs: Bytes(self.needed(function)), free: Bytes(free) }
            }
        }
    }
}
