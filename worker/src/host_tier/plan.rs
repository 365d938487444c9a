//! Decides what the host tier holds: which artifacts to prepare, install and drop so that this
//! worker serves what it should. Pure: callers pass `now`, carry the [`Action`]s out and report
//! back with [`Event`]s.
//!
//! ```text
//! Desired, Prepared, Failed, Installed, Tick  ->  Prepare, Install, Retire, Drop
//! ```
//!
//! A model is known by its digest and shared by every function that names it: prepared once,
//! dropped when the last of them goes. Host memory is bounded by a budget; a model that does not
//! fit fails with a message and is tried again when another leaves.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_policy::backoff::Waits;
use millrace_types::{Bytes, Digest, RevisionKey, Timestamp};

/// Artifacts fetched and compiled at one time: each holds its file in memory while it is compiled.
pub const PREPARATIONS_MAX: usize = 2;
/// The first wait after a failed fetch.
const RETRY_BASE: Duration = Duration::from_millis(200);
/// The longest wait between fetches.
const RETRY_CEILING: Duration = Duration::from_secs(15);

/// A function this worker should serve, as far as the host tier cares.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// The function.
    pub key: RevisionKey,
    /// Its model.
    pub digest: Digest,
    /// The size of the model's file: what is reserved until the prepared size is known.
    pub artifact_bytes: Bytes,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// Everything this worker should serve now.
    Desired(Vec<Wanted>),
    /// A model is in host memory and takes this much of it.
    Prepared {
        /// The model.
        digest: Digest,
        /// Its weights and graph.
        bytes: Bytes,
    },
    /// A model could not be prepared.
    Failed {
        /// The model.
        digest: Digest,
        /// Why, and what that means for another try.
        failure: Failure,
    },
    /// The node took a function, or refused it with a message.
    Installed {
        /// The function.
        key: RevisionKey,
        /// The refusal.
        outcome: Result<(), String>,
    },
    /// Time passed: sent when [`Plan::wake_at`] says so.
    Tick,
}

/// Why a model could not be prepared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Nobody could be asked: tried again, and no fault of the model's.
    Unavailable(String),
    /// What came was wrong, or the disk refused: reported, and tried again.
    Transient(String),
    /// The model itself is no good: reported, and never tried again.
    Permanent(String),
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// Bring a model into host memory: from the local file, else from a controller.
    Prepare {
        /// The model.
        digest: Digest,
        /// The size of its file.
        artifact_bytes: Bytes,
    },
    /// Hand a function and its model to the node.
    Install {
        /// The function.
        key: RevisionKey,
        /// Its model, prepared.
        digest: Digest,
    },
    /// Take a function from the node.
    Retire {
        /// The function.
        key: RevisionKey,
    },
    /// Let go of a model's memory and delete its file: no function wants it.
    Drop {
        /// The model.
        digest: Digest,
    },
    /// Let go of a model's memory only: it did not fit.
    Release {
        /// The model.
        digest: Digest,
    },
}

/// How far a function is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Phase {
    /// On its way; the message says what it waits for, if that is not obvious.
    Preparing(String),
    /// Served.
    Ready,
    /// Not served, and why.
    Failed(String),
}

/// The host tier's plan.
#[derive(Debug)]
pub struct Plan {
    budget: Bytes,
    functions: BTreeMap<RevisionKey, Function>,
    models: BTreeMap<Digest, Model>,
    waits: Waits,
    arrivals: u64,
}

#[derive(Debug)]
struct Function {
    digest: Digest,
    install: Install,
}

#[derive(Debug, PartialEq)]
enum Install {
    Waiting,
    Asked,
    Done,
    Refused(String),
}

#[derive(Debug)]
struct Model {
    // Order of arrival: the first asked for is the first prepared.
    arrival: u64,
    artifact_bytes: Bytes,
    failures: u32,
    state: State,
}

