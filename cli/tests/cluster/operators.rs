//! What operators wait for, when they are told that there is no use in it, and what is said of who is away.

use millrace_client::messages as wire;
use serde_json::json;

use super::{cluster, json_of, ok};

/// A server that logs a line for each time that it is asked has always one more.
#[tokio::test]
async fn reading_logs_ends_where_a_line_is_logged_for_each_time_that_they_are_read() {
    let (_server, sandbox) = cluster().await;
    let lines = ok(sandbox.run("logs --tail 5").await);
    assert!(lines.ends_with("line 1\n") && lines.lines().count() == 1, "{lines}");
}

#[tokio::test]
async fn a_drain_that_is_cancelled_elsewhere_is_waited_for_no_more() {
    let (_server, sandbox) = cluster().await;
    sandbox.write_function("never");
    ok(sandbox.run("apply -f never.yaml --no-wait").await);
    let cancelled = async {
        while json_of(sandbox.run("get node node-0 -o json").await)["scheduling"] != "Draining" {}
        ok(sandbox.run("operation cancel 1").await);
    };
    let (run, ()) = tokio::join!(sandbox.run("drain node-0"), cancelled);
    assert_eq!((run.code, run.stdout.as_str()), (1, "node/node-0 draining\n"), "{run:?}");
    assert!(run.stderr.contains("node/node-0 is drained no more"), "{}", run.stderr);
}

#[tokio::test]
async fn why_a_controller_cannot_be_reached_is_said_in_every_format() {
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
