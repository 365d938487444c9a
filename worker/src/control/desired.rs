//! The leader's messages about the desired state of this node. A state is obeyed only if the state's
//! stamp is higher than the stamp of the last state obeyed.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use millrace_proto::parts::{DesiredItem, ItemSet};
use millrace_proto::worker as wire;
use millrace_types::{
    Alpha, Alphas, Bytes, Failure, Priority, Quota, Reason, ResourceShare, Revision, RevisionKey, Slo,
    SloBase, TenantName,
};
use tokio::sync::watch;

use crate::desired_state::{
    DesiredState, LogPosition, NodeSlices, PlacedFunction, PlacedSlices, TenantQuotas,
};
use crate::policy::DesiredPolicy;

/// Obeys `state` unless the last state is newer. Returns whether anything changed. Sessions with
/// several controllers share `obeyed`, and the channel compares and replaces in one step.
///
/// # Errors
/// [`Reason::InvalidSpec`] if a function of the state cannot be read. Nothing of the state is
/// obeyed then: a half-read state would retire functions that the state names.
pub fn obey(
    obeyed: &watch::Sender<DesiredState>,
    state: &ItemSet<wire::DesiredState>,
) -> Result<bool, Failure> {
    let head = state.head();
    let stamp = Some(LogPosition { term: head.term, index: head.index });
    if stamp <= obeyed.borrow().stamp {
        return Ok(false);
    }
    let scheduling = head.scheduling.into();
    let mut functions = Vec::with_capacity(state.items().len());
    let mut quotas = TenantQuotas::new();
    let mut slices = NodeSlices::new();
    for item in state.items() {
        match item {
            DesiredItem::Function(wire) => {
                let function = function(wire)?;
                if let Some(wire) = &wire.slices {
                    slices.insert(function.key.clone(), placed_slices(wire)?);
                }
                functions.push(function);
            }
            DesiredItem::Quota(wire) => quotas.extend([quota(wire)?]),
        }
    }
    let quotas = Arc::new(quotas);
    let policy = policy(head.policy.clone().unwrap_or_default())?;
    let alphas = alphas(&head.alphas_ppm)?;
    let slices = Arc::new(slices);
    let mut new = Some(DesiredState { stamp, functions, scheduling, quotas, policy, alphas, slices });
    Ok(obeyed.send_if_modified(|last| match new.take() {
        Some(state) if state.stamp > last.stamp => {
            *last = state;
            true
        }
        _ => false,
    }))
}

fn policy(wire: wire::Policy) -> Result<DesiredPolicy, Failure> {
    let spec = millrace_proto::convert::policy_spec(&wire.spec.unwrap_or_default())?;
    Ok(DesiredPolicy { generation: wire.generation, spec })
}

fn alphas(wire: &BTreeMap<u32, u32>) -> Result<Alphas, Failure> {
    let alpha = |(&level, &ppm): (&u32, &u32)| {
        let invalid = |what: String| Failure::new(Reason::InvalidSpec, format!("priority {level}: {what}"));
        let priority = Priority::new(level.into()).ok_or_else(|| invalid("no such priority".into()))?;
        let alpha = Alpha::from_ppm(ppm).map_err(|error| invalid(error.to_string()))?;
        Ok((priority, alpha))
    };
    wire.iter().map(alpha).collect()
}

fn quota(wire: &wire::TenantQuota) -> Result<(TenantName, Quota), Failure> {
    let invalid = |what: String| Failure::new(Reason::InvalidSpec, format!("tenant {}: {what}", wire.tenant));
    let share = |ppm: u32| (ppm > 0).then(|| ResourceShare::from_ppm(ppm)).transpose();
    let quota = Quota {
        gpus_max: NonZeroU32::new(wire.gpus_max),
        gpu_share: share(wire.gpu_share_ppm).map_err(|error| invalid(error.to_string()))?,
        memory_share: share(wire.memory_share_ppm).map_err(|error| invalid(error.to_string()))?,
    };
    let tenant = TenantName::new(&wire.tenant).map_err(|error| invalid(error.to_string()))?;
    Ok((tenant, quota))
}

fn function(wire: &wire::DesiredFunction) -> Result<PlacedFunction, Failure> {
    let name = format!("{}/{}", wire.tenant, wire.name);
    let invalid = |what: String| Failure::new(Reason::InvalidSpec, format!("function {name}: {what}"));
    let function = millrace_proto::convert::function_key(&wire.tenant, &wire.name)?;
    let revision = Revision::new(wire.revision).ok_or_else(|| invalid("revision 0".into()))?;
    let slo = wire.slo_deadline.map(|deadline| {
        let deadline = Duration::try_from(deadline).map_err(|error| invalid(error.to_string()))?;
        Ok::<_, Failure>(Slo { deadline, percentile: wire.slo_percentile })
    });
    let serving = millrace_proto::convert::placed_serving(wire)?;
    let sequences = wire.sequences.clone().map(millrace_proto::convert::placed_sequences).transpose()?;
    Ok(PlacedFunction {
        key: RevisionKey { function, revision },
        serving,
        digest: wire.digest.parse().map_err(|error| invalid(format!("{error}")))?,
        artifact_bytes: Bytes(wire.artifact_bytes),
        idempotent: wire.idempotent,
        slo: slo.transpose()?,
        gpu_memory: (wire.gpu_memory_bytes > 0).then_some(Bytes(wire.gpu_memory_bytes)),
        slo_base: SloBase { m: wire.slo_base_m, n: wire.slo_base_n },
        created_at_ms: wire.created_at_ms,
        processes: wire.processes,
        sequences,
    })
}

