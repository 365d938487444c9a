//! Parsing and checks of `kind: Tenant`, which declares all caps on a tenant for each node. A cap
//! that the manifest leaves out does not exist.

use std::num::NonZeroU32;

use serde::Deserialize;

use super::field::{FieldFault, Metadata};
use crate::ids::TenantName;
use crate::tenancy::{Quota, ResourceShare};

/// The declared caps on a tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TenantManifest {
    /// The tenant's name.
    pub name: TenantName,
    /// The caps on each node.
    pub quota: Quota,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub(super) struct TenantText {
    gpus_max: Option<u32>,
    gpu_share: Option<f64>,
    memory_share: Option<f64>,
}

impl TenantText {
    pub(super) fn check(self, metadata: &Metadata) -> Result<TenantManifest, FieldFault> {
        metadata.check_bare()?;
        let name = TenantName::new(&metadata.name).map_err(|error| ("metadata.name", error.to_string()))?;
        let quota = Quota {
            gpus_max: self.gpus_max.map(gpus).transpose()?,
            gpu_share: share("spec.gpuShare", self.gpu_share)?,
            memory_share: share("spec.memoryShare", self.memory_share)?,
        };
        Ok(TenantManifest { name, quota })
    }
}

fn gpus(max: u32) -> Result<NonZeroU32, FieldFault> {
    let problem = "0 is no cap: write a number from 1, or leave gpusMax out; to stop a tenant, delete or unload its functions";
    NonZeroU32::new(max).ok_or_else(|| ("spec.gpusMax", problem.to_owned()))
}

fn share(field: &'static str, fraction: Option<f64>) -> Result<Option<ResourceShare>, FieldFault> {
    let share = |fraction: f64| {
        ResourceShare::from_fraction(fraction)
            .map_err(|error| (field, format!("{fraction} is not a share: {error}")))
    };
    fraction.map(share).transpose()
}
