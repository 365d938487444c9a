//! All GPUs of a node, indexed so that a decision examines as few of them as possible (L16). The
//! indexes list the idle GPUs in the policy's order, the busy GPUs that accept a next request, and
//! the neighbours of each GPU.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_types::{BytesPerSec, GpuIndex, Timestamp};

use super::config::Config;
use super::cost::SwapSource;
use super::gpus::{Assignment, ExpectedFinish, GpuRecord, LoadClass, RECALL_COST};
use super::holders::ModelHolders;
use super::load_summary::GpuLoadSummary;
use super::models::{ModelSlot, ModelTable};
use super::size_rank::SizeRank;

/// Factor by which a run may exceed its expected time before its end counts as unknown. A request needs up to
/// [`RECALL_COST`] in addition to reach its GPU and to be reported, however short its run is.
const OVERDUE: u32 = 2;

/// Order of the idle GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdleOrder {
    /// Most free memory first.
    Emptiest,
    /// Longest idle first.
    Longest,
    /// Most assigned requests first: "sorted by frequency" in the LALB paper.
    MostUsed,
    /// Least loading by neighbours first, then most free memory (T22).
    Calmest,
    /// GPUs with a quarter of their memory free first, then by the age of their least recently used
    /// model.
    Coldest,
}

/// Index entries of a GPU.
#[derive(Debug, Clone, Copy, Default)]
struct GpuIndexEntry {
    /// Key in the order of idle GPUs, while the GPU is idle.
    idle: Option<u64>,
    /// Position in `listed`, while the GPU is idle.
    listed: usize,
    asked: usize,
    /// Whether the GPU is in `free_ahead`.
    free_ahead: bool,
    /// Whether the GPU is in `recallable`.
    askable: bool,
}

#[derive(Debug)]
pub(super) struct GpuTable {
    gpus: Vec<GpuRecord>,
    glances: Vec<GpuLoadSummary>,
    order: IdleOrder,
    noted: Vec<GpuIndexEntry>,
    /// Idle GPUs in the policy's order, by size rank.
    idle: Vec<BTreeSet<(u64, GpuIndex)>>,
    /// Idle GPUs in arbitrary order, by size rank; a random choice reads this list.
    listed: Vec<Vec<GpuIndex>>,
    /// Busy GPUs that accept a next request and have none.
    free_ahead: BTreeSet<GpuIndex>,
    /// Busy GPUs with a next request that can be recalled.
    askable: BTreeSet<GpuIndex>,
    /// Recalled requests that have not returned yet.
    asked: usize,
    idled: u64,
    /// Neighbours of each GPU: the GPUs with a shared link to the host.
    neighbours: Vec<Vec<GpuIndex>>,
    /// Peers of each GPU: the GPUs with a direct link, fastest first.
    peers: Vec<Vec<(BytesPerSec, GpuIndex)>>,
    /// For each GPU, the GPUs that its data reaches without the host.
    reached: Vec<Vec<GpuIndex>>,
    /// Transfer rates without the host by source and destination, row by row; 0 if the data travels
    /// over the host. Empty if no two GPUs are joined.
    ways: Vec<BytesPerSec>,
}

impl GpuTable {
    pub(super) fn new(config: &Config, ranks: &[SizeRank], order: IdleOrder) -> Self {
        let count = config.gpus.len();
        let mut neighbours = vec![Vec::new(); count];
        for switch in &config.switches {
            for &gpu in switch {
                neighbours[gpu.0 as usize].extend(switch.iter().copied().filter(|&other| other != gpu));
            }
        }
        for gpus in &mut neighbours {
            gpus.sort_unstable();
            gpus.dedup();
        }
        let mut peers = vec![Vec::new(); count];
        for link in &config.peers {
            peers[link.a.0 as usize].push((link.rate, link.b));
            peers[link.b.0 as usize].push((link.rate, link.a));
        }
        peers
            .iter_mut()
            .for_each(|links| links.sort_unstable_by_key(|&(rate, gpu)| (u64::MAX - rate.0, gpu)));
        let mut reached = vec![Vec::new(); count];
        let mut ways = vec![BytesPerSec(0); if config.ways.is_empty() { 0 } else { count * count }];
        for way in &config.ways {
            let from = way.from.0 as usize;
            let to = way.to.0 as usize;
            reached[from].push(way.to);
            ways[from * count + to] = way.rate;
        }
        let classes = ranks.iter().map(|rank| rank.0 + 1).max().unwrap_or(0);
        let gpus: Vec<GpuRecord> =
            config.gpus.iter().zip(ranks).map(|(gpu, &rank)| GpuRecord::new(gpu, rank)).collect();
        Self {
            glances: gpus.iter().map(GpuLoadSummary::of).collect(),
            gpus,
            order,
            noted: vec![GpuIndexEntry::default(); count],
            idle: vec![BTreeSet::new(); classes],
            listed: vec![Vec::new(); classes],
            free_ahead: BTreeSet::new(),
            askable: BTreeSet::new(),
            asked: 0,
            idled: 0,
            neighbours,
            peers,
            reached,
            ways,
        }
    }

