//! All GPUs of a node and their seats, indexed so that a decision examines as few of them as
//! possible (L16). The indexes list the idle seats in the policy's order, the busy seats that accept
//! a next request, and the neighbours of each GPU.
//!
//! A GPU has the executor, the memory and the links; a seat has the requests. A GPU that is not
//! shared has a single open seat. The open seats are the first seats of the GPU. A closed seat takes no
//! request, is in no index of seats that take requests, and is examined only until its last request
//! ends. The last seats of the GPU are for slices ([`sliced`](super::sliced)); they are in no such index
//! either.

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::time::Duration;

use millrace_types::{BytesPerSec, GpuIndex, Timestamp};

use super::config::Config;
use super::cost::SwapSource;
use super::gpus::GpuRecord;
use super::holders::ModelHolders;
use super::load_class::LoadClass;
use super::load_summary::SeatLoadSummary;
use super::models::{ModelSlot, ModelTable};
use super::seats::{Assignment, ExpectedFinish, RECALL_COST, Seat};
use super::size_rank::SizeRank;
use millrace_core::ids::{RequestKey, SeatIndex};

/// Factor by which a run may exceed its expected time before its end counts as unknown. A request needs up to
/// [`RECALL_COST`] in addition to reach its GPU and to be reported, however short its run is.
const OVERDUE: u32 = 2;

/// Order of the idle seats, by their GPUs.
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

/// Index entries of a seat.
#[derive(Debug, Clone, Copy, Default)]
struct SeatIndexEntry {
    /// Key in the order of idle seats, while the seat is idle.
    idle: Option<u64>,
    /// Position in `listed`, while the seat is idle.
    listed: usize,
    asked: usize,
    /// Whether the seat is in `free_ahead`.
    free_ahead: bool,
    /// Whether the seat is in `askable`.
    askable: bool,
}

