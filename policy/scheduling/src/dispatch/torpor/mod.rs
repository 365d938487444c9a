//! Torpor's queue order and choice of GPU (T17 to T22).
//!
//! **Order.** Functions are sorted by their required request count: the number of requests that
//! they would have to serve in time in a row to meet their objective ([`required`]). The functions
//! with a sum of at most alpha times the total are prioritised ([`groups`]), and alpha follows the
//! share of functions that meet their objective ([`alpha`]). Among prioritised functions the
//! largest count goes first, among the others the least (T21). Requests of the same function, and
//! of functions with equal counts, go by age. A function without an objective counts as just
//! meeting its objective: prioritised, but after functions with a positive count.
//!
//! **GPU** (algorithm 1, and the reading in docs/develop/mechanisms.md). The first choice is an idle seat
//! on a GPU that holds the model. The second is the idle GPU with the fastest direct link from a busy
//! holder, if that link is faster than the path from the host. The third is the idle GPU with the
//! least loading by neighbours under the same switch: nothing, from another GPU, a light, a medium
//! or a heavy model, in this order. Ties go to the GPU that the request's inputs reach soonest
//! ([`locality`](super::locality); the paper's requests have no such inputs). No request is assigned to
//! a busy GPU: a request is bound to a GPU when the GPU is free (T01, T15).
//!
//! Requests that are already late keep their turn, as in the paper.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::{Alpha, BytesPerSec, GpuIndex, Priority, SloCounts, Timestamp};

use self::alpha::PrioritisedShare;
use self::groups::{ALPHA_ONE, PriorityGroups};
use self::required::{RequiredRequestCount, ScoredRequests};
use super::config::{AlphaRule, TorporConfig, TorporGpuChoice, TorporOrder};
use super::models::{ModelSlot, ModelTable};
use super::policy::{CopyOrigin, DispatchDecision, DispatchPolicy, DispatchView, QueueEntry};
use super::protocol::LatencyObjective;
use super::queue::WaitingRequest;
use super::size_rank::SizeRank;
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex};

mod alpha;
mod groups;
pub(super) mod required;

/// Interval of alpha's adjustment: the artifact's 20 times 2 s. The paper gives no value.
pub(super) const ALPHA_PERIOD: Duration = Duration::from_secs(40);
/// Interval at which the artifact renews its groups (T20).
const REGROUP_PERIOD: Duration = Duration::from_secs(2);

/// Position of a function in the order: its group, the position in that group, and the age of its
/// oldest request.
type QueuePosition = (u8, i128, RequestKey, FunctionIndex);

#[derive(Debug)]
struct TorporFunction {
    objective: Option<LatencyObjective>,
    tally: ScoredRequests,
    /// Required request count as stored in the groups, if the function has an objective.
    required: Option<RequiredRequestCount>,
    complies: bool,
    /// Model of the most recent request.
    model: Option<ModelSlot>,
    waiting: BTreeMap<RequestKey, WaitingRequest>,
    /// Position in the line of its size class, while requests wait.
    turn: Option<(SizeRank, QueuePosition)>,
    /// Whether the function was removed, so that its record goes with its last request.
    gone: bool,
}

#[derive(Debug)]
pub(super) struct Torpor {
    config: TorporConfig,
    functions: BTreeMap<FunctionIndex, TorporFunction>,
    /// Functions with waiting requests, in order, by size class.
    lines: Vec<BTreeSet<QueuePosition>>,
    fronts: Vec<(QueuePosition, SizeRank)>,
    groups: PriorityGroups,
    alpha: PrioritisedShare,
    /// Number of functions with an objective.
    held: usize,
    /// Number of functions that meet their objective.
    compliant: usize,
    /// Functions with new scores that wait for the next regrouping.
    changed: BTreeSet<FunctionIndex>,
    moved: Vec<FunctionIndex>,
    next_regroup: Option<Timestamp>,
    next_adjust: Option<Timestamp>,
    lots: RandomChoices,
}

impl Torpor {
    pub(super) fn new(config: TorporConfig, ranks: usize, seed: u64) -> Self {
        Self {
            config,
            functions: BTreeMap::new(),
            lines: vec![BTreeSet::new(); ranks],
            fronts: Vec::new(),
            groups: PriorityGroups::new(),
            alpha: PrioritisedShare::new(config.alpha),
            held: 0,
            compliant: 0,
            changed: BTreeSet::new(),
            moved: Vec::new(),
            next_regroup: None,
            next_adjust: None,
            lots: RandomChoices(seed),
        }
    }

