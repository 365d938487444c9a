//! What operators wait for, and when they are told that there is no use in it.

use super::{cluster, ok};

/// A server that logs a line for each time that it is asked has always one more.
#[tokio::test]
async fn reading_logs_ends_where_a_line_is_logged_for_each_time_that_they_are_read() {
    let (_server, sandbox) = cluster().await;
    let lines = ok(sandbox.run("logs --tail 5").await);
    assert!(lines.ends_with("line 1\n") && lines.lines().count() == 1, "{lines}");
}
