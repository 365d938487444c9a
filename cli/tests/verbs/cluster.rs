//! Every verb that calls a cluster, against a small server in this process.

mod again;
mod invoke;
mod members;
mod operators;
mod rules;

use serde_json::{Value, json};

use crate::fake::Fake;
use crate::support::{Run, Sandbox, manifest};

async fn cluster() -> (Fake, Sandbox) {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    (server, sandbox)
}

fn ok(run: Run) -> String {
    assert_eq!(run.code, 0, "{run:?}");
    run.stdout
}

fn json_of(run: Run) -> Value {
    serde_json::from_str(&ok(run)).unwrap()
}

#[tokio::test]
async fn apply_creates_a_function_then_leaves_it_unchanged_then_configures_it() {
    let (server, sandbox) = cluster().await;
    sandbox.write_function("digits");
    assert_eq!(ok(sandbox.run("apply -f digits.yaml").await), "function/digits created\n");
    assert_eq!(ok(sandbox.run("apply -f digits.yaml").await), "function/digits unchanged\n");
    sandbox.write(
        "digits.yaml",
        manifest("digits", "mlp.onnx").replace("spec: {", "spec: {idempotent: false, "),
    );
    assert_eq!(ok(sandbox.run("apply -f digits.yaml --no-wait").await), "function/digits configured\n");
    assert_eq!(server.uploads(), 1, "the cluster had the model already");
}

#[tokio::test]
async fn all_manifests_of_a_folder_are_applied_and_deleted() {
    let (server, sandbox) = cluster().await;
    for name in ["a", "b", "c"] {
        sandbox.write_function(name);
    }
    let applied = ok(sandbox.run("apply -f .").await);
    assert_eq!(applied, "function/a created\nfunction/b created\nfunction/c created\n");
    assert_eq!(server.uploads(), 1, "three functions share one model");
    let deleted = ok(sandbox.run("delete -f a.yaml -f b.yaml").await);
    assert_eq!(deleted, "function/a deleted\nfunction/b deleted\n");
    assert_eq!(server.function_names(), ["c"]);
}

#[tokio::test]
async fn nothing_is_applied_when_one_item_is_refused() {
    let (server, sandbox) = cluster().await;
    sandbox.write_function("good");
    sandbox.write("refused.yaml", manifest("refused", "mlp.onnx"));
    let run = sandbox.run("apply -f .").await;
    assert_eq!((run.code, run.stdout.as_str()), (1, ""));
    assert!(
        run.stderr.contains("error: function/refused: this name is refused (INVALID_SPEC)"),
        "{}",
        run.stderr
    );
    assert_eq!(server.function_names(), Vec::<String>::new());
}

#[tokio::test]
async fn a_dry_run_reports_the_outcomes_and_changes_nothing() {
    let (server, sandbox) = cluster().await;
    sandbox.write_function("digits");
    assert_eq!(
        ok(sandbox.run("apply -f digits.yaml --dry-run").await),
        "function/digits created (dry run)\n"
    );
    assert_eq!((server.uploads(), server.function_names().len()), (0, 0));
    ok(sandbox.run("apply -f digits.yaml").await);
    assert_eq!(
        ok(sandbox.run("apply -f digits.yaml --dry-run").await),
        "function/digits unchanged (dry run)\n"
    );
    assert_eq!(
        ok(sandbox.run("delete function digits --dry-run").await),
        "function/digits deleted (dry run)\n"
    );
    assert_eq!(server.function_names(), ["digits"]);
}

#[tokio::test]
async fn apply_waits_until_ready_and_reports_the_missing_condition() {
    let (_server, sandbox) = cluster().await;
    sandbox.write_function("never");
    let run = sandbox.run("apply -f never.yaml --wait=50ms").await;
    assert_eq!((run.code, run.stdout.as_str()), (5, "function/never created\n"));
    assert!(
        run.stderr.contains("function/never is not ready after 50ms: NoWorker: no worker has joined"),
        "{}",
        run.stderr
    );
    sandbox.write_function("broken");
    let run = sandbox.run("apply -f broken.yaml").await;
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("cannot serve: PrepareFailed: its weights do not fit"), "{}", run.stderr);
}

