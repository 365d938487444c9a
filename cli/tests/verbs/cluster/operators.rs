//! The waits of operators that end early, and the reasons for unreachable controllers.

use millrace_client::messages as wire;
use serde_json::json;

use super::{cluster, json_of, ok};

/// A server that logs each read of its log always has one more line.
#[tokio::test]
async fn reading_logs_ends_although_each_read_is_logged() {
    let (_server, sandbox) = cluster().await;
    let lines = ok(sandbox.run("logs --tail 5").await);
    assert!(lines.ends_with("line 1\n") && lines.lines().count() == 1, "{lines}");
}

#[tokio::test]
async fn a_wait_for_a_drain_ends_when_the_drain_is_cancelled_elsewhere() {
    let (_server, sandbox) = cluster().await;
    sandbox.write_function("never");
    ok(sandbox.run("apply -f never.yaml --no-wait").await);
    let cancelled = async {
        while json_of(sandbox.run("get node node-0 -o json").await)["scheduling"] != "Draining" {}
        ok(sandbox.run("operation cancel 1").await);
    };
    let (run, ()) = tokio::join!(sandbox.run("drain node-0"), cancelled);
    assert_eq!((run.code, run.stdout.as_str()), (1, "node/node-0 draining\n"), "{run:?}");
    assert!(run.stderr.contains("node/node-0 is no longer draining"), "{}", run.stderr);
}

#[tokio::test]
async fn the_reason_of_an_unreachable_controller_is_in_every_format() {
    let (server, sandbox) = cluster().await;
    let why = "controllers speak protocols 8 and 7";
    let up = wire::Controller { id: 1, voter: true, reachable: true, ..Default::default() };
    let away = wire::Controller { id: 3, unreachable_reason: why.into(), ..Default::default() };
    server.set_status(wire::ClusterStatus { controllers: vec![up, away], ..Default::default() });
    let run = sandbox.run("cluster status").await;
    assert_eq!(run.stderr, format!("warning: controller 3 cannot be reached: {why}\n"));
    assert!(!run.stdout.contains(why), "{}", run.stdout);
    let run = sandbox.run("cluster status -o wide").await;
    assert!(run.stdout.contains(why) && run.stderr.is_empty(), "{run:?}");
    let document = json_of(sandbox.run("cluster status -o json").await);
    let reasons = [0, 1].map(|at: usize| document["controllers"][at]["unreachableReason"].clone());
    assert_eq!(reasons, [json!(null), json!(why)]);
}
