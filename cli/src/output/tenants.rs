//! Tenants for people and programs: in the shape of their manifest, with a `status` beside it.

use millrace_client::messages as wire;
use millrace_types::manifest::ManifestKind;
use serde::Serialize;

use crate::output::documents::ManifestDocument;
use crate::output::table::{TextTable, col, wide};
use crate::output::text::{moment, non_empty};

pub(crate) type TenantDocument =
    ManifestDocument<TenantMetadataDocument, TenantSpecDocument, TenantStatusDocument>;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TenantMetadataDocument {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    resource_version: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    updated_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    updated_by: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct TenantSpecDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    gpus_max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_share: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct TenantStatusDocument {
    functions: u32,
}

impl From<wire::Tenant> for TenantDocument {
    fn from(tenant: wire::Tenant) -> Self {
        let quota = tenant.quota.unwrap_or_default();
        let metadata = TenantMetadataDocument {
            name: tenant.name,
            resource_version: Some(tenant.resource_version).filter(|&version| version > 0),
            updated_at: tenant.updated_at.and_then(moment),
            updated_by: non_empty(tenant.updated_by),
        };
        let spec = TenantSpecDocument {
            gpus_max: quota.gpus_max,
            gpu_share: quota.gpu_share,
            memory_share: quota.memory_share,
        };
        Self::new(ManifestKind::Tenant, metadata, spec, TenantStatusDocument { functions: tenant.functions })
    }
}

pub(crate) fn table(tenants: &[wire::Tenant]) -> TextTable {
    let mut table = TextTable::new([
        col("NAME"),
        col("FUNCTIONS"),
        col("GPUS-MAX"),
        col("GPU-SHARE"),
        col("MEMORY-SHARE"),
        wide("UPDATED"),
        wide("BY"),
    ]);
    for tenant in tenants {
        let quota = tenant.quota.unwrap_or_default();
        let share = |share: Option<f64>| share.map(|it| it.to_string()).unwrap_or_default();
        table.row([
            tenant.name.clone(),
            tenant.functions.to_string(),
            quota.gpus_max.map(|it| it.to_string()).unwrap_or_default(),
            share(quota.gpu_share),
            share(quota.memory_share),
            tenant.updated_at.and_then(moment).unwrap_or_default(),
            tenant.updated_by.clone(),
        ]);
    }
    table
}

/// Describes a tenant's caps in words.
pub(crate) fn caps(tenant: &wire::Tenant) -> String {
    let quota = tenant.quota.unwrap_or_default();
    let gpus = quota.gpus_max.map(|max| match max {
        1 => "one GPU".to_owned(),
        max => format!("{max} GPUs"),
    });
    let time = quota.gpu_share.map(|share| format!("{share} of the GPUs' time"));
    let memory = quota.memory_share.map(|share| format!("{share} of the GPU memory"));
    let caps: Vec<_> = [gpus, time, memory].into_iter().flatten().collect();
    if caps.is_empty() {
        "has no caps".to_owned()
    } else {
        format!("may use {} of each node", caps.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{ListFormat, document, whole};
    use millrace_proto::convert::quota_wire;
    use millrace_types::manifest::{self, Manifest, TenantManifest};
    use millrace_types::{Quota, ResourceShare, TenantName};

    #[test]
    fn printed_tenants_can_be_applied_again() {
        let quota = Quota { gpu_share: ResourceShare::from_ppm(333_333).ok(), ..Quota::NONE };
        let tenant = |name: &str, quota| TenantManifest { name: TenantName::new(name).unwrap(), quota };
        let tenants = [tenant("acme", quota), tenant("beta", Quota::NONE)];
        let shown = tenants.clone().map(|it| {
            let quota = Some(quota_wire(&it.quota));
            let name = it.name.to_string();
            let updated_by = "alice".to_owned();
            TenantDocument::from(wire::Tenant {
                name,
                quota,
                functions: 2,
                resource_version: 7,
                updated_by,
                ..Default::default()
            })
        });
        let applied = tenants.map(Manifest::Tenant);
        for format in [ListFormat::Yaml, ListFormat::Json] {
            let text = document(format, &whole(&shown)).unwrap().unwrap();
            assert_eq!(manifest::parse(&text).unwrap(), applied, "{text}");
        }
        let yaml = document(ListFormat::Yaml, &shown[1]).unwrap().unwrap();
        let expected = "\
apiVersion: millrace/v1
kind: Tenant
metadata:
  name: beta
  resourceVersion: 7
  updatedBy: alice
spec: {}
status:
  functions: 2
";
        assert_eq!(yaml, expected);
    }
}
