//! The gateway's backend: the replicated state lists the models, the fleet knows the workers that are
//! ready for each, and the router picks a worker.
//!
//! | module | task |
//! |---|---|
//! | [`backend`] | the data of the backend |
//! | [`catalog`] | the models as the protocol shows them, made once per change |
//! | `crowd` | a bench fixture of many fake workers |
//! | [`dispatch`] | sends a request to a worker, and to another worker after a loss |
//! | [`route`] | the router's input about each worker |
//! | [`runs`] | run estimates and retry credits |
//! | [`workflow`] | workflows, and their runs |
//! | [`tensors`] | conversions of tensors and times between the gateway and workers |
//!
//! This module does not depend on a leader: without a leader and without a majority, requests are still
//! routed to the known workers.

mod backend;
mod catalog;
#[cfg(feature = "sim")]
pub(crate) mod crowd;
mod dispatch;
mod route;
mod runs;
mod tensors;
mod workflow;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use millrace_cluster_state::{CallerName, StateCommand};
use millrace_gateway::authentication;
use millrace_gateway::backend::{
    Backend, Intent, Kind, ModelRequest, ModelResponse, ModelRevision, RequestContents,
};
use millrace_proto::convert::in_sequence_wire;
use millrace_proto::worker as wire;
use millrace_types::{Failure, FunctionKey, Reason, Revision, TenantName};
use tokio::sync::watch;

use crate::fleet::readiness::{self, RevisionReadiness};
use crate::leadership::Shortages;
use crate::raft;
use dispatch::DispatchedCall;

pub(crate) use backend::ServingBackend;

/// The longest wait of a load request for the function to become ready.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// The longest wait of an unload request for the workers to unload the function.
const UNLOAD_TIMEOUT: Duration = Duration::from_secs(10);

impl ServingBackend {
    /// Waits until the newest revision is ready on a worker, or cannot become ready.
    async fn ready(&self, key: &FunctionKey) -> Result<(), Failure> {
        let mut changes = self.changes();
        loop {
            let now = self.replica.state();
            let function = now.function(key).ok_or_else(|| catalog::not_found(key))?;
            let workers = self.fleet.workers();
            let shortages = self.outlook.shortages();
            match readiness::of_revision(&now, function, function.latest(), &workers, &shortages) {
                RevisionReadiness::Prepared(_) => return Ok(()),
                RevisionReadiness::Disabled => {
                    return Err(Failure::new(
                        Reason::FunctionDisabled,
                        format!("function {key} was unloaded meanwhile"),
                    ));
                }
                RevisionReadiness::PrepareFailed(why) => {
                    return Err(Failure::new(Reason::FunctionNotReady, why));
                }
                RevisionReadiness::Preparing
                | RevisionReadiness::NoWorker
                | RevisionReadiness::Unplaced(_)
                | RevisionReadiness::Away(_) => {}
            }
            changes.next().await?;
        }
    }

    /// Waits until no worker reports a function as ready. Otherwise, a load right after an unload would
    /// count a worker that has yet to unload, and would return too early.
    async fn let_go(&self, key: &FunctionKey) -> Result<(), Failure> {
        let mut changes = self.changes();
        loop {
            // The function was loaded again or deleted, so the wait is pointless.
            let enabled = self.replica.state().function(key).is_none_or(|function| function.enabled);
            if enabled || !self.fleet.workers().values().any(|worker| worker.holds_ready(key)) {
                return Ok(());
            }
            changes.next().await?;
        }
    }

    /// Returns a watch of everything that readiness depends on.
    fn changes(&self) -> Changes {
        let shortages = self.outlook.shortage_changes();
        Changes { fleet: self.fleet.changes(), state: self.replica.changes(), shortages }
    }
}

/// A watch of everything that readiness depends on.
struct Changes {
    fleet: watch::Receiver<u64>,
    state: raft::ReplicaWatch,
    shortages: watch::Receiver<Shortages>,
}

impl Changes {
    async fn next(&mut self) -> Result<(), Failure> {
        let changed = tokio::select! {
            changed = self.fleet.changed() => changed,
            changed = self.state.changed() => changed,
            changed = self.shortages.changed() => changed,
        };
        changed.map_err(|_| Failure::new(Reason::ShuttingDown, "this controller is shutting down"))
    }
}

