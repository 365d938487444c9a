//! Places the slices that functions ask for on the GPUs of a cluster.
//!
//! ```text
//! wishes, nodes, present slices ─► place() ─► all slices, and the slices without a GPU with the reasons
//! ```
//!
//! The plan is stable: a slice that stands and still fits keeps its number and its GPU, and a plan from
//! the result of a plan changes nothing. A new slice goes to the node with the fewest slices of its
//! function, and there to a GPU on which a dry run of the token core meets all requests: the fullest for a
//! slice with requested time, else the GPU with the fewest SMs in slices. Slices are placed in the order of
//! their sizes, the longest first.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;

use millrace_types::limits::SLICES_PER_NODE_MAX;
use millrace_types::{Bytes, FunctionKey, GpuIndex, NodeName, Permille, SliceId, Terms};

use crate::pack::{FitCheck, Misfit, SliceDemand};

/// The slices that a function asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SliceWish {
    pub function: FunctionKey,
    pub terms: Terms,
    /// Number of slices.
    pub count: u32,
    /// GPU memory of the model. Counts once for all slices of the function on a GPU.
    pub memory: Bytes,
    /// Nodes on which the function is placed.
    pub nodes: Vec<NodeName>,
}

/// Whether a node shares its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeSharing {
    Shares,
    SharesNot,
    /// The node has not reported yet. Such a node keeps its slices and gets no others.
    Unknown,
}

/// A node with GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedNode {
    pub name: NodeName,
    pub sharing: NodeSharing,
    /// The GPUs with their memory.
    pub gpus: Vec<(GpuIndex, Bytes)>,
}

/// A slice on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlacedSlice {
    pub id: SliceId,
    pub function: FunctionKey,
    pub node: NodeName,
    pub gpu: GpuIndex,
    pub terms: Terms,
}

/// The reason why a slice has no GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoGpu {
    /// The function is placed on no node.
    NotPlaced,
    /// No node of the function is known to share its GPUs.
    NoSharedNode,
    /// The number of GPUs of the function's nodes by their reason.
    NoRoom(BTreeMap<Misfit, usize>),
}

impl fmt::Display for NoGpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotPlaced => f.write_str("the function is on no node: 'millrace describe function' has the reason"),
            Self::NoSharedNode => f.write_str(
                "no node of the function shares its GPUs: run 'millrace policy set --gpu-sharing slices', or wait \
                 for the node's report",
            ),
            Self::NoRoom(why) => {
                let texts = why.iter().map(|(misfit, count)| format!("{count} {misfit}"));
                let why = texts.collect::<Vec<_>>().join(", ");
                write!(f, "of the GPUs of its nodes, {why}: lower the shares or the number, or add GPUs")
            }
        }
    }
}

/// Slices of a function that have no GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingSlices {
    pub function: FunctionKey,
    pub count: u32,
    pub why: NoGpu,
}

/// The slices that a cluster should have.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SlicePlacement {
    /// By number.
    pub slices: Vec<PlacedSlice>,
    pub missing: Vec<MissingSlices>,
}

/// Places all wanted slices. New slices get the numbers after `given`, node by node in the order of the
/// names: the slices of a node can then be stored before the next node's slices.
#[must_use]
pub fn place(
    wishes: &[SliceWish],
    nodes: &[SharedNode],
    present: &[PlacedSlice],
    given: SliceId,
    fit: &mut FitCheck,
) -> SlicePlacement {
    let mut placing = Placing::new(wishes, nodes, given, fit);
    placing.keep_standing(present);
    placing.add_missing();
    let mut slices: Vec<_> = placing.on.into_values().flatten().collect();
    slices.sort_by(|a, b| (&a.node, a.id).cmp(&(&b.node, b.id)));
    let new = slices.iter_mut().filter(|slice| slice.id > given);
    (given.0 + 1..).zip(new).for_each(|(number, slice)| slice.id = SliceId(number));
    slices.sort_unstable_by_key(|slice| slice.id);
    SlicePlacement { slices, missing: placing.missing }
}

type GpuPlace = (NodeName, GpuIndex);

