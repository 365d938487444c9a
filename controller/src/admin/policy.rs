//! How nodes schedule while they run. What is wanted is committed; workers are told with what they
//! should serve, and say in their reports what they do.

use std::collections::BTreeMap;

use millrace_cluster_state::{Applied, Caller, Command, IdempotencyKey, State};
use millrace_proto::admin as api;
use millrace_proto::convert::{policy_spec, policy_spec_wire, timestamp_wire};
use millrace_proto::policy as wire;
use millrace_types::{Failure, PolicySpec, Reason};
use tonic::Request;

use super::{AdminService, caller, idempotency, masks};
use crate::fleet::Workers;

/// What a mask may name.
const FIELDS: [&str; 5] = ["dispatch", "eviction", "overtakes_max", "alpha", "batching"];
/// How often an update of some fields is tried again when others change the rest meanwhile.
const RACES_MAX: u32 = 8;

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
        let change = |it: &std::sync::Arc<millrace_cluster_state::Policy>| api::PolicyChange {
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
        let fields = masks::updated(request.update_mask, &FIELDS)?;
        // Without a version, a repeat sets the same again: nothing has to be remembered for it.
        let idempotency = idempotency(request.idempotency_key)?.filter(|_| request.resource_version > 0);
        let mut races = 0;
        loop {
            let before = self.replica.linearizable().await?;
            let known = before.policy();
            let seen = known.map_or(0, |it| it.resource_version);
            let version = if request.resource_version == 0 { seen } else { request.resource_version };
            let spec = merged(known.map_or(PolicySpec::NONE, |it| it.spec), &given, &fields)?;
            let write =
                self.set_policy(caller.clone(), idempotency.clone(), request.dry_run, (spec, version));
            match write.await {
                Err(failure)
                    if failure.reason == Reason::Conflict
                        && request.resource_version == 0
                        && races < RACES_MAX =>
                {
                    races += 1;
                }
                written => return Ok(view(&written?.1, &self.fleet.workers())),
            }
        }
    }

    async fn set_policy(
        &self,
        caller: Caller,
        idempotency: Option<IdempotencyKey>,
        dry_run: bool,
        (spec, version): (PolicySpec, u64),
    ) -> Result<(Applied, State), Failure> {
        let command = Command::SetPolicy { spec, expected: Some(version) };
        self.write(caller, idempotency, dry_run, command).await
    }
}

/// What is set already, with these fields as they are given.
fn merged(known: PolicySpec, given: &wire::PolicySpec, fields: &[&str]) -> Result<PolicySpec, Failure> {
    let mut spec = policy_spec_wire(&known);
    for field in fields {
        match *field {
            "dispatch" => spec.dispatch.clone_from(&given.dispatch),
            "eviction" => spec.eviction.clone_from(&given.eviction),
            "overtakes_max" => spec.overtakes_max = given.overtakes_max,
            "alpha" => spec.alpha.clone_from(&given.alpha),
            _ => spec.batching.clone_from(&given.batching),
        }
    }
    policy_spec(&spec)
}

/// What is wanted, and what every live node does.
fn view(state: &State, workers: &Workers) -> api::Policy {
    let policy = state.policy();
    let wanted = policy.map_or(PolicySpec::NONE, |it| it.spec);
    let actual: BTreeMap<_, _> = workers
        .values()
        .filter_map(|worker| Some((&worker.name, worker.telemetry()?.policy.clone()?)))
        .collect();
    let node = |node: &std::sync::Arc<millrace_cluster_state::Node>| {
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

/// Whether a node does all that is wanted; what is not said is its own business.
fn obeys(wanted: &PolicySpec, does: &wire::PolicySpec) -> bool {
    let wanted = policy_spec_wire(wanted);
    let same = |wanted: &str, does: &str| wanted.is_empty() || wanted == does;
    same(&wanted.dispatch, &does.dispatch)
        && same(&wanted.eviction, &does.eviction)
        && same(&wanted.alpha, &does.alpha)
        && same(&wanted.batching, &does.batching)
        && wanted.overtakes_max.is_none_or(|max| does.overtakes_max == Some(max))
}

#[cfg(test)]
mod tests {
    use millrace_types::policy::{Batches, DispatchName, EvictionName};

    use super::*;

    #[test]
    fn an_update_takes_the_fields_that_it_names() {
        let known = PolicySpec {
            dispatch: Some(DispatchName::LalbO3),
            overtakes_max: Some(9),
            batching: Some(Batches::Off),
            ..PolicySpec::NONE
        };
        let given = wire::PolicySpec { eviction: "torpor".into(), ..Default::default() };
        let with = |fields: &[&str]| merged(known, &given, fields);
        let torpor = Some(EvictionName::Torpor);
        assert_eq!(with(&["eviction"]), Ok(PolicySpec { eviction: torpor, ..known }));
        assert_eq!(with(&["batching"]), Ok(PolicySpec { batching: None, ..known }), "as started");
        assert_eq!(with(&FIELDS), Ok(PolicySpec { eviction: torpor, ..PolicySpec::NONE }));
        assert!(with(&["dispatch"]).is_err(), "nothing reads overtakes_max then");
    }

    #[test]
    fn a_node_obeys_that_does_what_is_said() {
        let wanted =
            PolicySpec { dispatch: Some(DispatchName::LalbO3), overtakes_max: Some(9), ..PolicySpec::NONE };
        let does = |dispatch: &str, overtakes_max| wire::PolicySpec {
            dispatch: dispatch.into(),
            eviction: "lru".into(),
            overtakes_max,
            ..Default::default()
        };
        assert!(obeys(&wanted, &does("lalb-o3", Some(9))));
        assert!(!obeys(&wanted, &does("lalb-o3", Some(25))) && !obeys(&wanted, &does("native", None)));
        assert!(obeys(&PolicySpec::NONE, &does("native", None)), "nothing is wanted of it");
    }
}