    /// Changes the order of the idle GPUs. Idle times before the change are unknown, so the first
    /// GPU by index counts as idle longest.
    pub(super) fn reorder(&mut self, order: IdleOrder) {
        self.order = order;
        self.idle.iter_mut().for_each(BTreeSet::clear);
        self.listed.iter_mut().for_each(Vec::clear);
        self.noted.iter_mut().for_each(|noted| noted.idle = None);
        self.all().for_each(|gpu| self.note(gpu));
    }

    pub(super) fn all(&self) -> impl Iterator<Item = GpuIndex> + use<> {
        (0..self.gpus.len() as u32).map(GpuIndex)
    }

    pub(super) fn get(&self, gpu: GpuIndex) -> &GpuRecord {
        &self.gpus[gpu.0 as usize]
    }

    pub(super) fn glance(&self, gpu: GpuIndex) -> &GpuLoadSummary {
        &self.glances[gpu.0 as usize]
    }

    /// Changes a GPU and updates the indexes.
    pub(super) fn change<T>(&mut self, gpu: GpuIndex, change: impl FnOnce(&mut GpuRecord) -> T) -> T {
        let it = &mut self.gpus[gpu.0 as usize];
        let before = it.loading();
        let result = change(it);
        let after = it.loading();
        self.glances[gpu.0 as usize] = GpuLoadSummary::of(it);
        self.note(gpu);
        if self.order == IdleOrder::Calmest && before != after {
            for place in 0..self.neighbours[gpu.0 as usize].len() {
                self.note(self.neighbours[gpu.0 as usize][place]);
            }
        }
        result
    }

    fn note(&mut self, index: GpuIndex) {
        let gpu = &self.gpus[index.0 as usize];
        let rank = gpu.rank.0;
        let noted = self.noted[index.0 as usize];
        let key = gpu.idle().then(|| self.idle_key(index, noted.idle));
        if key != noted.idle {
            if let Some(before) = noted.idle {
                self.idle[rank].remove(&(before, index));
            }
            if let Some(key) = key {
                self.idle[rank].insert((key, index));
            }
            match (noted.idle, key) {
                (None, Some(_)) => {
                    self.noted[index.0 as usize].listed = self.listed[rank].len();
                    self.listed[rank].push(index);
                    self.idled += 1;
                }
                (Some(_), None) => {
                    self.listed[rank].swap_remove(noted.listed);
                    if let Some(&moved) = self.listed[rank].get(noted.listed) {
                        self.noted[moved.0 as usize].listed = noted.listed;
                    }
                }
                _ => {}
            }
        }
        let gpu = &self.gpus[index.0 as usize];
        let asked = gpu.recalled_count();
        self.asked = self.asked - noted.asked + asked;
        let noted = &mut self.noted[index.0 as usize];
        (noted.idle, noted.asked) = (key, asked);
        let put = |set: &mut BTreeSet<GpuIndex>, is_in: &mut bool, belongs| {
            if *is_in != belongs {
                if belongs {
                    set.insert(index)
                } else {
                    set.remove(&index)
                };
                *is_in = belongs;
            }
        };
        put(&mut self.free_ahead, &mut noted.free_ahead, gpu.accepts_queued() && gpu.ahead.is_empty());
        put(&mut self.askable, &mut noted.askable, gpu.recallable().is_some());
    }

    fn idle_key(&self, index: GpuIndex, before: Option<u64>) -> u64 {
        let gpu = &self.gpus[index.0 as usize];
        match self.order {
            IdleOrder::Emptiest => gpu.resident_size().0,
            IdleOrder::Longest => before.unwrap_or(self.idled),
            IdleOrder::MostUsed => u64::MAX - gpu.dispatched,
            IdleOrder::Calmest => {
                // No GPU has 2^56 bytes, so the two parts of the key do not overlap.
                ((self.loading_beside(index) as u64) << 56) | gpu.resident_size().0
            }
            IdleOrder::Coldest if gpu.has_free_quarter() => 0,
            IdleOrder::Coldest => gpu.least_recently_used().map_or(0, |(used, _)| used.0),
        }
    }

