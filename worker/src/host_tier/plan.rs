//! Decides what the host tier holds: which artifacts to prepare, install and drop so that this
//! worker serves what it should. Pure: callers pass `now`, carry the [`Action`]s out and report
//! back with [`Event`]s.
//!
//! ```text
//! Desired, Prepared, Failed, Installed, Asked, Hinted, RoomMade, Tick
//!                            ->  Prepare, Install, Arrived, MakeRoom, Retire, Release, Refuse, Drop
//! ```
//!
//! A model is known by its digest and shared by every function that names it: prepared once,
//! dropped when the last of them goes. Host memory is bounded by a budget. One that does not fit makes
//! others leave that no request uses: their files stay on the disk and their functions are served, and
//! a request for one of them has it brought again (a cold start). Which of them leave, the caller
//! knows. One that is larger than the budget fails with a message, and never makes others leave.
//!
//! A model that left and is only likely to be asked for (D29) comes when nothing else is to come, and
//! when those that no request uses, and that are neither pinned nor kept warm, make enough room; else it
//! stays where it is.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use millrace_policy::backoff::Waits;
use millrace_types::{Bytes, Digest, RevisionKey, Timestamp};

pub use self::protocol::{Action, Asker, Event, Failure, Phase, Wanted};

mod protocol;

/// Artifacts fetched and compiled at one time: each holds its file in memory while it is compiled.
pub const PREPARATIONS_MAX: usize = 2;
/// The first wait after a failed fetch.
const RETRY_BASE: Duration = Duration::from_millis(200);
/// The longest wait between fetches.
const RETRY_CEILING: Duration = Duration::from_secs(15);

/// The host tier's plan.
#[derive(Debug)]
pub struct Plan {
    budget: Bytes,
    functions: BTreeMap<RevisionKey, Function>,
    models: BTreeMap<Digest, Model>,
    waits: Waits,
    arrivals: u64,
    /// The model that room was asked for, as long as nobody said what came of that.
    making_room: Option<Digest>,
    /// Those for which there is none, until something else happens.
    stuck: BTreeSet<Digest>,
    /// The model that is to come though no request waits for it, until it is on its way.
    hinted: Option<Digest>,
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
    /// Its model is on the disk: it is handed to the node with it.
    Asleep,
    Refused(String),
}

#[derive(Debug)]
struct Model {
    // Order of arrival: the first asked for is the first prepared.
    arrival: u64,
    artifact_bytes: Bytes,
    /// Host memory to reserve for it: its file's size, until it is known better.
    needs: Bytes,
    failures: u32,
    state: State,
}

