//! The scheduling policy of the cluster's nodes, which can change while they run.

use millrace_proto::admin;
use millrace_proto::convert::policy_spec_wire;
use millrace_types::PolicySpec;
use prost_types::FieldMask;

use super::Admin;
use crate::error::Error;

/// A change of the scheduling policy.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PolicyChange {
    /// The new values.
    pub spec: PolicySpec,
    /// The fields of the spec to change, such as `dispatch`. A field that is named here and absent
    /// from the spec returns to the preset's value. `None` changes all fields.
    pub fields: Option<Vec<String>>,
    /// Whether the server makes every check but stores nothing.
    pub dry_run: bool,
    /// The resource version that the policy must have; any other version is refused with
    /// `CONFLICT`. The version is 0 until the first change. `None` accepts any version.
    pub resource_version: Option<u64>,
}

impl Admin {
    /// Returns the desired scheduling policy, and the policy that each node reports.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn policy(&self) -> Result<admin::Policy, Error> {
        let request = admin::GetPolicyRequest { consistency: self.consistency.into() };
        self.ask(request, async |mut client, request| client.get_policy(request).await).await
    }

    /// Returns the last changes of the policy, the newest first.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn policy_changes(&self) -> Result<Vec<admin::PolicyChange>, Error> {
        let request = admin::ListPolicyChangesRequest { page_size: 0, consistency: self.consistency.into() };
        let answer =
            self.ask(request, async |mut client, request| client.list_policy_changes(request).await).await?;
        Ok(answer.changes)
    }

    /// Changes the scheduling policy. Requests that wait for a GPU move to the new policy in order.
    ///
    /// # Errors
    /// [`Error::Refused`] with `INVALID_SPEC` when no part of the policy would read a value, with
    /// `MALFORMED_REQUEST` when a field is unknown, with `CONFLICT` when the policy changed since.
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