struct Placing<'a> {
    wishes: BTreeMap<FunctionKey, &'a SliceWish>,
    nodes: BTreeMap<&'a NodeName, &'a SharedNode>,
    fit: &'a mut FitCheck,
    given: SliceId,
    on: BTreeMap<GpuPlace, Vec<PlacedSlice>>,
    /// Number of slices in `on` of each function.
    counts: BTreeMap<FunctionKey, u32>,
    missing: Vec<MissingSlices>,
}

impl<'a> Placing<'a> {
    fn new(wishes: &'a [SliceWish], nodes: &'a [SharedNode], given: SliceId, fit: &'a mut FitCheck) -> Self {
        Self {
            wishes: wishes.iter().map(|wish| (wish.function.clone(), wish)).collect(),
            nodes: nodes.iter().map(|node| (&node.name, node)).collect(),
            fit,
            given,
            on: BTreeMap::new(),
            counts: BTreeMap::new(),
            missing: Vec::new(),
        }
    }

    fn sharing(&self, node: &NodeName) -> Option<NodeSharing> {
        self.nodes.get(node).map(|node| node.sharing)
    }

    /// Keeps the present slices that may stay and fit, with the present terms of their functions. All slices
    /// of a GPU are tried together first, because a part of a set that fits need not fit. Otherwise
    /// slices with unchanged terms go first, then the oldest. A node without a report cannot say
    /// whether new terms fit, and keeps the old ones.
    fn keep_standing(&mut self, present: &[PlacedSlice]) {
        let mut of_gpu: BTreeMap<GpuPlace, Vec<(bool, PlacedSlice)>> = BTreeMap::new();
        for slice in self.standing(present) {
            let Some(wish) = self.wishes.get(&slice.function) else { continue };
            let place = (slice.node.clone(), slice.gpu);
            if self.sharing(&slice.node) == Some(NodeSharing::Unknown) {
                self.keep(slice);
            } else {
                let renewed = PlacedSlice { terms: wish.terms, ..slice.clone() };
                of_gpu.entry(place).or_default().push((renewed.terms != slice.terms, renewed));
            }
        }
        for ((node, gpu), mut slices) in of_gpu {
            slices.sort_by_key(|(changed, slice)| (*changed, slice.id));
            let slices: Vec<_> = slices.into_iter().map(|(_, slice)| slice).collect();
            if self.fit_together(&node, gpu, &slices) {
                slices.into_iter().for_each(|slice| self.keep(slice));
                continue;
            }
            for slice in slices {
                if self.fits(&node, gpu, &slice.function).is_ok() {
                    self.keep(slice);
                }
            }
        }
    }

    /// Checks whether slices fit on a GPU together.
    fn fit_together(&mut self, node: &NodeName, gpu: GpuIndex, slices: &[PlacedSlice]) -> bool {
        let Some((last, others)) = slices.split_last() else { return true };
        let memory = self.memory(node, gpu);
        let demands = others.iter().enumerate().map(|(place, slice)| self.demand(slice, &others[..place]));
        let demands: Vec<_> = demands.collect();
        let last = self.demand(last, others);
        self.fit.check(memory, &demands, &last).is_ok()
    }

    fn memory(&self, node: &NodeName, gpu: GpuIndex) -> Bytes {
        let gpus = self.nodes.get(node).into_iter().flat_map(|node| &node.gpus);
        gpus.copied().find(|&(index, _)| index == gpu).map_or(Bytes::ZERO, |(_, memory)| memory)
    }

    /// Returns the present slices that may stay where they are: at most the wanted number of each
    /// function; those of nodes without a report before the others, then the oldest.
    fn standing(&self, present: &[PlacedSlice]) -> Vec<PlacedSlice> {
        let mut oldest_first: Vec<_> = present.iter().collect();
        let reported = |slice: &PlacedSlice| self.sharing(&slice.node) != Some(NodeSharing::Unknown);
        oldest_first.sort_by_key(|slice| (reported(slice), slice.id));
        let mut counts: BTreeMap<&FunctionKey, u32> = BTreeMap::new();
        let mut stands = |slice: &PlacedSlice| {
            let Some(wish) = self.wishes.get(&slice.function) else { return false };
            let Some(node) = self.nodes.get(&slice.node) else { return false };
            let here = node.sharing != NodeSharing::SharesNot
                && wish.nodes.contains(&slice.node)
                && node.gpus.iter().any(|&(gpu, _)| gpu == slice.gpu);
            let count = counts.entry(&wish.function).or_default();
            let stands = here && *count < wish.count;
            *count += u32::from(stands);
            stands
        };
        oldest_first.into_iter().filter(|slice| stands(slice)).cloned().collect()
    }

