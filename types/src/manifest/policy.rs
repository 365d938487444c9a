//! Parsing and checks of `kind: Policy`, which declares the whole scheduling policy of the
//! cluster's nodes. A setting that the manifest leaves out has the value of the preset.

use std::str::FromStr;

use serde::Deserialize;

use super::field::{FieldFault, Metadata};
use crate::policy::{PolicyError, PolicySpec, UnknownName};

/// The name of the only policy of a cluster.
pub const POLICY: &str = "cluster";

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct PolicyText {
    preset: Option<String>,
    dispatch: Option<String>,
    eviction: Option<String>,
    overtakes_max: Option<u32>,
    alpha: Option<String>,
    batching: Option<String>,
    slo_window: Option<u32>,
    transfer_sharing: Option<String>,
    host_links: Option<String>,
    gpu_sharing: Option<String>,
}

impl PolicyText {
    pub(super) fn check(self, metadata: &Metadata) -> Result<PolicySpec, FieldFault> {
        metadata.check_bare()?;
        if metadata.name != POLICY {
            let problem =
                format!("there is no policy {:?}: the cluster has one, named {POLICY}", metadata.name);
            return Err(("metadata.name", problem));
        }
        let spec = PolicySpec {
            preset: named("spec.preset", self.preset)?,
            dispatch: named("spec.dispatch", self.dispatch)?,
            eviction: named("spec.eviction", self.eviction)?,
            overtakes_max: self.overtakes_max,
            alpha: named("spec.alpha", self.alpha)?,
            batching: named("spec.batching", self.batching)?,
            slo_window: self.slo_window,
            transfer_sharing: named("spec.transferSharing", self.transfer_sharing)?,
            host_links: named("spec.hostLinks", self.host_links)?,
            gpu_sharing: named("spec.gpuSharing", self.gpu_sharing)?,
        };
        spec.check().map_err(|error| (about(&error), error.to_string()))?;
        Ok(spec)
    }
}

fn named<T: FromStr<Err = UnknownName>>(
    field: &'static str,
    name: Option<String>,
) -> Result<Option<T>, FieldFault> {
    let read = name.map(|name| name.parse::<T>()).transpose();
    read.map_err(|error| (field, error.to_string()))
}

/// Returns the field that the error is about.
fn about(error: &PolicyError) -> &'static str {
    match error {
        PolicyError::Overtakes | PolicyError::NoOvertakes => "spec.overtakesMax",
        PolicyError::Alpha => "spec.alpha",
        PolicyError::SloWindow | PolicyError::SloWindowSize => "spec.sloWindow",
    }
}
