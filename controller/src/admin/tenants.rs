//! Tenants and caps (L20). The caps are committed, and workers get the caps with the desired state.

use std::collections::{BTreeMap, BTreeSet};

use millrace_cluster_state::{State, StateCommand};
use millrace_proto::admin as api;
use millrace_proto::convert::{quota, quota_wire, timestamp_wire};
use millrace_types::{Failure, TenantName};
use tonic::Request;

use super::listing::{fill, page_size};
use super::masks::{ResponseMask, updated};
use super::{AdminService, caller, idempotency, invalid_name, unknown_token};

/// The field names that the mask of a quota may have.
const CAPS: [&str; 3] = ["gpus_max", "gpu_share", "memory_share"];
/// The extra path in the mask of a dry run. A server without dry runs ignores the request's flag, but
/// refuses the unknown path.
const DRY_RUN: &str = "dry_run";

impl AdminService {
    pub(super) async fn set_tenant(
        &self,
        request: Request<api::SetTenantRequest>,
    ) -> Result<api::Tenant, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let tenant = TenantName::new(&request.name).map_err(invalid_name)?;
        let given = request.quota.unwrap_or_default();
        let mut mask = request.update_mask;
        if request.dry_run
            && let Some(mask) = &mut mask
        {
            mask.paths.retain(|path| path != DRY_RUN);
        }
        let fields = updated(mask, &CAPS)?;
        let known = match fields.len() == CAPS.len() {
            true => api::Quota::default(),
            false => quota_wire(&self.replica.linearizable().await?.quota(&tenant)),
        };
        let quota = quota(&merged(known, &given, &fields))?;
        let idempotency = idempotency(request.idempotency_key)?;
        let command = StateCommand::SetQuota { tenant: tenant.clone(), quota };
        let (_, state) = self.write(caller, idempotency, request.dry_run, command).await?;
        let functions = state.functions_of(&tenant).count();
        Ok(view(&state, &tenant, functions))
    }

    pub(super) async fn list_tenants(
        &self,
        request: api::ListTenantsRequest,
    ) -> Result<api::ListTenantsResponse, Failure> {
        let after = page_token(&request.page_token)?;
        let size = page_size(request.page_size);
        let consistency = request.consistency();
        let mask = ResponseMask::read(request.read_mask, "Tenant")?;
        let state = self.read(consistency).await?;
        let mut functions = BTreeMap::<&TenantName, usize>::new();
        for function in state.functions() {
            *functions.entry(&function.key.tenant).or_default() += 1;
        }
        let capped = state.tenants().map(|tenant| &tenant.name);
        let names: BTreeSet<_> = functions.keys().copied().chain(capped).collect();
        let rest = names.into_iter().filter(|name| after.as_ref().is_none_or(|after| *name > after));
        let shown =
            |name: &&TenantName| mask.cut(view(&state, name, functions.get(name).copied().unwrap_or(0)));
        let (tenants, last) = fill(rest, size, shown);
        let next_page_token = last.map(TenantName::to_string).unwrap_or_default();
        Ok(api::ListTenantsResponse { next_page_token, tenants })
    }
}

/// Returns the current caps with the given fields replaced. Concurrent updates of different caps may
/// undo each other, because caps have no version to check.
fn merged(mut quota: api::Quota, given: &api::Quota, fields: &[&str]) -> api::Quota {
    for field in fields {
        match *field {
            "gpus_max" => quota.gpus_max = given.gpus_max,
            "gpu_share" => quota.gpu_share = given.gpu_share,
            _ => quota.memory_share = given.memory_share,
        }
    }
    quota
}

fn view(state: &State, name: &TenantName, functions: usize) -> api::Tenant {
    let record = state.tenant(name);
    api::Tenant {
        name: name.to_string(),
        quota: Some(quota_wire(&state.quota(name))),
        functions: u32::try_from(functions).unwrap_or(u32::MAX),
        resource_version: record.map_or(0, |it| it.resource_version),
        updated_at: record.map(|it| timestamp_wire(it.changed_at.0)),
        updated_by: record.map(|it| it.changed_by.to_string()).unwrap_or_default(),
    }
}

/// Parses a page token: the name of the last tenant of the previous page.
fn page_token(token: &str) -> Result<Option<TenantName>, Failure> {
    let name = (!token.is_empty()).then(|| TenantName::new(token)).transpose();
    name.map_err(|_| Failure::malformed(unknown_token(token)))
}