#[tokio::test]
async fn listings_are_printed_as_tables_and_documents() {
    let (_server, sandbox) = cluster().await;
    for name in ["a", "b", "c"] {
        sandbox.write_function(name);
    }
    ok(sandbox.run("apply -f .").await);
    let table = ok(sandbox.run("get functions").await);
    let expected = "\
NAME   READY   REVISION   MODEL      SLO   AGE
a      False   1          33.2 KiB   -     -
b      False   1          33.2 KiB   -     -
c      False   1          33.2 KiB   -     -
";
    assert_eq!(table, expected);
    let list = json_of(sandbox.run("get functions -o json").await);
    assert_eq!((&list["kind"], list["items"].as_array().unwrap().len()), (&json!("List"), 3));
    let one = json_of(sandbox.run("get function/b -o json").await);
    assert_eq!(one["metadata"]["name"], "b");
    assert_eq!(one["spec"]["timeout"], "1m");
    let yaml = ok(sandbox.run("get function b -o yaml").await);
    assert!(yaml.starts_with("apiVersion: millrace/v1\nkind: Function\nmetadata:\n  name: b\n"), "{yaml}");
    let wide = ok(sandbox.run("get functions -o wide").await);
    assert!(wide.starts_with("TENANT    NAME   READY"), "{wide}");
}

#[tokio::test]
async fn nodes_gpus_and_residents_are_listed() {
    let (_server, sandbox) = cluster().await;
    let nodes = "\
NAME     STATUS      GPUS   GPU-MEMORY         HOST-TIER          FUNCTIONS   QUEUED
node-0   Connected   1/1    64.0 MiB/1.0 GiB   64.0 MiB/4.0 GiB   2           0
";
    assert_eq!(ok(sandbox.run("get nodes").await), nodes);
    let gpus = "\
NODE     GPU   TYPE       HEALTH   USED       MEMORY    MODELS   RUNNING
node-0   0     emulated   Up       64.0 MiB   1.0 GiB   1        -
";
    assert_eq!(ok(sandbox.run("get gpus").await), gpus);
    let ps = "\
NODE     GPU   FUNCTION         SIZE       LOADED   IDLE   STATE
node-0   0     default/echo@1   64.0 MiB   -        5s     Idle
";
    assert_eq!(ok(sandbox.run("ps").await), ps);
    let document = json_of(sandbox.run("ps -o json").await);
    let expected = json!({
        "node": "node-0", "gpu": 0, "functions": ["default/echo@1"],
        "digest": format!("sha256:{}", "ab".repeat(32)),
        "bytes": 64 << 20, "loadedBytes": 64 << 20, "idleSeconds": 5.0, "running": false, "executorPid": 42,
    });
    assert_eq!(document["items"], json!([expected]));
    assert_eq!(sandbox.run("get node nowhere").await.code, 3);
}

#[tokio::test]
async fn bills_are_listed_by_function_with_totals_and_costs() {
    let (_server, sandbox) = cluster().await;
    let own = "\
TENANT    FUNCTION         REQUESTS   GPU-TIME    IDLE         CHARGE
default   (forgotten)      1          0.001s      0.000s       0.001s
default   digits           1000       7200.000s   36000.000s   10800.000s
default   gone (deleted)   2          0.002s      0.000s       0.002s
TOTAL     -                1003       7200.003s   36000.000s   10800.003s
";
    assert_eq!(ok(sandbox.run("billing").await), own);
    let one = "\
TENANT    FUNCTION   REQUESTS   GPU-TIME    IDLE         CHARGE       COST
acme      digits     3          0.250s      10.000s      1.250s       0.0009
default   digits     1000       7200.000s   36000.000s   10800.000s   7.5000
TOTAL     -          1003       7200.250s   36010.000s   10801.250s   7.5009
";
    let line = "billing -A --function digits --price-per-gpu-hour 2.50";
    assert_eq!(ok(sandbox.run(line).await), one);
    let document = json_of(sandbox.run("billing --tenant acme --price-per-gpu-hour 2880 -o json").await);
    let amount = |more: Value| {
        let mut amount = json!({
            "requests": 3, "busySeconds": 0.25, "idleSeconds": 10.0, "chargeGpuSeconds": 1.25, "cost": 1.0,
        });
        amount.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        amount
    };
    let expected = json!({
        "apiVersion": "millrace/v1",
        "kind": "Billing",
        "pricePerGpuHour": 2880.0,
        "items": [amount(json!({"tenant": "acme", "function": "digits", "deleted": false}))],
        "tenants": [amount(json!({"tenant": "acme"}))],
        "total": amount(json!({})),
    });
    assert_eq!(document, expected);
    assert!(
        ok(sandbox.run("billing -A -o yaml").await).starts_with("apiVersion: millrace/v1\nkind: Billing\n")
    );
    let run = sandbox.run("billing --tenant nobody").await;
    assert_eq!((run.code, run.stdout.as_str()), (0, ""));
    let told = "is reported yet (workers report runs once per second, and idle time alone once per minute)";
    let nothing = format!("no usage of tenant nobody {told}: -A shows every tenant\n");
    assert_eq!(run.stderr, nothing);
    let run = sandbox.run("billing -A --function nothing").await;
    assert_eq!(run.stderr, format!("no usage of functions named nothing {told}\n"));
    let run = sandbox.run("billing --price-per-gpu-hour=-1").await;
    assert!(run.code == 2 && run.stderr.contains("a price is a number of at least 0"), "{}", run.stderr);
}