fn placed_slices(wire: &wire::PlacedSlices) -> Result<PlacedSlices, Failure> {
    let (terms, on) = millrace_proto::convert::placed_slices(wire)?;
    Ok(PlacedSlices { terms, on })
}

#[cfg(test)]
mod tests {
    use millrace_proto::parts::PartAssembler;
    use millrace_types::Digest;

    use super::*;
    use crate::desired_state::NodeScheduling;

    /// Obeys a state that arrived in one message.
    fn obey(obeyed: &watch::Sender<DesiredState>, state: wire::DesiredState) -> Result<bool, Failure> {
        let mut set = ItemSet::default();
        set.apply(PartAssembler::default().take(state).unwrap().unwrap()).unwrap();
        super::obey(obeyed, &set)
    }

    fn state(term: u64, index: u64, names: &[&str]) -> wire::DesiredState {
        let function = |name: &&str| wire::DesiredFunction {
            name: (*name).to_owned(),
            revision: 1,
            digest: Digest::of(b"x").to_string(),
            ..Default::default()
        };
        let functions = names.iter().map(function).collect();
        wire::DesiredState { term, index, functions, ..Default::default() }
    }

    fn names(obeyed: &watch::Sender<DesiredState>) -> Vec<String> {
        obeyed.borrow().functions.iter().map(|function| function.key.function.name.to_string()).collect()
    }

    #[test]
    fn states_are_obeyed_in_log_order_if_they_arrive_in_another() {
        let obeyed = watch::Sender::new(DesiredState::default());
        for (term, index, name, changes) in [
            (1, 5, "a", true),
            (1, 4, "b", false),
            (1, 5, "c", false),
            (1, 6, "d", true),
            (2, 1, "e", true),
            (1, 9, "f", false),
        ] {
            let before = names(&obeyed);
            assert_eq!(obey(&obeyed, state(term, index, &[name])), Ok(changes), "{term} {index}");
            assert_eq!(names(&obeyed), if changes { vec![name.to_owned()] } else { before });
        }
    }

    #[test]
    fn an_empty_state_at_zero_is_obeyed_too() {
        let obeyed = watch::Sender::new(DesiredState::default());
        assert_eq!(obey(&obeyed, state(0, 0, &[])), Ok(true));
    }

    #[test]
    fn scheduling_and_inherited_scores_are_read_from_the_state() {
        let obeyed = watch::Sender::new(DesiredState::default());
        let mut moved = state(1, 1, &["a"]);
        moved.set_scheduling(wire::NodeScheduling::Draining);
        moved.functions[0].slo_base_m = -2;
        moved.functions[0].slo_base_n = 5;
        obey(&obeyed, moved).unwrap();
        assert_eq!(obeyed.borrow().scheduling, NodeScheduling::Draining);
        assert_eq!(obeyed.borrow().functions[0].slo_base, SloBase { m: -2, n: 5 });
    }

    #[test]
    fn caps_are_read_from_the_state() {
        let obeyed = watch::Sender::new(DesiredState::default());
        let mut capped = state(1, 1, &["a"]);
        let quota = wire::TenantQuota { tenant: "acme".into(), gpus_max: 2, ..Default::default() };
        capped.quotas = vec![wire::TenantQuota { memory_share_ppm: 500_000, ..quota.clone() }];
        obey(&obeyed, capped.clone()).unwrap();
        let half = ResourceShare::from_ppm(500_000).ok();
        let expected = Quota { gpus_max: NonZeroU32::new(2), gpu_share: None, memory_share: half };
        assert_eq!(obeyed.borrow().quotas.get(&TenantName::new("acme").unwrap()), Some(&expected));
        capped.index = 2;
        capped.quotas = vec![wire::TenantQuota { gpu_share_ppm: 1_000_001, ..quota }];
        assert!(obey(&obeyed, capped).unwrap_err().message.contains("tenant acme"));
    }

    #[test]
    fn a_state_with_an_unknown_policy_is_not_obeyed() {
        let obeyed = watch::Sender::new(DesiredState::default());
        let spec = |dispatch: &str| millrace_proto::policy::PolicySpec {
            dispatch: dispatch.to_owned(),
            ..Default::default()
        };
        let mut told = state(1, 1, &["a"]);
        told.policy = Some(wire::Policy { generation: 4, spec: Some(spec("lalb")) });
        obey(&obeyed, told.clone()).unwrap();
        let lalb = Some(millrace_types::policy::DispatchName::Lalb);
        assert_eq!((obeyed.borrow().policy.generation, obeyed.borrow().policy.spec.dispatch), (4, lalb));
        told.index = 2;
        told.policy = Some(wire::Policy { generation: 5, spec: Some(spec("lifo")) });
        assert!(obey(&obeyed, told).unwrap_err().message.contains("lifo"));
        assert_eq!(obeyed.borrow().policy.generation, 4);
    }

    #[test]
    fn an_unreadable_state_changes_nothing() {
        let obeyed = watch::Sender::new(DesiredState::default());
        obey(&obeyed, state(1, 1, &["a"])).unwrap();
        let mut bad = state(1, 2, &["b", "c"]);
        bad.functions[1].digest = "md5:0".into();
        let error = obey(&obeyed, bad).unwrap_err();
        assert!(error.message.contains("function /c"), "{error:?}");
        assert_eq!(names(&obeyed), ["a"]);
    }
}
