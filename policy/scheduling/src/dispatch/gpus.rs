//! The dispatcher's model of a GPU: its executor, its memory and its resident models.

use std::collections::{BTreeSet, VecDeque};
use std::num::NonZeroU32;
use std::ops::Range;
use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec, Incarnation, Timestamp};

use super::config::GpuConfig;
use super::cost::{ModelCost, SwapSource};
use super::models::{ModelSlot, ModelTable};
use super::queue::WaitingRequest;
use super::seats::{Assignment, Seat};
use super::size_rank::SizeRank;
use millrace_core::ids::SeatIndex;
use millrace_memory::BlockSize;

/// A model on a GPU, or on its way there.
#[derive(Debug, Clone, Copy)]
struct ResidentEntry {
    model: ModelSlot,
    /// Size of the model's blocks on this GPU.
    size: Bytes,
    /// Time of the last request for the model.
    used: Timestamp,
}

#[derive(Debug)]
pub(super) struct GpuRecord {
    /// Incarnation of the executor, while up.
    pub(super) executor: Option<Incarnation>,
    pub(super) rank: SizeRank,
    pub(super) host_rate: BytesPerSec,
    pub(super) kind: u32,
    /// Numbers of the GPU's seats, open or closed.
    seat_numbers: Range<u32>,
    /// Number of seats for requests of all functions, open or closed: the first seats. The seats behind
    /// them are for slices.
    free_seats: u32,
    /// Number of open seats. The GPU's first seats are the open ones.
    open_seats: u32,
    /// Seats that belong to a slice.
    slice_seats: BTreeSet<SeatIndex>,
    /// Number of seats up to the last seat that is open, belongs to a slice or has a request. No event
    /// examines the seats behind that seat, so that closed seats cost nothing.
    seats_in_use: u32,
    /// Suspects that wait until the GPU has no other request.
    pub(super) suspects: VecDeque<WaitingRequest>,
    /// Whether no seat takes a further request, because a suspect runs or waits here. May be false
    /// while a suspect runs on the only seat in use, because no request may wait behind a suspect.
    pub(super) held_for_suspect: bool,
    /// Requests assigned to the GPU so far.
    pub(super) dispatched: u64,
    /// Models on the GPU or on their way, sorted. Stored contiguously, because the search for a hit
    /// scans all of them.
    resident: Vec<ResidentEntry>,
    /// Resident models, without confirmation yet that their transfer is complete.
    arriving: BTreeSet<ModelSlot>,
    /// Resident models by last use, oldest first.
    by_use: BTreeSet<(Timestamp, ModelSlot)>,
    /// Size of the blocks of all resident models.
    resident_size: Bytes,
    /// Memory that the GPU gives out.
    memory: Bytes,
    block: BlockSize,
}

impl GpuRecord {
    /// Returns a GPU without an executor, with the seats from `first_seat` on, of which at most the
    /// first `open_seats` are open.
    pub(super) fn new(config: &GpuConfig, open_seats: NonZeroU32, rank: SizeRank, first_seat: u32) -> Self {
        let open_seats = config.open_seat_count(open_seats);
        Self {
            executor: None,
            seat_numbers: first_seat..first_seat + config.seat_count(),
            free_seats: config.free_seat_count(),
            open_seats,
            slice_seats: BTreeSet::new(),
            seats_in_use: open_seats,
            rank,
            host_rate: config.host_rate,
            kind: config.kind,
            suspects: VecDeque::new(),
            held_for_suspect: false,
            dispatched: 0,
            resident: Vec::new(),
            arriving: BTreeSet::new(),
            by_use: BTreeSet::new(),
            resident_size: Bytes::ZERO,
            memory: config.usable(),
            block: config.block,
        }
    }

    /// Returns the seats in use: the first seats of the GPU, up to the last seat that is open, belongs
    /// to a slice or has a request.
    pub(super) fn seats(&self) -> impl ExactSizeIterator<Item = SeatIndex> + use<> {
        self.numbers(self.seats_in_use).map(SeatIndex)
    }

    /// Returns the open seats: the seats that take requests.
    pub(super) fn open_seats(&self) -> impl ExactSizeIterator<Item = SeatIndex> + use<> {
        self.numbers(self.open_seats).map(SeatIndex)
    }

