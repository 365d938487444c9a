//! Interface between the shared code path of dispatch and the policies. A policy stores the waiting
//! requests in its own order and chooses the next request and its GPU.
//! [`Dispatcher`](super::Dispatcher) does all other work for every policy: checks on entry to the
//! queue, retries after the loss of a GPU, and recalls.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use millrace_types::{Alpha, Alphas, BytesPerSec, GpuIndex, Priority, Reason, SloCounts, Timestamp};

use super::cost::PredictionError;
use super::fleet::GpuTable;
use super::inputs::InputLocations;
use super::models::ModelTable;
use super::prewarm_hint::PrewarmCounts;
use super::protocol::LatencyObjective;
use super::queue::WaitingRequest;
use super::seats::{ExpectedFinish, RECALL_COST};
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex};

/// Inputs of a policy's decision.
pub(super) struct DispatchView<'a> {
    pub(super) now: Timestamp,
    pub(super) fleet: &'a GpuTable,
    pub(super) models: &'a ModelTable,
    /// Locations of inputs, for the requests that have inputs on GPUs.
    pub(super) inputs: &'a BTreeMap<RequestKey, InputLocations>,
}

impl DispatchView<'_> {
    /// Returns the location of a request's inputs. Costs nothing while no request has inputs on a
    /// GPU.
    pub(super) fn inputs(&self, request: &WaitingRequest) -> &InputLocations {
        self.inputs.get(&request.key).unwrap_or(&InputLocations::NONE)
    }

    /// Returns the time until a request's model and inputs are on an idle GPU.
    pub(super) fn bringing(&self, gpu: GpuIndex, request: &WaitingRequest) -> Duration {
        let moved = self.fleet.move_time(self.inputs(request), gpu);
        moved.saturating_add(self.fleet.swap_time(self.models, gpu, request.model))
    }
}

/// Origin of a request that enters a policy's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueEntry {
    /// The request is new.
    New,
    /// The request returned from a GPU.
    Back,
}

/// Path over which a model is copied to a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CopyOrigin {
    /// From host memory.
    Host,
    /// From a GPU that holds the model, over a direct link of this rate.
    Peer { holder: GpuIndex, rate: BytesPerSec },
}

/// Decision about a request. The policy no longer stores the request, except after `Reserve`.
#[derive(Debug)]
pub(super) enum DispatchDecision {
    /// Assign the request to a seat; behind the running request if the seat is busy.
    Assign {
        request: WaitingRequest,
        seat: SeatIndex,
        /// Source of the model, unless resident.
        over: CopyOrigin,
    },
    /// The request has to wait for this GPU alone, in the own queue that the policy keeps for the
    /// GPU.
    Reserve { request: WaitingRequest, gpu: GpuIndex },
    /// No GPU of this node can ever run the request.
    Refuse { request: WaitingRequest, reason: Reason },
}

/// Counters of a dispatcher (L17).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DispatchStats {
    /// Requests assigned to a GPU that held their model.
    pub hits: u64,
    /// Requests assigned to a GPU that did not hold their model.
    pub misses: u64,
    /// Misses while another GPU held the model.
    pub false_misses: u64,
    /// Requests bound to a busy GPU.
    pub reserved: u64,
    /// Number of times that a request left the queue before older requests that fit the same GPUs.
    pub overtakings: u64,
    /// Number of times that the most overtaken request was overtaken by a younger request that left
    /// the queue.
    pub overtaken_max: u64,
    /// Maximum number of overtakings by the LALB paper's count, in which each fruitless
    /// search for a hit also counts once.
    pub visits_max: u64,
    /// Number of GPUs that hold, or are loading, the model with most assigned requests.
    pub top_copies: usize,
    /// Outcomes of prewarming (D29).
    pub prewarms: PrewarmCounts,
    /// Share of required request counts that is prioritised (A.3), by priority level.
    pub alphas: Alphas,
    /// Errors of the cost model (L15).
    pub errors: Vec<PredictionError>,
    /// Mean error, in percent, of the regression of run time over rows at batch sizes left out of
    /// the fit (L15). `None` until three batch sizes of a model ran.
    pub held_out: Option<f64>,
}

/// A dispatch policy.
pub(super) trait DispatchPolicy: fmt::Debug {
    /// Adds a request to the queue.
    fn push(&mut self, request: WaitingRequest, entry: QueueEntry);

    /// Removes a request that its client withdrew.
    fn remove(&mut self, request: &WaitingRequest);

    /// Returns the next decision that can be carried out now.
    fn decide(&mut self, view: &DispatchView<'_>) -> Option<DispatchDecision>;

    /// Returns whether requests on busy GPUs may be recalled.
    fn recalls(&self) -> bool {
        false
    }

    /// Returns when a seat is expected to finish its running request and the first `ahead` requests
    /// behind it.
    fn expected_turn(&self, view: &DispatchView<'_>, seat: SeatIndex, ahead: usize) -> ExpectedFinish {
        view.fleet.expected_free(view.models, view.now, seat, ahead)
    }

    /// Returns the time at which a seat's running request is overdue, so that recalls should be
    /// considered again.
    fn overdue_at(&self, view: &DispatchView<'_>, seat: SeatIndex) -> Option<Timestamp> {
        match view.fleet.expected_free(view.models, view.now, seat, 0) {
            ExpectedFinish::At(at) => Some(at + RECALL_COST),
            ExpectedFinish::Unknown => None,
        }
    }

    /// Returns the wait that a request should accept rather than have its model and inputs brought
    /// to this idle GPU.
    fn bringing(&self, view: &DispatchView<'_>, gpu: GpuIndex, request: &WaitingRequest) -> Duration {
        view.bringing(gpu, request)
    }

    /// Notes that a seat has capacity for another request.
    fn on_seat_freed(&mut self, _seat: SeatIndex, _gpu: GpuIndex) {}

    /// Notes that a GPU is lost: requests that waited for this GPU alone rejoin the common queue.
    /// Returns these requests.
    fn on_gpu_lost(&mut self, _gpu: GpuIndex) -> Vec<WaitingRequest> {
        Vec::new()
    }

    /// Returns whether the policy needs objectives and scores.
    fn uses_scores(&self) -> bool {
        false
    }

    fn objective(&mut self, _function: FunctionIndex, _objective: Option<LatencyObjective>) {}

    fn score(&mut self, _models: &ModelTable, _function: FunctionIndex, _counts: SloCounts) {}

    fn forget(&mut self, _function: FunctionIndex) {}

    /// Notes that time has passed.
    fn tick(&mut self, _now: Timestamp, _models: &ModelTable) {}

    fn next_wake(&self) -> Option<Timestamp> {
        None
    }

    /// Returns the share of required request counts that is prioritised. `None` without such a
    /// share, or without a function with an objective.
    fn alpha(&self) -> Option<Alpha> {
        None
    }

    /// Begins with the alpha of an earlier registration at a priority.
    fn begin_with(&mut self, _priority: Priority, _alpha: Alpha) {}

    /// Adds the policy's own counters.
    fn add_stats(&self, _stats: &mut DispatchStats) {}

    /// Asserts that lookups through the indexes agree with a full scan, for requests of each of
    /// these models.
    #[cfg(test)]
    fn check(&self, _view: &DispatchView<'_>, _models: &[super::models::ModelSlot]) {}
}