#[derive(Debug, PartialEq)]
enum State {
    Queued,
    NoMemory(String),
    Preparing,
    Waiting { until: Timestamp, why: Phase },
    Ready { bytes: Bytes },
    Broken(String),
}

impl Plan {
    /// An empty tier of at most `budget` bytes. The seed spreads retries.
    #[must_use]
    pub fn new(budget: Bytes, seed: u64) -> Self {
        Self {
            budget,
            functions: BTreeMap::new(),
            models: BTreeMap::new(),
            waits: Waits::new(RETRY_BASE, RETRY_CEILING, seed),
            arrivals: 0,
        }
    }

    /// Takes an event and says what to do, in order.
    pub fn on_event(&mut self, event: Event, now: Timestamp) -> Vec<Action> {
        let mut actions = Vec::new();
        match event {
            Event::Desired(wanted) => self.desire(wanted, &mut actions),
            Event::Prepared { digest, bytes } => self.prepared(digest, bytes, &mut actions),
            Event::Failed { digest, failure } => self.failed(digest, failure, now),
            Event::Installed { key, outcome } => self.installed(&key, outcome),
            Event::Tick => {}
        }
        self.drop_unwanted(&mut actions);
        self.start_preparations(now, &mut actions);
        actions
    }

    /// When to send the next [`Event::Tick`].
    #[must_use]
    pub fn wake_at(&self) -> Option<Timestamp> {
        let waiting = |model: &Model| match model.state {
            State::Waiting { until, .. } => Some(until),
            _ => None,
        };
        self.models.values().filter_map(waiting).min()
    }

    /// Every function's phase, in key order.
    #[must_use]
    pub fn phases(&self) -> Vec<(RevisionKey, Phase)> {
        self.functions.iter().map(|(key, function)| (key.clone(), self.phase(function))).collect()
    }

    /// The models in host memory and their sizes.
    #[must_use]
    pub fn resident(&self) -> Vec<(Digest, Bytes)> {
        let ready = |(digest, model): (&Digest, &Model)| match model.state {
            State::Ready { bytes } => Some((*digest, bytes)),
            _ => None,
        };
        self.models.iter().filter_map(ready).collect()
    }

    fn phase(&self, function: &Function) -> Phase {
        if let Install::Refused(why) = &function.install {
            return Phase::Failed(why.clone());
        }
        match self.models.get(&function.digest).map(|model| &model.state) {
            Some(State::Ready { .. }) if function.install == Install::Done => Phase::Ready,
            Some(State::NoMemory(why) | State::Broken(why)) => Phase::Failed(why.clone()),
            Some(State::Waiting { why, .. }) => why.clone(),
            _ => Phase::Preparing(String::new()),
        }
    }

    fn desire(&mut self, wanted: Vec<Wanted>, actions: &mut Vec<Action>) {
        let wanted: BTreeMap<RevisionKey, Wanted> =
            wanted.into_iter().map(|wanted| (wanted.key.clone(), wanted)).collect();
        self.functions.retain(|key, function| {
            let stays = wanted.get(key).is_some_and(|wanted| wanted.digest == function.digest);
            if !stays && matches!(function.install, Install::Asked | Install::Done) {
                actions.push(Action::Retire { key: key.clone() });
            }
            stays
        });
        for (key, Wanted { digest, artifact_bytes, .. }) in wanted {
            let arrivals = &mut self.arrivals;
            let model = self.models.entry(digest).or_insert_with(|| {
                *arrivals += 1;
                Model { arrival: *arrivals, artifact_bytes, failures: 0, state: State::Queued }
            });
            let ready = matches!(model.state, State::Ready { .. });
            self.functions.entry(key.clone()).or_insert_with(|| {
                if ready {
                    actions.push(Action::Install { key, digest });
                }
                Function { digest, install: if ready { Install::Asked } else { Install::Waiting } }
            });
        }
    }

