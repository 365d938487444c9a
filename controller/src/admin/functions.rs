//! Functions: apply, get, list, delete.

use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{
    CallerName, CommandEffect, ControllerId, FunctionRecord, IdempotencyKey, Proposal, RevisionRecord, State,
    StateCommand,
};
use millrace_proto::admin as api;
use millrace_proto::convert;
use millrace_types::{Digest, Failure, Reason, Runtime};
use tonic::Request;

use super::listing::Listing;
use super::masks::ResponseMask;
use super::{AdminService, caller, idempotency, views};
use crate::raft::refused;

/// The longest wait of an apply for the model file to be on a majority of the controllers. An upload
/// ends in that state, but a membership change may undo it.
pub(super) const COPY_PATIENCE: Duration = Duration::from_secs(10);

impl AdminService {
    pub(super) async fn apply_function(
        &self,
        request: Request<api::ApplyFunctionRequest>,
    ) -> Result<api::ApplyFunctionResponse, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let wanted = request.spec.ok_or_else(|| Failure::new(Reason::InvalidSpec, "there is no spec"))?;
        let spec = convert::function_spec(wanted)?;
        let digest: Digest =
            request.digest.parse().map_err(|error| Failure::malformed(format!("{error}")))?;
        self.check_runnable(spec.runtime)?;
        let key = spec.key.clone();
        let idempotency = idempotency(request.idempotency_key)?;
        let expected = expected(request.resource_version);
        if !request.dry_run {
            self.artifacts.copied_within(COPY_PATIENCE, &digest).await;
        }
        // A majority of the named voters must hold the model, because the other copies may be lost.
        let command = StateCommand::ApplyFunction { spec, digest, expected, voters: self.voters() };
        let (applied, state) = self.write(caller, idempotency, request.dry_run, command).await?;
        Ok(api::ApplyFunctionResponse {
            outcome: outcome(applied).into(),
            // The function is absent if it was deleted again meanwhile.
            function: state
                .function(&key)
                .map(|function| self.view(&state, function, std::slice::from_ref(function.latest()))),
        })
    }

    /// Returns the controllers of which a majority must hold a model.
    pub(super) fn voters(&self) -> Vec<ControllerId> {
        self.replica.membership().voter_ids().map(ControllerId).collect()
    }

    /// Refuses a program if workers are attached and none runs programs. Without an attached worker,
    /// programs are accepted like models, because workers come and go.
    pub(super) fn check_runnable(&self, runtime: Runtime) -> Result<(), Failure> {
        let workers = self.fleet.workers();
        let refused = runtime == Runtime::Process
            && !workers.is_empty()
            && workers.values().all(|worker| !worker.hello.runs_programs);
        if !refused {
            return Ok(());
        }
        let message = "no worker runs programs: start one with --allow processes, which lets everyone who may publish functions run code on it";
        Err(Failure::new(Reason::PermissionDenied, message))
    }

    pub(super) async fn delete_function(
        &self,
        request: Request<api::DeleteFunctionRequest>,
    ) -> Result<api::DeleteFunctionResponse, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let key = convert::function_key(&request.tenant, &request.name)?;
        let idempotency = idempotency(request.idempotency_key)?;
        let command = StateCommand::DeleteFunction { key, expected: expected(request.resource_version) };
        self.write(caller, idempotency, request.dry_run, command).await?;
        Ok(api::DeleteFunctionResponse {})
    }

    /// Proposes a write, or only tries the write, and returns the resulting state.
    pub(super) async fn write(
        &self,
        caller: CallerName,
        idempotency: Option<IdempotencyKey>,
        dry_run: bool,
        command: StateCommand,
    ) -> Result<(CommandEffect, State), Failure> {
        if dry_run {
            return self.dry_run(caller, command).await;
        }
        Ok((self.replica.propose(caller, idempotency, command).await?, self.replica.state()))
    }

    /// Checks a write completely, by applying the write to a copy of the state.
    async fn dry_run(
        &self,
        caller: CallerName,
        command: StateCommand,
    ) -> Result<(CommandEffect, State), Failure> {
        let state = self.replica.linearizable().await?;
        let proposal = Proposal { stamp: self.replica.now(), caller, idempotency: None, command };
        state.admitted_dry_run(&proposal).map_err(|refusal| refused(&refusal))
    }

    pub(super) async fn get_function(
        &self,
        request: api::GetFunctionRequest,
    ) -> Result<api::Function, Failure> {
        let key = convert::function_key(&request.tenant, &request.name)?;
        let consistency = request.consistency();
        let mask = ResponseMask::read(request.read_mask, "Function")?;
        let state = self.read(consistency).await?;
        let function = state.function(&key).ok_or_else(|| {
            Failure::new(
                Reason::FunctionNotFound,
                format!("no function {key}: list them with 'millrace get functions'"),
            )
        })?;
        Ok(mask.cut(self.view(&state, function, &function.revisions)))
    }

    pub(super) async fn list_functions(
        &self,
        request: api::ListFunctionsRequest,
    ) -> Result<api::ListFunctionsResponse, Failure> {
        let listing = Listing::read(&request.tenant, request.page_size, &request.page_token)?;
        let consistency = request.consistency();
        let mask = ResponseMask::read(request.read_mask, "Function")?;
        let state = self.read(consistency).await?;
        let workers = self.fleet.workers();
        let view = |function: &&Arc<FunctionRecord>| {
            mask.cut(views::function(&state, function, &function.revisions, &workers, &self.outlook))
        };
        let found = state.functions_from(listing.start().as_ref());
        let (functions, next_page_token) = listing.page(found, |function| &function.key, view);
        Ok(api::ListFunctionsResponse { functions, next_page_token })
    }

    fn view(
        &self,
        state: &State,
        function: &FunctionRecord,
        revisions: &[Arc<RevisionRecord>],
    ) -> api::Function {
        views::function(state, function, revisions, &self.fleet.workers(), &self.outlook)
    }
}

/// Converts the expected version of a request; 0 means any version.
pub(super) fn expected(resource_version: u64) -> Option<u64> {
    (resource_version > 0).then_some(resource_version)
}

/// Converts the outcome of an apply.
pub(super) fn outcome(applied: CommandEffect) -> api::ApplyOutcome {
    match applied {
        CommandEffect::Created { .. } => api::ApplyOutcome::Created,
        CommandEffect::Unchanged => api::ApplyOutcome::Unchanged,
        _ => api::ApplyOutcome::Configured,
    }
}
