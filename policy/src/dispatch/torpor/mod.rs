//! Torpor's queue and choice of GPU (T17 to T22).
//!
//! **Which request.** Functions are sorted by how many requests in a row they would have to serve
//! in time to meet their objective ([`required`]); those that together come to at most alpha of what
//! is due go before the others ([`groups`]), and alpha follows how many comply ([`alpha`]). Among the
//! prioritised the one with most due is first, among the others the one with least (T21); a
//! function's own requests, and those of functions that are equal, are taken by age. A function
//! without an objective is as one that just meets its own: prioritised, after those with something
//! due.
//!
//! **Which GPU** (algorithm 1, and the reading in MECHANISMS section 2). An idle one that holds the
//! model; else the idle one with the fastest direct link from a busy holder, where that is faster
//! than its way from the host; else the one whose neighbours under the same switch load nothing,
//! from another GPU, a light, a medium or a heavy model, in this order. Where these are equal, the one
//! that the request's data comes to soonest ([`inputs`](super::inputs); the paper's pass none). Nothing
//! is handed ahead: a request is bound to a GPU when that is free (T01, T15).
//!
//! Requests that are late already keep their turn, as in the paper.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{BytesPerSec, GpuIndex, SloCounts, Timestamp};

use self::alpha::Alpha;
use self::groups::{ALPHA_ONE, Groups};
use self::required::{Required, Tally};
use super::config::{AlphaRule, Choice, Order, TorporConfig};
use super::models::{Models, Slot};
use super::policy::{Decision, Entry, Policy, Route, Stats, View};
use super::protocol::Objective;
use super::queue::{SizeRank, Waiting};
use crate::ids::{FunctionIndex, RequestKey};

mod alpha;
mod groups;
pub(super) mod required;

/// The interval at which alpha is adjusted: the artifact's 20 times 2 s. The paper gives none.
pub(super) const ALPHA_PERIOD: Duration = Duration::from_secs(40);
/// How often the artifact renews its groups (T20).
const REGROUP_PERIOD: Duration = Duration::from_secs(2);

/// Where a function's oldest request stands: its group, place in it, age.
type Turn = (u8, i128, RequestKey, FunctionIndex);

#[derive(Debug)]
struct Function {
    objective: Option<Objective>,
    tally: Tally,
    /// As it stands in the groups, where it has an objective.
    required: Option<Required>,
    complies: bool,
    /// The model of its last request.
    model: Option<Slot>,
    waiting: BTreeMap<RequestKey, Waiting>,
    /// Where it stands in the line of its requests' size class.
    turn: Option<(SizeRank, Turn)>,
    /// Whether it goes with its last request.
    gone: bool,
}

#[derive(Debug)]
pub(super) struct Torpor {
    config: TorporConfig,
    functions: BTreeMap<FunctionIndex, Function>,
    /// The functions with requests, in order.
    lines: Vec<BTreeSet<Turn>>,
    fronts: Vec<(Turn, SizeRank)>,
    groups: Groups,
    alpha: Alpha,
    /// Functions with an objective, and how many of them comply.
    held: usize,
    compliant: usize,
    /// Functions whose new scores wait for the next regrouping.
    changed: BTreeSet<FunctionIndex>,
    moved: Vec<FunctionIndex>,
    next_regroup: Option<Timestamp>,
    next_adjust: Option<Timestamp>,
    lots: Lots,
}

impl Torpor {
    pub(super) fn new(config: TorporConfig, ranks: usize, seed: u64) -> Self {
        Self {
            config,
            functions: BTreeMap::new(),
            lines: vec![BTreeSet::new(); ranks],
            fronts: Vec::new(),
            groups: Groups::new(),
            alpha: Alpha::new(config.alpha),
            held: 0,
            compliant: 0,
            changed: BTreeSet::new(),
            moved: Vec::new(),
            next_regroup: None,
            next_adjust: None,
            lots: Lots(seed),
        }
    }

    fn function(&mut self, function: FunctionIndex) -> &mut Function {
        let counts = self.config.counts;
        self.functions.entry(function).or_insert_with(|| Function {
            objective: None,
            tally: Tally::new(counts),
            required: None,
            complies: false,
            model: None,
            waiting: BTreeMap::new(),
            turn: None,
            gone: false,
        })
    }

