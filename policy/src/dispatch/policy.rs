//! The seam between the one code path of dispatch and the ways to decide. A policy keeps the
//! requests that wait, in its own order, and says which goes where next; everything else (who may
//! wait at all, what becomes of a request that lost its GPU, asking requests back) is the same for
//! all and in [`Dispatch`](super::Dispatch).

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use millrace_types::{BytesPerSec, GpuIndex, Reason, SloCounts, Timestamp};

use super::config::Config;
use super::cost::PredictionError;
use super::fleet::{Fleet, IdleOrder};
use super::gpus::Expected;
use super::inputs::Inputs;
use super::likely::Prewarms;
use super::models::Models;
use super::priority::Prioritised;
use super::protocol::Objective;
use super::queue::Waiting;
use super::{PolicyConfig, RECALL_COST, arrival, bound, lalb, torpor, unified};
use crate::ids::{FunctionIndex, RequestKey};

/// What a policy sees when it decides.
pub(super) struct View<'a> {
    pub(super) now: Timestamp,
    pub(super) fleet: &'a Fleet,
    pub(super) models: &'a Models,
    /// Of the requests that have any on GPUs.
    pub(super) inputs: &'a BTreeMap<RequestKey, Inputs>,
}

impl View<'_> {
    /// Where a request's data is. Costs nothing where nobody's is on a GPU.
    pub(super) fn inputs(&self, request: &Waiting) -> &Inputs {
        self.inputs.get(&request.key).unwrap_or(&Inputs::NONE)
    }

    /// What it takes until a request's model and data are on an idle GPU.
    pub(super) fn bringing(&self, gpu: GpuIndex, request: &Waiting) -> Duration {
        let moved = self.fleet.move_time(self.inputs(request), gpu);
        moved.saturating_add(self.fleet.swap_time(self.models, gpu, request.model))
    }
}

/// How a request came to wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// It is new.
    New,
    /// It comes back from a GPU.
    Back,
}

/// Where a model is copied from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    Host,
    /// A GPU that holds it, over a direct link of this rate.
    Peer {
        holder: GpuIndex,
        rate: BytesPerSec,
    },
}

/// What a policy wants done with a request, which it does not keep any more.
#[derive(Debug)]
pub(super) enum Decision {
    /// Give it to a GPU, ahead of its turn if that is at work.
    Assign {
        request: Waiting,
        gpu: GpuIndex,
        /// Where its model comes from, if it is not there.
        over: Route,
    },
    /// It has to wait for this GPU alone: the policy keeps it in that GPU's own queue.
    Reserve { request: Waiting, gpu: GpuIndex },
    /// Nothing will ever run it here.
    Refuse { request: Waiting, reason: Reason },
}

/// What policies count (L17).
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Stats {
    /// Requests given to a GPU that held their model.
    pub hits: u64,
    /// And to one that did not.
    pub misses: u64,
    /// Of those, while another GPU held it.
    pub false_misses: u64,
    /// Requests bound to a busy GPU.
    pub reserved: u64,
    /// Times a request left the queue before older ones that fit the same GPUs.
    pub passed: u64,
    /// Times the most overtaken request was overtaken: by another that left the queue before it.
    pub overtaken_max: u64,
    /// The same as the LALB paper counts: also once for every look for a hit that found none.
    pub visits_max: u64,
    /// GPUs that hold the model that was asked for most, or to which it is on its way.
    pub top_copies: usize,
    /// What became of models that were likely to be asked for (D29).
    pub prewarms: Prewarms,
    /// The share of required request counts that is prioritised (A.3).
    pub alpha: Option<f64>,
    /// How wrong the cost model was (L15).
    pub errors: Vec<PredictionError>,
    /// How wrong the regression of runs over their rows is about sizes that it was drawn without, in
    /// percent on average (L15). None before three sizes of some model ran.
    pub held_out: Option<f64>,
}

/// A way to decide.
pub(super) trait Policy: fmt::Debug {
    /// Takes a request in.
    fn push(&mut self, request: Waiting, entry: Entry);