    /// Returns the heaviest load that a neighbour of a GPU carries out.
    pub(super) fn loading_beside(&self, gpu: GpuIndex) -> LoadClass {
        let beside = self.neighbours[gpu.0 as usize].iter();
        beside.map(|&other| self.get(other).loading()).max().unwrap_or_default()
    }

    /// Returns the GPUs with an executor.
    pub(super) fn up(&self) -> impl Iterator<Item = GpuIndex> {
        let gpus = (0..).map(GpuIndex).zip(&self.gpus);
        gpus.filter(|(_, gpu)| gpu.executor.is_some()).map(|(index, _)| index)
    }

    /// Returns whether a GPU is idle and large enough.
    pub(super) fn takes_now(&self, gpu: GpuIndex, rank: SizeRank) -> bool {
        let gpu = self.get(gpu);
        gpu.idle() && gpu.rank >= rank
    }

    /// Returns the idle GPU that holds a model, is large enough and has the least `key`; the first
    /// by index among equals. Scans the smaller of the two sets: under
    /// overload, hundreds of GPUs may hold a model while a single GPU is idle.
    pub(super) fn idle_holder<K: Ord>(
        &self,
        holders: &ModelHolders,
        rank: SizeRank,
        key: impl Fn(GpuIndex) -> K,
    ) -> Option<GpuIndex> {
        if holders.len() <= self.idle_count(rank) {
            let idle = holders.iter().filter(|&gpu| self.takes_now(gpu, rank));
            return idle.min_by_key(|&gpu| (key(gpu), gpu));
        }
        self.idle(rank).filter(|&gpu| holders.contains(gpu)).min_by_key(|&gpu| (key(gpu), gpu))
    }

    /// Returns the idle GPUs of at least this rank, in no order.
    pub(super) fn idle(&self, rank: SizeRank) -> impl Iterator<Item = GpuIndex> {
        self.listed.iter().skip(rank.0).flatten().copied()
    }

    pub(super) fn any_idle(&self) -> bool {
        self.idle.iter().any(|idle| !idle.is_empty())
    }

    /// Returns the first idle GPU of at least this rank.
    pub(super) fn first_idle(&self, rank: SizeRank) -> Option<GpuIndex> {
        let firsts = self.idle.iter().skip(rank.0).filter_map(|idle| idle.first());
        firsts.min().map(|&(_, gpu)| gpu)
    }

    /// Returns the first `count` idle GPUs of each rank that is at least `rank`.
    pub(super) fn first_idles(&self, rank: SizeRank, count: usize) -> impl Iterator<Item = GpuIndex> {
        let idle = self.idle.iter().skip(rank.0);
        idle.flat_map(move |idle| idle.iter().take(count).map(|&(_, gpu)| gpu))
    }

    /// Returns the number of idle GPUs of at least this rank.
    pub(super) fn idle_count(&self, rank: SizeRank) -> usize {
        self.listed.iter().skip(rank.0).map(Vec::len).sum()
    }

    /// Returns the idle GPU with this number, counting only GPUs of at least this rank.
    pub(super) fn nth_idle(&self, rank: SizeRank, mut number: usize) -> Option<GpuIndex> {
        for listed in self.listed.iter().skip(rank.0) {
            match listed.get(number) {
                Some(&gpu) => return Some(gpu),
                None => number -= listed.len(),
            }
        }
        None
    }

    /// Returns all idle GPUs in index order.
    pub(super) fn all_idle(&self) -> Vec<GpuIndex> {
        let mut idle: Vec<_> = self.listed.iter().flatten().copied().collect();
        idle.sort_unstable();
        idle
    }

    /// Returns the busy GPUs without a next request, in index order.
    pub(super) fn free_ahead(&self) -> impl ExactSizeIterator<Item = GpuIndex> {
        self.free_ahead.iter().copied()
    }

    pub(super) fn askable(&self) -> impl Iterator<Item = GpuIndex> {
        self.askable.iter().copied()
    }

    /// Returns the GPUs that share a link to the host with a GPU.
    pub(super) fn neighbours(&self, gpu: GpuIndex) -> &[GpuIndex] {
        &self.neighbours[gpu.0 as usize]
    }

    /// Returns the source from which a GPU would get a model now, peers aside. A model in transit
    /// counts as absent, because the arrived part is unknown.
    pub(super) fn source(&self, gpu: GpuIndex, model: ModelSlot) -> SwapSource {
        if self.get(gpu).has_for_next(model) {
            return SwapSource::Here;
        }
        let loads = |&other: &GpuIndex| self.get(other).loading() > LoadClass::FromPeer;
        if self.neighbours(gpu).iter().any(loads) { SwapSource::SharedHost } else { SwapSource::Host }
    }