    /// Puts a function where it belongs among those with requests.
    fn place(&mut self, index: FunctionIndex) {
        let Some(function) = self.functions.get_mut(&index) else { return };
        let turn = function.waiting.first_key_value().map(|(&oldest, request)| {
            let (group, place) = match (self.config.order, function.required) {
                (Order::Arrival, _) | (Order::Required, None) => (0, 0),
                (Order::Required, Some(required)) if self.groups.is_high(required, index) => (0, -required.0),
                (Order::Required, Some(required)) => (1, required.0),
            };
            (request.rank, (group, place, oldest, index))
        });
        if turn == function.turn {
            return;
        }
        if let Some((rank, before)) = function.turn {
            self.lines[rank.0].remove(&before);
        }
        if let Some((rank, turn)) = turn {
            self.lines[rank.0].insert(turn);
        }
        function.turn = turn;
        if turn.is_none() && function.gone {
            self.functions.remove(&index);
        }
    }

    /// Takes a function's score into the groups.
    fn apply(&mut self, models: Option<&Models>, index: FunctionIndex) {
        let Some(function) = self.functions.get_mut(&index) else { return };
        let raw = function.objective.map(|objective| Required::of(function.tally.counts(), objective));
        let weigh = |raw: Required| match self.config.alpha {
            AlphaRule::Paper => raw,
            AlphaRule::Artifact => raw.weighted(run_millis(models, function.model)),
        };
        let required = raw.map(weigh);
        self.held = self.held + usize::from(raw.is_some()) - usize::from(function.required.is_some());
        let complies = raw.is_some_and(|raw| raw.due() == 0);
        self.compliant = self.compliant + usize::from(complies) - usize::from(function.complies);
        function.complies = complies;
        if required != function.required {
            if let Some(before) = std::mem::replace(&mut function.required, required) {
                self.groups.remove(before, index);
            }
            if let Some(required) = required {
                self.groups.insert(required, index);
            }
            self.settle();
        }
        self.place(index);
    }

    fn settle(&mut self) {
        let mut moved = std::mem::take(&mut self.moved);
        self.groups.settle(&mut moved);
        moved.drain(..).for_each(|function| self.place(function));
        self.moved = moved;
    }

    fn adjust(&mut self) {
        self.alpha.adjust(self.compliant, self.held);
        self.groups.set_alpha((self.alpha.get() * ALPHA_ONE as f64).round() as u64);
        self.settle();
    }

    /// The request that is first of those that fit an idle GPU.
    fn first(&mut self, view: &View<'_>) -> Option<FunctionIndex> {
        self.fronts.clear();
        let lines = self.lines.iter().enumerate();
        self.fronts.extend(lines.filter_map(|(rank, line)| Some((*line.first()?, SizeRank(rank)))));
        self.fronts.sort_unstable();
        let fits = |(_, rank): &&(Turn, SizeRank)| view.fleet.idle_count(*rank) > 0;
        self.fronts.iter().find(fits).map(|((.., function), _)| *function)
    }

    fn choose(&mut self, view: &View<'_>, request: &Waiting) -> Option<(GpuIndex, Route)> {
        let (holders, inputs) = (&view.models.get(request.model).holders, view.inputs(request));
        let moved = |gpu| view.fleet.move_time(inputs, gpu);
        if let Some(hit) = view.fleet.idle_holder(holders, request.rank, moved) {
            return Some((hit, Route::Host));
        }
        if self.config.choice == Choice::Random {
            let number = self.lots.below(view.fleet.idle_count(request.rank));
            return Some((view.fleet.nth_idle(request.rank, number)?, Route::Host));
        }
        if let Some((Reverse(rate), _, to, holder)) = from_peer(view, request) {
            return Some((to, Route::Peer { holder, rate }));
        }
        let calm = |gpu| view.fleet.loading_beside(gpu);
        Some((view.fleet.nearest_idle(inputs, request.rank, calm)?, Route::Host))
    }
}

