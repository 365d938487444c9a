//! The rules that operators set, compared with the cluster's: tenants' caps, and the scheduling
//! policy. A manifest replaces its whole rule: a field that the manifest omits is removed.

use futures::TryStreamExt as _;
use millrace_client::{Admin, ApplyOutcome, Error, PolicyChange, messages as wire};
use millrace_proto::convert::{policy_spec_wire, quota_wire};
use millrace_proto::policy::PolicySpec as WirePolicy;
use millrace_types::manifest::{POLICY, TenantManifest};
use millrace_types::{PolicySpec, Quota, Reason, TenantName};

use super::resource::AppliedResource;
use crate::failure::CommandFailure;
use crate::output::text::non_empty;

/// A rule that an operator sets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Rule {
    Tenant(TenantManifest),
    Policy(PolicySpec),
}

impl Rule {
    /// Returns the name for people, such as `tenant/acme`.
    pub(crate) fn title(&self) -> String {
        match self {
            Self::Tenant(tenant) => format!("tenant/{}", tenant.name),
            Self::Policy(_) => format!("policy/{POLICY}"),
        }
    }

    /// Returns the rule with nothing set.
    pub(crate) fn cleared(self) -> Self {
        match self {
            Self::Tenant(tenant) => Self::Tenant(TenantManifest { quota: Quota::NONE, ..tenant }),
            Self::Policy(_) => Self::Policy(PolicySpec::NONE),
        }
    }
}

/// A rule, and its difference from the cluster's.
#[derive(Debug)]
pub(crate) struct RuleChange {
    pub(crate) rule: Rule,
    pub(crate) outcome: ApplyOutcome,
    before: AppliedResource,
    /// The differences, by field.
    differences: Vec<String>,
}