#[derive(Debug, PartialEq)]
enum State {
    Queued,
    NoMemory(String),
    Preparing,
    Waiting {
        until: Timestamp,
        why: Phase,
    },
    Ready {
        bytes: Bytes,
    },
    /// It has left, and comes again when it is asked for.
    Asleep,
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
            making_room: None,
            stuck: BTreeSet::new(),
            hinted: None,
        }
    }

    /// Takes an event and says what to do, in order.
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
            Event::Asked(models) => models.into_iter().for_each(|digest| self.asked(digest)),
            Event::Hinted(digest) => self.hinted(digest),
            Event::RoomMade(gone) => {
                let asked_for = self.making_room.take();
                // Asked again at once, nobody would have more to say.
                self.stuck.extend(asked_for.filter(|_| gone.is_empty()));
                gone.into_iter().for_each(|digest| self.left(digest, &mut actions));
            }
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
            Some(State::Broken(why)) => Phase::Failed(why.clone()),
            // Who asks for it waits, whatever its model waits for.
            Some(State::NoMemory(why)) if self.never_fits(function.digest) => Phase::Failed(why.clone()),
            _ if function.install == Install::Asleep => Phase::Ready,
            Some(State::NoMemory(why)) => Phase::Preparing(why.clone()),
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
                let (needs, failures, state) = (artifact_bytes, 0, State::Queued);
                Model { arrival: *arrivals, artifact_bytes, needs, failures, state }
            });
            let install = match model.state {
                State::Ready { .. } => Install::Asked,
                State::Asleep => Install::Asleep,
                _ => Install::Waiting,
            };
            self.functions.entry(key.clone()).or_insert_with(|| {
                if install == Install::Asked {
                    actions.push(Action::Install { key, digest });
                }
                Function { digest, install }
            });
        }
    }

    fn prepared(&mut self, digest: Digest, bytes: Bytes, actions: &mut Vec<Action>) {
        let others = self.used().saturating_sub(self.reserved(digest));
        let Some(model) = self.models.get_mut(&digest) else { return };
        model.needs = bytes;
        if others + bytes > self.budget {
            // With its size known, as much room is made for it as it needs.
            model.state = State::Queued;
            actions.push(Action::Release { digest });
            return;
        }
        model.state = State::Ready { bytes };
        model.failures = 0;
        for (key, function) in self.functions.iter_mut().filter(|(_, function)| function.digest == digest) {
            function.install = Install::Asked;
            actions.push(Action::Install { key: key.clone(), digest });
        }
        if self.functions.values().any(|function| function.digest == digest) {
            actions.push(Action::Arrived { digest });
        }
    }

    /// A model is likely to be asked for. It comes only where no other is to come.
    fn hinted(&mut self, digest: Digest) {
        let is_to_come =
            |model: &Model| matches!(model.state, State::Queued | State::NoMemory(_) | State::Preparing);
        let has_left = self.models.get(&digest).is_some_and(|model| model.state == State::Asleep);
        if has_left && !self.models.values().any(is_to_come) {
            self.asked(digest);
            self.hinted = Some(digest);
        }
    }

    /// Requests wait for a model: those that were asked for first come first.
    fn asked(&mut self, digest: Digest) {
        self.hinted = self.hinted.filter(|&hinted| hinted != digest);
        if let Some(model) = self.models.get_mut(&digest).filter(|model| model.state == State::Asleep) {
            self.arrivals += 1;
            (model.arrival, model.state) = (self.arrivals, State::Queued);
        }
    }

    /// A model leaves host memory, and its functions the node.
    fn left(&mut self, digest: Digest, actions: &mut Vec<Action>) {
        let ready = |model: &&mut Model| matches!(model.state, State::Ready { .. });
        let Some(model) = self.models.get_mut(&digest).filter(ready) else { return };
        model.state = State::Asleep;
        for (key, function) in self.functions.iter_mut().filter(|(_, function)| function.digest == digest) {
            if matches!(function.install, Install::Asked | Install::Done) {
                function.install = Install::Asleep;
                actions.push(Action::Retire { key: key.clone() });
            }
        }
        actions.push(Action::Release { digest });
    }

    fn failed(&mut self, digest: Digest, failure: Failure, now: Timestamp, actions: &mut Vec<Action>) {
        let Some(model) = self.models.get_mut(&digest) else { return };
        let why = match failure {
            Failure::Permanent(why) => {
                actions.push(Action::Refuse { digest, why: why.clone() });
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
        let budget = self.budget;
        let ready: Bytes = self.resident().iter().map(|(_, bytes)| *bytes).sum();
        for (_, digest) in candidates {
            let (used, never_fits) = (self.used(), self.never_fits(digest));
            let Some(model) = self.models.get_mut(&digest) else { continue };
            if never_fits {
                let why = too_large(model.needs, budget);
                if model.state != State::NoMemory(why.clone()) {
                    actions.push(Action::Refuse { digest, why: why.clone() });
                }
                model.state = State::NoMemory(why);
            } else if used + model.needs > budget {
                let lacking = used + model.needs - budget;
                let asker = if self.hinted == Some(digest) { Asker::Hint } else { Asker::Request };
                if asker == Asker::Hint && (lacking > ready || self.stuck.contains(&digest)) {
                    (model.state, self.hinted) = (State::Asleep, None);
                    continue;
                }
                model.state = State::NoMemory(no_memory(model.needs, used, budget));
                // What is being prepared has first to be there.
                if lacking <= ready && !self.stuck.contains(&digest) {
                    if self.making_room.is_none() {
                        self.making_room = Some(digest);
                        actions.push(Action::MakeRoom { bytes: lacking, asker });
                    }
                    // Those behind it must not take the room that is made for it.
                    break;
                }
            } else if running < PREPARATIONS_MAX {
                running += 1;
                model.state = State::Preparing;
                self.hinted = self.hinted.filter(|&hinted| hinted != digest);
                actions.push(Action::Prepare { digest, artifact_bytes: model.artifact_bytes });
            } else {
                model.state = State::Queued;
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
            Some(Model { state: State::Ready { bytes }, .. }) => *bytes,
            Some(Model { state: State::Preparing, needs, .. }) => *needs,
            _ => Bytes::ZERO,
        }
    }
}

fn no_memory(needed: Bytes, used: Bytes, budget: Bytes) -> String {
    format!(
        "the model needs {needed} of host memory, and {used} of this worker's {budget} are in use: \
         it waits until others are not; give the worker more host memory, or add a worker"
    )
}

fn too_large(needed: Bytes, budget: Bytes) -> String {
    format!(
        "the model needs {needed} of host memory and this worker has {budget} in all: give it more \
         (--host-memory), use a smaller model, or add a larger worker"
    )
}

#[cfg(test)]
mod tests;
