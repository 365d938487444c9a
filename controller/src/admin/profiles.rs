//! Profiles of functions: begun as operations, and listed with their points.

use std::sync::Arc;

use millrace_cluster_state::operations::{OperationKind, OperationRecord};
use millrace_cluster_state::{Artifact, CommandEffect, CommandRefusal, FunctionRecord, State, StateCommand};
use millrace_proto::admin as api;
use millrace_proto::convert::{function_key, profile_point_wire};
use millrace_types::profile::GpuProfile;
use millrace_types::{Failure, Reason, Runtime};
use tonic::Request;

use super::listing::{fill, page_size_or_all};
use super::{AdminService, caller, idempotency, unknown_token};
use crate::raft::refused;

impl AdminService {
    pub(super) async fn profile_function(
        &self,
        request: Request<api::ProfileFunctionRequest>,
    ) -> Result<api::Operation, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let function = function_key(&request.tenant, &request.name)?;
        let state = self.replica.linearizable().await?;
        let record = state.function(&function);
        let record =
            record.ok_or_else(|| refused(&CommandRefusal::FunctionNotFound { key: function.clone() }))?;
        let latest = record.latest();
        let digest = latest.digest;
        check_profilable(&state, record)?;
        let kind = OperationKind::ProfileFunction { function, digest, grid: request.grid };
        let command = StateCommand::BeginOperation { kind };
        let applied = self.replica.propose(caller, idempotency(request.idempotency_key)?, command).await?;
        match applied {
            CommandEffect::Created { version } => self.found_operation(&self.replica.state(), version),
            effect => Err(Failure::new(Reason::Internal, format!("the profile began with {effect:?}"))),
        }
    }

    pub(super) async fn list_profiles(
        &self,
        request: api::ListProfilesRequest,
    ) -> Result<api::ListProfilesResponse, Failure> {
        let after = match request.page_token.as_str() {
            "" => None,
            token => Some(position(token).ok_or_else(|| Failure::malformed(unknown_token(token)))?),
        };
        let size = page_size_or_all(request.page_size);
        let state = self.read(request.consistency()).await?;
        let wanted = |function: &&Arc<FunctionRecord>| {
            let is = |asked: &str, name: &str| asked.is_empty() || asked == name;
            is(&request.tenant, function.key.tenant.as_str()) && is(&request.name, function.key.name.as_str())
        };
        let profiles = state.functions().filter(wanted).flat_map(|function| profiles(&state, function));
        let rest = profiles.filter(|profile| {
            let at = (profile.tenant.as_str(), profile.function.as_str(), profile.gpu_type.as_str());
            after.is_none_or(|after| at > after)
        });
        let (profiles, last) = fill(rest, size, api::Profile::clone);
        let token = last.map(|it| format!("{}/{}/{}", it.tenant, it.function, it.gpu_type));
        Ok(api::ListProfilesResponse { profiles, next_page_token: token.unwrap_or_default() })
    }
}

/// Refuses functions that no trial can run.
fn check_profilable(state: &State, function: &FunctionRecord) -> Result<(), Failure> {
    let latest = function.latest();
    let is_program = state.artifact(&latest.digest).is_some_and(|it| it.model.runtime() == Runtime::Process);
    let problem = if is_program {
        "is a program: only models have profiles"
    } else if latest.spec.sequences.is_some() {
        "keeps state between requests: profile the model in a function without sequences"
    } else if !function.enabled {
        "is unloaded: load it through the repository API first"
    } else {
        return Ok(());
    };
    Err(Failure::new(Reason::InvalidSpec, format!("{} {problem}", function.key)))
}

/// Parses a token: the tenant, the function and the type of GPU of the last profile on the page before.
fn position(token: &str) -> Option<(&str, &str, &str)> {
    let (tenant, rest) = token.split_once('/')?;
    let (function, gpu_type) = rest.split_once('/')?;
    Some((tenant, function, gpu_type))
}

/// Returns the profiles of a function's latest model, by type of GPU.
fn profiles(state: &State, function: &FunctionRecord) -> Vec<api::Profile> {
    let digest = function.latest().digest;
    let artifact = state.artifact(&digest).map(Arc::as_ref);
    let of_artifact = |artifact: &Artifact| artifact.profiles.clone();
    let mut profiles: Vec<GpuProfile> = artifact.map(of_artifact).unwrap_or_default();
    profiles.sort_by(|a, b| a.gpu_type.cmp(&b.gpu_type));
    let is_running = |id| state.operation(id).is_some_and(|it: &Arc<OperationRecord>| it.is_running());
    let shown = |profile: GpuProfile| api::Profile {
        tenant: function.key.tenant.to_string(),
        function: function.key.name.to_string(),
        digest: digest.to_string(),
        running: is_running(profile.operation),
        operation: profile.operation.to_string(),
        points: profile.points.into_iter().map(profile_point_wire).collect(),
        gpu_type: profile.gpu_type,
    };
    profiles.into_iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_the_last_profile_also_of_a_type_with_slashes() {
        assert_eq!(position("shop/classify/A/B"), Some(("shop", "classify", "A/B")));
        for wrong in ["", "12", "a/12"] {
            assert_eq!(position(wrong), None, "{wrong}");
        }
    }
}
