//! What the dispatcher knows of one GPU: who is on it, which models it holds, and what it loads.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use millrace_types::{BytesPerSec, GpuIndex, Incarnation, Timestamp};

use super::config::GpuConfig;
use super::cost::{Cost, Source};
use super::models::{Models, Slot};
use super::queue::{SizeRank, Waiting};
use crate::ids::RequestKey;
use crate::memory::BLOCK;

/// How much bringing a model disturbs the copies of GPUs beside it (T22, T23), least first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Loading {
    /// Nothing is brought.
    #[default]
    Nothing,
    /// It comes from another GPU.
    FromPeer,
    /// From the host, hidden behind the run even at half the link.
    Light,
    /// Slowed down a little by another.
    Medium,
    /// Slowed down much.
    Heavy,
}

/// A model is light where half the link slows a run with its load by less than this, in percent.
const LIGHT_BELOW: u32 = 110;
/// And heavy from this on: it then waits for the link most of the time even alone.
const HEAVY_FROM: u32 = 400;

impl Loading {
    /// The class of a model that comes from the host: by how much a run that overlaps its load
    /// takes longer with half the link than without a load, max(2 · load, run) / run. With the
    /// paper's figures (table 4, at 12 GB/s) DenseNet-201 is light, Inception-v3 and ResNet-152
    /// medium, Bert-qa heavy. What never ran counts as heavy.
    pub(super) fn of(load: Duration, run: Option<Duration>) -> Self {
        let Some(run) = run.filter(|run| !run.is_zero()) else { return Self::Heavy };
        let slowed = (load * 2).max(run) * 100;
        match () {
            () if slowed < run * LIGHT_BELOW => Self::Light,
            () if slowed < run * HEAVY_FROM => Self::Medium,
            () => Self::Heavy,
        }
    }
}

/// A request on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Held {
    pub(super) request: Waiting,
    /// How many rows run as one for it.
    pub(super) rows: u32,
    /// When its turn began.
    pub(super) since: Timestamp,
    /// Where its model was to come from, and what that and bringing its data was expected to take.
    pub(super) source: Source,
    pub(super) swap: Duration,
    /// Whether it was given while others were before it: its model may have come meanwhile.
    pub(super) ahead: bool,
    /// Whether what it takes says nothing of where its model was to come from: another load began
    /// beside its own, it came from elsewhere, some of it before, or data with it.
    pub(super) unlike: bool,
    /// What its turn was expected to take.
    pub(super) predicted: Option<Duration>,
    /// How that disturbs others, while it is under way.
    pub(super) loading: Loading,
    /// Whether it was asked back.
    pub(super) recalled: bool,
    /// Whether anybody still waits for it.
    pub(super) withdrawn: bool,
}

/// A model on a GPU, or on its way there.
#[derive(Debug, Clone, Copy)]
struct Resident {
    model: Slot,
    blocks: u32,
    /// When it was last asked for.
    used: Timestamp,
}

#[derive(Debug)]
pub(super) struct Gpu {
    /// Its executor, while it is up.
    pub(super) executor: Option<Incarnation>,
    pub(super) rank: SizeRank,
    pub(super) host_rate: BytesPerSec,
    pub(super) kind: u32,
    pub(super) running: Option<Held>,
    /// Handed over ahead: each starts as soon as the one before it ends. At most
    /// [`AHEAD_MAX`](super::AHEAD_MAX).
    pub(super) ahead: VecDeque<Held>,
    /// Requests it was given so far.
    pub(super) dispatched: u64,
    /// The models on it or on their way to it, in order: side by side, since whoever looks for a hit
    /// looks at all of them.
    resident: Vec<Resident>,
    /// Those of them of which it is not known that all is there.
    arriving: BTreeSet<Slot>,
    /// The same, longest ago first.
    by_use: BTreeSet<(Timestamp, Slot)>,
    resident_blocks: u64,
    blocks: u64,
}

impl Gpu {
    pub(super) fn new(config: &GpuConfig, rank: SizeRank) -> Self {
        Self {
            executor: None,
            rank,
            host_rate: config.host_rate,
            kind: config.kind,
            running: None,
            ahead: VecDeque::new(),
            dispatched: 0,
            resident: Vec::new(),
            arriving: BTreeSet::new(),
            by_use: BTreeSet::new(),
            resident_blocks: 0,
            blocks: config.memory.0 / BLOCK.0,
        }
    }

