//! Locality and load balance, with out-of-order dispatch (L03, L09 to L14, L16): algorithms 1 and 2
//! of the LALB paper, in the reading of MECHANISMS section 2.
//!
//! An idle GPU takes, in this order:
//!
//! 1. the first request of its own queue (L10);
//! 2. the oldest request whose model it holds, past others, unless one before it has been overtaken
//!    as often as is allowed (L11, L14);
//! 3. that one, else the oldest of all: on another idle GPU that holds its model; in the own queue
//!    of the busy holder that finishes first, if that is before this GPU could have loaded the model
//!    (L12); else here (L13).
//!
//! What waits in a GPU's own queue is handed ahead to it, one at a time, and not asked back: the
//! GPU holds its model, so nothing is loaded sooner than in the paper, and no message is waited for.
//! Its model is pinned there until it has gone.
//!
//! **Overtaking.** A request is overtaken when a younger one that fits the same GPUs leaves the
//! queue before it. Whoever is overtaken, all older ones are too, so no request was overtaken more
//! often than the oldest, and only that one's count is needed: it is the sum of marks that each
//! request that passes leaves on the one just before it, and a request that goes hands its marks to
//! the one before it. One that comes back from a lost GPU is not overtaken any more.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_types::GpuIndex;

use super::models::Slot;
use super::policy::{Decision, Entry, Policy, Stats, View};
use super::queue::{SizeRank, Waiting};
use crate::ids::RequestKey;

#[derive(Debug)]
struct Queued {
    request: Waiting,
    /// Requests that passed this one and no younger one that waits now.
    marks: u64,
    /// Fruitless looks before it came.
    looks: u64,
}

/// The requests of one size class, by age.
#[derive(Debug, Default)]
struct Line {
    queued: BTreeMap<RequestKey, Queued>,
    /// Times the oldest was overtaken: the sum of marks.
    marks: u64,
    /// Those that came back.
    back: BTreeSet<RequestKey>,
}

impl Line {
    fn before(&mut self, key: RequestKey) -> Option<&mut Queued> {
        self.queued.range_mut(..key).next_back().map(|(_, queued)| queued)
    }

    /// Takes a request out, and says what the oldest's counts were, where it was that.
    fn take(&mut self, key: RequestKey) -> Option<(Waiting, Option<Overtaken>)> {
        let counts = self.oldest().filter(|&(oldest, _)| oldest == key).map(|(_, counts)| counts);
        let gone = self.queued.remove(&key)?;
        self.back.remove(&key);
        match self.before(key) {
            Some(before) => before.marks += gone.marks,
            None => self.marks -= gone.marks,
        }
        Some((gone.request, counts))
    }

    /// A request of this age leaves for a GPU that all in this line fit.
    fn passed_by(&mut self, key: RequestKey) -> bool {
        let Some(before) = self.before(key) else { return false };
        before.marks += 1;
        self.marks += 1;
        true
    }

    fn oldest(&self) -> Option<(RequestKey, Overtaken)> {
        let (&key, queued) = self.queued.first_key_value()?;
        Some((key, Overtaken { times: self.marks, looks: queued.looks }))
    }

    /// The oldest that may not be overtaken again.
    fn at_limit(&self, limit: u64) -> Option<RequestKey> {
        let oldest = self.oldest().filter(|(_, overtaken)| overtaken.times >= limit);
        oldest.map(|(key, _)| key).into_iter().chain(self.back.first().copied()).min()
    }
}

#[derive(Debug, Clone, Copy)]
struct Overtaken {
    times: u64,
    looks: u64,
}

/// Requests that wait for one GPU.
#[derive(Debug, Default)]
struct Own {
    queue: BTreeMap<RequestKey, (Waiting, Duration)>,
    /// What their runs take.
    time: Duration,
}

impl Own {
    fn take(&mut self, key: RequestKey) -> Option<Waiting> {
        let (request, time) = self.queue.remove(&key)?;
        self.time -= time;
        Some(request)
    }
}

#[derive(Debug)]
pub(super) struct Lalb {
    limit: u64,
    lines: Vec<Line>,
    /// Of each model, by its slot, who waits for it in [`Self::lines`].
    by_model: Vec<BTreeSet<RequestKey>>,
    own: Vec<Own>,
    /// Which GPU's own queue a request is in.
    reserved: BTreeMap<RequestKey, GpuIndex>,
    /// GPUs that may have room for the next of their own queue.
    ready: BTreeSet<GpuIndex>,
    /// Times an idle GPU looked through the whole queue and found no hit.
    looks: u64,
    passed: u64,
    reserves: u64,
    overtaken_max: u64,
    visits_max: u64,
}