    /// Marks the neighbours' loads from the host as disturbed, because a load from the host begins
    /// on this GPU.
    pub(super) fn cross_loads(&mut self, gpu: GpuIndex) {
        for &other in &self.neighbours[gpu.0 as usize] {
            let running = self.gpus[other.0 as usize].running.as_mut();
            let loads = running.filter(|held| held.loading > LoadClass::FromPeer);
            loads.into_iter().for_each(|held| held.unlike = true);
        }
    }

    /// Returns the time that bringing a model to a GPU adds to a run now, peers aside; zero if the
    /// model is there.
    pub(super) fn swap_time(&self, models: &ModelTable, gpu: GpuIndex, model: ModelSlot) -> Duration {
        self.get(gpu).swap_time(models, model, self.source(gpu, model))
    }

    /// Returns the number of recalled requests that have not returned yet.
    pub(super) fn asked(&self) -> usize {
        self.asked
    }

    /// Returns an idle GPU's position in the order.
    pub(super) fn idle_place(&self, gpu: GpuIndex) -> Option<u64> {
        self.noted[gpu.0 as usize].idle
    }

    /// Returns the rate at which data travels from one GPU to another without the host.
    pub(super) fn way(&self, from: GpuIndex, to: GpuIndex) -> Option<BytesPerSec> {
        let rate = self.ways.get(from.0 as usize * self.gpus.len() + to.0 as usize);
        rate.copied().filter(|rate| rate.0 > 0)
    }

    /// Returns the GPUs that data from a GPU reaches without the host.
    pub(super) fn reached(&self, from: GpuIndex) -> &[GpuIndex] {
        &self.reached[from.0 as usize]
    }

    /// Returns the GPUs with a direct link to a GPU, fastest first.
    pub(super) fn peers(&self, gpu: GpuIndex) -> &[(BytesPerSec, GpuIndex)] {
        &self.peers[gpu.0 as usize]
    }

    /// Returns when a GPU is expected to finish its running request and the first `ahead` requests
    /// behind it.
    pub(super) fn expected_free(
        &self,
        models: &ModelTable,
        now: Timestamp,
        gpu: GpuIndex,
        ahead: usize,
    ) -> ExpectedFinish {
        let gpu = self.get(gpu);
        let takes = |held: &Assignment| gpu.turn_time(models, held);
        let running = gpu.running.as_ref().and_then(|held| Some(held.since + takes(held)?));
        let Some(free) = running.filter(|&free| free + RECALL_COST > now) else {
            return ExpectedFinish::Unknown;
        };
        let rest: Option<Duration> = gpu.ahead.iter().take(ahead).map(takes).sum();
        rest.map_or(ExpectedFinish::Unknown, |rest| ExpectedFinish::At(free.max(now) + rest))
    }

    /// Returns the time until a GPU finishes all its requests, if known.
    pub(super) fn backlog(&self, models: &ModelTable, now: Timestamp, gpu: GpuIndex) -> Option<Duration> {
        self.backlog_of(models, now, gpu, usize::MAX)
    }

    /// Returns the time until a GPU finishes its running request and the first `ahead` requests
    /// behind it. A run that exceeds its expected time counts as about to end. `None` from
    /// [`Self::overdue_at`] on, or if a run time is unknown.
    pub(super) fn backlog_of(
        &self,
        models: &ModelTable,
        now: Timestamp,
        gpu: GpuIndex,
        ahead: usize,
    ) -> Option<Duration> {
        let gpu = self.get(gpu);
        let Some(running) = &gpu.running else { return Some(Duration::ZERO) };
        let takes = gpu.turn_time(models, running)?;
        let elapsed = now.since(running.since);
        if elapsed > takes * OVERDUE + RECALL_COST {
            return None;
        }
        let rest: Option<Duration> =
            gpu.ahead.iter().take(ahead).map(|held| gpu.turn_time(models, held)).sum();
        Some(takes.saturating_sub(elapsed) + rest?)
    }

    /// Returns the time from which the end of a GPU's running request counts as unknown.
    pub(super) fn overdue_at(&self, models: &ModelTable, gpu: GpuIndex) -> Option<Timestamp> {
        let gpu = self.get(gpu);
        let running = gpu.running.as_ref()?;
        Some(running.since + gpu.turn_time(models, running)? * OVERDUE + RECALL_COST)
    }
}
