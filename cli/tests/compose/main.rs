//! The compose cluster of `deploy/compose` in a real engine: an image with the binary under test,
//! the containers with their networks and volumes, and clients on the published ports. Needs a
//! Docker Engine, a compose tool, root, and the base image of `deploy/compose/base-image.sh`. If
//! one of them is missing, the test prints which and passes.

#![allow(clippy::unwrap_used)]

mod clients;
mod engine;

use clients::Clients;
use engine::{Cluster, SERVICES};

/// The number of responses after each fault that show that the cluster serves again.
const STEADY: usize = 50;

#[test]
fn a_compose_cluster_loses_no_request_to_kills_and_a_rolling_restart() {
    let Some(cluster) = Cluster::up() else { return };
    cluster.wait_whole();
    cluster.ok(&["apply", "-f", &engine::repository("examples/digits/function.yaml")]);
    let picture = engine::repository("examples/digits/images/digit-3.png");
    let answer = cluster.ok(&["invoke", "digits", "--image", &picture]);
    assert!(answer.contains("digit-3.png: 3 "), "{answer}");

    // The engine restarts the killed services over their volumes.
    let clients = Clients::start(&cluster.endpoints);
    let leader = cluster.leader();
    for service in [format!("controller-{leader}"), "worker-1".to_owned()] {
        cluster.kill(&service);
        clients.answered_more(STEADY);
        cluster.wait_whole();
    }
    for service in SERVICES {
        cluster.restart(service);
        cluster.wait_whole();
        clients.answered_more(STEADY);
    }
    let (answered, failures) = clients.stop();
    assert!(failures.is_empty(), "{} of {answered} requests failed: {failures:#?}", failures.len());

    cluster.wait_healthy();
    assert_eq!(cluster.ok(&["invoke", "digits", "--image", &picture]).lines().next(), answer.lines().next());
    eprintln!("compose: {answered} requests were answered");

    // `docker run` of the same image, without arguments.
    let alone = cluster.alone();
    alone.ok(&["cluster", "wait", "--voters", "1", "--nodes", "1", "--timeout", "60s"]);
    alone.ok(&["apply", "-f", &engine::repository("examples/digits/function.yaml")]);
    let answer = alone.ok(&["invoke", "digits", "--image", &picture]);
    assert!(answer.contains("digit-3.png: 3 "), "{answer}");
    assert_eq!(alone.stop(), "0");
}
