//! The host tier: brings the models of the desired functions into host memory, and installs the functions
//! on the node. One task owns the host tier. The task leaves all decisions to [`plan`], and runs heavy
//! work on blocking threads.
//!
//! ```text
//! desired ─► plan ─► prepare: disk or controller ─► compile ─► memfds ─► node.install ─► gate: here
//!              ▲                                                             │             │
//!              └──────────────────────── events ◄────────────────────────────┘             │
//!              ▲  a request needs an evicted model, or room is needed and a model is idle  │
//!              └───────────────────────────────────────────────────── gate ◄── requests ◄──┘
//! ```
//! Idle models are evicted when other models need host memory. `eviction` defines the order.

use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroUsize;
use std::sync::Arc;

use millrace_device::PinState;
use millrace_proto::worker as wire;
use millrace_types::{Bytes, Digest, RevisionKey, Timestamp};
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};

use crate::clock::Clock;
use crate::desired_state::{DesiredState, PlacedFunction};
use crate::groups;
use crate::handle::NodeHandle;
use crate::install::FunctionConfig;
use crate::profile_store::ProfileStore;
use crate::programs::ProgramStore;
use crate::signature::{FunctionSignature, Signatures};
use compile::{HostModel, PreparedArtifact};
use eviction::IdleModel;
use fetch::ArtifactSource;
use gate::HostMemoryGate;
use millrace_storage::FileStore;
use plan::{Action, DesiredFunction, Event, HostTierPlan, RoomPurpose};

mod compile;
mod eviction;
pub mod fetch;
pub mod gate;
pub mod plan;
mod prepare;
mod programs;
mod publish;
mod snapshot;
mod state;

pub use self::snapshot::{HostTierCounts, HostTierPublisher, HostTierSnapshot};

/// The configuration of the host tier.
pub struct Config {
    /// Maximum host memory of all models together.
    pub budget: Bytes,
    /// The artifacts on this worker's disk.
    pub store: FileStore,
    /// The remote source of artifacts.
    pub source: Arc<dyn ArtifactSource>,
    /// The profiles of models from earlier runs of this worker.
    pub(crate) learned: ProfileStore,
    /// The node that functions are installed on.
    pub node: NodeHandle,
    pub clock: Arc<dyn Clock>,
    /// The gate through which requests reserve models in host memory.
    pub gate: HostMemoryGate,
    /// The seed of the jitter of retries.
    pub seed: u64,
    /// Most launches of a model.
    pub launches_max: NonZeroUsize,
    /// The storage and start of programs; `None` if this worker runs no programs.
    pub(crate) programs: Option<ProgramStore>,
}

/// Starts the host tier. The host tier follows `desired` until that channel closes or the returned task is
/// dropped.
#[must_use]
pub fn start(
    config: Config,
    showing: HostTierPublisher,
    desired: watch::Receiver<DesiredState>,
) -> JoinSet<()> {
    let HostTierPublisher { statuses, models, signatures, counts } = showing;
    let plan = HostTierPlan::new(config.budget, config.seed);
    let tier = HostTier {
        config,
        plan,
        functions: BTreeMap::new(),
        models: BTreeMap::new(),
        known: BTreeMap::new(),
        jobs: JoinSet::new(),
        swept: false,
        pageable_told: false,
        counts: HostTierCounts::default(),
        statuses_now: statuses,
        models_now: models,
        signatures_now: signatures,
        counts_now: counts,
    };
    let mut task = JoinSet::new();
    task.spawn(tier.run(desired));
    task
}

struct HostTier {
    config: Config,
    plan: HostTierPlan,
    functions: BTreeMap<RevisionKey, PlacedFunction>,
    models: BTreeMap<Digest, HostModel>,
    /// The signatures of all models that were ever prepared. Functions stay ready while their models are on
    /// the disk only.
    known: BTreeMap<Digest, Arc<FunctionSignature>>,
    /// The preparations under way, at most [`plan::PREPARATIONS_MAX`].
    jobs: JoinSet<(Digest, Result<HostModel, plan::PrepareFailure>)>,
    /// Whether unused artifacts were deleted. That has to wait for the first desired state.
    swept: bool,
    /// Whether the warning about memory that cannot be locked was logged.
    pageable_told: bool,
    counts: HostTierCounts,
    statuses_now: watch::Sender<Arc<Vec<wire::FunctionStatus>>>,
    models_now: watch::Sender<Arc<Vec<wire::HostModel>>>,
    signatures_now: watch::Sender<Arc<Signatures>>,
    counts_now: watch::Sender<Arc<HostTierCounts>>,
}

