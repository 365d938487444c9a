//! What operators wait for, and when they are told that there is no use in it.

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
