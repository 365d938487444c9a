//! Apply, get, list, delete.

use std::ops::Bound;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{Applied, Command, ControllerId, Function, Proposal, RevisionRecord, State};
use millrace_proto::admin as api;
use millrace_proto::convert;
use millrace_types::{Digest, Failure, FunctionKey, Reason, TenantName};
use tonic::Request;

use super::{AdminService, caller, idempotency, invalid_name, page_size, unknown_token, views};
use crate::raft::replica::refused;

/// How long an apply waits for its model file to be copied to a majority of the controllers, which
/// an upload ends with and a change of the group undoes.
const COPY_PATIENCE: Duration = Duration::from_secs(10);

impl AdminService {
    pub(super) async fn apply_function(
        &self,
        request: Request<api::ApplyFunctionRequest>,
    ) -> Result<api::ApplyFunctionResponse, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let wanted = request.spec.ok_or_else(|| Failure::new(Reason::InvalidSpec, "there is no spec"))?;
        let spec = convert::function_spec(wanted)?;
        let digest: Digest = request
            .digest
            .parse()
            .map_err(|error| Failure::new(Reason::MalformedRequest, format!("{error}")))?;
        let key = spec.key.clone();
        let idempotency = idempotency(request.idempotency_key)?;
        let expected = expected(request.resource_version);
        if !request.dry_run {
            self.artifacts.copied_within(COPY_PATIENCE, &digest).await;
        }
        // A majority of them must hold the model: the others may be lost.
        let voters = self.replica.membership().voter_ids().map(ControllerId).collect();
        let command = Command::ApplyFunction { spec, digest, expected, voters };
        let (applied, state) = if request.dry_run {
            self.dry_run(caller, command).await?
        } else {
            (self.replica.propose(caller, idempotency, command).await?, self.replica.state())
        };
        let outcome = match applied {
            Applied::Created { .. } => api::ApplyOutcome::Created,
            Applied::Unchanged => api::ApplyOutcome::Unchanged,
            _ => api::ApplyOutcome::Configured,
        };
        Ok(api::ApplyFunctionResponse {
            outcome: outcome.into(),
            // Absent when it was deleted again since.
            function: state
                .function(&key)
                .map(|function| self.view(&state, function, std::slice::from_ref(function.latest()))),
        })
    }

    pub(super) async fn delete_function(
        &self,
        request: Request<api::DeleteFunctionRequest>,
    ) -> Result<api::DeleteFunctionResponse, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let key = convert::function_key(&request.tenant, &request.name)?;
        let idempotency = idempotency(request.idempotency_key)?;
        let command = Command::DeleteFunction { key, expected: expected(request.resource_version) };
        if request.dry_run {
            self.dry_run(caller, command).await?;
        } else {
            self.replica.propose(caller, idempotency, command).await?;
        }
        Ok(api::DeleteFunctionResponse {})
    }

    /// Every check of a write, by applying it to a copy of the state.
    pub(super) async fn dry_run(
        &self,
        caller: millrace_cluster_state::Caller,
        command: Command,
    ) -> Result<(Applied, State), Failure> {
        let state = self.replica.linearizable().await?;
        let proposal = Proposal { stamp: self.replica.now(), caller, idempotency: None, command };
        let (outcome, after) = state.dry_run(&proposal);
        Ok((outcome.map_err(|refusal| refused(&refusal))?, after))
    }

    pub(super) async fn get_function(
        &self,
        request: api::GetFunctionRequest,
    ) -> Result<api::Function, Failure> {
        let key = convert::function_key(&request.tenant, &request.name)?;
        let state = self.read(request.consistency()).await?;
        let function = state.function(&key).ok_or_else(|| {
            Failure::new(
                Reason::FunctionNotFound,
                format!("no function {key}: list them with 'millrace get functions'"),
            )
        })?;
        Ok(self.view(&state, function, &function.revisions))
    }

    pub(super) async fn list_functions(
        &self,
        request: api::ListFunctionsRequest,
    ) -> Result<api::ListFunctionsResponse, Failure> {
        let tenant = match request.tenant.as_str() {
            "" => None,
            tenant => Some(TenantName::new(tenant).map_err(invalid_name)?),
        };
        let size = page_size(request.page_size);
        let after = page_token(&request.page_token)?;
        let state = self.read(request.consistency()).await?;
        let (workers, shortages) = (self.fleet.workers(), self.outlook.shortages());
        let mut rest = listed(&state, tenant.as_ref(), after.as_ref()).peekable();
        let mut functions: Vec<api::Function> = Vec::new();
        let mut last = None;
        while let Some(function) = rest.next_if(|_| functions.len() < size) {
            functions.push(views::function(&state, function, &function.revisions, &workers, &shortages));
            last = Some(&function.key);
        }
        let next = last.filter(|_| rest.peek().is_some());
        Ok(api::ListFunctionsResponse {
            next_page_token: next.map(FunctionKey::to_string).unwrap_or_default(),
            functions,
        })
    }

    fn view(&self, state: &State, function: &Function, revisions: &[Arc<RevisionRecord>]) -> api::Function {
        views::function(state, function, revisions, &self.fleet.workers(), &self.outlook.shortages())
    }
}

/// The wire's 0 takes whatever is there.
pub(super) fn expected(resource_version: u64) -> Option<u64> {
    (resource_version > 0).then_some(resource_version)
}

/// The functions of a tenant, or of all, after a key.
fn listed<'a>(
    state: &'a State,
    tenant: Option<&'a TenantName>,
    after: Option<&FunctionKey>,
) -> Box<dyn Iterator<Item = &'a Arc<Function>> + 'a> {
    let of_tenant =
        move |function: &&Arc<Function>| tenant.is_none_or(|tenant| function.key.tenant == *tenant);
    match (after, tenant) {
        (Some(after), _) => Box::new(state.functions_from(Bound::Excluded(after)).take_while(of_tenant)),
        (None, Some(tenant)) => Box::new(state.functions_of(tenant)),
        (None, None) => Box::new(state.functions()),
    }
}

/// A token is the key of the last function, or workflow, of the page before.
pub(super) fn page_token(token: &str) -> Result<Option<FunctionKey>, Failure> {
    if token.is_empty() {
        return Ok(None);
    }
    let bad = || Failure::new(Reason::MalformedRequest, unknown_token(token));
    let (tenant, name) = token.split_once('/').ok_or_else(bad)?;
    convert::function_key(tenant, name).map(Some).map_err(|_| bad())
}