/// The values of a rule, by their names in manifests.
type Fields<const N: usize> = [(&'static str, Option<String>); N];

/// Compares each rule with the cluster's, in the given order.
pub(crate) async fn compare(rules: Vec<Rule>, admin: &Admin) -> Result<Vec<RuleChange>, CommandFailure> {
    let tenants: Vec<wire::Tenant> = match rules.iter().any(|rule| matches!(rule, Rule::Tenant(_))) {
        true => admin.tenants().try_collect().await?,
        false => Vec::new(),
    };
    let mut changes = Vec::with_capacity(rules.len());
    for rule in rules {
        changes.push(match rule {
            Rule::Tenant(tenant) => RuleChange::of_tenant(tenant, &tenants),
            Rule::Policy(spec) => RuleChange::of_policy(spec, admin.policy().await?),
        });
    }
    Ok(changes)
}

/// Lets the server check each changed rule without storing it.
pub(crate) async fn check(changes: &[RuleChange], admin: &Admin) -> Result<(), CommandFailure> {
    for change in changes.iter().filter(|change| change.outcome != ApplyOutcome::Unchanged) {
        let tried = match &change.rule {
            Rule::Tenant(tenant) => try_tenant(&tenant.name, &tenant.quota, admin).await.map(drop),
            Rule::Policy(spec) => {
                let tried = PolicyChange { dry_run: true, ..change.policy(*spec) };
                admin.update_policy(&tried).await.map(drop).map_err(CommandFailure::from)
            }
        };
        tried.map_err(|failure| failure.about(change.rule.title()))?;
    }
    Ok(())
}

/// Lets the server check a tenant's caps without storing them. Returns the tenant with the caps.
pub(crate) async fn try_tenant(
    name: &TenantName,
    quota: &Quota,
    admin: &Admin,
) -> Result<wire::Tenant, CommandFailure> {
    admin.try_tenant(name, quota).await.map_err(|error| {
        // The request is well formed, so only an older controller finds it malformed.
        let is_old = error.reason() == Some(Reason::MalformedRequest);
        let failure = CommandFailure::from(error);
        let hint = "the controller is of an older build without a dry run of tenants' caps: update it, or omit --dry-run and apply the tenant by itself";
        if is_old { failure.hint(hint) } else { failure }
    })
}

impl RuleChange {
    fn of_tenant(tenant: TenantManifest, there: &[wire::Tenant]) -> Self {
        let name = tenant.name.as_str();
        let found = there.iter().find(|it| it.name == name).cloned();
        let before = found.unwrap_or_else(|| wire::Tenant { name: name.to_owned(), ..Default::default() });
        let was = before.quota.unwrap_or_default();
        let is = quota_wire(&tenant.quota);
        let differences = differences(caps(&was), caps(&is), "none");
        let outcome = match differences.is_empty() {
            true => ApplyOutcome::Unchanged,
            false if was == wire::Quota::default() => ApplyOutcome::Created,
            false => ApplyOutcome::Configured,
        };
        Self { rule: Rule::Tenant(tenant), outcome, before: AppliedResource::Tenant(before), differences }
    }

    /// Compares a policy with the cluster's. The cluster always has a policy.
    fn of_policy(spec: PolicySpec, before: wire::Policy) -> Self {
        let was = before.spec.clone().unwrap_or_default();
        let differences = differences(settings(&was), settings(&policy_spec_wire(&spec)), "the preset's");
        let outcome = if differences.is_empty() { ApplyOutcome::Unchanged } else { ApplyOutcome::Configured };
        Self { rule: Rule::Policy(spec), outcome, before: AppliedResource::Policy(before), differences }
    }

    /// Describes the differences, to follow the outcome, such as `: gpusMax 2 (was 4)`.
    pub(crate) fn told(&self) -> String {
        match self.differences.as_slice() {
            [] => String::new(),
            some => format!(": {}", some.join(", ")),
        }
    }

    /// Lets the server store the rule, unless the rule is unchanged.
    pub(crate) async fn store(&self, admin: &Admin) -> Result<AppliedResource, CommandFailure> {
        if self.outcome == ApplyOutcome::Unchanged {
            return Ok(self.before.clone());
        }
        let stored = match &self.rule {
            Rule::Tenant(tenant) => {
                admin.set_tenant(&tenant.name, &tenant.quota).await.map(AppliedResource::Tenant)
            }
            Rule::Policy(spec) => admin.update_policy(&self.policy(*spec)).await.map(AppliedResource::Policy),
        };
        stored.map_err(|error| self.failed(error))
    }

    /// Returns a change of all settings of the policy. The server refuses the change if another
    /// client has changed the policy since the comparison.
    fn policy(&self, spec: PolicySpec) -> PolicyChange {
        let resource_version = match &self.before {
            AppliedResource::Policy(before) => Some(before.resource_version),
            _ => None,
        };
        PolicyChange { spec, fields: None, dry_run: false, resource_version }
    }

    fn failed(&self, error: Error) -> CommandFailure {
        CommandFailure::from(error).about(self.rule.title())
    }
}

fn caps(quota: &wire::Quota) -> Fields<3> {
    [
        ("gpusMax", quota.gpus_max.map(|it| it.to_string())),
        ("gpuShare", quota.gpu_share.map(|it| it.to_string())),
        ("memoryShare", quota.memory_share.map(|it| it.to_string())),
    ]
}

fn settings(spec: &WirePolicy) -> Fields<10> {
    [
        ("preset", non_empty(spec.preset.clone())),
        ("dispatch", non_empty(spec.dispatch.clone())),
        ("eviction", non_empty(spec.eviction.clone())),
        ("overtakesMax", spec.overtakes_max.map(|it| it.to_string())),
        ("alpha", non_empty(spec.alpha.clone())),
        ("batching", non_empty(spec.batching.clone())),
        ("sloWindow", spec.slo_window.map(|it| it.to_string())),
        ("transferSharing", non_empty(spec.transfer_sharing.clone())),
        ("hostLinks", non_empty(spec.host_links.clone())),
        ("gpuSharing", non_empty(spec.gpu_sharing.clone())),
    ]
}

/// Describes the fields that differ. `unset` is the text for a field without a value.
fn differences<const N: usize>(was: Fields<N>, is: Fields<N>, unset: &str) -> Vec<String> {
    let both = was.into_iter().zip(is).filter(|((_, was), (_, is))| was != is);
    let told = both.map(|((field, was), (_, is))| {
        let is = is.as_deref().unwrap_or(unset);
        match was {
            Some(was) => format!("{field} {is} (was {was})"),
            None => format!("{field} {is}"),
        }
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use millrace_types::ResourceShare;
    use millrace_types::policy::{DispatchName, EvictionName};

    use super::*;

    fn tenant(quota: Quota) -> TenantManifest {
        TenantManifest { name: TenantName::new("acme").unwrap(), quota }
    }

    #[test]
    fn a_tenants_caps_are_compared_one_by_one() {
        let gpus = |max| Quota { gpus_max: NonZeroU32::new(max), ..Quota::NONE };
        let half = Quota { gpu_share: ResourceShare::from_ppm(500_000).ok(), ..gpus(2) };
        let there = |quota: Quota| {
            let name = "acme".to_owned();
            vec![wire::Tenant { name, quota: Some(quota_wire(&quota)), functions: 1, ..Default::default() }]
        };
        for (there, wanted, outcome, told) in [
            (vec![], gpus(2), ApplyOutcome::Created, ": gpusMax 2"),
            (there(Quota::NONE), half, ApplyOutcome::Created, ": gpusMax 2, gpuShare 0.5"),
            (there(gpus(4)), half, ApplyOutcome::Configured, ": gpusMax 2 (was 4), gpuShare 0.5"),
            (there(half), gpus(2), ApplyOutcome::Configured, ": gpuShare none (was 0.5)"),
            (there(half), half, ApplyOutcome::Unchanged, ""),
            (vec![], Quota::NONE, ApplyOutcome::Unchanged, ""),
        ] {
            let change = RuleChange::of_tenant(tenant(wanted), &there);
            assert_eq!((change.outcome, change.told().as_str()), (outcome, told));
        }
    }

    #[test]
    fn a_setting_that_the_policy_does_not_name_becomes_the_presets() {
        let torpor = PolicySpec {
            dispatch: Some(DispatchName::Torpor),
            eviction: Some(EvictionName::Torpor),
            ..PolicySpec::NONE
        };
        let there =
            wire::Policy { spec: Some(policy_spec_wire(&torpor)), resource_version: 7, ..Default::default() };
        let lalb =
            PolicySpec { dispatch: Some(DispatchName::LalbO3), overtakes_max: Some(9), ..PolicySpec::NONE };
        let change = RuleChange::of_policy(lalb, there.clone());
        let told = ": dispatch lalb-o3 (was torpor), eviction the preset's (was torpor), overtakesMax 9";
        assert_eq!((change.outcome, change.told().as_str()), (ApplyOutcome::Configured, told));
        let expected = PolicyChange { spec: lalb, fields: None, dry_run: false, resource_version: Some(7) };
        assert_eq!(change.policy(lalb), expected);
        assert_eq!(RuleChange::of_policy(torpor, there).outcome, ApplyOutcome::Unchanged);
        let unset = RuleChange::of_policy(PolicySpec::NONE, wire::Policy::default());
        assert_eq!(unset.outcome, ApplyOutcome::Unchanged);
    }

    #[test]
    fn a_rule_that_is_taken_back_has_no_settings() {
        let capped = tenant(Quota { gpus_max: NonZeroU32::new(2), ..Quota::NONE });
        assert_eq!(Rule::Tenant(capped).cleared(), Rule::Tenant(tenant(Quota::NONE)));
        let fifo = PolicySpec { dispatch: Some(DispatchName::Fifo), ..PolicySpec::NONE };
        assert_eq!(Rule::Policy(fifo).cleared(), Rule::Policy(PolicySpec::NONE));
    }
}