    pub(super) fn idle(&self) -> bool {
        self.executor.is_some() && self.running.is_none()
    }

    /// Whether it is at work and somebody may wait behind it. Nobody waits behind a suspect.
    pub(super) fn takes_ahead(&self) -> bool {
        let alone = |held: &Held| held.request.attempts.suspect();
        self.executor.is_some() && self.running.as_ref().is_some_and(|held| !alone(held))
    }

    /// The place, in [`Self::ahead`], of the last request that could be asked back.
    pub(super) fn askable(&self) -> Option<usize> {
        self.ahead.iter().rposition(|held| !held.recalled && !held.withdrawn)
    }

    /// Requests that were asked back and have not come yet.
    pub(super) fn asked(&self) -> usize {
        self.ahead.iter().filter(|held| held.recalled).count()
    }

    /// What it loads for the request whose turn it is.
    pub(super) fn loading(&self) -> Loading {
        self.running.as_ref().map_or(Loading::Nothing, |held| held.loading)
    }

    /// Whether a model is still on its way here, whether or not a request that needs it is.
    pub(super) fn is_loading(&self, model: Slot) -> bool {
        self.arriving.contains(&model)
    }

    /// Whether any model is still on its way here.
    pub(super) fn is_loading_any(&self) -> bool {
        !self.arriving.is_empty()
    }

    /// Whether the next request for a model would find it here: all of it is, or is brought for one
    /// whose turn comes before.
    pub(super) fn has_for_next(&self, model: Slot) -> bool {
        let mut here = self.running.iter().chain(&self.ahead);
        self.holds(model) && (!self.is_loading(model) || here.any(|held| held.request.model == model))
    }

    pub(super) fn holds(&self, model: Slot) -> bool {
        self.place_of(model).is_ok()
    }

    pub(super) fn resident(&self) -> impl Iterator<Item = Slot> {
        self.resident.iter().map(|it| it.model)
    }

    /// Its place in [`Self::resident`], or where it would be.
    fn place_of(&self, model: Slot) -> Result<usize, usize> {
        self.resident.binary_search_by_key(&model, |it| it.model)
    }

    pub(super) fn resident_blocks(&self) -> u64 {
        self.resident_blocks
    }

    /// Blocks of the models on it that requests refer to.
    pub(super) fn wanted_blocks(&self, models: &Models) -> u64 {
        let wanted = self.resident.iter().filter(|it| models.get(it.model).users > 0);
        wanted.map(|it| u64::from(it.blocks)).sum()
    }

    /// A model is asked for here: it is brought, unless it is here.
    pub(super) fn add_resident(&mut self, now: Timestamp, model: Slot, blocks: u32) {
        let asked = Resident { model, blocks, used: now };
        match self.place_of(model) {
            Ok(place) => {
                let before = std::mem::replace(&mut self.resident[place], asked);
                self.uncount(before);
            }
            Err(place) => {
                self.arriving.insert(model);
                self.resident.insert(place, asked);
            }
        }
        self.by_use.insert((now, model));
        self.resident_blocks += u64::from(blocks);
    }

    pub(super) fn remove_resident(&mut self, model: Slot) {
        self.arriving.remove(&model);
        if let Ok(place) = self.place_of(model) {
            let before = self.resident.remove(place);
            self.uncount(before);
        }
    }

    fn uncount(&mut self, before: Resident) {
        self.by_use.remove(&(before.used, before.model));
        self.resident_blocks -= u64::from(before.blocks);
    }

    /// Whether a quarter of its memory is free: most models fit.
    pub(super) fn roomy(&self) -> bool {
        self.resident_blocks * 4 <= self.blocks * 3
    }

    /// The model that was asked for longest ago, and when.
    pub(super) fn coldest(&self) -> Option<(Timestamp, Slot)> {
        self.by_use.first().copied()
    }

    /// What is likely to be evicted for so many blocks: the least recently used (L07), and when
    /// each was asked for.
    pub(super) fn victims(&self, blocks: u32) -> impl Iterator<Item = (Timestamp, Slot)> {
        let free = self.blocks.saturating_sub(self.resident_blocks);
        let mut lacking = u64::from(blocks).saturating_sub(free);
        self.by_use.iter().copied().take_while(move |(_, model)| {
            let lacked = lacking > 0;
            let held = self.place_of(*model).map_or(0, |place| self.resident[place].blocks);
            lacking = lacking.saturating_sub(held.into());
            lacked
        })
    }

