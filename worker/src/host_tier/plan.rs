//! The plan of the host tier: decides which artifacts to prepare, install and drop, so that this worker
//! serves the desired functions. The code is pure: callers pass `now`, carry out the [`Action`]s and
//! report back with [`Event`]s.
//!
//! ```text
//! Desired, Prepared, Failed, Installed, ModelsAwaited, Hinted, RoomMade, Tick
//!                            ->  Prepare, Install, Arrived, MakeRoom, Retire, Release, Refuse, Drop
//! ```
//!
//! A model is identified by its digest, and all functions with that digest share the model. The model is
//! prepared once, and dropped with its last function. A budget bounds host memory.
//!
//! If a model does not fit, idle models are evicted, and the caller chooses which. The files of evicted
//! models stay on the disk, and their functions stay ready: a request for such a function loads the model
//! again (a cold start). A model that is larger than the budget fails with a message, and never evicts
//! others.
//!
//! Prewarming (D29) loads an evicted model only if no other model is to be loaded, and if idle models
//! that are neither pinned nor kept warm make enough room. Otherwise the model stays on the disk.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_core::backoff::BackoffDelays;
use millrace_types::{Bytes, Digest, RevisionKey, Timestamp};

pub use self::protocol::{Action, DesiredFunction, Event, PrepareFailure, RoomPurpose, ServingPhase};

mod protocol;

/// Maximum number of concurrent preparations. Each holds its whole file in memory while it compiles.
pub const PREPARATIONS_MAX: usize = 2;
/// The wait after the first failed preparation.
const RETRY_BASE: Duration = Duration::from_millis(200);
/// The longest wait between two preparations of a model.
const RETRY_CEILING: Duration = Duration::from_secs(15);

/// The host tier's plan.
#[derive(Debug)]
pub struct HostTierPlan {
    budget: Bytes,
    functions: BTreeMap<RevisionKey, PlannedFunction>,
    models: BTreeMap<Digest, PlannedModel>,
    waits: BackoffDelays,
    arrivals: u64,
    /// The model for which room is being made, until [`Event::RoomMade`].
    making_room: Option<Digest>,
    /// The models for which no room could be made. Any event other than [`Event::RoomMade`] clears the set.
    stuck: BTreeSet<Digest>,
    /// The model to prewarm, until its preparation starts or a request waits for it.
    hinted: Option<Digest>,
}

#[derive(Debug)]
struct PlannedFunction {
    digest: Digest,
    install: InstallState,
}

#[derive(Debug, PartialEq)]
enum InstallState {
    Waiting,
    Asked,
    Done,
    /// The function's model is only on the disk. The function is installed when the model is loaded.
    Asleep,
    Refused(String),
}

#[derive(Debug)]
struct PlannedModel {
    /// The rank in the order in which models were asked for, which is the order of preparation.
    arrival: u64,
    artifact_bytes: Bytes,
    /// The host memory to reserve: the size of the file, until the prepared size is known.
    needs: Bytes,
    failures: u32,
    state: ModelState,
}

#[derive(Debug, PartialEq)]
enum ModelState {
    Queued,
    NoMemory(String),
    Preparing,
    Waiting {
        until: Timestamp,
        why: ServingPhase,
    },
    Ready {
        bytes: Bytes,
    },
    /// The model was evicted, and is loaded again when a request needs it.
    Evicted,
    Broken(String),
}

impl HostTierPlan {
    /// Returns the plan of an empty host tier of at most `budget` bytes. The seed is for the jitter of
    /// retries.
    #[must_use]
    pub fn new(budget: Bytes, seed: u64) -> Self {
        Self {
            budget,
            functions: BTreeMap::new(),
            models: BTreeMap::new(),
            waits: BackoffDelays::new(RETRY_BASE, RETRY_CEILING, seed),
            arrivals: 0,
            making_room: None,
            stuck: BTreeSet::new(),
            hinted: None,
        }
    }