    /// Lets a request go that nobody waits for any more.
    fn remove(&mut self, request: &Waiting);

    /// The next decision that can be carried out now.
    fn decide(&mut self, view: &View<'_>) -> Option<Decision>;

    /// Whether requests that were handed ahead may be asked back.
    fn recalls(&self) -> bool {
        false
    }

    /// When the turn comes of the request behind so many others that a GPU was handed ahead.
    fn turn(&self, view: &View<'_>, gpu: GpuIndex, ahead: usize) -> Expected {
        view.fleet.expected_free(view.models, view.now, gpu, ahead)
    }

    /// When what a GPU runs has taken so long that the turns behind it should be looked at again.
    fn late_at(&self, view: &View<'_>, gpu: GpuIndex) -> Option<Timestamp> {
        match view.fleet.expected_free(view.models, view.now, gpu, 0) {
            Expected::At(at) => Some(at + RECALL_COST),
            Expected::Unknown => None,
        }
    }

    /// What it takes for a request to wait rather than have its model and data brought to this idle GPU.
    fn bringing(&self, view: &View<'_>, gpu: GpuIndex, request: &Waiting) -> Duration {
        view.bringing(gpu, request)
    }

    /// A GPU has room for another request.
    fn freed(&mut self, _gpu: GpuIndex) {}

    /// A GPU is lost: what waited for it alone waits with the others again. Gives those.
    fn lost(&mut self, _gpu: GpuIndex) -> Vec<Waiting> {
        Vec::new()
    }

    /// Whether it wants to be told objectives and scores.
    fn scores(&self) -> bool {
        false
    }

    fn objective(&mut self, _function: FunctionIndex, _objective: Option<Objective>) {}

    fn score(&mut self, _models: &Models, _function: FunctionIndex, _counts: SloCounts) {}

    fn forget(&mut self, _function: FunctionIndex) {}

    /// Time has passed.
    fn tick(&mut self, _now: Timestamp, _models: &Models) {}

    fn next_wake(&self) -> Option<Timestamp> {
        None
    }

    /// Adds what it counts itself.
    fn count(&self, _stats: &mut Stats) {}

    /// Asserts that what it finds by its indexes is what looking at everything finds, for requests of
    /// each of these models.
    #[cfg(test)]
    fn check(&self, _view: &View<'_>, _models: &[super::models::Slot]) {}
}

/// A policy and the order in which it wants the idle GPUs.
pub(super) fn policy(config: &Config, ranks: usize) -> (Box<dyn Policy>, IdleOrder) {
    let order = match config.policy {
        PolicyConfig::Fifo | PolicyConfig::Bound(_) => IdleOrder::Emptiest,
        PolicyConfig::Lb => IdleOrder::Longest,
        PolicyConfig::Lalb { .. } => IdleOrder::MostUsed,
        PolicyConfig::Torpor(_) => IdleOrder::Calmest,
        PolicyConfig::Unified(_) => IdleOrder::Coldest,
    };
    if let PolicyConfig::Bound(bound) = config.policy {
        return (Box::new(bound::Early::new(bound, &config.gpus)), order);
    }
    let (choice, gpus, seed) = (config.policy, config.gpus.len(), config.seed);
    let of_level = move || -> Box<dyn Policy> {
        match choice {
            PolicyConfig::Fifo | PolicyConfig::Bound(_) => Box::new(arrival::Fifo::new(ranks)),
            PolicyConfig::Lb => Box::new(arrival::Lb::new(ranks)),
            PolicyConfig::Lalb { overtakes_max } => Box::new(lalb::Lalb::new(ranks, gpus, overtakes_max)),
            PolicyConfig::Torpor(config) => Box::new(torpor::Torpor::new(config, ranks, seed)),
            PolicyConfig::Unified(config) => Box::new(unified::Unified::new(config, ranks)),
        }
    };
    (Box::new(Prioritised::new(Box::new(of_level))), order)
}