    fn function(&mut self, function: FunctionIndex) -> &mut TorporFunction {
        let counts = self.config.counts;
        self.functions.entry(function).or_insert_with(|| TorporFunction {
            objective: None,
            tally: ScoredRequests::new(counts),
            required: None,
            complies: false,
            model: None,
            waiting: BTreeMap::new(),
            turn: None,
            gone: false,
        })
    }

    /// Moves a function to its position among the functions with requests.
    fn place(&mut self, index: FunctionIndex) {
        let Some(function) = self.functions.get_mut(&index) else { return };
        let turn = function.waiting.first_key_value().map(|(&oldest, request)| {
            let (group, place) = match (self.config.order, function.required) {
                (TorporOrder::Arrival, _) | (TorporOrder::Required, None) => (0, 0),
                (TorporOrder::Required, Some(required)) if self.groups.is_high(required, index) => {
                    (0, -required.0)
                }
                (TorporOrder::Required, Some(required)) => (1, required.0),
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

    /// Updates the groups with a function's score.
    fn update_groups(&mut self, models: Option<&ModelTable>, index: FunctionIndex) {
        let Some(function) = self.functions.get_mut(&index) else { return };
        let raw =
            function.objective.map(|objective| RequiredRequestCount::of(function.tally.counts(), objective));
        let weigh = |raw: RequiredRequestCount| match self.config.alpha {
            AlphaRule::Paper => raw,
            AlphaRule::Artifact => raw.weighted(run_micros(models, function.model)),
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
        self.regroup();
    }

    fn regroup(&mut self) {
        self.groups.set_alpha((self.alpha.get() * ALPHA_ONE as f64).round() as u64);
        self.settle();
    }

    /// Returns the function with the first request that fits the GPU of an idle seat.
    fn first(&mut self, view: &DispatchView<'_>) -> Option<FunctionIndex> {
        self.fronts.clear();
        let lines = self.lines.iter().enumerate();
        self.fronts.extend(lines.filter_map(|(rank, line)| Some((*line.first()?, SizeRank(rank)))));
        self.fronts.sort_unstable();
        let fits = |(_, rank): &&(QueuePosition, SizeRank)| view.fleet.idle_count(*rank) > 0;
        self.fronts.iter().find(fits).map(|((.., function), _)| *function)
    }

    fn choose(
        &mut self,
        view: &DispatchView<'_>,
        request: &WaitingRequest,
    ) -> Option<(SeatIndex, CopyOrigin)> {
        let holders = &view.models.get(request.model).holders;
        let inputs = view.inputs(request);
        let moved = |gpu: GpuIndex| view.fleet.move_time(inputs, gpu);
        if let Some(hit) = view.fleet.idle_holder(holders, request.rank, moved) {
            return Some((hit, CopyOrigin::Host));
        }
        if self.config.choice == TorporGpuChoice::Random {
            let number = self.lots.below(view.fleet.idle_count(request.rank));
            return Some((view.fleet.nth_idle(request.rank, number)?, CopyOrigin::Host));
        }
        if let Some((Reverse(rate), _, to, holder)) = from_peer(view, request) {
            return Some((to, CopyOrigin::Peer { holder, rate }));
        }
        let calm = |gpu: GpuIndex| view.fleet.loading_beside(gpu);
        Some((view.fleet.nearest_idle(inputs, request.rank, calm)?, CopyOrigin::Host))
    }
}

/// Returns the fastest direct link from a holder to a GPU with an idle seat, if that link is faster than the
/// GPU's path from the host. Among equally fast links, the inputs decide: the link to the GPU that
/// they reach soonest. Scans the smaller set of the two.
pub(super) fn from_peer(view: &DispatchView<'_>, request: &WaitingRequest) -> Option<PeerCopy> {
    let inputs = view.inputs(request);
    let way = |rate, to: SeatIndex, holder| {
        (Reverse(rate), view.fleet.move_time(inputs, view.fleet.gpu_of(to)), to, holder)
    };
    let holders = &view.models.get(request.model).holders;
    // A holder with a copy still in transit cannot serve as a source yet.
    let gives = |holder: GpuIndex| !view.fleet.get(holder).is_loading(request.model);
    let faster = |to: GpuIndex, rate: BytesPerSec| rate > view.fleet.get(to).host_rate;
    let links = |gpu: GpuIndex| view.fleet.peers(gpu).iter().copied();
    if holders.len() <= view.fleet.idle_count(request.rank) {
        let whole = holders.iter().filter(|&holder| gives(holder));
        let ways = whole.flat_map(|holder| links(holder).map(move |(rate, to)| (rate, to, holder)));
        let ways = ways.filter(|&(rate, to, _)| faster(to, rate));
        let idle = |(rate, to, holder)| Some(way(rate, view.fleet.idle_seat(to, request.rank)?, holder));
        return ways.filter_map(idle).min();
    }
    let ways = view.fleet.idle(request.rank);
    let ways = ways.flat_map(|to| links(view.fleet.gpu_of(to)).map(move |(rate, holder)| (rate, to, holder)));
    let ways = ways.filter(|&(rate, to, holder)| {
        faster(view.fleet.gpu_of(to), rate) && holders.contains(holder) && gives(holder)
    });
    ways.map(|(rate, to, holder)| way(rate, to, holder)).min()
}

/// Rate of a link, transfer time of the request's inputs, destination and source.
pub(super) type PeerCopy = (Reverse<BytesPerSec>, Duration, SeatIndex, GpuIndex);

/// Returns the run time by which the artifact's rule weights a function's count, in microseconds, so that
/// the result is in thousandths of the artifact's milliseconds; 1000 for a function that never ran. With several kinds of GPU, the first kind
/// counts.
fn run_micros(models: Option<&ModelTable>, model: Option<ModelSlot>) -> u64 {
    let run = models.zip(model).and_then(|(models, model)| models.run_time(model, 0));
    run.map_or(1000, |run| u64::try_from(run.as_micros()).unwrap_or(u64::MAX))
}

impl DispatchPolicy for Torpor {
    fn push(&mut self, request: WaitingRequest, _entry: QueueEntry) {
        let function = self.function(request.function);
        function.model = Some(request.model);
        function.waiting.insert(request.key, request);
        self.place(request.function);
    }

    fn remove(&mut self, request: &WaitingRequest) {
        let function = self.function(request.function);
        function.waiting.remove(&request.key);
        self.place(request.function);
    }

    fn decide(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision> {
        if !view.fleet.any_idle() {
            return None;
        }
        let function = self.first(view)?;
        let request = *self.functions.get(&function)?.waiting.first_key_value()?.1;
        let (seat, over) = self.choose(view, &request)?;
        self.remove(&request);
        Some(DispatchDecision::Assign { request, seat, over })
    }

    fn uses_scores(&self) -> bool {
        true
    }

    fn objective(&mut self, function: FunctionIndex, objective: Option<LatencyObjective>) {
        let it = self.function(function);
        (it.objective, it.gone) = (objective, false);
        self.update_groups(None, function);
    }

    fn score(&mut self, models: &ModelTable, function: FunctionIndex, counts: SloCounts) {
        let Some(it) = self.functions.get_mut(&function) else { return };
        it.tally.update(counts);
        match self.config.alpha {
            AlphaRule::Paper => self.update_groups(Some(models), function),
            AlphaRule::Artifact => {
                self.changed.insert(function);
            }
        }
    }

    fn forget(&mut self, function: FunctionIndex) {
        if let Some(it) = self.functions.get_mut(&function) {
            (it.objective, it.gone) = (None, true);
            self.changed.remove(&function);
            self.update_groups(None, function);
            if self.functions.get(&function).is_some_and(|it| it.waiting.is_empty()) {
                self.functions.remove(&function);
            }
        }
    }

    fn tick(&mut self, now: Timestamp, models: &ModelTable) {
        if self.held == 0 {
            (self.next_regroup, self.next_adjust) = (None, None);
            return;
        }
        if self.config.alpha == AlphaRule::Artifact
            && *self.next_regroup.get_or_insert(now + REGROUP_PERIOD) <= now
        {
            self.next_regroup = Some(now + REGROUP_PERIOD);
            while let Some(function) = self.changed.pop_first() {
                self.update_groups(Some(models), function);
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

    fn alpha(&self) -> Option<Alpha> {
        let ppm = (self.alpha.get() * f64::from(Alpha::ONE.ppm())).round();
        Some(Alpha::from_ppm(ppm as u32).unwrap_or(Alpha::ONE)).filter(|_| self.held > 0)
    }

    fn begin_with(&mut self, _priority: Priority, alpha: Alpha) {
        self.alpha.begin_with(alpha);
        self.regroup();
    }
}

/// SplitMix64 generator for random choices.
#[derive(Debug)]
struct RandomChoices(u64);

impl RandomChoices {
    /// Returns a number below `bound`, or 0 if `bound` is 0.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(z ^ (z >> 31)) * bound as u128) >> 64) as usize
    }
}