#[tokio::test]
async fn a_tenants_caps_are_set_shown_and_removed() {
    let (_server, sandbox) = cluster().await;
    let tried = ok(sandbox.run("tenant set acme --gpus-max 2 --dry-run").await);
    assert_eq!(tried, "tenant/acme may use 2 GPUs of each node (dry run)\n");
    assert_eq!(ok(sandbox.run("get tenants").await), "", "a dry run stores nothing");
    let set = ok(sandbox.run("tenant set acme --gpus-max 2 --memory-share 0.5").await);
    assert_eq!(set, "tenant/acme may use 2 GPUs, 0.5 of the GPU memory of each node\n");
    let set = ok(sandbox.run("tenant set zeta --gpu-share 0.25").await);
    assert_eq!(set, "tenant/zeta may use 0.25 of the GPUs' time of each node\n");
    assert_eq!(ok(sandbox.run("tenant set beta --no-caps").await), "tenant/beta has no caps\n");
    let table = "\
NAME   FUNCTIONS   GPUS-MAX   GPU-SHARE   MEMORY-SHARE
acme   2           2          -           0.5
beta   2           -          -           -
zeta   2           -          0.25        -
";
    assert_eq!(ok(sandbox.run("get tenants").await), table);
    let document = json_of(sandbox.run("get tenant acme -o json").await);
    let expected = json!({
        "apiVersion": "millrace/v1", "kind": "Tenant",
        "metadata": {"name": "acme", "updatedBy": "anonymous"},
        "spec": {"gpusMax": 2, "memoryShare": 0.5},
        "status": {"functions": 2},
    });
    assert_eq!(document["items"], json!([expected]));
    assert_eq!(sandbox.run("get tenant nobody").await.code, 3);
    for (line, says) in [
        ("tenant set acme", "no cap is named"),
        ("tenant set acme --gpus-max 0", "--gpus-max"),
        ("tenant set acme --gpu-share 1.5", "above 0 and at most 1"),
        ("tenant set acme --no-caps --gpus-max 1", "cannot be used with"),
        ("delete tenant acme", "millrace tenant set NAME --no-caps"),
    ] {
        let run = sandbox.run(line).await;
        assert!(run.code == 2 && run.stderr.contains(says), "{line}: {run:?}");
    }
}

#[tokio::test]
async fn a_missing_function_has_its_own_exit_code() {
    let (_server, sandbox) = cluster().await;
    for line in
        ["get function none", "describe function none", "delete function none", "invoke none --json [1]"]
    {
        let run = sandbox.run(line).await;
        assert_eq!(run.code, 3, "{line}: {run:?}");
        assert!(run.stderr.contains("FUNCTION_NOT_FOUND") && run.stderr.contains("hint: "), "{}", run.stderr);
    }
    ok(sandbox.run("delete function none --ignore-not-found").await);
    let run = sandbox.run("get functions").await;
    assert_eq!((run.code, run.stdout.as_str()), (0, ""));
    assert!(run.stderr.contains("publish one with 'millrace apply -f FILE'"), "{}", run.stderr);
}

#[tokio::test]
async fn describe_and_version_print_reports() {
    let (_server, sandbox) = cluster().await;
    sandbox.write_function("echo");
    ok(sandbox.run("apply -f echo.yaml").await);
    let report = ok(sandbox.run("describe function echo").await);
    assert!(report.contains("Name:        echo\n"), "{report}");
    assert!(report.contains("  node-0 GPU 0: revision 1, 64.0 MiB loaded, 64.0 MiB of memory"), "{report}");
    let versions = json_of(sandbox.run("version -o json").await);
    assert_eq!(
        (&versions["client"], &versions["server"]["version"]),
        (&json!(env!("CARGO_PKG_VERSION")), &json!("fake"))
    );
}