#[async_trait]
impl Backend for ServingBackend {
    fn ready(&self) -> bool {
        !self.fleet.workers().is_empty()
    }

    fn resolve(
        &self,
        function: &FunctionKey,
        revision: Option<Revision>,
    ) -> Result<Arc<ModelRevision>, Failure> {
        let state = self.replica.state();
        let sight = self.sight(&state);
        match self.workflows.resolve(&sight, function) {
            Some(workflow) => of_generation(workflow, revision),
            None => self.catalog.resolve(&sight, function, revision),
        }
    }

    fn index(&self, tenant: &TenantName) -> Vec<Arc<ModelRevision>> {
        let state = self.replica.state();
        let sight = self.sight(&state);
        let mut models = self.catalog.index(&sight, tenant);
        models.extend(self.workflows.index(&sight, tenant));
        models.sort_by(|a, b| (&a.key, a.revision).cmp(&(&b.key, b.revision)));
        models
    }

    async fn wait_until_ready(&self, model: &ModelRevision) -> Result<Arc<ModelRevision>, Failure> {
        let mut changes = self.changes();
        loop {
            let now = self.resolve(&model.key, Some(model.revision))?;
            if !now.availability.may_become_ready() {
                return Ok(now);
            }
            changes.next().await?;
        }
    }

    async fn set_intent(
        &self,
        function: &FunctionKey,
        intent: Intent,
        caller: &authentication::Caller,
    ) -> Result<(), Failure> {
        if self.replica.state().workflow(function).is_some() {
            let message = format!("{function} is a workflow: load or unload its functions instead");
            return Err(Failure::new(Reason::Unimplemented, message));
        }
        let caller = CallerName(caller.as_str().into());
        let command =
            StateCommand::SetFunctionEnabled { key: function.clone(), enabled: intent == Intent::Serve };
        self.replica.propose(caller, None, command).await?;
        if intent == Intent::Refuse {
            // Gateways refuse the function from here on, even while a worker still has a copy.
            return tokio::time::timeout(UNLOAD_TIMEOUT, self.let_go(function)).await.unwrap_or(Ok(()));
        }
        tokio::time::timeout(LOAD_TIMEOUT, self.ready(function)).await.unwrap_or_else(|_| {
            let message = format!(
                "function {function} is loaded but not ready after {LOAD_TIMEOUT:?}: see its conditions"
            );
            Err(Failure::new(Reason::FunctionNotReady, message))
        })
    }

    async fn invoke(
        &self,
        model: &ModelRevision,
        invocation: ModelRequest,
    ) -> Result<ModelResponse, Failure> {
        if model.kind == Kind::Workflow {
            return self.invoke_workflow(model, invocation).await;
        }
        let RequestContents { inputs, outputs, parameters } = invocation.contents;
        let request = wire::InvokeRequest {
            request_id: invocation.request_id.to_string(),
            inputs: inputs.into_iter().map(tensors::sent).collect(),
            outputs,
            priority: parameters.priority,
            sequence: parameters.sequence.map(in_sequence_wire),
            ..wire::InvokeRequest::default()
        };
        let call = DispatchedCall { request, timeout: invocation.timeout, target: None, held: Vec::new() };
        let answer = self.call(model, call).await?;
        let split = answer.response.split.unwrap_or_default();
        let served_by = answer.worker.served_by(tensors::gpu_of(model, &answer.response));
        let outputs = answer.response.outputs.into_iter().map(tensors::received);
        Ok(ModelResponse {
            outputs: outputs.collect::<Result<_, _>>()?,
            split: tensors::split(&split),
            attempts: answer.attempts,
            served_by: Some(served_by),
        })
    }
}

/// Returns the workflow if the request names its only revision.
fn of_generation(
    workflow: Arc<ModelRevision>,
    revision: Option<Revision>,
) -> Result<Arc<ModelRevision>, Failure> {
    if revision.is_none_or(|revision| revision == workflow.revision) {
        return Ok(workflow);
    }
    let message = format!(
        "workflow {} has only version {}: name that version, or no version",
        workflow.key, workflow.revision
    );
    Err(Failure::new(Reason::RevisionNotFound, message))
}