    /// Handles an event and returns the actions to carry out, in order.
    pub fn on_event(&mut self, event: Event, now: Timestamp) -> Vec<Action> {
        let mut actions = Vec::new();
        if !matches!(event, Event::RoomMade(_)) {
            self.stuck.clear();
        }
        match event {
            Event::Desired(wanted) => self.desire(wanted, &mut actions),
            Event::Prepared { digest, bytes } => self.prepared(digest, bytes, &mut actions),
            Event::Failed { digest, failure } => self.failed(digest, failure, now, &mut actions),
            Event::Installed { key, outcome } => self.installed(&key, outcome),
            Event::ModelsAwaited(models) => models.into_iter().for_each(|digest| self.asked(digest)),
            Event::Hinted(digest) => self.hinted(digest),
            Event::RoomMade(gone) => {
                let asked_for = self.making_room.take();
                // Without an eviction, the same request for room would fail again until something changes.
                self.stuck.extend(asked_for.filter(|_| gone.is_empty()));
                gone.into_iter().for_each(|digest| self.left(digest, &mut actions));
            }
            Event::Tick => {}
        }
        self.drop_unwanted(&mut actions);
        self.start_preparations(now, &mut actions);
        actions
    }

    /// Returns the time of the next [`Event::Tick`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Timestamp> {
        let waiting = |model: &PlannedModel| match model.state {
            ModelState::Waiting { until, .. } => Some(until),
            _ => None,
        };
        self.models.values().filter_map(waiting).min()
    }

    /// Returns the phase of every function, in key order.
    #[must_use]
    pub fn phases(&self) -> Vec<(RevisionKey, ServingPhase)> {
        self.functions.iter().map(|(key, function)| (key.clone(), self.phase(function))).collect()
    }

    /// Returns the models in host memory and their sizes.
    #[must_use]
    pub fn resident(&self) -> Vec<(Digest, Bytes)> {
        let ready = |(digest, model): (&Digest, &PlannedModel)| match model.state {
            ModelState::Ready { bytes } => Some((*digest, bytes)),
            _ => None,
        };
        self.models.iter().filter_map(ready).collect()
    }

    fn phase(&self, function: &PlannedFunction) -> ServingPhase {
        if let InstallState::Refused(why) = &function.install {
            return ServingPhase::Failed(why.clone());
        }
        match self.models.get(&function.digest).map(|model| &model.state) {
            Some(ModelState::Ready { .. }) if function.install == InstallState::Done => ServingPhase::Ready,
            Some(ModelState::Broken(why)) => ServingPhase::Failed(why.clone()),
            // Once evicted, the function stays ready while its model waits for memory or a retry: its
            // requests wait at the gate. Only a model that is broken or never fits fails the function.
            Some(ModelState::NoMemory(why)) if self.never_fits(function.digest) => {
                ServingPhase::Failed(why.clone())
            }
            _ if function.install == InstallState::Asleep => ServingPhase::Ready,
            Some(ModelState::NoMemory(why)) => ServingPhase::Preparing(why.clone()),
            Some(ModelState::Waiting { why, .. }) => why.clone(),
            _ => ServingPhase::Preparing(String::new()),
        }
    }

    fn desire(&mut self, wanted: Vec<DesiredFunction>, actions: &mut Vec<Action>) {
        let wanted: BTreeMap<RevisionKey, DesiredFunction> =
            wanted.into_iter().map(|wanted| (wanted.key.clone(), wanted)).collect();
        self.functions.retain(|key, function| {
            let stays = wanted.get(key).is_some_and(|wanted| wanted.digest == function.digest);
            if !stays && matches!(function.install, InstallState::Asked | InstallState::Done) {
                actions.push(Action::Retire { key: key.clone() });
            }
            stays
        });
        for (key, DesiredFunction { digest, artifact_bytes, .. }) in wanted {
            let arrivals = &mut self.arrivals;
            let model = self.models.entry(digest).or_insert_with(|| {
                *arrivals += 1;
                PlannedModel {
                    arrival: *arrivals,
                    artifact_bytes,
                    needs: artifact_bytes,
                    failures: 0,
                    state: ModelState::Queued,
                }
            });
            let install = match model.state {
                ModelState::Ready { .. } => InstallState::Asked,
                ModelState::Evicted => InstallState::Asleep,
                _ => InstallState::Waiting,
            };
            self.functions.entry(key.clone()).or_insert_with(|| {
                if install == InstallState::Asked {
                    actions.push(Action::Install { key, digest });
                }
                PlannedFunction { digest, install }
            });
        }
    }

    fn prepared(&mut self, digest: Digest, bytes: Bytes, actions: &mut Vec<Action>) {
        let others = self.used().saturating_sub(self.reserved(digest));
        let Some(model) = self.models.get_mut(&digest) else { return };
        model.needs = bytes;
        if others + bytes > self.budget {
            // The prepared size is larger than the reservation. The model is queued again with its real
            // size.
            model.state = ModelState::Queued;
            actions.push(Action::Release { digest });
            return;
        }
        model.state = ModelState::Ready { bytes };
        model.failures = 0;
        for (key, function) in self.functions.iter_mut().filter(|(_, function)| function.digest == digest) {
            function.install = InstallState::Asked;
            actions.push(Action::Install { key: key.clone(), digest });
        }
        if self.functions.values().any(|function| function.digest == digest) {
            actions.push(Action::Arrived { digest });
        }
    }

    /// Queues an evicted model for prewarming, if no other model is to be loaded.
    fn hinted(&mut self, digest: Digest) {
        let is_to_come = |model: &PlannedModel| {
            matches!(model.state, ModelState::Queued | ModelState::NoMemory(_) | ModelState::Preparing)
        };
        let has_left = self.models.get(&digest).is_some_and(|model| model.state == ModelState::Evicted);
        if has_left && !self.models.values().any(is_to_come) {
            self.asked(digest);
            self.hinted = Some(digest);
        }
    }

    /// Queues an evicted model that requests wait for. Models are loaded in the order of these calls.
    fn asked(&mut self, digest: Digest) {
        self.hinted = self.hinted.filter(|&hinted| hinted != digest);
        if let Some(model) = self.models.get_mut(&digest).filter(|model| model.state == ModelState::Evicted) {
            self.arrivals += 1;
            model.arrival = self.arrivals;
            model.state = ModelState::Queued;
        }
    }

    /// Marks a model as evicted, removes its functions from the node and releases its memory.
    fn left(&mut self, digest: Digest, actions: &mut Vec<Action>) {
        let ready = |model: &&mut PlannedModel| matches!(model.state, ModelState::Ready { .. });
        let Some(model) = self.models.get_mut(&digest).filter(ready) else { return };
        model.state = ModelState::Evicted;
        for (key, function) in self.functions.iter_mut().filter(|(_, function)| function.digest == digest) {
            if matches!(function.install, InstallState::Asked | InstallState::Done) {
                function.install = InstallState::Asleep;
                actions.push(Action::Retire { key: key.clone() });
            }
        }
        actions.push(Action::Release { digest });
    }

    fn failed(&mut self, digest: Digest, failure: PrepareFailure, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(model) = self.models.get_mut(&digest) else { return };
        let why = match failure {
            PrepareFailure::Permanent(why) => {
                actions.push(Action::Refuse { digest, why: why.clone() });
                model.state = ModelState::Broken(why);
                return;
            }
            PrepareFailure::Unavailable(why) => ServingPhase::Preparing(why),
            PrepareFailure::Transient(why) => ServingPhase::Failed(why),
        };
        let until = now + self.waits.after(model.failures);
        model.failures = model.failures.saturating_add(1);
        model.state = ModelState::Waiting { until, why };
    }

    fn installed(&mut self, key: &RevisionKey, outcome: Result<(), String>) {
        // The outcome is ignored if the function was retired or evicted meanwhile.
        if let Some(function) =
            self.functions.get_mut(key).filter(|function| function.install == InstallState::Asked)
        {
            function.install = outcome.map_or_else(InstallState::Refused, |()| InstallState::Done);
        }
    }

    /// Drops models that no function uses. A model that is being prepared stays until its preparation
    /// reports, because the preparation cannot be cancelled.
    fn drop_unwanted(&mut self, actions: &mut Vec<Action>) {
        let functions = &self.functions;
        self.models.retain(|digest, model| {
            let wanted = functions.values().any(|function| function.digest == *digest);
            let stays = wanted || model.state == ModelState::Preparing;
            if !stays {
                actions.push(Action::Drop { digest: *digest });
            }
            stays
        });
    }

    fn start_preparations(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let mut candidates: Vec<(u64, Digest)> = Vec::new();
        for (digest, model) in &mut self.models {
            if matches!(model.state, ModelState::Waiting { until, .. } if until <= now) {
                model.state = ModelState::Queued;
            }
            if matches!(model.state, ModelState::Queued | ModelState::NoMemory(_)) {
                candidates.push((model.arrival, *digest));
            }
        }
        candidates.sort_unstable();
        let mut running = self.models.values().filter(|model| model.state == ModelState::Preparing).count();
        let budget = self.budget;
        let ready: Bytes = self.resident().iter().map(|(_, bytes)| *bytes).sum();
        for (_, digest) in candidates {
            let used = self.used();
            let never_fits = self.never_fits(digest);
            let Some(model) = self.models.get_mut(&digest) else { continue };
            if never_fits {
                let why = too_large(model.needs, budget);
                if model.state != ModelState::NoMemory(why.clone()) {
                    actions.push(Action::Refuse { digest, why: why.clone() });
                }
                model.state = ModelState::NoMemory(why);
            } else if used + model.needs > budget {
                let lacking = used + model.needs - budget;
                let asker =
                    if self.hinted == Some(digest) { RoomPurpose::Hint } else { RoomPurpose::Request };
                if asker == RoomPurpose::Hint && (lacking > ready || self.stuck.contains(&digest)) {
                    model.state = ModelState::Evicted;
                    self.hinted = None;
                    continue;
                }
                model.state = ModelState::NoMemory(no_memory(model.needs, used, budget));
                // Only models in host memory can be evicted. If these are not enough, the model waits for
                // the preparations under way.
                if lacking <= ready && !self.stuck.contains(&digest) {
                    if self.making_room.is_none() {
                        self.making_room = Some(digest);
                        actions.push(Action::MakeRoom { bytes: lacking, asker });
                    }
                    // Later models must not use the room that is made for this model.
                    break;
                }
            } else if running < PREPARATIONS_MAX {
                running += 1;
                model.state = ModelState::Preparing;
                self.hinted = self.hinted.filter(|&hinted| hinted != digest);
                actions.push(Action::Prepare { digest, artifact_bytes: model.artifact_bytes });
            } else {
                model.state = ModelState::Queued;
            }
        }
    }

    fn never_fits(&self, digest: Digest) -> bool {
        self.models.get(&digest).is_some_and(|model| model.needs > self.budget)
    }

    fn used(&self) -> Bytes {
        self.models.keys().map(|digest| self.reserved(*digest)).sum()
    }

    fn reserved(&self, digest: Digest) -> Bytes {
        match self.models.get(&digest) {
            Some(PlannedModel { state: ModelState::Ready { bytes }, .. }) => *bytes,
            Some(PlannedModel { state: ModelState::Preparing, needs, .. }) => *needs,
            _ => Bytes::ZERO,
        }
    }
}

fn no_memory(needed: Bytes, used: Bytes, budget: Bytes) -> String {
    format!(
        "the model needs {needed} of host memory, and {used} of this worker's {budget} are in use: \
         wait until other models are idle, give the worker more host memory, or add a worker"
    )
}

fn too_large(needed: Bytes, budget: Bytes) -> String {
    format!(
        "the model needs {needed} of host memory and this worker has {budget} in all: give the worker \
         more (--host-memory), use a smaller model, or add a larger worker"
    )
}

#[cfg(test)]
mod tests;