impl HostTier {
    async fn run(mut self, mut desired: watch::Receiver<DesiredState>) {
        desired.mark_changed();
        let mut healths = self.config.programs.as_ref().map(ProgramStore::healths);
        loop {
            let wake = self.until_wake();
            let event = tokio::select! {
                biased;
                changed = desired.changed() => match changed {
                    Ok(()) => {
                        let state = desired.borrow_and_update().clone();
                        match self.desire(state).await {
                            Some(event) => event,
                            None => continue,
                        }
                    }
                    Err(_closed) => return,
                },
                Some(job) = self.jobs.join_next() => match job {
                    Ok((digest, outcome)) => self.finished(digest, outcome),
                    // Panics of a job's blocking work are reported as failures, and jobs are cancelled only
                    // with this task.
                    Err(error) => { tracing::error!(%error, "the preparation of a model was lost"); continue }
                },
                () = programs::changed(&mut healths) => {
                    self.publish();
                    continue;
                }
                () = self.config.gate.wanted() => Event::ModelsAwaited(self.config.gate.awaited_models()),
                () = wake => Event::Tick,
            };
            self.take(event).await;
            if let Some(digest) = self.config.gate.take_hint() {
                self.take(Event::Hinted(digest)).await;
            }
            self.publish();
        }
    }