impl Lalb {
    pub(super) fn new(ranks: usize, gpus: usize, limit: u32) -> Self {
        Self {
            limit: limit.into(),
            lines: (0..ranks).map(|_| Line::default()).collect(),
            by_model: Vec::new(),
            own: (0..gpus).map(|_| Own::default()).collect(),
            reserved: BTreeMap::new(),
            ready: BTreeSet::new(),
            looks: 0,
            passed: 0,
            reserves: 0,
            overtaken_max: 0,
            visits_max: 0,
        }
    }

    fn waiting_for(&mut self, model: Slot) -> &mut BTreeSet<RequestKey> {
        let place = model.0 as usize;
        if self.by_model.len() <= place {
            self.by_model.resize_with(place + 1, BTreeSet::new);
        }
        &mut self.by_model[place]
    }

    fn take(&mut self, rank: SizeRank, key: RequestKey) -> Option<Waiting> {
        let (request, counts) = self.lines[rank.0].take(key)?;
        self.waiting_for(request.model).remove(&key);
        if let Some(Overtaken { times, looks }) = counts {
            self.overtaken_max = self.overtaken_max.max(times);
            self.visits_max = self.visits_max.max(times + self.looks - looks);
        }
        Some(request)
    }

    /// Takes a request that goes to a GPU of this rank, past all older ones that fit it too.
    fn send(&mut self, from: SizeRank, key: RequestKey, to: SizeRank) -> Option<Waiting> {
        let request = self.take(from, key)?;
        let lines = self.lines.iter_mut().take(to.0 + 1);
        let passed = lines.filter_map(|line| line.passed_by(key).then_some(())).count();
        self.passed += u64::from(passed > 0);
        Some(request)
    }

    /// The next of a GPU's own queue, where that has room.
    fn next_reserved(&mut self, view: &View<'_>) -> Option<Decision> {
        while let Some(gpu) = self.ready.pop_first() {
            let it = view.fleet.get(gpu);
            let own = &mut self.own[gpu.0 as usize];
            let has_room = it.idle() || (it.takes_ahead() && it.ahead.is_empty());
            let Some(&key) = own.queue.keys().next().filter(|_| has_room) else { continue };
            let Some(request) = own.take(key) else { continue };
            self.reserved.remove(&key);
            self.ready.insert(gpu);
            return Some(Decision::Assign { request, gpu, over: None });
        }
        None
    }

    /// The oldest request whose model a GPU holds.
    fn hit(&self, view: &View<'_>, gpu: GpuIndex) -> Option<(RequestKey, SizeRank)> {
        let models = view.fleet.get(gpu).resident();
        let oldest = |model: Slot| Some((*self.by_model.get(model.0 as usize)?.first()?, model));
        let (key, model) = models.filter_map(oldest).min()?;
        Some((key, view.models.get(model).rank?))
    }

    /// The oldest of those that fit GPUs of this rank, by what is asked of each line.
    fn first(
        &self,
        rank: SizeRank,
        of: impl Fn(&Line) -> Option<RequestKey>,
    ) -> Option<(RequestKey, SizeRank)> {
        let lines = self.lines.iter().take(rank.0 + 1).enumerate();
        lines.filter_map(|(rank, line)| Some((of(line)?, SizeRank(rank)))).min()
    }

    /// The oldest of those that may not be overtaken again.
    fn at_limit(&self, rank: SizeRank) -> Option<(RequestKey, SizeRank)> {
        self.first(rank, |line| line.at_limit(self.limit))
    }

    /// Whether a request may go to a GPU of this rank: no older one that fits it is at its limit.
    fn may_go(&self, key: RequestKey, rank: SizeRank) -> bool {
        self.at_limit(rank).is_none_or(|(oldest, _)| key <= oldest)
    }

    /// What an idle GPU takes, or what has to go elsewhere first (algorithm 1).
    fn for_gpu(&mut self, view: &View<'_>, gpu: GpuIndex) -> Option<Decision> {
        let rank = view.fleet.get(gpu).rank;
        let at_limit = self.at_limit(rank);
        let hit = self.hit(view, gpu);
        if let Some((key, from)) = hit.filter(|hit| at_limit.is_none_or(|at_limit| hit.0 <= at_limit.0)) {
            let request = self.send(from, key, rank)?;
            return Some(Decision::Assign { request, gpu, over: None });
        }
        let oldest = |line: &Line| line.oldest().map(|(key, _)| key);
        let (key, from) = at_limit.or_else(|| self.first(rank, oldest))?;
        if at_limit.is_none() {
            self.looks += 1;
        }
        self.balance(view, gpu, key, from)
    }

