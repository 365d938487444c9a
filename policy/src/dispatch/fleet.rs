//! All GPUs of the dispatch domain, indexed so that a decision looks at no more of them than it
//! has to (L16): the idle ones in the policy's order, those with room behind what they run, the
//! neighbours of each.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_types::{BytesPerSec, GpuIndex, Timestamp};

use super::RECALL_COST;
use super::config::Config;
use super::cost::Source;
use super::glance::Glance;
use super::gpus::{Expected, Gpu, Held, Loading};
use super::holders::Holders;
use super::models::{Models, Slot};
use super::queue::SizeRank;

/// What takes so many times as long as expected may take for ever.
const OVERDUE: u32 = 2;

/// Which idle GPU is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum IdleOrder {
    /// The one with most free memory.
    Emptiest,
    /// The one that has been idle longest.
    Longest,
    /// The one that was given most requests: the LALB paper's "sorted by frequency".
    MostUsed,
    /// The one whose neighbours load least, then the one with most free memory (T22).
    Calmest,
    /// One with room, else the one whose least recently used model was used longest ago.
    Coldest,
}

/// What the indexes say of a GPU.
#[derive(Debug, Clone, Copy, Default)]
struct Noted {
    idle: Option<u64>,
    /// Its place in `listed`, while it is idle.
    listed: usize,
    asked: usize,
    /// Whether it is in `free_ahead`, and in `askable`.
    free_ahead: bool,
    askable: bool,
}

#[derive(Debug)]
pub(super) struct Fleet {
    gpus: Vec<Gpu>,
    glances: Vec<Glance>,
    order: IdleOrder,
    noted: Vec<Noted>,
    /// The idle ones in order, by rank.
    idle: Vec<BTreeSet<(u64, GpuIndex)>>,
    /// The same in no order that means anything, to draw one at random.
    listed: Vec<Vec<GpuIndex>>,
    /// Those at work, with nobody waiting behind, where somebody may.
    free_ahead: BTreeSet<GpuIndex>,
    /// Those with a request that could be asked back.
    askable: BTreeSet<GpuIndex>,
    asked: usize,
    idled: u64,
    /// Those whose copies from the host share a link.
    neighbours: Vec<Vec<GpuIndex>>,
    /// Those with a direct link, fastest first.
    peers: Vec<Vec<(BytesPerSec, GpuIndex)>>,
}

