//! The scheduling policy of running nodes. The policy is committed, workers get the policy with the
//! desired state, and report the settings in force.

use std::collections::BTreeMap;

use millrace_cluster_state::{State, StateCommand};
use millrace_proto::admin as api;
use millrace_proto::convert::{policy_settings, policy_spec_wire, timestamp_wire};
use millrace_proto::policy as wire;
use millrace_scheduling::preset::SchedulingPolicy;
use millrace_types::policy::Setting;
use millrace_types::{Failure, PolicySpec, Reason};
use tonic::Request;

use super::{AdminService, caller, idempotency, masks};
use crate::fleet::Workers;

impl AdminService {
    pub(super) async fn get_policy(&self, request: api::GetPolicyRequest) -> Result<api::Policy, Failure> {
        let state = self.read(request.consistency()).await?;
        Ok(view(&state, &self.fleet.workers()))
    }

    pub(super) async fn list_policy_changes(
        &self,
        request: api::ListPolicyChangesRequest,
    ) -> Result<api::ListPolicyChangesResponse, Failure> {
        let state = self.read(request.consistency()).await?;
        let max = if request.page_size == 0 { usize::MAX } else { request.page_size as usize };
        let change = |it: &std::sync::Arc<millrace_cluster_state::PolicyRecord>| api::PolicyChange {
            generation: it.generation,
            spec: Some(policy_spec_wire(&it.spec)),
            changed_at: Some(timestamp_wire(it.changed_at.0)),
            changed_by: it.changed_by.to_string(),
        };
        let changes = state.policies().rev().take(max).map(change).collect();
        Ok(api::ListPolicyChangesResponse { changes })
    }

    pub(super) async fn update_policy(
        &self,
        request: Request<api::UpdatePolicyRequest>,
    ) -> Result<api::Policy, Failure> {
        let caller = caller(&request)?;
        let request = request.into_inner();
        let given = request.spec.unwrap_or_default();
        let idempotency = idempotency(request.idempotency_key)?;
        let (spec, settings) = meant(&given, &masks::updated(request.update_mask, &names())?)?;
        if let Some(stored) = self.replica.state().policy() {
            check_retired(&stored.spec, &spec, &settings)?;
        }
        let command = StateCommand::SetPolicy { spec, settings, expected: request.resource_version };
        let (_, state) = self.write(caller, idempotency, request.dry_run, command).await?;
        Ok(view(&state, &self.fleet.workers()))
    }
}

/// Returns the field names that a mask may have.
fn names() -> Vec<&'static str> {
    Setting::ALL.iter().map(|it| it.name()).collect()
}

/// Returns the named settings of a request, and the list of names. Unnamed fields are not checked.
fn meant(given: &wire::PolicySpec, named: &[&str]) -> Result<(PolicySpec, Vec<Setting>), Failure> {
    let settings: Vec<_> = Setting::ALL.iter().copied().filter(|it| named.contains(&it.name())).collect();
    let text =
        |setting, text: &String| if settings.contains(&setting) { text.clone() } else { String::new() };
    let spec = wire::PolicySpec {
        dispatch: text(Setting::Dispatch, &given.dispatch),
        eviction: text(Setting::Eviction, &given.eviction),
        overtakes_max: given.overtakes_max.filter(|_| settings.contains(&Setting::OvertakesMax)),
        alpha: text(Setting::Alpha, &given.alpha),
        batching: text(Setting::Batching, &given.batching),
        slo_window: given.slo_window.filter(|_| settings.contains(&Setting::SloWindow)),
        preset: text(Setting::Preset, &given.preset),
        transfer_sharing: text(Setting::TransferSharing, &given.transfer_sharing),
        host_links: text(Setting::HostLinks, &given.host_links),
        gpu_sharing: text(Setting::GpuSharing, &given.gpu_sharing),
    };
    Ok((policy_settings(&spec)?, settings))
}

/// Refuses a change that leaves a retired dispatch policy in the stored policy: nodes would carry out the default
/// preset, and not the change.
fn check_retired(stored: &PolicySpec, given: &PolicySpec, settings: &[Setting]) -> Result<(), Failure> {
    let after = stored.with(given, settings);
    match after.dispatch.filter(|dispatch| dispatch.is_retired()) {
        None => Ok(()),
        Some(dispatch) => {
            let message = format!(
                "dispatch {dispatch} of the stored policy is retired, so nodes use the default preset: \
                 add --unset dispatch, or name another with --dispatch"
            );
            Err(Failure::new(Reason::InvalidSpec, message))
        }
    }
}