#[derive(Debug)]
pub(super) struct GpuTable {
    gpus: Vec<GpuRecord>,
    /// Seats in the order of their GPUs.
    seats: Vec<Seat>,
    glances: Vec<SeatLoadSummary>,
    order: IdleOrder,
    noted: Vec<SeatIndexEntry>,
    /// Idle seats in the policy's order, by size rank.
    idle: Vec<BTreeSet<(u64, SeatIndex)>>,
    /// Idle seats in arbitrary order, by size rank; a random choice reads this list.
    listed: Vec<Vec<SeatIndex>>,
    /// Busy seats without a next request.
    free_ahead: BTreeSet<SeatIndex>,
    /// Seats with a request that can be recalled.
    askable: BTreeSet<SeatIndex>,
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
        let open_seats = config.open_seats;
        let classes = ranks.iter().map(|rank| rank.0 + 1).max().unwrap_or(0);
        let mut gpus = Vec::with_capacity(count);
        let mut seats = Vec::with_capacity(count);
        for ((index, config), &rank) in (0..).map(GpuIndex).zip(&config.gpus).zip(ranks) {
            let gpu = GpuRecord::new(config, open_seats, rank, seats.len() as u32);
            let free = config.free_seat_count() as usize;
            seats.extend((0..free).map(|_| Seat::new(index, free)));
            seats.extend(gpu.seats_for_slices().map(|_| Seat::for_slice(index)));
            gpus.push(gpu);
        }
        let numbered = (0..).map(SeatIndex).zip(&seats);
        let glance =
            |(index, seat): (SeatIndex, &Seat)| SeatLoadSummary::of(&gpus[seat.gpu.0 as usize], index, seat);
        Self {
            glances: numbered.map(glance).collect(),
            noted: vec![SeatIndexEntry::default(); seats.len()],
            gpus,
            seats,
            order,
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

    /// Changes the order of the idle seats. Idle times before the change are unknown, so the first
    /// seat by index counts as idle longest.
    pub(super) fn reorder(&mut self, order: IdleOrder) {
        self.order = order;
        self.idle.iter_mut().for_each(BTreeSet::clear);
        self.listed.iter_mut().for_each(Vec::clear);
        self.noted.iter_mut().for_each(|noted| noted.idle = None);
        self.all_seats().for_each(|seat| self.note(seat));
    }

    pub(super) fn all(&self) -> impl Iterator<Item = GpuIndex> + use<> {
        (0..self.gpus.len() as u32).map(GpuIndex)
    }

    pub(super) fn all_seats(&self) -> impl Iterator<Item = SeatIndex> + use<> {
        (0..self.seats.len() as u32).map(SeatIndex)
    }

    pub(super) fn get(&self, gpu: GpuIndex) -> &GpuRecord {
        &self.gpus[gpu.0 as usize]
    }

    pub(super) fn seat(&self, seat: SeatIndex) -> &Seat {
        &self.seats[seat.0 as usize]
    }

    /// Returns the GPU that a seat is on.
    pub(super) fn gpu_of(&self, seat: SeatIndex) -> GpuIndex {
        self.seat(seat).gpu
    }

    /// Returns the record of the GPU that a seat is on.
    pub(super) fn under(&self, seat: SeatIndex) -> &GpuRecord {
        self.get(self.gpu_of(seat))
    }

    /// Returns the seats in use of a GPU with their records.
    pub(super) fn seats_of(&self, gpu: GpuIndex) -> impl Iterator<Item = (SeatIndex, &Seat)> {
        self.get(gpu).seats().map(|seat| (seat, self.seat(seat)))
    }

    /// Returns the seat of a GPU that has a request.
    pub(super) fn seat_with(&self, gpu: GpuIndex, key: RequestKey) -> Option<SeatIndex> {
        let has = |seat: &Seat| seat.requests().any(|held| held.request.key == key);
        self.seats_of(gpu).find(|(_, seat)| has(seat)).map(|(index, _)| index)
    }

    pub(super) fn glance(&self, seat: SeatIndex) -> &SeatLoadSummary {
        &self.glances[seat.0 as usize]
    }

    /// Changes a GPU and its seats in use, and updates the indexes.
    pub(super) fn change<T>(
        &mut self,
        gpu: GpuIndex,
        change: impl FnOnce(&mut GpuRecord, &mut [Seat]) -> T,
    ) -> T {
        let before = self.loading(gpu);
        let it = &mut self.gpus[gpu.0 as usize];
        let numbers = it.seats();
        let seats = &mut self.seats[it.places_in_use()];
        let result = change(it, seats);
        // A suspect that runs on the only seat in use needs no hold, because no other seat could take
        // a request. A hold from the time of several seats has to end, though.
        if seats.len() > 1 || it.held_for_suspect {
            it.update_seats(seats);
        }
        // A seat that the change took out of use must leave the indexes too.
        for seat in numbers {
            self.glances[seat.0 as usize] = SeatLoadSummary::of(self.under(seat), seat, self.seat(seat));
            self.note(seat);
        }
        if self.order == IdleOrder::Calmest && before != self.loading(gpu) {
            for place in 0..self.neighbours[gpu.0 as usize].len() {
                self.get(self.neighbours[gpu.0 as usize][place]).seats().for_each(|seat| self.note(seat));
            }
        }
        result
    }

    /// Changes a seat and its GPU, and updates the indexes.
    pub(super) fn change_seat<T>(
        &mut self,
        seat: SeatIndex,
        change: impl FnOnce(&mut GpuRecord, &mut Seat) -> T,
    ) -> T {
        let gpu = self.gpu_of(seat);
        let place = seat.0 as usize - self.get(gpu).places_in_use().start;
        self.change(gpu, |gpu, seats| change(gpu, &mut seats[place]))
    }

    /// Opens the first `open_seats` seats of a GPU, and closes its other seats. Requests on seats
    /// that close stay there. Returns the seats that are open now and were closed before.
    pub(super) fn open_seats(
        &mut self,
        gpu: GpuIndex,
        open_seats: NonZeroU32,
    ) -> impl Iterator<Item = SeatIndex> + use<> {
        let it = &mut self.gpus[gpu.0 as usize];
        let before = it.open_seats().len();
        let count = it.extend_seats_in_use(open_seats);
        self.change(gpu, |it, _| it.set_open_seats(count));
        self.get(gpu).open_seats().skip(before)
    }

    /// Gives a seat of a GPU to a slice. Returns `None` if each seat for slices belongs to a slice or
    /// still has a request.
    pub(super) fn open_slice_seat(&mut self, gpu: GpuIndex) -> Option<SeatIndex> {
        let it = self.get(gpu);
        let is_free = |seat: &SeatIndex| !it.belongs_to_slice(*seat) && self.seat(*seat).running.is_none();
        let seat = it.seats_for_slices().find(is_free)?;
        self.gpus[gpu.0 as usize].extend_to(seat);
        self.change(gpu, |it, _| it.set_slice_seat(seat, true));
        Some(seat)
    }

    /// Takes a seat back from a slice. A request on the seat stays there to its end.
    pub(super) fn close_slice_seat(&mut self, gpu: GpuIndex, seat: SeatIndex) {
        self.change(gpu, |it, _| it.set_slice_seat(seat, false));
    }

    /// Returns whether a seat of a slice has no request and may get one.
    pub(super) fn is_free_slice_seat(&self, seat: SeatIndex) -> bool {
        self.seat(seat).running.is_none() && self.under(seat).slice_may_take(seat)
    }

    /// Returns whether a seat has an executor and no request, and may get one.
    pub(super) fn is_idle(&self, seat: SeatIndex) -> bool {
        self.seat(seat).running.is_none() && self.under(seat).may_take(seat)
    }

    /// Returns whether a seat is busy and accepts a next request.
    pub(super) fn accepts_queued(&self, seat: SeatIndex) -> bool {
        self.glance(seat).accepts_queued()
    }

    /// Returns the class of the heaviest load under way for the running requests of a GPU.
    pub(super) fn loading(&self, gpu: GpuIndex) -> LoadClass {
        self.seats_of(gpu).map(|(_, seat)| seat.loading()).max().unwrap_or_default()
    }

    /// Returns whether the next request for a model would find the model on a GPU: the model is
    /// complete, or is loaded for a request with an earlier turn.
    pub(super) fn has_for_next(&self, gpu: GpuIndex, model: ModelSlot) -> bool {
        let it = self.get(gpu);
        let mut here = self.seats_of(gpu).flat_map(|(_, seat)| seat.requests());
        it.holds(model) && (!it.is_loading(model) || here.any(|held| held.request.model == model))
    }

    fn note(&mut self, index: SeatIndex) {
        let rank = self.under(index).rank.0;
        let noted = self.noted[index.0 as usize];
        let key = self.is_idle(index).then(|| self.idle_key(index, noted.idle));
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
        let takes_next = self.glance(index).accepts_queued();
        let seat = &self.seats[index.0 as usize];
        let asked = seat.recalled_count();
        self.asked = self.asked - noted.asked + asked;
        let noted = &mut self.noted[index.0 as usize];
        (noted.idle, noted.asked) = (key, asked);
        let put = |set: &mut BTreeSet<SeatIndex>, is_in: &mut bool, belongs| {
            if *is_in != belongs {
                if belongs {
                    set.insert(index)
                } else {
                    set.remove(&index)
                };
                *is_in = belongs;
            }
        };
        put(&mut self.free_ahead, &mut noted.free_ahead, takes_next && seat.ahead.is_empty());
        put(&mut self.askable, &mut noted.askable, seat.recallable().is_some());
    }

    fn idle_key(&self, index: SeatIndex, before: Option<u64>) -> u64 {
        let on = self.gpu_of(index);
        let gpu = self.get(on);
        match self.order {
            IdleOrder::Emptiest => gpu.resident_size().0,
            IdleOrder::Longest => before.unwrap_or(self.idled),
            IdleOrder::MostUsed => u64::MAX - gpu.dispatched,
            IdleOrder::Calmest => {
                // No GPU has 2^56 bytes, so the two parts of the key do not overlap.
                ((self.loading_beside(on) as u64) << 56) | gpu.resident_size().0
            }
            IdleOrder::Coldest if gpu.has_free_quarter() => 0,
            IdleOrder::Coldest => gpu.least_recently_used().map_or(0, |(used, _)| used.0),
        }
    }

    /// Returns the heaviest load that a neighbour of a GPU carries out.
    pub(super) fn loading_beside(&self, gpu: GpuIndex) -> LoadClass {
        let beside = self.neighbours[gpu.0 as usize].iter();
        beside.map(|&other| self.loading(other)).max().unwrap_or_default()
    }

    /// Returns the GPUs with an executor.
    pub(super) fn up(&self) -> impl Iterator<Item = GpuIndex> {
        let gpus = (0..).map(GpuIndex).zip(&self.gpus);
        gpus.filter(|(_, gpu)| gpu.executor.is_some()).map(|(index, _)| index)
    }

    /// Returns the first idle seat of a GPU, if the GPU is large enough.
    pub(super) fn idle_seat(&self, gpu: GpuIndex, rank: SizeRank) -> Option<SeatIndex> {
        let it = self.get(gpu);
        let fits = it.executor.is_some() && !it.held_for_suspect && it.rank >= rank;
        fits.then(|| it.open_seats().find(|&seat| self.seat(seat).running.is_none())).flatten()
    }

    /// Returns the seat of a GPU that is idle, else the busy seat without a next request that will
    /// be free first.
    pub(super) fn next_seat(&self, models: &ModelTable, now: Timestamp, gpu: GpuIndex) -> Option<SeatIndex> {
        let free = |seat: &SeatIndex| self.accepts_queued(*seat) && self.seat(*seat).ahead.is_empty();
        let busy = || self.get(gpu).seats().filter(free);
        let first = || busy().min_by_key(|&seat| (self.expected_free(models, now, seat, 0), seat));
        self.idle_seat(gpu, SizeRank(0)).or_else(first)
    }

    /// Returns the idle seat on the GPU that holds a model, is large enough and has the least `key`;
    /// the first by index among equals. Scans the smaller of the two sets: under
    /// overload, hundreds of GPUs may hold a model while a single seat is idle.
    pub(super) fn idle_holder<K: Ord>(
        &self,
        holders: &ModelHolders,
        rank: SizeRank,
        key: impl Fn(GpuIndex) -> K,
    ) -> Option<SeatIndex> {
        let key = |&seat: &SeatIndex| (key(self.gpu_of(seat)), seat);
        if holders.len() <= self.idle_count(rank) {
            return holders.iter().filter_map(|gpu| self.idle_seat(gpu, rank)).min_by_key(key);
        }
        self.idle(rank).filter(|&seat| holders.contains(self.gpu_of(seat))).min_by_key(key)
    }

    /// Returns the idle seats on GPUs of at least this rank, in no order.
    pub(super) fn idle(&self, rank: SizeRank) -> impl Iterator<Item = SeatIndex> {
        self.listed.iter().skip(rank.0).flatten().copied()
    }

    pub(super) fn any_idle(&self) -> bool {
        self.idle.iter().any(|idle| !idle.is_empty())
    }

    /// Returns the first idle seat on a GPU of at least this rank.
    pub(super) fn first_idle(&self, rank: SizeRank) -> Option<SeatIndex> {
        let firsts = self.idle.iter().skip(rank.0).filter_map(|idle| idle.first());
        firsts.min().map(|&(_, seat)| seat)
    }

    /// Returns the first `count` idle seats on GPUs of each rank that is at least `rank`.
    pub(super) fn first_idles(&self, rank: SizeRank, count: usize) -> impl Iterator<Item = SeatIndex> {
        let idle = self.idle.iter().skip(rank.0);
        idle.flat_map(move |idle| idle.iter().take(count).map(|&(_, seat)| seat))
    }

    /// Returns the number of idle seats on GPUs of at least this rank.
    pub(super) fn idle_count(&self, rank: SizeRank) -> usize {
        self.listed.iter().skip(rank.0).map(Vec::len).sum()
    }

    /// Returns the idle seat with this number, counting only GPUs of at least this rank.
    pub(super) fn nth_idle(&self, rank: SizeRank, mut number: usize) -> Option<SeatIndex> {
        for listed in self.listed.iter().skip(rank.0) {
            match listed.get(number) {
                Some(&seat) => return Some(seat),
                None => number -= listed.len(),
            }
        }
        None
    }

    /// Returns all idle seats in index order.
    pub(super) fn all_idle(&self) -> Vec<SeatIndex> {
        let mut idle: Vec<_> = self.listed.iter().flatten().copied().collect();
        idle.sort_unstable();
        idle
    }

    /// Returns the GPUs with an idle seat, in index order.
    pub(super) fn idle_gpus(&self) -> Vec<GpuIndex> {
        let mut gpus: Vec<_> = self.all_idle().into_iter().map(|seat| self.gpu_of(seat)).collect();
        gpus.dedup();
        gpus
    }

    /// Returns the busy seats without a next request, in index order.
    pub(super) fn free_ahead(&self) -> impl ExactSizeIterator<Item = SeatIndex> {
        self.free_ahead.iter().copied()
    }

    pub(super) fn askable(&self) -> impl Iterator<Item = SeatIndex> {
        self.askable.iter().copied()
    }

    /// Returns the GPUs that share a link to the host with a GPU.
    pub(super) fn neighbours(&self, gpu: GpuIndex) -> &[GpuIndex] {
        &self.neighbours[gpu.0 as usize]
    }

    /// Returns the source from which a GPU would get a model now, peers aside. A model in transit
    /// counts as absent, because the arrived part is unknown.
    pub(super) fn source(&self, gpu: GpuIndex, model: ModelSlot) -> SwapSource {
        if self.has_for_next(gpu, model) {
            return SwapSource::Here;
        }
        let loads = |&other: &GpuIndex| self.loading(other) > LoadClass::FromPeer;
        // The seats of a GPU share its link.
        let shares = self.get(gpu).seats().len() > 1 && loads(&gpu);
        if shares || self.neighbours(gpu).iter().any(loads) {
            SwapSource::SharedHost
        } else {
            SwapSource::Host
        }
    }

    /// Marks the loads from the host that share a link with a seat as disturbed, because a load from
    /// the host begins for this seat.
    pub(super) fn cross_loads(&mut self, seat: SeatIndex) {
        let gpu = self.gpu_of(seat);
        let beside = self.neighbours[gpu.0 as usize].iter().copied().chain([gpu]);
        for other in beside.flat_map(|gpu| self.gpus[gpu.0 as usize].seats()).filter(|&other| other != seat) {
            let running = self.seats[other.0 as usize].running.as_mut();
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

    /// Returns an idle seat's position in the order.
    pub(super) fn idle_place(&self, seat: SeatIndex) -> Option<u64> {
        self.noted[seat.0 as usize].idle
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

    /// Returns when a seat is expected to finish its running request and the first `ahead` requests
    /// behind it.
    pub(super) fn expected_free(
        &self,
        models: &ModelTable,
        now: Timestamp,
        seat: SeatIndex,
        ahead: usize,
    ) -> ExpectedFinish {
        let gpu = self.under(seat);
        let seat = self.seat(seat);
        let takes = |held: &Assignment| gpu.turn_time(models, held);
        let running = seat.running.as_ref().and_then(|held| Some(held.since + takes(held)?));
        let Some(free) = running.filter(|&free| free + RECALL_COST > now) else {
            return ExpectedFinish::Unknown;
        };
        let rest: Option<Duration> = seat.ahead.iter().take(ahead).map(takes).sum();
        rest.map_or(ExpectedFinish::Unknown, |rest| ExpectedFinish::At(free.max(now) + rest))
    }

    /// Returns the time until a seat finishes all its requests, if known.
    pub(super) fn backlog(&self, models: &ModelTable, now: Timestamp, seat: SeatIndex) -> Option<Duration> {
        self.backlog_of(models, now, seat, usize::MAX)
    }

    /// Returns the time until a seat finishes its running request and the first `ahead` requests
    /// behind it. A run that exceeds its expected time counts as about to end. `None` from
    /// [`Self::overdue_at`] on, or if a run time is unknown.
    pub(super) fn backlog_of(
        &self,
        models: &ModelTable,
        now: Timestamp,
        seat: SeatIndex,
        ahead: usize,
    ) -> Option<Duration> {
        let gpu = self.under(seat);
        let seat = self.seat(seat);
        let Some(running) = &seat.running else { return Some(Duration::ZERO) };
        let takes = gpu.turn_time(models, running)?;
        let elapsed = now.since(running.since);
        if elapsed > takes * OVERDUE + RECALL_COST {
            return None;
        }
        let rest: Option<Duration> =
            seat.ahead.iter().take(ahead).map(|held| gpu.turn_time(models, held)).sum();
        Some(takes.saturating_sub(elapsed) + rest?)
    }

    /// Returns the time from which the end of a seat's running request counts as unknown.
    pub(super) fn overdue_at(&self, models: &ModelTable, seat: SeatIndex) -> Option<Timestamp> {
        let running = self.seat(seat).running.as_ref()?;
        Some(running.since + self.under(seat).turn_time(models, running)? * OVERDUE + RECALL_COST)
    }
}