impl Fleet {
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
        let classes = ranks.iter().map(|rank| rank.0 + 1).max().unwrap_or(0);
        let gpus: Vec<Gpu> = config.gpus.iter().zip(ranks).map(|(gpu, &rank)| Gpu::new(gpu, rank)).collect();
        Self {
            glances: gpus.iter().map(Glance::of).collect(),
            gpus,
            order,
            noted: vec![Noted::default(); count],
            idle: vec![BTreeSet::new(); classes],
            listed: vec![Vec::new(); classes],
            free_ahead: BTreeSet::new(),
            askable: BTreeSet::new(),
            asked: 0,
            idled: 0,
            neighbours,
            peers,
        }
    }

    /// Has the idle ones in another order. How long each has been idle is not known to it: the first in
    /// index order counts as idle longest.
    pub(super) fn reorder(&mut self, order: IdleOrder) {
        self.order = order;
        self.idle.iter_mut().for_each(BTreeSet::clear);
        self.listed.iter_mut().for_each(Vec::clear);
        self.noted.iter_mut().for_each(|noted| noted.idle = None);
        self.all().for_each(|gpu| self.note(gpu));
    }

    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = GpuIndex> + use<> {
        (0..self.gpus.len() as u32).map(GpuIndex)
    }

    pub(super) fn get(&self, gpu: GpuIndex) -> &Gpu {
        &self.gpus[gpu.0 as usize]
    }

    pub(super) fn glance(&self, gpu: GpuIndex) -> &Glance {
        &self.glances[gpu.0 as usize]
    }

    /// Changes a GPU and brings the indexes up to date.
    pub(super) fn change<T>(&mut self, gpu: GpuIndex, change: impl FnOnce(&mut Gpu) -> T) -> T {
        let it = &mut self.gpus[gpu.0 as usize];
        let before = it.loading();
        let result = change(it);
        let after = it.loading();
        self.glances[gpu.0 as usize] = Glance::of(it);
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
        let (rank, noted) = (gpu.rank.0, self.noted[index.0 as usize]);
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
        let asked = gpu.asked();
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
        put(&mut self.free_ahead, &mut noted.free_ahead, gpu.takes_ahead() && gpu.ahead.is_empty());
        put(&mut self.askable, &mut noted.askable, gpu.askable().is_some());
    }

    fn idle_key(&self, index: GpuIndex, before: Option<u64>) -> u64 {
        let gpu = &self.gpus[index.0 as usize];
        match self.order {
            IdleOrder::Emptiest => gpu.resident_blocks(),
            IdleOrder::Longest => before.unwrap_or(self.idled),
            IdleOrder::MostUsed => u64::MAX - gpu.dispatched,
            IdleOrder::Calmest => {
                // No GPU has 2^56 blocks.
                ((self.loading_beside(index) as u64) << 56) | gpu.resident_blocks()
            }
            IdleOrder::Coldest if gpu.roomy() => 0,
            IdleOrder::Coldest => gpu.coldest().map_or(0, |(used, _)| used.0),
        }
    }

    /// The most that a GPU's neighbours load.
    pub(super) fn loading_beside(&self, gpu: GpuIndex) -> Loading {
        let beside = self.neighbours[gpu.0 as usize].iter();
        beside.map(|&other| self.get(other).loading()).max().unwrap_or_default()
    }

    /// Those with an executor.
    pub(super) fn up(&self) -> impl Iterator<Item = GpuIndex> {
        let gpus = (0..).map(GpuIndex).zip(&self.gpus);
        gpus.filter(|(_, gpu)| gpu.executor.is_some()).map(|(index, _)| index)
    }

    /// Whether a GPU is idle and large enough.
    pub(super) fn takes_now(&self, gpu: GpuIndex, rank: SizeRank) -> bool {
        let gpu = self.get(gpu);
        gpu.idle() && gpu.rank >= rank
    }

    /// The least by `key` of the idle GPUs that hold a model and are large enough, the first in index
    /// order of equals. Looks at the holders or at the idle ones, whichever are fewer: in overload
    /// hundreds may hold a model and one be idle.
    pub(super) fn idle_holder<K: Ord>(
        &self,
        holders: &Holders,
        rank: SizeRank,
        key: impl Fn(GpuIndex) -> K,
    ) -> Option<GpuIndex> {
        if holders.len() <= self.idle_count(rank) {
            let idle = holders.iter().filter(|&gpu| self.takes_now(gpu, rank));
            return idle.min_by_key(|&gpu| (key(gpu), gpu));
        }
        self.idle(rank).filter(|&gpu| holders.contains(gpu)).min_by_key(|&gpu| (key(gpu), gpu))
    }

    /// The idle GPUs of at least this rank, in no order.
    pub(super) fn idle(&self, rank: SizeRank) -> impl Iterator<Item = GpuIndex> {
        self.listed.iter().skip(rank.0).flatten().copied()
    }

    pub(super) fn any_idle(&self) -> bool {
        self.idle.iter().any(|idle| !idle.is_empty())
    }

    /// The first idle GPU of at least this rank.
    pub(super) fn first_idle(&self, rank: SizeRank) -> Option<GpuIndex> {
        let firsts = self.idle.iter().skip(rank.0).filter_map(|idle| idle.first());
        firsts.min().map(|&(_, gpu)| gpu)
    }

    /// The first so many idle GPUs of at least this rank, of each rank.
    pub(super) fn first_idles(&self, rank: SizeRank, count: usize) -> impl Iterator<Item = GpuIndex> {
        let idle = self.idle.iter().skip(rank.0);
        idle.flat_map(move |idle| idle.iter().take(count).map(|&(_, gpu)| gpu))
    }

    /// Idle GPUs of at least this rank.
    pub(super) fn idle_count(&self, rank: SizeRank) -> usize {
        self.listed.iter().skip(rank.0).map(Vec::len).sum()
    }

    /// One of them, by number.
    pub(super) fn nth_idle(&self, rank: SizeRank, mut number: usize) -> Option<GpuIndex> {
        for listed in self.listed.iter().skip(rank.0) {
            match listed.get(number) {
                Some(&gpu) => return Some(gpu),
                None => number -= listed.len(),
            }
        }
        None
    }

    /// Every idle GPU, in index order.
    pub(super) fn all_idle(&self) -> Vec<GpuIndex> {
        let mut idle: Vec<_> = self.listed.iter().flatten().copied().collect();
        idle.sort_unstable();
        idle
    }

    /// Those at work behind which nobody waits, in index order.
    pub(super) fn free_ahead(&self) -> impl ExactSizeIterator<Item = GpuIndex> {
        self.free_ahead.iter().copied()
    }

    pub(super) fn askable(&self) -> impl Iterator<Item = GpuIndex> {
        self.askable.iter().copied()
    }

    /// Those whose copies from the host share a link with this one's.
    pub(super) fn neighbours(&self, gpu: GpuIndex) -> &[GpuIndex] {
        &self.neighbours[gpu.0 as usize]
    }

    /// Where a model would come from now, if not from a peer. Of one that is on its way it is not
    /// known how much has come: it counts as one that is not there yet.
    pub(super) fn source(&self, gpu: GpuIndex, model: Slot) -> Source {
        if self.get(gpu).has_for_next(model) {
            return Source::Here;
        }
        let loads = |&other: &GpuIndex| self.get(other).loading() > Loading::FromPeer;
        if self.neighbours(gpu).iter().any(loads) { Source::SharedHost } else { Source::Host }
    }

    /// A load from the host begins on a GPU, beside whatever its neighbours load.
    pub(super) fn cross_loads(&mut self, gpu: GpuIndex) {
        for &other in &self.neighbours[gpu.0 as usize] {
            let running = self.gpus[other.0 as usize].running.as_mut();
            let loads = running.filter(|held| held.loading > Loading::FromPeer);
            loads.into_iter().for_each(|held| held.unlike = true);
        }
    }

    /// What bringing a model to a GPU adds to a run now, if not from a peer; nothing where it is.
    pub(super) fn swap_time(&self, models: &Models, gpu: GpuIndex, model: Slot) -> Duration {
        self.get(gpu).swap_time(models, model, self.source(gpu, model))
    }

    /// Requests that were asked back and have not come yet.
    pub(super) fn asked(&self) -> usize {
        self.asked
    }

    /// An idle GPU's place in the order.
    pub(super) fn idle_place(&self, gpu: GpuIndex) -> Option<u64> {
        self.noted[gpu.0 as usize].idle
    }

    /// The rate of the direct link between two GPUs.
    pub(super) fn link(&self, from: GpuIndex, to: GpuIndex) -> Option<BytesPerSec> {
        self.peers(to).iter().find(|(_, other)| *other == from).map(|&(rate, _)| rate)
    }

    /// GPUs with a direct link to this one, fastest first.
    pub(super) fn peers(&self, gpu: GpuIndex) -> &[(BytesPerSec, GpuIndex)] {
        &self.peers[gpu.0 as usize]
    }

    /// When a GPU is through with what it runs and the first `ahead` that it was handed ahead.
    pub(super) fn expected_free(
        &self,
        models: &Models,
        now: Timestamp,
        gpu: GpuIndex,
        ahead: usize,
    ) -> Expected {
        let gpu = self.get(gpu);
        let takes = |held: &Held| gpu.takes(models, held);
        let running = gpu.running.as_ref().and_then(|held| Some(held.since + takes(held)?));
        let Some(free) = running.filter(|&free| free + RECALL_COST > now) else { return Expected::Unknown };
        let rest: Option<Duration> = gpu.ahead.iter().take(ahead).map(takes).sum();
        rest.map_or(Expected::Unknown, |rest| Expected::At(free.max(now) + rest))
    }

    /// How long until a GPU is through with all it has been given, as far as is known.
    pub(super) fn backlog(&self, models: &Models, now: Timestamp, gpu: GpuIndex) -> Option<Duration> {
        self.backlog_of(models, now, gpu, usize::MAX)
    }

    /// The same of what it runs and the first `ahead` behind that. What takes longer than expected is
    /// taken to end at any moment, until it has taken twice as long: then it is unknown.
    pub(super) fn backlog_of(
        &self,
        models: &Models,
        now: Timestamp,
        gpu: GpuIndex,
        ahead: usize,
    ) -> Option<Duration> {
        let gpu = self.get(gpu);
        let Some(running) = &gpu.running else { return Some(Duration::ZERO) };
        let (takes, elapsed) = (gpu.takes(models, running)?, now.since(running.since));
        if elapsed > takes * OVERDUE {
            return None;
        }
        let rest: Option<Duration> = gpu.ahead.iter().take(ahead).map(|held| gpu.takes(models, held)).sum();
        Some(takes.saturating_sub(elapsed) + rest?)
    }

    /// From when on it is not known any more when what a GPU runs will end.
    pub(super) fn overdue_at(&self, models: &Models, gpu: GpuIndex) -> Option<Timestamp> {
        let gpu = self.get(gpu);
        let running = gpu.running.as_ref()?;
        Some(running.since + gpu.takes(models, running)? * OVERDUE + RECALL_COST)
    }
}