    fn keep(&mut self, slice: PlacedSlice) {
        *self.counts.entry(slice.function.clone()).or_default() += 1;
        self.on.entry((slice.node.clone(), slice.gpu)).or_default().push(slice);
    }

    /// Returns the demand of a slice of a function on a GPU. The memory of a function counts for its first
    /// slice there.
    fn demand(&self, slice: &PlacedSlice, beside: &[PlacedSlice]) -> SliceDemand {
        let first = beside.iter().all(|other| other.function != slice.function);
        let memory = self.wishes.get(&slice.function).map_or(Bytes::ZERO, |wish| wish.memory);
        SliceDemand {
            id: slice.id,
            terms: slice.terms,
            memory: if first { memory } else { Bytes::ZERO },
            bandwidth: Permille::ZERO,
        }
    }

    /// Checks whether a further slice of a function fits on a GPU.
    fn fits(&mut self, node: &NodeName, gpu: GpuIndex, function: &FunctionKey) -> Result<(), Misfit> {
        let there = self.on.get(&(node.clone(), gpu)).cloned().unwrap_or_default();
        let demands = there.iter().enumerate().map(|(place, slice)| self.demand(slice, &there[..place]));
        let others: Vec<_> = demands.collect();
        let Some(wish) = self.wishes.get(function).copied() else { return Err(Misfit::Requests) };
        let slice = PlacedSlice {
            id: SliceId(self.given.0 + 1),
            function: function.clone(),
            node: node.clone(),
            gpu,
            terms: wish.terms,
        };
        let demand = self.demand(&slice, &there);
        let memory = self.memory(node, gpu);
        self.fit.check(memory, &others, &demand)
    }

    /// Places the slices that functions lack, the longest first.
    fn add_missing(&mut self) {
        let mut wishes: Vec<_> = self.wishes.values().copied().collect();
        wishes.sort_by_key(|wish| {
            (Reverse(wish.terms.least().max(wish.terms.request())), wish.function.clone())
        });
        // A set may fit that is larger than a set that does not fit.
        while wishes.iter().map(|wish| self.add(wish)).max() == Some(true) {}
        for wish in wishes {
            let count = self.lacks(wish);
            if count > 0 {
                let why = self.refusal(wish);
                self.missing.push(MissingSlices { function: wish.function.clone(), count, why });
            }
        }
    }

    /// Returns the number of slices that a function lacks.
    fn lacks(&self, wish: &SliceWish) -> u32 {
        wish.count.saturating_sub(self.counts.get(&wish.function).copied().unwrap_or(0))
    }

    /// Adds slices that a function lacks, as far as they fit. Returns whether a slice was added.
    fn add(&mut self, wish: &SliceWish) -> bool {
        let mut added = false;
        for _ in 0..self.lacks(wish) {
            let mut candidates = self.candidates(wish).into_iter();
            let found = candidates.find(|(node, gpu)| self.fits(node, *gpu, &wish.function).is_ok());
            let Some((node, gpu)) = found else { break };
            self.given.0 += 1;
            let function = wish.function.clone();
            self.keep(PlacedSlice { id: self.given, function, node, gpu, terms: wish.terms });
            added = true;
        }
        added
    }

    /// Returns the reason why no GPU has room for a further slice of a function.
    fn refusal(&mut self, wish: &SliceWish) -> NoGpu {
        let mut why: BTreeMap<Misfit, usize> = BTreeMap::new();
        let candidates = self.candidates(wish);
        if candidates.is_empty() {
            return if wish.nodes.is_empty() { NoGpu::NotPlaced } else { NoGpu::NoSharedNode };
        }
        for (node, gpu) in candidates {
            let misfit = self.fits(&node, gpu, &wish.function).err();
            misfit.into_iter().for_each(|misfit| *why.entry(misfit).or_default() += 1);
        }
        NoGpu::NoRoom(why)
    }

