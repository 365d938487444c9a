//! Waiting requests in the order of their urgency, grouped by function and model, so that a new
//! score of a function moves no individual request.
//!
//! The waiting requests of a function for the same model form a *flow*. A flow is ordered by
//! arrival, hence also by deadline. A flow's position among the due requests is that of its first
//! request that can still be in time; its position among the late requests is that of its oldest
//! request that cannot. Time changes these positions: a flow with a first request that became late
//! gets its new position at the next update, at most once for each request.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::Timestamp;

use crate::dispatch::models::{ModelSlot, ModelTable};
use crate::dispatch::queue::WaitingRequest;
use crate::dispatch::size_rank::SizeRank;
use millrace_core::ids::{FunctionIndex, RequestKey};

/// Urgency of a function's requests, derived from its score, most urgent first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FlowUrgency {
    /// The function misses its objective, or would with another late request, and can be rescued.
    Endangered,
    /// The function can afford another late request.
    Safe,
    /// The function has no deadline.
    Free,
    /// The function misses its objective by so much that serving it in time makes no difference
    /// soon.
    Hopeless,
}

pub(super) const CLASSES: [FlowUrgency; 4] =
    [FlowUrgency::Endangered, FlowUrgency::Safe, FlowUrgency::Free, FlowUrgency::Hopeless];

pub(super) type FlowId = (FunctionIndex, ModelSlot);

/// A request that may go next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FlowCandidate {
    pub(super) request: WaitingRequest,
    pub(super) class: FlowUrgency,
    /// Latest start of the run; the time of arrival if the request has no deadline.
    pub(super) latest: Timestamp,
    /// Whether the latest start is over.
    pub(super) late: bool,
}

/// Position of a flow: the requests that represent it among the due and the late requests.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct FlowPosition {
    due: Option<(FlowUrgency, Timestamp, WaitingRequest)>,
    late: Option<WaitingRequest>,
}

#[derive(Debug)]
struct Flow {
    class: FlowUrgency,
    /// Time from a request's arrival until its run has to begin.
    within: Option<Duration>,
    waiting: BTreeMap<(Timestamp, RequestKey), WaitingRequest>,
    rank: SizeRank,
    position: FlowPosition,
}

impl Flow {
    /// Returns the first request that can still be in time.
    fn due(&self, now: Timestamp) -> Option<&WaitingRequest> {
        let came = self.within.map_or(Timestamp::ZERO, |within| {
            Timestamp(now.0.saturating_sub(u64::try_from(within.as_nanos()).unwrap_or(u64::MAX)))
        });
        self.waiting.range((came, RequestKey(0))..).next().map(|(_, request)| request)
    }

    fn latest(&self, request: &WaitingRequest) -> Timestamp {
        request.arrived + self.within.unwrap_or_default()
    }

    fn position(&self, now: Timestamp) -> FlowPosition {
        let due = self.due(now);
        let oldest = self.waiting.first_key_value().map(|(_, request)| request);
        let late = oldest.filter(|oldest| due.is_none_or(|due| due.key != oldest.key));
        FlowPosition {
            due: due.map(|request| (self.class, self.latest(request), *request)),
            late: late.copied(),
        }
    }
}

/// Flows of a model.
#[derive(Debug, Default)]
struct OfModel {
    due: BTreeSet<(FlowUrgency, Timestamp, FunctionIndex)>,
    late: BTreeSet<(RequestKey, FunctionIndex)>,
}

/// Maximum number of flows that became late and are moved in the same update. More flows become
/// late than requests arrive only for a short time.
const SETTLED_MAX: usize = 32;

#[derive(Debug)]
pub(super) struct RequestFlows {
    flows: BTreeMap<FlowId, Flow>,
    /// Flows that may not be at their position.
    moved: BTreeSet<FlowId>,
    /// Due flows, by size class and urgency.
    due: Vec<[BTreeSet<(Timestamp, FlowId)>; CLASSES.len()]>,
    /// Late flows, by size class.
    late: Vec<BTreeSet<(RequestKey, FlowId)>>,
    of_model: Vec<OfModel>,
    /// First entries of [`Self::of_model`], stored contiguously: an idle GPU reads an entry for
    /// each resident model.
    first_of_model: Vec<First>,
}

/// First due and first late flow of a model.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct First {
    due: Option<(FlowUrgency, Timestamp, FunctionIndex)>,
    late: Option<(RequestKey, FunctionIndex)>,
}