/// The fastest direct link from a holder to an idle GPU, where that is faster than its way from the
/// host; of several that are as fast, to the GPU that the request's data comes to soonest. Looks from
/// the holders or from the idle ones, whichever are fewer.
pub(super) fn from_peer(view: &View<'_>, request: &Waiting) -> Option<Peer> {
    let inputs = view.inputs(request);
    let way = |rate, to, holder| (Reverse(rate), view.fleet.move_time(inputs, to), to, holder);
    let holders = &view.models.get(request.model).holders;
    // One whose own copy is still on its way has nothing to give yet.
    let gives = |holder: GpuIndex| !view.fleet.get(holder).is_loading(request.model);
    let faster = |to: GpuIndex, rate: BytesPerSec| rate > view.fleet.get(to).host_rate;
    let links = |gpu: GpuIndex| view.fleet.peers(gpu).iter().copied();
    if holders.len() <= view.fleet.idle_count(request.rank) {
        let whole = holders.iter().filter(|&holder| gives(holder));
        let ways = whole.flat_map(|holder| links(holder).map(move |(rate, to)| (rate, to, holder)));
        let ways = ways.filter(|&(rate, to, _)| view.fleet.takes_now(to, request.rank) && faster(to, rate));
        return ways.map(|(rate, to, holder)| way(rate, to, holder)).min();
    }
    let ways = view.fleet.idle(request.rank);
    let ways = ways.flat_map(|to| links(to).map(move |(rate, holder)| (rate, to, holder)));
    let ways =
        ways.filter(|&(rate, to, holder)| faster(to, rate) && holders.contains(holder) && gives(holder));
    ways.map(|(rate, to, holder)| way(rate, to, holder)).min()
}

/// A link's rate, what bringing the request's data takes, where the link leads, and from where.
pub(super) type Peer = (Reverse<BytesPerSec>, Duration, GpuIndex, GpuIndex);

/// A mean run of a function in milliseconds and thousandths: what the artifact weighs its count by.
/// One that never ran weighs one; where there are several kinds of GPU, the first one's counts.
fn run_millis(models: Option<&Models>, model: Option<Slot>) -> u64 {
    let run = models.zip(model).and_then(|(models, model)| models.run_time(model, 0));
    run.map_or(1000, |run| u64::try_from(run.as_micros()).unwrap_or(u64::MAX))
}

impl Policy for Torpor {
    fn push(&mut self, request: Waiting, _entry: Entry) {
        let function = self.function(request.function);
        function.model = Some(request.model);
        function.waiting.insert(request.key, request);
        self.place(request.function);
    }

    fn remove(&mut self, request: &Waiting) {
        let function = self.function(request.function);
        function.waiting.remove(&request.key);
        self.place(request.function);
    }

    fn decide(&mut self, view: &View<'_>) -> Option<Decision> {
        if !view.fleet.any_idle() {
            return None;
        }
        let function = self.first(view)?;
        let request = *self.functions.get(&function)?.waiting.first_key_value()?.1;
        let (gpu, over) = self.choose(view, &request)?;
        self.remove(&request);
        Some(Decision::Assign { request, gpu, over })
    }

    fn scores(&self) -> bool {
        true
    }

    fn objective(&mut self, function: FunctionIndex, objective: Option<Objective>) {
        let it = self.function(function);
        (it.objective, it.gone) = (objective, false);
        self.apply(None, function);
    }

    fn score(&mut self, models: &Models, function: FunctionIndex, counts: SloCounts) {
        let Some(it) = self.functions.get_mut(&function) else { return };
        it.tally.update(counts);
        match self.config.alpha {
            AlphaRule::Paper => self.apply(Some(models), function),
            AlphaRule::Artifact => {
                self.changed.insert(function);
            }
        }
    }

    fn forget(&mut self, function: FunctionIndex) {
        if let Some(it) = self.functions.get_mut(&function) {
            (it.objective, it.gone) = (None, true);
            self.changed.remove(&function);
            self.apply(None, function);
            if self.functions.get(&function).is_some_and(|it| it.waiting.is_empty()) {
                self.functions.remove(&function);
            }
        }
    }

    fn tick(&mut self, now: Timestamp, models: &Models) {
        if self.held == 0 {
            (self.next_regroup, self.next_adjust) = (None, None);
            return;
        }
        if self.config.alpha == AlphaRule::Artifact
            && *self.next_regroup.get_or_insert(now + REGROUP_PERIOD) <= now
        {
            self.next_regroup = Some(now + REGROUP_PERIOD);
            while let Some(function) = self.changed.pop_first() {
                self.apply(Some(models), function);
            }
        }
        if *self.next_adjust.get_or_insert(now + ALPHA_PERIOD) <= now {
            self.next_adjust = Some(now + ALPHA_PERIOD);
            self.adjust();
        }
    }

    fn next_wake(&self) -> Option<Timestamp> {
        [self.next_regroup, self.next_adjust].into_iter().flatten().min()
    }

    fn count(&self, stats: &mut Stats) {
        stats.alpha = Some(self.alpha.get());
    }
}

/// SplitMix64.
#[derive(Debug)]
struct Lots(u64);

impl Lots {
    /// A number below `bound`; 0 where that is 0.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * bound as u128) >> 64) as usize
    }
}
