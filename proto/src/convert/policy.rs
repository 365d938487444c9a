//! Conversions of the scheduling policy.

use std::fmt::Display;
use std::str::FromStr;

use millrace_types::{Failure, PolicySpec, Reason};

use crate::policy;

/// Parses a scheduling policy and checks that its settings fit together.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the unknown name or the unused setting.
pub fn policy_spec(wire: &policy::PolicySpec) -> Result<PolicySpec, Failure> {
    let spec = policy_settings(wire)?;
    spec.check().map_err(|error| Failure::new(Reason::InvalidSpec, error.to_string()))?;
    Ok(spec)
}

/// Parses settings of a scheduling policy without a check that they fit together.
///
/// # Errors
/// [`Reason::InvalidSpec`] with the unknown name.
pub fn policy_settings(wire: &policy::PolicySpec) -> Result<PolicySpec, Failure> {
    fn named<T: FromStr<Err: Display>>(name: &str) -> Result<Option<T>, Failure> {
        let read = (!name.is_empty()).then(|| name.parse()).transpose();
        read.map_err(|error: T::Err| Failure::new(Reason::InvalidSpec, error.to_string()))
    }
    Ok(PolicySpec {
        dispatch: named(&wire.dispatch)?,
        eviction: named(&wire.eviction)?,
        overtakes_max: wire.overtakes_max,
        alpha: named(&wire.alpha)?,
        batching: named(&wire.batching)?,
        slo_window: wire.slo_window,
        preset: named(&wire.preset)?,
        transfer_sharing: named(&wire.transfer_sharing)?,
        host_links: named(&wire.host_links)?,
        gpu_sharing: named(&wire.gpu_sharing)?,
    })
}

/// Encodes a scheduling policy.
#[must_use]
pub fn policy_spec_wire(spec: &PolicySpec) -> policy::PolicySpec {
    policy::PolicySpec {
        dispatch: spec.dispatch.map(|it| it.to_string()).unwrap_or_default(),
        eviction: spec.eviction.map(|it| it.to_string()).unwrap_or_default(),
        overtakes_max: spec.overtakes_max,
        alpha: spec.alpha.map(|it| it.to_string()).unwrap_or_default(),
        batching: spec.batching.map(|it| it.to_string()).unwrap_or_default(),
        slo_window: spec.slo_window,
        preset: spec.preset.map(|it| it.to_string()).unwrap_or_default(),
        transfer_sharing: spec.transfer_sharing.map(|it| it.to_string()).unwrap_or_default(),
        host_links: spec.host_links.map(|it| it.to_string()).unwrap_or_default(),
        gpu_sharing: spec.gpu_sharing.map(|it| it.to_string()).unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use millrace_types::policy::{
        AlphaReading, Batches, DispatchName, EvictionName, GpuSharingName, HostLinksName, PresetName,
        TransferSharingName,
    };

    use super::*;

    #[test]
    fn a_policy_survives_the_wire() {
        let spec = PolicySpec {
            preset: Some(PresetName::Torpor),
            dispatch: Some(DispatchName::Torpor),
            eviction: Some(EvictionName::Replicas),
            overtakes_max: None,
            alpha: Some(AlphaReading::Artifact),
            batching: Some(Batches::Off),
            slo_window: Some(100),
            transfer_sharing: Some(TransferSharingName::Faastube),
            host_links: Some(HostLinksName::All),
            gpu_sharing: Some(GpuSharingName::Slices),
        };
        for spec in [spec, PolicySpec::NONE] {
            assert_eq!(policy_spec(&policy_spec_wire(&spec)), Ok(spec));
        }
    }

    #[test]
    fn unknown_names_and_unused_settings_are_refused() {
        let refused = |wire: policy::PolicySpec| policy_spec(&wire).unwrap_err().message;
        let native = policy::PolicySpec { dispatch: "native".into(), ..Default::default() };
        assert!(refused(native).contains("\"native\""));
        let alone = policy::PolicySpec { overtakes_max: Some(3), ..Default::default() };
        assert!(refused(alone).contains("overtakes_max"));
    }
}