    /// Returns whether a seat of this GPU takes requests.
    pub(super) fn is_open(&self, seat: SeatIndex) -> bool {
        seat.0 - self.seat_numbers.start < self.open_seats
    }

    /// Returns whether a seat of this GPU may take a request, if the seat has room: the GPU has an
    /// executor, no suspect holds the GPU, and the seat is open.
    pub(super) fn may_take(&self, seat: SeatIndex) -> bool {
        self.executor.is_some() && !self.held_for_suspect && self.is_open(seat)
    }

    /// Returns the seats for slices.
    pub(super) fn seats_for_slices(&self) -> impl Iterator<Item = SeatIndex> + use<> {
        (self.seat_numbers.start + self.free_seats..self.seat_numbers.end).map(SeatIndex)
    }

    /// Returns whether a seat is for slices.
    pub(super) fn is_for_slices(&self, seat: SeatIndex) -> bool {
        seat.0 - self.seat_numbers.start >= self.free_seats
    }

    /// Returns whether a seat belongs to a slice.
    pub(super) fn belongs_to_slice(&self, seat: SeatIndex) -> bool {
        self.slice_seats.contains(&seat)
    }

    /// Counts a seat as in use, because a slice gets the seat next.
    pub(super) fn extend_to(&mut self, seat: SeatIndex) {
        self.seats_in_use = self.seats_in_use.max(seat.0 - self.seat_numbers.start + 1);
    }

    /// Gives a seat to a slice, or takes the seat back.
    pub(super) fn set_slice_seat(&mut self, seat: SeatIndex, belongs: bool) {
        if belongs {
            self.slice_seats.insert(seat)
        } else {
            self.slice_seats.remove(&seat)
        };
    }

    /// Returns whether a seat of a slice may take a request, if the seat has room.
    pub(super) fn slice_may_take(&self, seat: SeatIndex) -> bool {
        self.executor.is_some() && !self.held_for_suspect && self.belongs_to_slice(seat)
    }

    /// Returns the positions of the seats in use among the seats of all GPUs.
    pub(super) fn places_in_use(&self) -> Range<usize> {
        let numbers = self.numbers(self.seats_in_use);
        numbers.start as usize..numbers.end as usize
    }

    fn numbers(&self, count: u32) -> Range<u32> {
        self.seat_numbers.start..self.seat_numbers.start + count
    }

    /// Counts at least the first `open_seats` seats as in use, because these seats open next. Returns the
    /// number of seats to open.
    pub(super) fn extend_seats_in_use(&mut self, open_seats: NonZeroU32) -> u32 {
        let count = open_seats.get().min(self.free_seats);
        self.seats_in_use = self.seats_in_use.max(count);
        count
    }

    /// Opens the first `count` seats, and closes the others.
    pub(super) fn set_open_seats(&mut self, count: u32) {
        self.open_seats = count;
    }

    /// Updates the records that depend on the requests of all seats in use: whether a suspect holds
    /// the GPU, and the number of seats in use.
    pub(super) fn update_seats(&mut self, seats: &[Seat]) {
        self.held_for_suspect = !self.suspects.is_empty() || seats.iter().any(Seat::runs_suspect);
        let used = |seat: &Seat| seat.running.is_some();
        let closed = seats.get(self.open_seats as usize..).unwrap_or_default();
        let in_use = closed.iter().rposition(used).map_or(0, |last| last as u32 + 1);
        let of_slices = self.slice_seats.last().map_or(0, |last| last.0 - self.seat_numbers.start + 1);
        self.seats_in_use = (self.open_seats + in_use).max(of_slices);
    }

    /// Notes that all weights of a model have arrived.
    pub(super) fn arrived(&mut self, model: ModelSlot) {
        self.arriving.remove(&model);
    }

    /// Returns whether a model is still in transit to this GPU, with or without a request.
    pub(super) fn is_loading(&self, model: ModelSlot) -> bool {
        self.arriving.contains(&model)
    }

    /// Returns whether any model is still in transit to this GPU.
    pub(super) fn is_loading_any(&self) -> bool {
        !self.arriving.is_empty()
    }

    pub(super) fn holds(&self, model: ModelSlot) -> bool {
        self.place_of(model).is_ok()
    }

