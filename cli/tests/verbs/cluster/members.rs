//! Nodes and controllers: cordoned, drained, awaited and changed.

use millrace_client::messages as wire;
use serde_json::json;

use super::{cluster, json_of, ok};
use crate::support::{Run, Sandbox};

/// Runs a verb that times out. Doubles the timeout until the verb has looked once, which may last
/// long on a busy machine.
async fn timed_out(sandbox: &Sandbox, line: &str, says: &str) -> Run {
    for doubled in 0..10 {
        let run = sandbox.run(&format!("{line} --timeout {}ms", 50 << doubled)).await;
        assert_eq!(run.code, 5, "{run:?}");
        if run.stderr.contains(says) {
            return run;
        }
    }
    panic!("{line} never says {says:?}")
}

#[tokio::test]
async fn a_node_is_cordoned_drained_and_uncordoned() {
    let (_server, sandbox) = cluster().await;
    assert_eq!(ok(sandbox.run("cordon node-0").await), "node/node-0 cordoned\n");
    assert!(ok(sandbox.run("get nodes").await).contains("Connected,Cordoned"));
    assert_eq!(ok(sandbox.run("drain node-0").await), "node/node-0 draining\nnode/node-0 drained\n");
    let node = json_of(sandbox.run("get node node-0 -o json").await);
    assert_eq!((&node["scheduling"], &node["placements"]), (&json!("Draining"), &json!(0)));
    assert_eq!(ok(sandbox.run("uncordon node-0").await), "node/node-0 uncordoned\n");

    sandbox.write_function("never");
    ok(sandbox.run("apply -f never.yaml --no-wait").await);
    let run = timed_out(&sandbox, "drain node-0", "node-0 has 2 functions still to move").await;
    assert_eq!(run.stdout, "node/node-0 draining\n");
    assert!(run.stderr.contains("not drained after "), "{}", run.stderr);
    assert_eq!(ok(sandbox.run("drain node-0 --no-wait").await), "node/node-0 draining\n");
    let run = sandbox.run("cordon nowhere").await;
    assert_eq!(run.code, 3);
    assert!(run.stderr.contains("node/nowhere: there is no node"), "{}", run.stderr);
}

#[tokio::test]
async fn only_lost_nodes_are_deleted() {
    let (_server, sandbox) = cluster().await;
    assert_eq!(ok(sandbox.run("delete node lost").await), "node/lost deleted\n");
    let run = sandbox.run("delete node/node-0").await;
    assert_eq!(run.code, 1);
    assert!(
        run.stderr.contains("node/node-0: it is live") && run.stderr.contains("NODE_STATE"),
        "{}",
        run.stderr
    );
    assert_eq!(sandbox.run("delete gpu x").await.code, 2);
    assert_eq!(sandbox.run("delete node lost --dry-run").await.code, 2);
}

#[tokio::test]
async fn the_controller_group_is_shown_awaited_and_changed() {
    let (server, sandbox) = cluster().await;
    let controller = |id: u64, role: wire::ControllerRole| wire::Controller {
        id,
        role: role.into(),
        voter: id < 3,
        reachable: true,
        client_address: format!("h{id}:8080"),
        internal_address: format!("h{id}:7070"),
        lag: Some(0),
        ..Default::default()
    };
    let roles = [wire::ControllerRole::Leader, wire::ControllerRole::Follower, wire::ControllerRole::Learner];
    server.set_status(wire::ClusterStatus {
        cluster_id: "c".into(),
        leader: 1,
        term: 4,
        quorum: true,
        controllers: (1..).zip(roles).map(|(id, role)| controller(id, role)).collect(),
        warnings: vec!["two voters stand no failure".into()],
        ..Default::default()
    });
    let run = sandbox.run("cluster status").await;
    let expected = "\
cluster c: controller 1 leads in term 4; 2 of 2 voters are up

ID   ROLE       VOTER   STATUS   CLIENTS   INTERNAL   LAG
1    Leader     Yes     Up       h1:8080   h1:7070    0
2    Follower   Yes     Up       h2:8080   h2:7070    0
3    Learner    No      Up       h3:8080   h3:7070    0
";
    assert_eq!((run.code, run.stdout.as_str()), (0, expected));
    assert!(run.stderr.contains("warning: two voters stand no failure"), "{}", run.stderr);
    let document = json_of(sandbox.run("cluster status -o json").await);
    assert_eq!((&document["leader"], &document["controllers"][2]["role"]), (&json!(1), &json!("Learner")));

    let run = timed_out(&sandbox, "cluster wait --voters 3", "2 of 3 voters are up").await;
    assert!(run.stderr.contains("not ready after "), "{}", run.stderr);
    let promoted = ok(sandbox.run("cluster promote 3").await);
    assert_eq!(promoted, "controller/3 promoted: the voters are 1, 2, 3\n");
    ok(sandbox.run("cluster wait --voters 3 --nodes 1 --timeout 10s").await);
    assert_eq!(ok(sandbox.run("cluster transfer 2").await), "controller/2 leads in term 5\n");
    assert_eq!(ok(sandbox.run("cluster remove 1").await), "controller/1 removed: the voters are 2, 3\n");
    let run = sandbox.run("cluster promote 9").await;
    assert!(run.code == 1 && run.stderr.contains("MEMBERSHIP_REFUSED"), "{run:?}");
}
