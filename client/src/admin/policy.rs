//! How the cluster's nodes schedule, changed while they run.

use millrace_proto::admin;
use millrace_proto::convert::policy_spec_wire;
use millrace_types::PolicySpec;
use prost_types::FieldMask;

use super::Admin;
use crate::error::Error;

/// How a policy is changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyChange {
    /// What is set.
    pub spec: PolicySpec,
    /// The fields of the spec to change, such as `dispatch`: a field that is named here and not set in the
    /// spec becomes the preset's. `None`: all fields.
    pub fields: Option<Vec<String>>,
    /// Every check, nothing stored.
    pub dry_run: bool,
    /// Refuses with `CONFLICT` unless the policy is at this resource version: at 0 until somebody changed
    /// it. `None` takes whatever is there.
    pub resource_version: Option<u64>,
}

impl Admin {
    /// How nodes are wanted to schedule, and how each does.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn policy(&self) -> Result<admin::Policy, Error> {
        let request = admin::GetPolicyRequest { consistency: self.consistency.into() };
        self.ask(request, async |mut client, request| client.get_policy(request).await).await
    }

    /// The last changes of it, the newest first.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn policy_changes(&self) -> Result<Vec<admin::PolicyChange>, Error> {
        let request = admin::ListPolicyChangesRequest { page_size: 0, consistency: self.consistency.into() };
        let answer =
            self.ask(request, async |mut client, request| client.list_policy_changes(request).await).await?;
        Ok(answer.changes)
    }

    /// Changes how nodes schedule. What waits for a GPU goes over in order.
    ///
    /// # Errors
    /// [`Error::Refused`] with `INVALID_SPEC` when nothing would read what is set, with
    /// `MALFORMED_REQUEST` when a field is not known, with `CONFLICT` when it was changed since.
    pub async fn update_policy(&self, change: &PolicyChange) -> Result<admin::Policy, Error> {
        let request = admin::UpdatePolicyRequest {
            spec: Some(policy_spec_wire(&change.spec)),
            update_mask: change.fields.clone().map(|paths| FieldMask { paths }),
            dry_run: change.dry_run,
            resource_version: change.resource_version,
            idempotency_key: self.endpoints.next_id(),
        };
        self.ask(request, async |mut client, request| client.update_policy(request).await).await
    }
}
