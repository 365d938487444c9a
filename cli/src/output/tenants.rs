//! Tenants for people and programs: in the shape of their manifest, with a `status` beside it.

use millrace_client::messages as wire;
use millrace_types::manifest::Kind;
use serde::Serialize;

use crate::output::documents::Document;
use crate::output::table::{Table, col, wide};
use crate::output::text::{moment, said};

pub(crate) type Tenant = Document<Metadata, Spec, Status>;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Metadata {
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
pub(crate) struct Spec {
    #[serde(skip_serializing_if = "Option::is_none")]
    gpus_max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_share: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_share: Option<f64>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Status {
    functions: u32,
}

impl From<wire::Tenant> for Tenant {
    fn from(tenant: wire::Tenant) -> Self {
        let quota = tenant.quota.unwrap_or_default();
        let metadata = Metadata {
            name: tenant.name,
            resource_version: Some(tenant.resource_version).filter(|&version| version > 0),
            updated_at: tenant.updated_at.and_then(moment),
            updated_by: said(tenant.updated_by),
        };
        let spec =
            Spec { gpus_max: quota.gpus_max, gpu_share: quota.gpu_share, memory_share: quota.memory_share };
        Self::new(Kind::Tenant, metadata, spec, Status { functions: tenant.functions })
    }
}

pub(crate) fn table(tenants: &[wire::Tenant]) -> Table {
    let mut table = Table::new([
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
    use crate::output::{Format, document, whole};
    use millrace_proto::convert::quota_wire;
    use millrace_types::manifest::{self, Manifest, TenantManifest};
    use millrace_types::{Quota, Share, TenantName};

    #[test]
    fn printed_tenants_can_be_applied_again() {
        let quota = Quota { gpu_share: Share::from_ppm(333_333).ok(), ..Quota::NONE };
        let tenant = |name: &str, quota| TenantManifest { name: TenantName::new(name).unwrap(), quota };
        let tenants = [tenant("acme", quota), tenant("beta", Quota::NONE)];
        let shown = tenants.clone().map(|it| {
            let quota = Some(quota_wire(&it.quota));
            let name = it.name.to_string();
            let updated_by = "alice".to_owned();
            Tenant::from(wire::Tenant {
                name,
                quota,
                functions: 2,
                resource_version: 7,
                updated_by,
                ..Default::default()
            })
        });
        let applied = tenants.map(Manifest::Tenant);
        for format in [Format::Yaml, Format::Json] {
            let text = document(format, &whole(&shown)).unwrap().unwrap();
            assert_eq!(manifest::parse(&text).unwrap(), applied, "{text}");
        }
        let yaml = document(Format::Yaml, &shown[1]).unwrap().unwrap();
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