/// Returns the policy, and the settings in force on every live node.
fn view(state: &State, workers: &Workers) -> api::Policy {
    let policy = state.policy();
    let wanted = policy.map_or(PolicySpec::NONE, |it| it.spec);
    let actual: BTreeMap<_, _> = workers
        .values()
        .filter_map(|worker| Some((&worker.name, worker.telemetry()?.policy.clone()?)))
        .collect();
    let node = |node: &std::sync::Arc<millrace_cluster_state::NodeRecord>| {
        let said = actual.get(&node.name);
        let does = said.and_then(|said| said.spec.clone());
        api::NodePolicy {
            node: node.name.to_string(),
            obeys: does.as_ref().is_some_and(|does| obeys(&wanted, does)),
            actual: does,
            generation: said.map_or(0, |said| said.generation),
        }
    };
    let live = state.nodes().filter(|node| node.status == millrace_cluster_state::NodeStatus::Live);
    api::Policy {
        spec: Some(policy_spec_wire(&wanted)),
        generation: policy.map_or(0, |it| it.generation),
        resource_version: policy.map_or(0, |it| it.resource_version),
        updated_at: policy.map(|it| timestamp_wire(it.changed_at.0)),
        updated_by: policy.map(|it| it.changed_by.to_string()).unwrap_or_default(),
        nodes: live.map(node).collect(),
    }
}

/// Whether the settings in force on a node equal the policy, with the preset's settings for the rest.
fn obeys(wanted: &PolicySpec, does: &wire::PolicySpec) -> bool {
    policy_spec_wire(&SchedulingPolicy::default().with(&wanted.carried_out()).spec()) == *does
}

#[cfg(test)]
mod tests {
    use millrace_types::policy::{DispatchName, EvictionName, PresetName};

    use super::*;

    #[test]
    fn an_update_changes_only_the_named_fields() {
        let given = wire::PolicySpec {
            dispatch: "not looked at".into(),
            eviction: "torpor".into(),
            overtakes_max: Some(9),
            ..Default::default()
        };
        let named = |names: &[&str]| meant(&given, names);
        let torpor = PolicySpec { eviction: Some(EvictionName::Torpor), ..PolicySpec::NONE };
        assert_eq!(named(&["eviction"]), Ok((torpor, vec![Setting::Eviction])));
        assert_eq!(named(&["batching"]), Ok((PolicySpec::NONE, vec![Setting::Batching])), "unset");
        let alone = PolicySpec { overtakes_max: Some(9), ..PolicySpec::NONE };
        assert_eq!(named(&["overtakes_max"]), Ok((alone, vec![Setting::OvertakesMax])));
        assert!(meant(&given, &names()).is_err(), "the dispatch is unknown");
    }

    #[test]
    fn a_node_obeys_if_every_setting_in_force_equals_the_policy() {
        let wanted =
            PolicySpec { preset: Some(PresetName::LalbO3), overtakes_max: Some(9), ..PolicySpec::NONE };
        let does = |overtakes_max| wire::PolicySpec {
            dispatch: "lalb-o3".into(),
            eviction: "lru".into(),
            overtakes_max: Some(overtakes_max),
            batching: "on".into(),
            transfer_sharing: "fair".into(),
            host_links: "own".into(),
            gpu_sharing: "off".into(),
            ..Default::default()
        };
        assert!(obeys(&wanted, &does(9)));
        assert!(!obeys(&wanted, &does(25)));
        assert!(!obeys(&PolicySpec::NONE, &does(9)), "the policy is the default preset");
    }

    #[test]
    fn a_change_that_keeps_a_retired_dispatch_is_refused_with_the_next_step() {
        let retired = PolicySpec { dispatch: Some(DispatchName::Lb), ..PolicySpec::NONE };
        let torpor = PolicySpec { preset: Some(PresetName::Torpor), ..PolicySpec::NONE };
        let refused = check_retired(&retired, &torpor, &[Setting::Preset]).unwrap_err();
        assert!(refused.message.contains("dispatch lb") && refused.message.contains("--unset dispatch"));
        assert_eq!(check_retired(&retired, &torpor, &[Setting::Preset, Setting::Dispatch]), Ok(()));
        assert_eq!(check_retired(&retired, &torpor, Setting::ALL), Ok(()));
        assert_eq!(check_retired(&torpor, &retired, &[Setting::Preset]), Ok(()));
    }

    #[test]
    fn a_node_with_the_default_preset_obeys_a_retired_policy() {
        let wanted = PolicySpec {
            dispatch: Some(DispatchName::Lb),
            eviction: Some(EvictionName::Replicas),
            ..PolicySpec::NONE
        };
        let default = policy_spec_wire(&SchedulingPolicy::default().spec());
        assert!(obeys(&wanted, &default));
    }
}
