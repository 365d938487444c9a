//! The start, stop, death and restart of a cluster in one process.

use rustix::process::Signal;

use crate::running::{RunningCluster, millrace, repository, wait_gone};

#[test]
fn a_stop_signal_ends_all_processes_in_order() {
    for signal in [Signal::INT, Signal::TERM] {
        let up = RunningCluster::ephemeral(&["--gpus", "2"]);
        let executors = up.executors();
        assert_eq!(executors.len(), 2, "one executor for each GPU");
        up.signal(signal);
        let (status, rest) = up.ended();
        assert!(status.success(), "{signal:?}: {status}");
        assert_eq!(rest, "", "stdout has the ready line and nothing else");
        wait_gone(&executors);
    }
}

#[test]
fn no_executor_outlives_a_killed_parent() {
    let up = RunningCluster::ephemeral(&["--gpus", "3"]);
    let executors = up.executors();
    assert_eq!(executors.len(), 3);
    up.signal(Signal::KILL);
    assert!(!up.ended().0.success());
    wait_gone(&executors);
}

#[test]
fn a_second_start_serves_the_same_functions_without_an_upload() {
    let dir = tempfile::tempdir().unwrap();
    let image = repository("examples/digits/images/digit-7.png");
    let first = RunningCluster::in_dir(dir.path());
    first.apply_digits();
    let before = first.ok(&["invoke", "digits", "--image", &image]);
    // Kill the process: a second start needs nothing that an orderly stop writes.
    first.signal(Signal::KILL);
    first.ended();

    let second = RunningCluster::in_dir(dir.path());
    crate::running::eventually("the function is ready again", || {
        second.json(&["get", "functions"])[0]["status"]["ready"] == true
            || second.run(&["invoke", "digits", "--image", &image]).status.success()
    });
    let after = second.ok(&["invoke", "digits", "--image", &image]);
    assert_eq!(before.lines().next(), after.lines().next());
    assert_eq!(second.apply_digits(), "function/digits unchanged\n");
}

#[test]
fn a_data_directory_has_one_cluster_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let _first = RunningCluster::in_dir(dir.path());
    let second = millrace()
        .args(["up", "--listen", "127.0.0.1:0", "--internal-listen", "127.0.0.1:0"])
        .args(["--worker-listen", "127.0.0.1:0", "--data-dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&second.stderr);
    assert!(stderr.contains("lock") || stderr.contains("in use"), "{stderr}");
}

#[test]
fn a_port_in_use_is_named() {
    let up = RunningCluster::ephemeral(&[]);
    let second = millrace().args(["up", "--ephemeral", "--listen", &up.client]).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    let stderr = String::from_utf8_lossy(&second.stderr);
    assert!(stderr.contains(&up.client) && stderr.contains("port 0"), "{stderr}");
}

#[test]
fn the_demo_shows_every_answer() {
    let demo = millrace().arg("demo").output().unwrap();
    let stdout = String::from_utf8_lossy(&demo.stdout);
    let stderr = String::from_utf8_lossy(&demo.stderr);
    assert!(demo.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("10 of 10 are correct"), "{stdout}");
    assert!(stdout.contains("= queue") && stdout.contains("Next steps"), "{stdout}");
}

#[test]
fn the_demo_loses_no_request_to_killed_executors() {
    let demo = millrace().args(["demo", "--chaos"]).output().unwrap();
    let stdout = String::from_utf8_lossy(&demo.stdout);
    let stderr = String::from_utf8_lossy(&demo.stderr);
    assert!(demo.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("answered as without chaos, 0 not"), "{stdout}");
}

#[test]
fn the_workflow_demo_shows_every_hop_and_loses_no_request_to_killed_executors() {
    let demo = millrace().args(["demo", "--workflow", "traffic", "--chaos"]).output().unwrap();
    let stdout = String::from_utf8_lossy(&demo.stdout);
    let stderr = String::from_utf8_lossy(&demo.stderr);
    assert!(demo.status.success(), "{stdout}{stderr}");
    assert!(stdout.contains("people: 24, ") && stdout.contains("vehicles: 16, "), "{stdout}");
    assert!(stdout.contains("detect.any_vehicles is 0"), "{stdout}");
    // The input of a recogniser was made on its own GPU or on the other GPU.
    let methods = [" intra-gpu ", " inter-gpu ", " host "];
    let is_hop =
        |line: &&str| methods.iter().any(|method| line.contains(method)) && line.contains("worker-1");
    assert_eq!(stdout.lines().filter(is_hop).count(), 3, "{stdout}");
    assert!(stdout.contains("answered as without chaos, 0 not"), "{stdout}");
}

#[test]
fn health_distinguishes_a_serving_server_from_an_unreachable_one() {
    let up = RunningCluster::ephemeral(&[]);
    assert_eq!(up.ok(&["health", &up.client]), "serving\n");
    let said = up.refused(4, &["health", "127.0.0.1:1"]);
    assert!(said.contains("127.0.0.1:1 does not answer a health check"), "{said}");
}