    /// Where a request goes that is no hit on an idle GPU (algorithm 2).
    fn balance(
        &mut self,
        view: &View<'_>,
        idle: GpuIndex,
        key: RequestKey,
        from: SizeRank,
    ) -> Option<Decision> {
        let request = self.lines[from.0].queued.get(&key)?.request;
        let holders = &view.models.get(request.model).holders;
        let free =
            |gpu: &GpuIndex| view.fleet.takes_now(*gpu, from) && self.may_go(key, view.fleet.get(*gpu).rank);
        let other_idle = holders.iter().copied().find(free);
        let busy = || self.busy_holder(view, &request, idle);
        let gpu = match other_idle {
            Some(gpu) => gpu,
            None => match busy() {
                Some(gpu) => return self.reserve(view, &request, gpu),
                None => idle,
            },
        };
        let request = self.send(from, key, view.fleet.get(gpu).rank)?;
        Some(Decision::Assign { request, gpu, over: None })
    }

    /// The busy holder that would finish a request first, if sooner than the idle GPU.
    fn busy_holder(&self, view: &View<'_>, request: &Waiting, idle: GpuIndex) -> Option<GpuIndex> {
        if request.attempts.suspect() {
            return None;
        }
        let run = |kind| view.models.run_time(request.model, kind);
        let here = view.fleet.get(idle);
        let load = view.fleet.swap_time(view.models, idle, request.model);
        let finish = |&gpu: &GpuIndex| {
            let it = view.fleet.get(gpu);
            if !it.takes_ahead() || !self.may_go(request.key, it.rank) {
                return None;
            }
            let wait = view.fleet.backlog(view.models, view.now, gpu)? + self.own[gpu.0 as usize].time;
            // On equal GPUs the run is the same on both sides.
            let (there, miss) = match it.kind == here.kind {
                true => (wait, load),
                false => (wait + run(it.kind)?, load + run(here.kind)?),
            };
            (there < miss).then_some((there, gpu))
        };
        let holders = view.models.get(request.model).holders.iter();
        holders.filter_map(finish).min().map(|(_, gpu)| gpu)
    }

    /// Binds a request to a busy GPU: it goes ahead at once where nobody else waits there.
    fn reserve(&mut self, view: &View<'_>, request: &Waiting, gpu: GpuIndex) -> Option<Decision> {
        let it = view.fleet.get(gpu);
        let request = self.send(request.rank, request.key, it.rank)?;
        self.reserves += 1;
        if self.own[gpu.0 as usize].queue.is_empty() && it.ahead.is_empty() {
            return Some(Decision::Assign { request, gpu, over: None });
        }
        let time = view.models.run_time(request.model, it.kind).unwrap_or_default();
        let own = &mut self.own[gpu.0 as usize];
        own.queue.insert(request.key, (request, time));
        own.time += time;
        self.reserved.insert(request.key, gpu);
        self.ready.insert(gpu);
        Some(Decision::Reserve { request, gpu })
    }
}

impl Policy for Lalb {
    fn push(&mut self, request: Waiting, entry: Entry) {
        let line = &mut self.lines[request.rank.0];
        line.queued.insert(request.key, Queued { request, marks: 0, looks: self.looks });
        if entry == Entry::Back {
            line.back.insert(request.key);
        }
        self.waiting_for(request.model).insert(request.key);
    }

    fn remove(&mut self, request: &Waiting) {
        match self.reserved.remove(&request.key) {
            Some(gpu) => drop(self.own[gpu.0 as usize].take(request.key)),
            None => drop(self.take(request.rank, request.key)),
        }
    }

    fn decide(&mut self, view: &View<'_>) -> Option<Decision> {
        if let Some(decision) = self.next_reserved(view) {
            return Some(decision);
        }
        // The idle GPU that comes first of those that somebody here fits (L09).
        let smallest = self.lines.iter().position(|line| !line.queued.is_empty())?;
        let gpu = view.fleet.first_idle(SizeRank(smallest))?;
        self.for_gpu(view, gpu)
    }

    fn freed(&mut self, gpu: GpuIndex) {
        self.ready.insert(gpu);
    }

    fn lost(&mut self, gpu: GpuIndex) -> Vec<Waiting> {
        let own = std::mem::take(&mut self.own[gpu.0 as usize]);
        let requests: Vec<_> = own.queue.into_values().map(|(request, _)| request).collect();
        for &request in &requests {
            self.reserved.remove(&request.key);
            self.push(request, Entry::Back);
        }
        requests
    }

    fn count(&self, stats: &mut Stats) {
        (stats.passed, stats.reserved) = (self.passed, self.reserves);
        stats.overtaken_max = self.overtaken_max;
        stats.visits_max = self.visits_max;
    }
}
