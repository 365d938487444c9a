//! The start, stop, death and restart of a cluster in one process.

use std::process::Command;

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
fn an_ephemeral_cluster_leaves_the_folder_of_the_variable_alone() {
    let dir = tempfile::tempdir().unwrap();
    let variables = [("MILLRACE_DATA_DIR", dir.path())];
    let up = RunningCluster::ephemeral_with(&[], &variables);
    up.ok(&["get", "nodes"]);
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
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
        is_ready(&second.json(&["get", "functions"])[0])
    });
    let after = second.ok(&["invoke", "digits", "--image", &image]);
    assert_eq!(before.lines().next(), after.lines().next());
    assert_eq!(second.apply_digits(), "function/digits unchanged\n");
}

/// Returns whether a function of `get functions -o json` is ready.
fn is_ready(function: &serde_json::Value) -> bool {
    let mut conditions = function["status"]["conditions"].as_array().into_iter().flatten();
    conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// The directory was written by the build of commit 01b7c454 (2026-11-23, cluster version 9): three
/// functions of two tenants, a workflow, a tenant's caps, six requests on a tenant's bill, and a
/// policy that this build's servers do not have.
#[test]
fn a_data_directory_of_an_earlier_build_serves_as_before() {
    let dir = tempfile::tempdir().unwrap();
    let packed = repository("cli/tests/data/data-directory-of-01b7c454.tar.gz");
    let unpacked = Command::new("tar").arg("-xzf").arg(packed).arg("-C").arg(dir.path()).status().unwrap();
    assert!(unpacked.success());
    let up = RunningCluster::in_dir(&dir.path().join("data"));

    let functions = || up.json(&["get", "functions", "--all-tenants"]);
    crate::running::eventually("all functions are ready again", || {
        let functions = functions();
        let functions = functions.as_array().unwrap();
        functions.len() == 3 && functions.iter().all(is_ready)
    });
    let names = |functions: &serde_json::Value| {
        let names = functions.as_array().unwrap().iter().map(|it| {
            let name = |part: &str| it["metadata"][part].as_str().unwrap().to_owned();
            (name("tenant"), name("name"), it["metadata"]["generation"].as_u64().unwrap())
        });
        names.collect::<Vec<_>>()
    };
    let due = [("default", "first", 1), ("default", "sums", 1), ("shop", "first", 1)];
    assert_eq!(names(&functions()), due.map(|(tenant, name, at)| (tenant.to_owned(), name.to_owned(), at)));

    let x: Vec<f64> = (0..64).map(|at| f64::from(at * 37 % 64 - 32) / 64.0).collect();
    let x = serde_json::json!({"x": [x]}).to_string();
    let answer = up.json(&["invoke", "both", "--json", &x]);
    // The earlier build's answer.
    for (at, due) in [-0.410_610_6, -0.014_818_668, -0.033_448_92, 0.404_791_44].into_iter().enumerate() {
        let y = answer["outputs"][0]["data"][at].as_f64().unwrap();
        assert!((y - due).abs() < 1e-5, "{y} instead of {due}");
    }

    let caps = up.json(&["get", "tenants"]);
    let shop = caps.as_array().unwrap().iter().find(|it| it["metadata"]["name"] == "shop").unwrap();
    assert_eq!(shop["spec"], serde_json::json!({"gpusMax": 1, "memoryShare": 0.5}));
    let bills = up.json(&["billing", "--all-tenants"]);
    let billed = bills["items"].as_array().unwrap().iter().find(|it| it["tenant"] == "shop").unwrap();
    assert_eq!(billed["requests"], 6);

    let policy = up.json(&["get", "policies"]);
    assert_eq!(policy["spec"], serde_json::json!({"dispatch": "simpleswap", "eviction": "replicas"}));
    let node = &policy["status"]["nodes"][0];
    assert_eq!((&node["obeys"], &node["actual"]["dispatch"]), (&true.into(), &"unified".into()));
    let events = up.ok(&["events"]);
    assert_eq!(events.matches("PolicyRetired").count(), 1, "{events}");

    let set = ["policy", "set", "--preset", "torpor"];
    let refused = up.run(&set);
    assert!(!refused.status.success());
    let refused = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.contains("--unset dispatch"), "{refused}");
    up.ok(&[&set[..], &["--unset", "dispatch"]].concat());
    let node = up.json(&["get", "policies"])["status"]["nodes"][0].take();
    assert_eq!((&node["obeys"], &node["actual"]["dispatch"]), (&true.into(), &"torpor".into()));
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