    /// What the link's rate says that bringing a model here takes.
    pub(super) fn nominal(&self, models: &Models, model: Slot, source: Source) -> Duration {
        let rate = if let Source::Peer(rate) = source { rate } else { self.host_rate };
        rate.time_for(models.get(model).weights)
    }

    /// How long a copy from the host keeps a free link busy.
    pub(super) fn transfer_time(&self, models: &Models, model: Slot) -> Duration {
        let known = models.cost(model, self.kind).and_then(|cost| cost.transfer());
        known.unwrap_or_else(|| self.nominal(models, model, Source::Host))
    }

    /// What bringing a model here adds to a run.
    pub(super) fn swap_time(&self, models: &Models, model: Slot, source: Source) -> Duration {
        if source == Source::Here {
            return Duration::ZERO;
        }
        let nominal = self.nominal(models, model, source);
        models
            .cost(model, self.kind)
            .map_or_else(|| Cost::default().swap(source, nominal), |cost| cost.swap(source, nominal))
    }

    /// What a request here takes from the beginning of its turn, where that is known.
    pub(super) fn takes(&self, models: &Models, held: &Held) -> Option<Duration> {
        Some(held.swap + models.run_time_of(held.request.model, self.kind, held.rows)?)
    }

    /// The request of this key, where it is here.
    pub(super) fn held_mut(&mut self, key: RequestKey) -> Option<&mut Held> {
        self.running.as_mut().into_iter().chain(&mut self.ahead).find(|held| held.request.key == key)
    }

    /// A model has arrived, all of it from another GPU or not.
    pub(super) fn loaded(&mut self, model: Slot, from: Option<GpuIndex>) {
        self.arriving.remove(&model);
        let here = self.running.as_mut().into_iter().chain(&mut self.ahead);
        for held in here.filter(|held| held.request.model == model) {
            held.loading = Loading::Nothing;
            held.unlike |= matches!(held.source, Source::Peer(_)) && from.is_none();
        }
        // Their turns begin with it there.
        let ahead = self.ahead.iter_mut().filter(|held| held.request.model == model);
        ahead.for_each(|held| held.swap = Duration::ZERO);
    }

    /// A request has run here: it has read all of its model.
    pub(super) fn ran(&mut self, model: Slot) {
        self.arriving.remove(&model);
    }

    /// Takes a request off; the next one's turn begins when the running one goes.
    pub(super) fn remove(&mut self, now: Timestamp, key: RequestKey) -> Option<Held> {
        if let Some(running) = self.running.take_if(|held| held.request.key == key) {
            self.running = self.ahead.pop_front().map(|held| Held { since: now, ..held });
            return Some(running);
        }
        let place = self.ahead.iter().position(|held| held.request.key == key)?;
        self.ahead.remove(place)
    }
}

/// When a GPU is likely to be through with what it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Expected {
    /// Then.
    At(Timestamp),
    /// A model never ran, or what runs should have ended before now.
    Unknown,
}

impl Expected {
    /// So much later.
    pub(super) fn and(self, time: Duration) -> Self {
        match self {
            Self::At(at) => Self::At(at + time),
            Self::Unknown => Self::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T23, with the paper's run times (table 4, GPU remoting) and weights at 12 GB/s.
    #[test]
    fn models_are_light_or_heavy_by_what_half_the_link_costs_them() {
        let class = |megabytes: u64, run_ms| {
            let load = Duration::from_micros(megabytes * 1000 / 12);
            Loading::of(load, Some(Duration::from_millis(run_ms)))
        };
        assert_eq!(class(80, 28), Loading::Light, "DenseNet-201");
        assert_eq!(class(57, 25), Loading::Light, "DenseNet-169");
        assert_eq!(class(108, 14), Loading::Medium, "Inception-v3");
        assert_eq!(class(241, 17), Loading::Medium, "ResNet-152");
        assert_eq!(class(1340, 43), Loading::Heavy, "Bert-qa");
        assert_eq!(Loading::of(Duration::ZERO, None), Loading::Heavy, "who knows");
    }
}