impl RequestFlows {
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            flows: BTreeMap::new(),
            moved: BTreeSet::new(),
            due: (0..ranks).map(|_| Default::default()).collect(),
            late: vec![BTreeSet::new(); ranks],
            of_model: Vec::new(),
            first_of_model: Vec::new(),
        }
    }

    pub(super) fn insert(&mut self, request: WaitingRequest, class: FlowUrgency, deadline: Option<Duration>) {
        let id = (request.function, request.model);
        let flow = self.flows.entry(id).or_insert_with(|| Flow {
            class,
            within: deadline,
            waiting: BTreeMap::new(),
            rank: request.rank,
            position: FlowPosition::default(),
        });
        flow.class = class;
        flow.waiting.insert((request.arrived, request.key), request);
        self.moved.insert(id);
    }

    pub(super) fn remove(&mut self, request: &WaitingRequest) {
        let id = (request.function, request.model);
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.waiting.remove(&(request.arrived, request.key));
            self.moved.insert(id);
        }
    }

    /// Returns whether any waiting request without a deadline fits this size class.
    pub(super) fn has_free(&self, rank: SizeRank) -> bool {
        self.due.iter().take(rank.0 + 1).any(|line| !line[FlowUrgency::Free as usize].is_empty())
    }

    /// Changes the urgency of a function's requests.
    pub(super) fn reclass(&mut self, function: FunctionIndex, class: FlowUrgency) {
        for (&id, flow) in self.flows.range_mut((function, ModelSlot::FIRST)..=(function, ModelSlot::LAST)) {
            if flow.class != class {
                flow.class = class;
                self.moved.insert(id);
            }
        }
    }

    /// Changes the urgency of the requests of the functions selected by `some`.
    pub(super) fn reclass_all(&mut self, some: impl Fn(FunctionIndex) -> bool, class: FlowUrgency) {
        for (&id, flow) in &mut self.flows {
            if flow.class != class && some(id.0) {
                flow.class = class;
                self.moved.insert(id);
            }
        }
    }

    /// Updates the positions of the flows that changed or became late.
    pub(super) fn settle(
        &mut self,
        now: Timestamp,
        models: &ModelTable,
        deadline: impl Fn(FunctionIndex) -> Option<Duration>,
    ) {
        while let Some(id) = self.moved.pop_first() {
            self.place(now, models, id, &deadline);
        }
        let mut left = SETTLED_MAX;
        for rank in 0..self.due.len() {
            for class in CLASSES.into_iter().filter(|&class| class != FlowUrgency::Free) {
                while left > 0
                    && let Some(&(_, id)) =
                        self.due[rank][class as usize].first().filter(|(latest, _)| *latest < now)
                {
                    self.place(now, models, id, &deadline);
                    left -= 1;
                }
            }
        }
    }

    fn place(
        &mut self,
        now: Timestamp,
        models: &ModelTable,
        id: FlowId,
        deadline: impl Fn(FunctionIndex) -> Option<Duration>,
    ) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let (function, model) = id;
        // With several kinds of GPU, the first kind's run time suffices, because only the order
        // depends on run times here.
        let run = models.run_time(model, 0).unwrap_or_default();
        flow.within = deadline(function).map(|deadline| deadline.saturating_sub(run));
        let before = flow.position;
        let after = flow.position(now);
        let rank = flow.rank.0;
        let gone = flow.waiting.is_empty();
        flow.position = after;
        if gone {
            self.flows.remove(&id);
        }
        if before == after {
            return;
        }
        let slot = model.0 as usize;
        if self.of_model.len() <= slot {
            self.of_model.resize_with(slot + 1, OfModel::default);
            self.first_of_model.resize(slot + 1, First::default());
        }
        let of_model = &mut self.of_model[slot];
        if before.due != after.due {
            if let Some((class, latest, _)) = before.due {
                self.due[rank][class as usize].remove(&(latest, id));
                of_model.due.remove(&(class, latest, function));
            }
            if let Some((class, latest, _)) = after.due {
                self.due[rank][class as usize].insert((latest, id));
                of_model.due.insert((class, latest, function));
            }
            self.first_of_model[slot].due = of_model.due.first().copied();
        }
        if before.late != after.late {
            if let Some(WaitingRequest { key, .. }) = before.late {
                self.late[rank].remove(&(key, id));
                of_model.late.remove(&(key, function));
            }
            if let Some(WaitingRequest { key, .. }) = after.late {
                self.late[rank].insert((key, id));
                of_model.late.insert((key, function));
            }
            self.first_of_model[slot].late = of_model.late.first().copied();
        }
    }

    /// Returns the candidate that represents a flow among the due requests. That is the first
    /// request that can still be in time, unless the candidate itself became late.
    fn candidate(&self, id: FlowId) -> Option<FlowCandidate> {
        let (class, latest, request) = self.flows.get(&id)?.position.due?;
        Some(FlowCandidate { request, class, latest, late: false })
    }

    /// Returns the candidate that represents a flow among the late requests.
    fn late_candidate(&self, id: FlowId) -> Option<FlowCandidate> {
        let flow = self.flows.get(&id)?;
        let request = flow.position.late?;
        Some(FlowCandidate { request, class: flow.class, latest: flow.latest(&request), late: true })
    }

    /// Returns the first `count` candidates of a class that can be in time and fit this size class.
    pub(super) fn firsts(
        &self,
        rank: SizeRank,
        class: FlowUrgency,
        now: Timestamp,
        count: usize,
    ) -> Vec<FlowCandidate> {
        let from = if class == FlowUrgency::Free { Timestamp::ZERO } else { now };
        let from = (from, (FunctionIndex(0), ModelSlot::FIRST));
        let lines = self.due.iter().take(rank.0 + 1);
        let firsts = lines.flat_map(|line| line[class as usize].range(from..).take(count));
        let mut firsts: Vec<_> = firsts.collect();
        firsts.sort_unstable();
        firsts.truncate(count);
        firsts.into_iter().filter_map(|&(_, id)| self.candidate(id)).collect()
    }

    /// Returns the first candidate of a class that can be in time and fits this size class.
    pub(super) fn first(&self, rank: SizeRank, class: FlowUrgency, now: Timestamp) -> Option<FlowCandidate> {
        let from = if class == FlowUrgency::Free { Timestamp::ZERO } else { now };
        let from = (from, (FunctionIndex(0), ModelSlot::FIRST));
        let lines = self.due.iter().take(rank.0 + 1);
        let &(_, id) = lines.filter_map(|line| line[class as usize].range(from..).next()).min()?;
        self.candidate(id)
    }

    /// Returns the oldest late request that fits this size class.
    pub(super) fn oldest_late(&self, rank: SizeRank) -> Option<FlowCandidate> {
        let &(_, id) = self.late.iter().take(rank.0 + 1).filter_map(BTreeSet::first).min()?;
        self.late_candidate(id)
    }

    /// Returns the most urgent request for any of these models: the requests in time by class, else
    /// the oldest late request.
    pub(super) fn first_of(
        &self,
        models: impl Iterator<Item = ModelSlot>,
        now: Timestamp,
    ) -> Option<FlowCandidate> {
        let in_time = |&(class, latest, _): &(FlowUrgency, Timestamp, FunctionIndex)| {
            class == FlowUrgency::Free || latest >= now
        };
        let position = |model: ModelSlot| {
            let First { due, late } = *self.first_of_model.get(model.0 as usize)?;
            let all = || &self.of_model[model.0 as usize].due;
            let others = || all().iter().take(SETTLED_MAX).copied().find(in_time);
            if let Some((class, latest, function)) =
                due.filter(in_time).or_else(|| due.and_then(|_| others()))
            {
                return Some((false, class, latest.0, (function, model)));
            }
            let (RequestKey(key), function) = late?;
            Some((true, FlowUrgency::Hopeless, key, (function, model)))
        };
        let mut first = None;
        for model in models {
            // Not `min`: a plain loop compiles to faster code here, and this is the hot path of `unified`.
            if let Some(it) = position(model)
                && first.is_none_or(|first| it < first)
            {
                first = Some(it);
            }
        }
        let (late, .., id) = first?;
        if late { self.late_candidate(id) } else { self.candidate(id) }
    }

    /// Asserts the same as `DispatchPolicy::check`.
    #[cfg(test)]
    pub(super) fn check(&self, now: Timestamp, models: &[ModelSlot]) {
        let first = |it: &OfModel| First { due: it.due.first().copied(), late: it.late.first().copied() };
        assert_eq!(self.first_of_model, self.of_model.iter().map(first).collect::<Vec<_>>());
        for &model in models {
            let Some(it) = self.of_model.get(model.0 as usize) else { continue };
            let in_time =
                |due: &&(FlowUrgency, Timestamp, FunctionIndex)| due.0 == FlowUrgency::Free || due.1 >= now;
            let due = it.due.iter().take(SETTLED_MAX).find(in_time);
            let due = due.and_then(|&(_, _, function)| self.candidate((function, model)));
            // Flows that changed since are updated before the next decision.
            if let Some(due) = due.filter(|due| !self.moved.contains(&(due.request.function, model))) {
                let flow = &self.flows[&(due.request.function, model)];
                assert_eq!(flow.due(now), Some(&due.request), "nothing before it can still be in time");
            }
            let late = || it.late.first().and_then(|&(_, function)| self.late_candidate((function, model)));
            let by_scan = if it.due.iter().take(SETTLED_MAX).any(|due| in_time(&due)) { due } else { late() };
            assert_eq!(self.first_of([model].into_iter(), now), by_scan, "{model:?}");
        }
    }
}
