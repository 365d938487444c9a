//! The rules that operators set by manifest.

use super::{cluster, ok};

const SETTINGS: &str = "\
apiVersion: millrace/v1
kind: Policy
metadata: {name: cluster}
spec: {dispatch: lalb-o3, overtakesMax: 9}
---
apiVersion: millrace/v1
kind: Tenant
metadata: {name: acme}
spec: {gpusMax: 2, gpuShare: 0.5}
";

#[tokio::test]
async fn rules_are_applied_before_functions_and_removed_after_them() {
    let (server, sandbox) = cluster().await;
    sandbox.write_function("digits");
    sandbox.write("a-settings.yaml", SETTINGS);
    let lines = |suffix: &str| {
        [
            "tenant/acme created: gpusMax 2, gpuShare 0.5",
            "policy/cluster configured: dispatch lalb-o3, overtakesMax 9",
            "function/digits created",
        ]
        .map(|line| format!("{line}{suffix}\n"))
        .concat()
    };
    assert_eq!(ok(sandbox.run("apply -f . --dry-run").await), lines(" (dry run)"));
    assert_eq!((server.uploads(), server.function_names().len()), (0, 0));
    assert_eq!(ok(sandbox.run("apply -f .").await), lines(""), "the dry run stored nothing");
    let unchanged = "tenant/acme unchanged\npolicy/cluster unchanged\nfunction/digits unchanged\n";
    assert_eq!(ok(sandbox.run("apply -f .").await), unchanged);

    let again = async |shown: &str| ok(sandbox.run_with(&["apply", "-f", "-"], shown).await);
    let tenants = ok(sandbox.run("get tenants -o yaml").await);
    assert_eq!(again(&tenants).await, "tenant/acme unchanged\n");
    let fewer = tenants.replace("gpusMax: 2", "gpusMax: null");
    assert_eq!(again(&fewer).await, "tenant/acme configured: gpusMax none (was 2)\n");
    let policy = ok(sandbox.run("get policy -o json").await);
    assert_eq!(again(&policy).await, "policy/cluster unchanged\n");
    let other = policy.replace("\"overtakesMax\": 9", "\"overtakesMax\": 5");
    assert_eq!(again(&other).await, "policy/cluster configured: overtakesMax 5 (was 9)\n");

    let gone = |suffix: &str| {
        [
            "function/digits deleted",
            "tenant/acme deleted: gpuShare none (was 0.5)",
            "policy/cluster deleted: dispatch the preset's (was lalb-o3), overtakesMax the preset's (was 5)",
        ]
        .map(|line| format!("{line}{suffix}\n"))
        .concat()
    };
    assert_eq!(ok(sandbox.run("delete -f . --dry-run").await), gone(" (dry run)"));
    assert_eq!(ok(sandbox.run("delete -f .").await), gone(""), "the dry run deleted nothing");
    let run = sandbox.run("delete -f a-settings.yaml").await;
    assert_eq!((run.code, run.stdout.as_str()), (3, ""));
    for nothing in ["tenant/acme: nothing is set", "policy/cluster: nothing is set"] {
        assert!(run.stderr.contains(nothing), "{}", run.stderr);
    }
    assert_eq!(ok(sandbox.run("delete -f a-settings.yaml --ignore-not-found").await), "");
}

#[tokio::test]
async fn malformed_rules_are_refused_with_file_and_field_before_anything_is_stored() {
    let (server, sandbox) = cluster().await;
    sandbox.write_function("digits");
    let policy = "hint: the policy is: {apiVersion";
    let tenant = "hint: a tenant is: {apiVersion";
    for (from, to, says, hint) in [
        (
            "gpuShare: 0.5",
            "gpuShare: 50",
            "document 2, spec.gpuShare: 50 is not a share: a share is above 0",
            tenant,
        ),
        (
            "lalb-o3",
            "nonswap",
            "document 1, spec.dispatch: dispatch policy \"nonswap\" cannot be set",
            policy,
        ),
        (
            "name: acme",
            "name: acme, tenant: acme",
            "document 2, metadata.tenant: only functions and workflows",
            tenant,
        ),
    ] {
        assert!(SETTINGS.contains(from), "{from}");
        sandbox.write("a-settings.yaml", SETTINGS.replace(from, to));
        let run = sandbox.run("apply -f .").await;
        assert_eq!((run.code, run.stdout.as_str()), (2, ""), "{run:?}");
        assert!(run.stderr.contains(&format!("a-settings.yaml: {says}")), "{}", run.stderr);
        assert!(run.stderr.contains(hint), "{}", run.stderr);
    }
    assert_eq!((server.uploads(), server.function_names().len()), (0, 0));
}

#[tokio::test]
async fn a_tenant_that_the_server_refuses_is_reported_before_anything_is_stored() {
    let (server, sandbox) = cluster().await;
    sandbox.write_function("digits");
    sandbox.write("a-settings.yaml", SETTINGS);
    sandbox.write("b-tenant.yaml", SETTINGS.split_once("---\n").unwrap().1.replace("acme", "one-too-many"));
    for line in ["apply -f . --dry-run", "apply -f ."] {
        let run = sandbox.run(line).await;
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
        let says = "error: tenant/one-too-many: 10000 tenants with caps are kept at most (QUEUE_FULL)";
        assert!(run.stderr.contains(says), "{}", run.stderr);
    }
    assert_eq!(server.function_names(), Vec::<String>::new());
    assert_eq!(ok(sandbox.run("get tenants").await), "");
}