    fn prepared(&mut self, digest: Digest, bytes: Bytes, actions: &mut Vec<Action>) {
        let others = self.used().saturating_sub(self.reserved(digest));
        let Some(model) = self.models.get_mut(&digest) else { return };
        if others + bytes > self.budget {
            model.artifact_bytes = model.artifact_bytes.max(bytes);
            model.state = State::NoMemory(no_memory(bytes, others, self.budget));
            actions.push(Action::Release { digest });
            return;
        }
        model.state = State::Ready { bytes };
        model.failures = 0;
        for (key, function) in self.functions.iter_mut().filter(|(_, function)| function.digest == digest) {
            function.install = Install::Asked;
            actions.push(Action::Install { key: key.clone(), digest });
        }
    }

    fn failed(&mut self, digest: Digest, failure: Failure, now: Timestamp) {
        let Some(model) = self.models.get_mut(&digest) else { return };
        let why = match failure {
            Failure::Permanent(why) => {
                model.state = State::Broken(why);
                return;
            }
            Failure::Unavailable(why) => Phase::Preparing(why),
            Failure::Transient(why) => Phase::Failed(why),
        };
        let until = now + self.waits.after(model.failures);
        model.failures = model.failures.saturating_add(1);
        model.state = State::Waiting { until, why };
    }

    fn installed(&mut self, key: &RevisionKey, outcome: Result<(), String>) {
        // An answer to an install that was retired meanwhile finds nobody waiting for it.
        if let Some(function) =
            self.functions.get_mut(key).filter(|function| function.install == Install::Asked)
        {
            function.install = outcome.map_or_else(Install::Refused, |()| Install::Done);
        }
    }

    /// One that is being prepared stays until its preparation reports: it cannot be called back.
    fn drop_unwanted(&mut self, actions: &mut Vec<Action>) {
        let functions = &self.functions;
        self.models.retain(|digest, model| {
            let wanted = functions.values().any(|function| function.digest == *digest);
            let stays = wanted || model.state == State::Preparing;
            if !stays {
                actions.push(Action::Drop { digest: *digest });
            }
            stays
        });
    }

    fn start_preparations(&mut self, now: Timestamp, actions: &mut Vec<Action>) {
        let mut candidates: Vec<(u64, Digest)> = Vec::new();
        for (digest, model) in &mut self.models {
            if matches!(model.state, State::Waiting { until, .. } if until <= now) {
                model.state = State::Queued;
            }
            if matches!(model.state, State::Queued | State::NoMemory(_)) {
                candidates.push((model.arrival, *digest));
            }
        }
        candidates.sort_unstable();
        let mut running = self.models.values().filter(|model| model.state == State::Preparing).count();
        for (_, digest) in candidates {
            let used = self.used();
            let Some(model) = self.models.get_mut(&digest) else { continue };
            if used + model.artifact_bytes > self.budget {
                model.state = State::NoMemory(no_memory(model.artifact_bytes, used, self.budget));
            } else if running < PREPARATIONS_MAX {
                running += 1;
                model.state = State::Preparing;
                actions.push(Action::Prepare { digest, artifact_bytes: model.artifact_bytes });
            } else {
                model.state = State::Queued;
            }
        }
    }

    fn used(&self) -> Bytes {
        self.models.keys().map(|digest| self.reserved(*digest)).sum()
    }

    fn reserved(&self, digest: Digest) -> Bytes {
        match self.models.get(&digest) {
            Some(Model { state: State::Ready { bytes }, .. }) => *bytes,
            Some(Model { state: State::Preparing, artifact_bytes, .. }) => *artifact_bytes,
            _ => Bytes::ZERO,
        }
    }
}

fn no_memory(needed: Bytes, used: Bytes, budget: Bytes) -> String {
    format!(
        "the model needs {needed} of host memory, and {used} of this worker's {budget} are taken: \
         delete functions, give the worker more host memory, or add a worker"
    )
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
