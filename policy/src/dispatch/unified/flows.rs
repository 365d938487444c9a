//! Who waits, in the order in which they should go: by function and model, so that an order of
//! functions that changes with every score moves no request.
//!
//! What waits of one function for one model is a *flow*. Its requests are ordered by when they came,
//! so their deadlines are too. It stands in the order with the first that can still be in time, and
//! among the late ones with its oldest that cannot. Time moves that: a flow whose first goes late is
//! put where it then belongs when next looked at, once for each request at most.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::Timestamp;

use crate::dispatch::models::{Models, Slot};
use crate::dispatch::queue::{SizeRank, Waiting};
use crate::ids::{FunctionIndex, RequestKey};

/// What a function's score says of its requests, the more pressing first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    /// It misses its objective, or would with one more late request, and can be rescued.
    Endangered,
    /// It can afford one more late request.
    Safe,
    /// It has no deadline.
    Free,
    /// It is so far from its objective that serving it in time makes no difference soon.
    Hopeless,
}

pub(super) const CLASSES: [Class; 4] = [Class::Endangered, Class::Safe, Class::Free, Class::Hopeless];

pub(super) type FlowId = (FunctionIndex, Slot);

/// A request that may go next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) request: Waiting,
    pub(super) class: Class,
    /// When its run has to begin at the latest; of what has no deadline, when it came.
    pub(super) latest: Timestamp,
    /// Whether that is over.
    pub(super) late: bool,
}

/// Where a flow stands, and with whom.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Standing {
    due: Option<(Class, Timestamp, Waiting)>,
    late: Option<Waiting>,
}

#[derive(Debug)]
struct Flow {
    class: Class,
    /// From a request's arrival until its run has to begin.
    within: Option<Duration>,
    waiting: BTreeMap<(Timestamp, RequestKey), Waiting>,
    rank: SizeRank,
    standing: Standing,
}

impl Flow {
    /// The first that can still be in time.
    fn due(&self, now: Timestamp) -> Option<&Waiting> {
        let came = self.within.map_or(Timestamp::ZERO, |within| {
            Timestamp(now.0.saturating_sub(u64::try_from(within.as_nanos()).unwrap_or(u64::MAX)))
        });
        self.waiting.range((came, RequestKey(0))..).next().map(|(_, request)| request)
    }

    fn latest(&self, request: &Waiting) -> Timestamp {
        request.arrived + self.within.unwrap_or_default()
    }

    fn standing(&self, now: Timestamp) -> Standing {
        let due = self.due(now);
        let oldest = self.waiting.first_key_value().map(|(_, request)| request);
        let late = oldest.filter(|oldest| due.is_none_or(|due| due.key != oldest.key));
        Standing { due: due.map(|request| (self.class, self.latest(request), *request)), late: late.copied() }
    }
}

#[derive(Debug, Default)]
struct OfModel {
    due: BTreeSet<(Class, Timestamp, FunctionIndex)>,
    late: BTreeSet<(RequestKey, FunctionIndex)>,
}

/// Flows that are put where they belong in one look, at most. More than one goes late for each that
/// comes only for a while.
const SETTLED_MAX: usize = 32;

#[derive(Debug)]
pub(super) struct Flows {
    flows: BTreeMap<FlowId, Flow>,
    /// Those that may not stand where they belong.
    moved: BTreeSet<FlowId>,
    /// By size class and class.
    due: Vec<[BTreeSet<(Timestamp, FlowId)>; CLASSES.len()]>,
    late: Vec<BTreeSet<(RequestKey, FlowId)>>,
    of_model: Vec<OfModel>,
    /// The first of each of those, side by side: an idle GPU looks at one for each model on it.
    first_of_model: Vec<First>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct First {
    due: Option<(Class, Timestamp, FunctionIndex)>,
    late: Option<(RequestKey, FunctionIndex)>,
}

impl Flows {
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

    pub(super) fn insert(&mut self, request: Waiting, class: Class, deadline: Option<Duration>) {
        let id = (request.function, request.model);
        let flow = self.flows.entry(id).or_insert_with(|| Flow {
            class,
            within: deadline,
            waiting: BTreeMap::new(),
            rank: request.rank,
            standing: Standing::default(),
        });
        flow.class = class;
        flow.waiting.insert((request.arrived, request.key), request);
        self.moved.insert(id);
    }

    pub(super) fn remove(&mut self, request: &Waiting) {
        let id = (request.function, request.model);
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.waiting.remove(&(request.arrived, request.key));
            self.moved.insert(id);
        }
    }

    /// Whether any request without a deadline waits that fits this size class.
    pub(super) fn has_free(&self, rank: SizeRank) -> bool {
        self.due.iter().take(rank.0 + 1).any(|line| !line[Class::Free as usize].is_empty())
    }

    /// A function's requests are of another class now.
    pub(super) fn reclass(&mut self, function: FunctionIndex, class: Class) {
        for (&id, flow) in self.flows.range_mut((function, Slot::FIRST)..=(function, Slot::LAST)) {
            if flow.class != class {
                flow.class = class;
                self.moved.insert(id);
            }
        }
    }

    /// Those of some functions are.
    pub(super) fn reclass_all(&mut self, some: impl Fn(FunctionIndex) -> bool, class: Class) {
        for (&id, flow) in &mut self.flows {
            if flow.class != class && some(id.0) {
                flow.class = class;
                self.moved.insert(id);
            }
        }
    }

