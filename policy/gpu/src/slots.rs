//! The requests on a seat of a GPU: the request that runs, and the requests queued behind it.

use millrace_core::SLOTS_MAX;
use millrace_types::{Bytes, GpuIndex, ModelId, Timestamp};

use super::protocol::ComputeRight;
use millrace_core::ids::{Generation, RequestKey, RunId};

/// The stage of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RequestStage {
    /// The request waits for room for its model.
    Waiting,
    /// A copy that the request needs failed. The request is sent again when more of its weights
    /// have arrived.
    Starved,
    /// The run was sent to the executor, which starts the run as soon as the data that the run
    /// reads has arrived.
    Sent { run: RunId, generation: Generation },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AssignedRequest {
    pub(super) key: RequestKey,
    pub(super) model: ModelId,
    /// The GPU to copy the model from; `None` for the host.
    pub(super) from: Option<GpuIndex>,
    /// The time by which the response is due; `None` if no time was asked for.
    pub(super) deadline: Option<Timestamp>,
    pub(super) right: ComputeRight,
    pub(super) stage: RequestStage,
    /// Start of the request's turn.
    pub(super) turn: Option<Timestamp>,
    /// Whether the model was resident when the turn began.
    pub(super) was_resident: bool,
    /// Bytes copied for the request.
    pub(super) swapped: Bytes,
    /// Times that the request was sent to the executor.
    pub(super) sends: u32,
    /// The time from which no client waits for the request any longer.
    pub(super) cancelled: Option<Timestamp>,
    /// Whether the node has recalled the request.
    pub(super) recalled: bool,
    /// Whether the weights cannot be copied.
    pub(super) doomed: bool,
}

impl AssignedRequest {
    pub(super) fn new(
        key: RequestKey,
        model: ModelId,
        from: Option<GpuIndex>,
        deadline: Option<Timestamp>,
        right: ComputeRight,
    ) -> Self {
        Self {
            key,
            model,
            from,
            deadline,
            right,
            stage: RequestStage::Waiting,
            turn: None,
            was_resident: false,
            swapped: Bytes::ZERO,
            sends: 0,
            cancelled: None,
            recalled: false,
            doomed: false,
        }
    }

    pub(super) fn run(&self) -> Option<RunId> {
        match self.stage {
            RequestStage::Sent { run, .. } => Some(run),
            RequestStage::Waiting | RequestStage::Starved => None,
        }
    }

    pub(super) fn urgency(&self) -> SeatUrgency {
        SeatUrgency { deadline: self.deadline.unwrap_or(Timestamp::MAX), key: self.key }
    }
}

/// The order of requests on different seats: the earliest deadline first. Requests without a
/// deadline are last, in the order of their keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SeatUrgency {
    deadline: Timestamp,
    key: RequestKey,
}

/// The line of a seat: at most [`SLOTS_MAX`] requests, in the order in which the executor runs them.
#[derive(Debug, Default)]
pub(super) struct RequestQueue(Vec<AssignedRequest>);

impl RequestQueue {
    pub(super) fn push(&mut self, slot: AssignedRequest) {
        assert!(self.0.len() < SLOTS_MAX, "the dispatcher gave {} to a seat that is full", slot.key);
        self.0.push(slot);
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    pub(super) fn get(&self, place: usize) -> Option<&AssignedRequest> {
        self.0.get(place)
    }

    pub(super) fn get_mut(&mut self, place: usize) -> Option<&mut AssignedRequest> {
        self.0.get_mut(place)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &AssignedRequest> {
        self.0.iter()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut AssignedRequest> {
        self.0.iter_mut()
    }

    pub(super) fn place_of(&self, key: RequestKey) -> Option<usize> {
        self.0.iter().position(|slot| slot.key == key)
    }

    pub(super) fn place_of_run(&self, run: RunId) -> Option<usize> {
        self.0.iter().position(|slot| slot.run() == Some(run))
    }

    pub(super) fn remove(&mut self, place: usize) -> AssignedRequest {
        self.0.remove(place)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Sets the stage of a request that has to be sent again, and moves it behind the requests that
    /// the executor has.
    pub(super) fn requeue(&mut self, place: usize, stage: RequestStage) {
        if let Some(slot) = self.0.get_mut(place) {
            slot.stage = stage;
        }
        self.0.sort_by_key(|slot| slot.run().is_none());
    }

    /// Moves the marked requests behind the others.
    pub(super) fn set_back(&mut self, marked: &[bool]) {
        if marked.contains(&true) {
            let mut first = Vec::with_capacity(SLOTS_MAX);
            let mut last = Vec::new();
            for (slot, &back) in self.0.drain(..).zip(marked) {
                if back { last.push(slot) } else { first.push(slot) }
            }
            first.append(&mut last);
            self.0 = first;
        }
    }

    /// Lets starved requests of a model be sent again.
    pub(super) fn feed(&mut self, model: ModelId) {
        for slot in
            self.0.iter_mut().filter(|slot| slot.model == model && slot.stage == RequestStage::Starved)
        {
            slot.stage = RequestStage::Waiting;
        }
    }

    pub(super) fn uses(&self, model: ModelId) -> bool {
        self.0.iter().any(|slot| slot.model == model)
    }
}
