//! Tests of the manifests that operators write: tenants and the policy.

use std::num::NonZeroU32;

use crate::ids::TenantName;
use crate::manifest::{Manifest, TenantManifest, parse};
use crate::policy::{
    Batches, DispatchName, EvictionName, GpuSharingName, HostLinksName, PolicySpec, PresetName,
    TransferSharingName,
};
use crate::tenancy::{Quota, ResourceShare};

const TENANT: &str = "\
apiVersion: millrace/v1
kind: Tenant
metadata: {name: acme}
spec: {gpusMax: 2, gpuShare: 0.5, memoryShare: 1}
";

const POLICY_TEXT: &str = "\
apiVersion: millrace/v1
kind: Policy
metadata: {name: cluster}
spec: {preset: torpor, dispatch: lalb-o3, eviction: replicas, overtakesMax: 9, batching: on, transferSharing: faastube, hostLinks: all, gpuSharing: slices}
";

#[test]
fn tenants_and_policies_are_parsed() {
    let name = TenantName::new("acme").unwrap();
    let quota = Quota {
        gpus_max: NonZeroU32::new(2),
        gpu_share: ResourceShare::from_ppm(500_000).ok(),
        memory_share: Some(ResourceShare::ALL),
    };
    let policy = PolicySpec {
        preset: Some(PresetName::Torpor),
        dispatch: Some(DispatchName::LalbO3),
        eviction: Some(EvictionName::Replicas),
        overtakes_max: Some(9),
        alpha: None,
        batching: Some(Batches::On),
        slo_window: None,
        transfer_sharing: Some(TransferSharingName::Faastube),
        host_links: Some(HostLinksName::All),
        gpu_sharing: Some(GpuSharingName::Slices),
    };
    let both = parse(&format!("{TENANT}---\n{POLICY_TEXT}")).unwrap();
    let tenant = Manifest::Tenant(TenantManifest { name: name.clone(), quota });
    assert_eq!(both, [tenant, Manifest::Policy(policy)]);
    let bare = |text: &str, spec: &str| {
        let (head, _) = text.split_once("spec: ").unwrap();
        parse(&format!("{head}spec: {spec}\n")).unwrap().remove(0)
    };
    let none = Manifest::Tenant(TenantManifest { name, quota: Quota::NONE });
    assert_eq!(bare(TENANT, "{}"), none, "an absent field sets no cap");
    assert_eq!(bare(TENANT, "{gpusMax: null}"), none);
    assert_eq!(bare(POLICY_TEXT, "{}"), Manifest::Policy(PolicySpec::NONE));
}

#[test]
fn each_refusal_of_a_tenant_or_policy_names_the_correction() {
    for (text, from, to, says) in [
        (TENANT, "gpusMax: 2", "gpusMax: 0", "document 1, spec.gpusMax: 0 is no cap: write a number from 1"),
        (TENANT, "gpusMax: 2", "gpusMax: two", "gpusMax"),
        (TENANT, "gpusMax: 2", "gpuMax: 2", "gpuMax"),
        (
            TENANT,
            "0.5",
            "0",
            "spec.gpuShare: 0 is not a share: a share is above 0 and at most 1, such as 0.5",
        ),
        (
            TENANT,
            "memoryShare: 1",
            "memoryShare: 1.5",
            "spec.memoryShare: 1.5 is not a share: a share is above 0",
        ),
        (TENANT, "name: acme", "name: Acme", "metadata.name: tenant name \"Acme\" is not valid"),
        (TENANT, "name: acme", "name: acme, tenant: acme", "metadata.tenant: only functions and workflows"),
        (
            POLICY_TEXT,
            "cluster}",
            "cluster, labels: {a: b}}",
            "metadata.labels: only functions and workflows",
        ),
        (POLICY_TEXT, "name: cluster", "name: mine", "the cluster has one, named cluster"),
        (POLICY_TEXT, "lalb-o3", "native", "spec.dispatch: dispatch policy \"native\" cannot be set"),
        (POLICY_TEXT, "lalb-o3", "fifo", "spec.overtakesMax: overtakes_max applies only to dispatch lalb-o3"),
        (POLICY_TEXT, "overtakesMax: 9", "overtakesMax: 0", "set dispatch lalb"),
        (POLICY_TEXT, "batching: on", "batching: yes", "spec.batching: batching \"yes\" cannot be set"),
        (POLICY_TEXT, "batching: on", "alpha: paper", "spec.alpha: alpha applies only to dispatch torpor"),
        (
            POLICY_TEXT,
            "batching: on",
            "sloWindow: 9",
            "spec.sloWindow: slo_window applies only to dispatch torpor",
        ),
        (POLICY_TEXT, "overtakesMax", "overtakes_max", "overtakes_max"),
    ] {
        assert!(text.contains(from), "{from}");
        let message = parse(&text.replace(from, to)).unwrap_err().to_string();
        assert!(message.contains(says), "{from:?} -> {to:?}: {message}");
    }
    for (text, says) in [(TENANT, "tenant acme is in this file"), (POLICY_TEXT, "the policy is in this file")]
    {
        let message = parse(&format!("{text}---\n{text}")).unwrap_err().to_string();
        assert!(message.contains(says), "{message}");
    }
}
