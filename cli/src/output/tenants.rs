//! Tenants as people and programs read them.

use millrace_client::messages as wire;
use serde::Serialize;

use crate::output::table::{Table, col, wide};
use crate::output::text::moment;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Tenant {
    name: String,
    functions: u32,
    gpus_max: Option<u32>,
    gpu_share: Option<f64>,
    memory_share: Option<f64>,
    resource_version: Option<u64>,
    updated_at: Option<String>,
    updated_by: Option<String>,
}

impl From<wire::Tenant> for Tenant {
    fn from(tenant: wire::Tenant) -> Self {
        let quota = tenant.quota.unwrap_or_default();
        Self {
            name: tenant.name,
            functions: tenant.functions,
            gpus_max: quota.gpus_max,
            gpu_share: quota.gpu_share,
            memory_share: quota.memory_share,
            resource_version: Some(tenant.resource_version).filter(|&version| version > 0),
            updated_at: tenant.updated_at.and_then(moment),
            updated_by: Some(tenant.updated_by).filter(|by| !by.is_empty()),
        }
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

/// A tenant's caps in words.
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