    fn until_wake(&self) -> impl Future<Output = ()> + use<> {
        let clock = &self.config.clock;
        let span = self.plan.wake_at().map(|at| clock.sleep_for(at.since(clock.now())));
        async move {
            match span {
                Some(span) => tokio::time::sleep(span).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Stores the desired functions and returns the event for the plan. Returns `None` before the first
    /// message of a leader.
    async fn desire(&mut self, state: DesiredState) -> Option<Event> {
        state.stamp?;
        let wanted = |function: &PlacedFunction| DesiredFunction {
            key: function.key.clone(),
            digest: function.digest,
            artifact_bytes: function.artifact_bytes,
        };
        let event = Event::Desired(state.functions.iter().map(wanted).collect());
        self.functions =
            state.functions.into_iter().map(|function| (function.key.clone(), function)).collect();
        if !self.swept {
            self.sweep().await;
        }
        Some(event)
    }

    async fn sweep(&mut self) {
        let wanted: Vec<Digest> = self.functions.values().map(|function| function.digest).collect();
        let store = self.config.store.clone();
        match spawn_blocking(move || store.retain(|digest| wanted.contains(&digest))).await {
            Ok(Ok(())) => self.swept = true,
            Ok(Err(error)) => tracing::warn!(%error, "cannot delete unused artifacts from the disk"),
            Err(error) => tracing::error!(%error, "the task that deletes unused artifacts was lost"),
        }
    }

    fn finished(&mut self, digest: Digest, outcome: Result<HostModel, plan::PrepareFailure>) -> Event {
        match outcome {
            Ok(model) => {
                let bytes = model.bytes;
                self.tell_pageable(&model);
                self.known.insert(digest, model.signature.clone());
                match model.is_program() {
                    true => tracing::info!(%digest, "program on the disk"),
                    false => tracing::info!(%digest, %bytes, "model in host memory"),
                }
                self.models.insert(digest, model);
                Event::Prepared { digest, bytes }
            }
            Err(failure) => {
                tracing::warn!(%digest, ?failure, "model not prepared");
                Event::Failed { digest, failure }
            }
        }
    }

    /// Passes an event to the plan and carries out its actions, including the actions of follow-up events.
    async fn take(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for action in self.plan.on_event(event, self.config.clock.now()) {
                events.extend(self.carry_out(action).await);
            }
        }
    }

    async fn carry_out(&mut self, action: Action) -> Option<Event> {
        match action {
            Action::Prepare { digest, artifact_bytes } => {
                let store = self.config.store.clone();
                let source = self.config.source.clone();
                let node = self.config.node.clone();
                let launches_max = self.config.launches_max;
                let programs = self.config.programs.clone();
                self.jobs.spawn(async move {
                    let prepared = prepare_artifact(
                        &store,
                        &source,
                        &node,
                        launches_max,
                        programs,
                        digest,
                        artifact_bytes,
                    )
                    .await;
                    (digest, prepared)
                });
                None
            }
            Action::Install { key, digest } => Some(self.install(key, digest).await),
            Action::Retire { key } => {
                self.config.node.retire(key).await;
                None
            }
            Action::Release { digest } => {
                self.models.remove(&digest);
                None
            }
            Action::Arrived { digest } => {
                self.counts.cold_starts += u64::from(self.config.gate.record_loaded(digest));
                None
            }
            Action::MakeRoom { bytes, asker } => Some(Event::RoomMade(self.make_room(bytes, asker).await)),
            Action::Refuse { digest, why } => {
                self.config.gate.refuse(digest, why);
                None
            }
            Action::Drop { digest } => {
                self.models.remove(&digest);
                self.known.remove(&digest);
                self.config.gate.forget(digest);
                self.remove(digest).await;
                None
            }
        }
    }

    /// Evicts idle models until `bytes` of host memory are freed, and returns the evicted models. Evicts no
    /// model if the evictable models together are not enough.
    async fn make_room(&mut self, bytes: Bytes, asker: RoomPurpose) -> Vec<Digest> {
        let is_model = |(_, digest): &(Timestamp, Digest)| {
            self.models.get(digest).is_none_or(|model| !model.is_program())
        };
        // A program uses no host memory.
        let unused: Vec<_> = self.config.gate.idle_models().into_iter().filter(is_model).collect();
        if unused.is_empty() {
            return Vec::new();
        }
        let on_gpus = self.config.node.snapshot().await.gpus.into_iter().flat_map(|gpu| gpu.models);
        let on_gpus: BTreeSet<_> = on_gpus.map(|model| model.digest).collect();
        let stays = |function: &&PlacedFunction| {
            function.serving.residency.pin || function.serving.residency.min_warm > 0
        };
        let staying: BTreeSet<_> =
            self.functions.values().filter(stays).map(|function| function.digest).collect();
        let unused = unused.into_iter().map(|(last_used, digest)| {
            let stays = staying.contains(&digest);
            let on_gpu = on_gpus.contains(&digest);
            let bytes = self.models.get(&digest).map_or(Bytes::ZERO, |model| model.bytes);
            IdleModel { stays, on_gpu, last_used, digest, bytes }
        });
        let chosen = eviction::models_to_evict(unused.collect(), asker, bytes);
        // A model that a request has reserved meanwhile stays. The plan then asks for the missing room
        // again.
        let gone: Vec<_> = chosen.into_iter().filter(|&digest| self.config.gate.try_evict(digest)).collect();
        self.counts.evictions += gone.len() as u64;
        for digest in &gone {
            tracing::info!(%digest, "model evicted from host memory to make room for another");
        }
        gone
    }

    /// Logs once that the memory of models is not locked. The reason says what to change.
    fn tell_pageable(&mut self, model: &HostModel) {
        if let Some(PinState::Pageable { reason }) = model.pinned()
            && !std::mem::replace(&mut self.pageable_told, true)
        {
            tracing::warn!(reason, "the host memory of models is not locked and may be paged out");
        }
    }

    async fn install(&mut self, key: RevisionKey, digest: Digest) -> Event {
        let (Some(function), Some(model)) = (self.functions.get(&key), self.models.get(&digest)) else {
            // The plan installs only functions that are desired, and models that are prepared. If the plan
            // were wrong, the function's status would show this error.
            let outcome = Err("the model is not in host memory".to_owned());
            return Event::Installed { key, outcome };
        };
        let processes = function.processes.max(1);
        let function = FunctionConfig {
            key: key.clone(),
            slo: function.slo,
            idempotent: function.idempotent,
            gpu_memory: function.gpu_memory,
            serving: function.serving,
            profiles: self.config.learned.profiles(digest).await,
        };
        let outcome = match &model.artifact {
            PreparedArtifact::Model { prepared, .. } => {
                self.config.node.install(function, prepared.clone()).await
            }
            PreparedArtifact::Program(program) => {
                self.config.node.install_program(function, program.clone(), processes).await
            }
        };
        Event::Installed { key, outcome: outcome.map_err(|error| error.to_string()) }
    }

    async fn remove(&self, digest: Digest) {
        let store = self.config.store.clone();
        match spawn_blocking(move || store.remove(digest)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(%digest, %error, "cannot delete an artifact from the disk"),
            Err(error) => tracing::error!(%digest, %error, "the task that deletes an artifact was lost"),
        }
    }
}

async fn prepare_artifact(
    store: &FileStore,
    source: &Arc<dyn ArtifactSource>,
    node: &NodeHandle,
    launches_max: NonZeroUsize,
    programs: Option<ProgramStore>,
    digest: Digest,
    bytes: Bytes,
) -> Result<HostModel, plan::PrepareFailure> {
    let artifact = prepare::artifact(store, source, digest, bytes).await?;
    let grouping = groups::grouping(node.weight_group_bytes(), launches_max);
    let make = move || compile::make_ready(digest, artifact, grouping, programs.as_ref());
    spawn_blocking(make).await.map_err(prepare::panicked)?
}