    pub(super) fn resident(&self) -> impl Iterator<Item = ModelSlot> {
        self.resident.iter().map(|it| it.model)
    }

    /// Returns the model's position in [`Self::resident`], or the position for its insertion.
    fn place_of(&self, model: ModelSlot) -> Result<usize, usize> {
        self.resident.binary_search_by_key(&model, |it| it.model)
    }

    /// Returns the memory that the GPU gives out, in use or not.
    pub(super) fn memory(&self) -> Bytes {
        self.memory
    }

    /// Returns the size of the blocks that `memory` needs on this GPU.
    pub(super) fn size_of(&self, memory: Bytes) -> Bytes {
        self.block.round_up(memory)
    }

    pub(super) fn resident_size(&self) -> Bytes {
        self.resident_size
    }

    /// Returns the size of the resident models that requests refer to.
    pub(super) fn wanted_size(&self, models: &ModelTable) -> Bytes {
        let wanted = self.resident.iter().filter(|it| models.get(it.model).users > 0);
        wanted.map(|it| it.size).sum()
    }

    /// Notes that a model, which needs `memory`, is requested here. The model is loaded unless
    /// resident.
    pub(super) fn add_resident(&mut self, now: Timestamp, model: ModelSlot, memory: Bytes) {
        let size = self.size_of(memory);
        let asked = ResidentEntry { model, size, used: now };
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
        self.resident_size += size;
    }

    pub(super) fn remove_resident(&mut self, model: ModelSlot) {
        self.arriving.remove(&model);
        if let Ok(place) = self.place_of(model) {
            let before = self.resident.remove(place);
            self.uncount(before);
        }
    }

    fn uncount(&mut self, before: ResidentEntry) {
        self.by_use.remove(&(before.used, before.model));
        self.resident_size = self.resident_size - before.size;
    }

    /// Returns whether a quarter of the memory is free, so that most models fit.
    pub(super) fn has_free_quarter(&self) -> bool {
        self.resident_size.0 * 4 <= self.memory.0 * 3
    }

    /// Returns the model that was requested longest ago, with the time of that request.
    pub(super) fn least_recently_used(&self) -> Option<(Timestamp, ModelSlot)> {
        self.by_use.first().copied()
    }

    /// Returns the models that are likely to be evicted to make room for `memory`, least recently
    /// used first (L07), each with the time of its last request.
    pub(super) fn victims(&self, memory: Bytes) -> impl Iterator<Item = (Timestamp, ModelSlot)> {
        let free = self.memory.saturating_sub(self.resident_size);
        let mut lacking = self.size_of(memory).saturating_sub(free);
        self.by_use.iter().copied().take_while(move |(_, model)| {
            let lacked = lacking > Bytes::ZERO;
            let held = self.place_of(*model).map_or(Bytes::ZERO, |place| self.resident[place].size);
            lacking = lacking.saturating_sub(held);
            lacked
        })
    }

    /// Returns the time of bringing a model here at the link's nominal rate.
    pub(super) fn nominal(&self, models: &ModelTable, model: ModelSlot, source: SwapSource) -> Duration {
        let rate = if let SwapSource::Peer(rate) = source { rate } else { self.host_rate };
        rate.time_for(models.get(model).weights)
    }

    /// Returns the time that a copy of a model from the host keeps a free link busy.
    pub(super) fn transfer_time(&self, models: &ModelTable, model: ModelSlot) -> Duration {
        let known = models.cost(model, self.kind).and_then(|cost| cost.transfer());
        known.unwrap_or_else(|| self.nominal(models, model, SwapSource::Host))
    }

    /// Returns the time that bringing a model here adds to a run.
    pub(super) fn swap_time(&self, models: &ModelTable, model: ModelSlot, source: SwapSource) -> Duration {
        if source == SwapSource::Here {
            return Duration::ZERO;
        }
        let nominal = self.nominal(models, model, source);
        models
            .cost(model, self.kind)
            .map_or_else(|| ModelCost::default().swap(source, nominal), |cost| cost.swap(source, nominal))
    }

    /// Returns the expected time of a request from the beginning of its turn, if known.
    pub(super) fn turn_time(&self, models: &ModelTable, held: &Assignment) -> Option<Duration> {
        Some(held.swap + models.run_time_of(held.request.model, self.kind, held.rows)?)
    }
}
