//! The dispatcher's model of a seat: the request that runs there, and the requests behind it.

use std::collections::VecDeque;
use std::time::Duration;

use millrace_types::{GpuIndex, Timestamp};

use super::cost::SwapSource;
use super::load_class::LoadClass;
use super::models::ModelSlot;
use super::queue::WaitingRequest;
use millrace_core::ids::RequestKey;
use millrace_core::{GPU_REQUESTS_MAX, SLOTS_MAX};

/// Cost of a recall. A request that would begin sooner than this stays on its GPU, and a run is
/// overdue only after exceeding its expected end by this time.
pub const RECALL_COST: Duration = Duration::from_micros(200);
/// Maximum number of requests that are assigned to a seat behind its running request. A seat of a GPU
/// with many seats takes fewer ([`GPU_REQUESTS_MAX`]).
pub const AHEAD_MAX: usize = SLOTS_MAX - 1;

/// A request that is assigned to a seat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Assignment {
    pub(super) request: WaitingRequest,
    /// Number of rows that run as one for the request.
    pub(super) rows: u32,
    /// Start of the request's turn.
    pub(super) since: Timestamp,
    /// Expected source of the model.
    pub(super) source: SwapSource,
    /// Expected time to bring the model and the inputs.
    pub(super) swap: Duration,
    /// Whether the request was assigned behind other requests, so that its model may have arrived
    /// meanwhile.
    pub(super) ahead: bool,
    /// Whether the duration of the turn tells nothing about the expected source: another load
    /// disturbed this load, the model came from elsewhere or was partly there, or inputs were
    /// copied too.
    pub(super) unlike: bool,
    /// Expected duration of the turn.
    pub(super) predicted: Option<Duration>,
    /// Degree to which the load of the model disturbs neighbours, while under way.
    pub(super) loading: LoadClass,
    /// Whether the dispatcher recalled the request.
    pub(super) recalled: bool,
    /// Whether the client no longer waits for the request.
    pub(super) withdrawn: bool,
}

/// A seat: a place on a GPU where a request runs, while others wait behind it.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) gpu: GpuIndex,
    /// Maximum length of [`Self::ahead`].
    pub(super) ahead_max: usize,
    pub(super) running: Option<Assignment>,
    /// Requests behind the running request: each starts as soon as the previous request ends.
    pub(super) ahead: VecDeque<Assignment>,
}

impl Seat {
    /// Returns one of `seats` seats of a GPU, without requests. Closed seats count too, because
    /// the bound of a GPU's requests must also hold after all seats open.
    pub(super) fn new(gpu: GpuIndex, seats: usize) -> Self {
        let ahead_max = AHEAD_MAX.min(GPU_REQUESTS_MAX / seats - 1);
        Self { gpu, ahead_max, running: None, ahead: VecDeque::new() }
    }

    /// Returns a seat for slices, without requests. No request waits behind another there, because
    /// another slice of the function may be free sooner.
    pub(super) fn for_slice(gpu: GpuIndex) -> Self {
        Self { gpu, ahead_max: 0, running: None, ahead: VecDeque::new() }
    }

    /// Returns the requests of the seat: the running request, then those behind it.
    pub(super) fn requests(&self) -> impl Iterator<Item = &Assignment> {
        self.running.iter().chain(&self.ahead)
    }

    /// Returns the requests of the seat, to change them.
    pub(super) fn requests_mut(&mut self) -> impl Iterator<Item = &mut Assignment> {
        self.running.iter_mut().chain(&mut self.ahead)
    }

    /// Returns whether a request may wait behind the running request. No request may wait behind a
    /// suspect.
    pub(super) fn accepts_queued(&self) -> bool {
        self.running.is_some() && !self.runs_suspect()
    }

    /// Returns whether the running request is a suspect.
    pub(super) fn runs_suspect(&self) -> bool {
        self.running.as_ref().is_some_and(|held| held.request.attempts.suspect())
    }

    /// Returns the position in [`Self::ahead`] of the last request that can be recalled.
    pub(super) fn recallable(&self) -> Option<usize> {
        self.ahead.iter().rposition(|held| !held.recalled && !held.withdrawn)
    }

    /// Returns the number of recalled requests that have not returned yet.
    pub(super) fn recalled_count(&self) -> usize {
        self.ahead.iter().filter(|held| held.recalled).count()
    }

    /// Returns the class of the load under way for the running request.
    pub(super) fn loading(&self) -> LoadClass {
        self.running.as_ref().map_or(LoadClass::Nothing, |held| held.loading)
    }

    /// Notes that a model has arrived; `from` is the GPU that sent all weights, if any.
    pub(super) fn loaded(&mut self, model: ModelSlot, from: Option<GpuIndex>) {
        for held in self.requests_mut().filter(|held| held.request.model == model) {
            held.loading = LoadClass::Nothing;
            held.unlike |= matches!(held.source, SwapSource::Peer(_)) && from.is_none();
        }
        // The model is here before the turns of these requests begin.
        let ahead = self.ahead.iter_mut().filter(|held| held.request.model == model);
        ahead.for_each(|held| held.swap = Duration::ZERO);
    }

    /// Removes a request. If the request was running, the turn of the next request begins.
    pub(super) fn remove(&mut self, now: Timestamp, key: RequestKey) -> Option<Assignment> {
        if let Some(running) = self.running.take_if(|held| held.request.key == key) {
            self.running = self.ahead.pop_front().map(|held| Assignment { since: now, ..held });
            return Some(running);
        }
        let place = self.ahead.iter().position(|held| held.request.key == key)?;
        self.ahead.remove(place)
    }
}

/// Time at which a seat is expected to finish its requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ExpectedFinish {
    /// The seat finishes at this time.
    At(Timestamp),
    /// The end is unknown: a model never ran here, or the running request is overdue.
    Unknown,
}

impl ExpectedFinish {
    /// Returns the expected time plus `time`.
    pub(super) fn and(self, time: Duration) -> Self {
        match self {
            Self::At(at) => Self::At(at + time),
            Self::Unknown => Self::Unknown,
        }
    }
}