    /// Brings the order up to date: what changed, and what went late.
    pub(super) fn settle(
        &mut self,
        now: Timestamp,
        models: &Models,
        deadline: impl Fn(FunctionIndex) -> Option<Duration>,
    ) {
        while let Some(id) = self.moved.pop_first() {
            self.place(now, models, id, &deadline);
        }
        let mut left = SETTLED_MAX;
        for rank in 0..self.due.len() {
            for class in CLASSES.into_iter().filter(|&class| class != Class::Free) {
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
        models: &Models,
        id: FlowId,
        deadline: impl Fn(FunctionIndex) -> Option<Duration>,
    ) {
        let Some(flow) = self.flows.get_mut(&id) else { return };
        let (function, model) = id;
        // Of several kinds of GPU the first one's counts: this only orders.
        let run = models.run_time(model, 0).unwrap_or_default();
        flow.within = deadline(function).map(|deadline| deadline.saturating_sub(run));
        let (before, after) = (flow.standing, flow.standing(now));
        let (rank, gone) = (flow.rank.0, flow.waiting.is_empty());
        flow.standing = after;
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
            if let Some(Waiting { key, .. }) = before.late {
                self.late[rank].remove(&(key, id));
                of_model.late.remove(&(key, function));
            }
            if let Some(Waiting { key, .. }) = after.late {
                self.late[rank].insert((key, id));
                of_model.late.insert((key, function));
            }
            self.first_of_model[slot].late = of_model.late.first().copied();
        }
    }

    /// With whom a flow stands among what is due. That one is the first that can still be in time
    /// while it can be itself.
    fn candidate(&self, id: FlowId) -> Option<Candidate> {
        let (class, latest, request) = self.flows.get(&id)?.standing.due?;
        Some(Candidate { request, class, latest, late: false })
    }

    /// With whom a flow stands among what is late.
    fn late_candidate(&self, id: FlowId) -> Option<Candidate> {
        let flow = self.flows.get(&id)?;
        let request = flow.standing.late?;
        Some(Candidate { request, class: flow.class, latest: flow.latest(&request), late: true })
    }

    /// The first few of a class that can be in time, of those that fit this size class.
    pub(super) fn firsts(
        &self,
        rank: SizeRank,
        class: Class,
        now: Timestamp,
        count: usize,
    ) -> Vec<Candidate> {
        let from = if class == Class::Free { Timestamp::ZERO } else { now };
        let from = (from, (FunctionIndex(0), Slot::FIRST));
        let lines = self.due.iter().take(rank.0 + 1);
        let firsts = lines.flat_map(|line| line[class as usize].range(from..).take(count));
        let mut firsts: Vec<_> = firsts.collect();
        firsts.sort_unstable();
        firsts.truncate(count);
        firsts.into_iter().filter_map(|&(_, id)| self.candidate(id)).collect()
    }

    /// The first of a class that can be in time.
    pub(super) fn first(&self, rank: SizeRank, class: Class, now: Timestamp) -> Option<Candidate> {
        let from = if class == Class::Free { Timestamp::ZERO } else { now };
        let from = (from, (FunctionIndex(0), Slot::FIRST));
        let lines = self.due.iter().take(rank.0 + 1);
        let &(_, id) = lines.filter_map(|line| line[class as usize].range(from..).next()).min()?;
        self.candidate(id)
    }

    /// The oldest of those that are late.
    pub(super) fn oldest_late(&self, rank: SizeRank) -> Option<Candidate> {
        let &(_, id) = self.late.iter().take(rank.0 + 1).filter_map(BTreeSet::first).min()?;
        self.late_candidate(id)
    }

    /// The most pressing request for any of some models: of those in time by class, else the oldest
    /// late one.
    pub(super) fn first_of(&self, models: impl Iterator<Item = Slot>, now: Timestamp) -> Option<Candidate> {
        let in_time =
            |&(class, latest, _): &(Class, Timestamp, FunctionIndex)| class == Class::Free || latest >= now;
        let standing = |model: Slot| {
            let First { due, late } = *self.first_of_model.get(model.0 as usize)?;
            let all = || &self.of_model[model.0 as usize].due;
            let others = || all().iter().take(SETTLED_MAX).copied().find(in_time);
            if let Some((class, latest, function)) =
                due.filter(in_time).or_else(|| due.and_then(|_| others()))
            {
                return Some((false, class, latest.0, (function, model)));
            }
            let (RequestKey(key), function) = late?;
            Some((true, Class::Hopeless, key, (function, model)))
        };
        let (late, .., id) = models.filter_map(standing).min()?;
        if late { self.late_candidate(id) } else { self.candidate(id) }
    }

    /// As [`Policy::check`](crate::dispatch::policy::Policy::check).
    #[cfg(test)]
    pub(super) fn check(&self, now: Timestamp, models: &[Slot]) {
        let first = |it: &OfModel| First { due: it.due.first().copied(), late: it.late.first().copied() };
        assert_eq!(self.first_of_model, self.of_model.iter().map(first).collect::<Vec<_>>());
        for &model in models {
            let Some(it) = self.of_model.get(model.0 as usize) else { continue };
            let in_time = |due: &&(Class, Timestamp, FunctionIndex)| due.0 == Class::Free || due.1 >= now;
            let due = it.due.iter().take(SETTLED_MAX).find(in_time);
            let due = due.and_then(|&(_, _, function)| self.candidate((function, model)));
            // What changed since is brought up to date before the next decision.
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