    /// Returns the GPUs that may have a slice of a function, in the order of the attempts.
    fn candidates(&self, wish: &SliceWish) -> Vec<GpuPlace> {
        let shares = |name: &&NodeName| self.sharing(name) == Some(NodeSharing::Shares);
        let mut gpus = Vec::new();
        for node in wish.nodes.iter().filter(shares).filter_map(|name| self.nodes.get(name)) {
            let places = (node.name.clone(), GpuIndex(0))..=(node.name.clone(), GpuIndex(u32::MAX));
            let on_node = || self.on.range(places.clone()).flat_map(|(_, slices)| slices);
            if on_node().count() >= SLICES_PER_NODE_MAX {
                continue;
            }
            let own = on_node().filter(|it| it.function == wish.function).count();
            for &(gpu, _) in &node.gpus {
                let place = (node.name.clone(), gpu);
                let there = || self.on.get(&place).into_iter().flatten().map(|slice| slice.terms);
                let sms: u32 = there().map(|it| u32::from(it.least().get())).sum();
                let sm_time = there().map(|it| u32::from(it.least().get()) * u32::from(it.request().get()));
                let packs = wish.terms.request() > Permille::ZERO;
                let full = if packs { sm_time.sum::<u32>() } else { 0 };
                gpus.push((own, Reverse(full), sms, place));
            }
        }
        gpus.sort_unstable();
        gpus.into_iter().map(|(_, _, _, place)| place).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use millrace_types::TenantName;
    use proptest::prelude::*;

    use super::*;
    use crate::tokens::Config;

    const MEMORY: Bytes = Bytes::gib(16);

    fn node_name(number: u32) -> NodeName {
        NodeName::new(&format!("n{number}")).unwrap()
    }

    fn function(number: u32) -> FunctionKey {
        let name = format!("f{number}").parse().unwrap();
        FunctionKey { tenant: TenantName::default(), name }
    }

    fn terms(sms: u16, request: u16) -> Terms {
        let share = |percent: u16| Permille::new(percent * 10).unwrap();
        Terms::new(share(sms), share(sms), share(request), Permille::ALL).unwrap()
    }

    fn wish(number: u32, sms: u16, request: u16, count: u32, nodes: &[u32]) -> SliceWish {
        SliceWish {
            function: function(number),
            terms: terms(sms, request),
            count,
            memory: Bytes::gib(2),
            nodes: nodes.iter().map(|&number| node_name(number)).collect(),
        }
    }

    fn node(number: u32, gpus: u32, sharing: NodeSharing) -> SharedNode {
        let gpus = (0..gpus).map(|index| (GpuIndex(index), MEMORY)).collect();
        SharedNode { name: node_name(number), sharing, gpus }
    }

    /// A cluster's slices between plans.
    struct Cluster {
        fit: FitCheck,
        slices: Vec<PlacedSlice>,
        given: SliceId,
    }

    impl Cluster {
        fn new() -> Self {
            Self { fit: FitCheck::new(Config::SLICES), slices: Vec::new(), given: SliceId(0) }
        }

        fn plan(&mut self, wishes: &[SliceWish], nodes: &[SharedNode]) -> Vec<MissingSlices> {
            let plan = place(wishes, nodes, &self.slices, self.given, &mut self.fit);
            self.given =
                plan.slices.iter().map(|slice| slice.id).max().map_or(self.given, |id| id.max(self.given));
            self.slices = plan.slices;
            plan.missing
        }

        /// Returns the slices as number, function, node and GPU.
        fn all(&self) -> Vec<(u64, String, String, u32)> {
            let text = |slice: &PlacedSlice| {
                (slice.id.0, slice.function.name.to_string(), slice.node.to_string(), slice.gpu.0)
            };
            self.slices.iter().map(text).collect()
        }
    }

    fn at(id: u64, function: u32, node: u32, gpu: u32) -> (u64, String, String, u32) {
        (id, format!("f{function}"), format!("n{node}"), gpu)
    }

    const SHARES: NodeSharing = NodeSharing::Shares;

    #[test]
    fn slices_fill_a_gpu_before_the_next_and_spread_over_a_functions_nodes() {
        let mut cluster = Cluster::new();
        let nodes = [node(0, 2, SHARES), node(1, 2, SHARES)];
        let wishes = [wish(0, 50, 40, 2, &[0, 1]), wish(1, 50, 40, 1, &[0]), wish(2, 100, 50, 1, &[0])];
        assert_eq!(cluster.plan(&wishes, &nodes), []);
        // The widest first; then function 0 once on each node, beside the slice that is there.
        assert_eq!(cluster.all(), [at(1, 2, 0, 0), at(2, 0, 0, 0), at(3, 1, 0, 0), at(4, 0, 1, 0)]);
    }

    #[test]
    fn slices_without_requested_time_spread_over_the_gpus() {
        let mut cluster = Cluster::new();
        let nodes = [node(0, 2, SHARES)];
        assert_eq!(cluster.plan(&[wish(0, 100, 0, 2, &[0]), wish(1, 50, 0, 2, &[0])], &nodes), []);
        let gpus: Vec<_> = cluster.all().into_iter().map(|(_, function, _, gpu)| (function, gpu)).collect();
        let of = |function: &str| {
            gpus.iter().filter(|it| it.0 == function).map(|it| it.1).collect::<BTreeSet<_>>()
        };
        assert_eq!([of("f0"), of("f1")], [BTreeSet::from([0, 1]), BTreeSet::from([0, 1])], "{gpus:?}");
    }

    #[test]
    fn a_slice_without_room_is_missing_with_the_reasons_and_comes_when_there_is_room() {
        let mut cluster = Cluster::new();
        let nodes = [node(0, 1, SHARES)];
        let wishes = [wish(0, 100, 60, 1, &[0]), wish(1, 100, 60, 2, &[0]), wish(2, 10, 0, 1, &[1])];
        let missing = cluster.plan(&wishes, &nodes);
        let texts: Vec<_> = missing.iter().map(|it| (it.count, it.why.to_string())).collect();
        let room = "of the GPUs of its nodes, 1 lacks SM time: lower the shares or the number, or add GPUs";
        assert_eq!(texts[0], (2, room.into()));
        assert!(texts[1].1.starts_with("no node of the function shares its GPUs: run"), "{texts:?}");
        assert_eq!(texts[1].0, 1);
        assert_eq!(cluster.all(), [at(1, 0, 0, 0)]);
        let missing = cluster.plan(&wishes[1..], &nodes);
        assert_eq!(missing[0].count, 1);
        assert_eq!(cluster.all(), [at(2, 1, 0, 0)], "a number is never used again");
    }

    #[test]
    fn new_terms_keep_the_place_if_they_fit_and_a_lower_count_ends_the_newest() {
        let mut cluster = Cluster::new();
        let nodes = [node(0, 2, SHARES)];
        cluster.plan(&[wish(0, 50, 50, 2, &[0]), wish(1, 50, 50, 1, &[0])], &nodes);
        assert_eq!(cluster.all(), [at(1, 0, 0, 0), at(2, 0, 0, 0), at(3, 1, 0, 0)]);
        cluster.plan(&[wish(0, 25, 50, 1, &[0]), wish(1, 100, 50, 1, &[0])], &nodes);
        assert_eq!(cluster.all(), [at(1, 0, 0, 0), at(3, 1, 0, 0)]);
        assert_eq!(cluster.slices[1].terms, terms(100, 50));
        cluster.plan(&[wish(0, 100, 60, 1, &[0]), wish(1, 100, 50, 1, &[0])], &nodes);
        assert_eq!(cluster.all(), [at(3, 1, 0, 0), at(4, 0, 0, 1)], "the larger slice moved");
    }

    #[test]
    fn a_node_without_a_report_keeps_its_slices_and_a_node_that_shares_no_longer_loses_them() {
        let mut cluster = Cluster::new();
        let wishes = [wish(0, 50, 50, 1, &[0, 1])];
        cluster.plan(&wishes, &[node(0, 1, SHARES)]);
        cluster.plan(&wishes, &[node(0, 1, NodeSharing::Unknown), node(1, 1, SHARES)]);
        assert_eq!(cluster.all(), [at(1, 0, 0, 0)]);
        cluster.plan(&wishes, &[node(0, 1, NodeSharing::SharesNot), node(1, 1, SHARES)]);
        assert_eq!(cluster.all(), [at(2, 0, 1, 0)]);
        assert_eq!(cluster.plan(&wishes, &[node(0, 1, NodeSharing::SharesNot)])[0].why, NoGpu::NoSharedNode);
        assert_eq!(cluster.all(), []);
    }

    #[test]
    fn a_slice_that_fits_no_longer_moves() {
        let mut cluster = Cluster::new();
        let nodes = [node(0, 2, SHARES)];
        cluster.plan(&[wish(0, 50, 40, 1, &[0]), wish(1, 50, 40, 1, &[0])], &nodes);
        assert_eq!(cluster.all(), [at(1, 0, 0, 0), at(2, 1, 0, 0)]);
        // A revision with a larger model.
        let large = SliceWish { memory: Bytes::gib(15), ..wish(1, 50, 40, 1, &[0]) };
        cluster.plan(&[wish(0, 50, 40, 1, &[0]), large], &nodes);
        assert_eq!(cluster.all(), [at(1, 0, 0, 0), at(3, 1, 0, 1)]);
    }

    #[test]
    fn slices_of_a_function_on_a_gpu_share_its_memory() {
        let mut cluster = Cluster::new();
        let nodes = [node(0, 1, SHARES)];
        let large = |number, count| SliceWish { memory: Bytes::gib(10), ..wish(number, 6, 10, count, &[0]) };
        assert_eq!(cluster.plan(&[large(0, 5)], &nodes), []);
        let missing = cluster.plan(&[large(0, 5), large(1, 1)], &nodes);
        assert_eq!(missing[0].why, NoGpu::NoRoom([(Misfit::Memory, 1)].into()));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// After any changes a plan from a plan changes nothing, no number is used twice, and each set of
        /// slices fits its GPU.
        #[test]
        fn plans_are_stable_and_fit(
            rounds in prop::collection::vec(
                (
                    prop::collection::vec((0..6u32, 1..=10u16, 0..=10u16, 0..4u32, 0..3u32), 0..6),
                    prop::collection::vec((0..3u8, 0..3u32), 3),
                ),
                1..6,
            ),
        ) {
            let mut cluster = Cluster::new();
            let mut seen: BTreeMap<SliceId, FunctionKey> = BTreeMap::new();
            for (wishes, nodes) in rounds {
                let mut names = BTreeSet::new();
                let wishes: Vec<_> = wishes
                    .into_iter()
                    .filter(|&(number, ..)| names.insert(number))
                    .map(|(number, sms, request, count, on)| {
                        let nodes: Vec<_> = (0..=on).collect();
                        wish(number, sms * 10, request * 10, count, &nodes)
                    })
                    .collect();
                let sharing = [NodeSharing::Shares, NodeSharing::SharesNot, NodeSharing::Unknown];
                let nodes: Vec<_> =
                    (0..).zip(nodes).map(|(number, (how, gpus))| node(number, gpus, sharing[usize::from(how)])).collect();
                let given = cluster.given;
                let missing = cluster.plan(&wishes, &nodes);
                let before = cluster.slices.clone();
                prop_assert_eq!(cluster.plan(&wishes, &nodes), missing);
                prop_assert_eq!(&cluster.slices, &before);
                for slice in &before {
                    let owner = seen.entry(slice.id).or_insert_with(|| slice.function.clone());
                    prop_assert_eq!(&*owner, &slice.function);
                }
                // Stored node by node, no new number is below a number that is stored already.
                let new: Vec<_> = before.iter().filter(|slice| slice.id > given).collect();
                prop_assert!(new.is_sorted_by_key(|slice| &slice.node), "{:?}", new);
                let mut on: BTreeMap<_, Vec<Terms>> = BTreeMap::new();
                for slice in &before {
                    let node = nodes.iter().find(|node| node.name == slice.node).unwrap();
                    prop_assert!(node.sharing != NodeSharing::SharesNot);
                    if node.sharing == NodeSharing::Shares {
                        on.entry((slice.node.clone(), slice.gpu)).or_default().push(slice.terms);
                    }
                }
                for terms in on.values() {
                    prop_assert!(crate::dry_run::shortfall(Config::SLICES, terms) <= Config::SLICES.token());
                }
            }
        }
    }
}
