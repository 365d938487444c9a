//! Three controllers and their workers, each in a separate process: killed, stopped and restarted.

use std::collections::BTreeSet;
use std::process::{Child, Stdio};

use rustix::process::Signal;
use serde_json::{Value, json};

use crate::running::{GroupProcess, RunningCluster, eventually, free, millrace, repository, wait_gone};

const SEVEN: &str = "examples/digits/images/digit-7.png";

/// A controller started by hand. Killed when dropped.
struct ByHand(Child);

impl Drop for ByHand {
    fn drop(&mut self) {
        // Both calls fail if the process has already ended.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

impl ByHand {
    /// Starts a command line as a shell would, and waits for the ready line.
    fn start(words: &[&str]) -> (Self, Value) {
        use std::io::BufRead as _;
        let mut child = millrace().args(words).stdout(Stdio::piped()).spawn().expect("the binary was built");
        let mut stdout = std::io::BufReader::new(child.stdout.take().expect("stdout is piped"));
        let by_hand = Self(child);
        let mut line = String::new();
        stdout.read_line(&mut line).expect("the ready line is text");
        let ready = serde_json::from_str(&line).unwrap_or_else(|_| panic!("no ready line: {line:?}"));
        (by_hand, ready)
    }
}

fn status(up: &RunningCluster) -> Value {
    up.json(&["cluster", "status"])
}

/// Returns the process of the leader.
fn leader(up: &RunningCluster) -> GroupProcess {
    let leader = status(up)["leader"].as_u64().expect("a controller leads");
    up.part(&format!("controller-{leader}"))
}

/// Returns the node that has the only function.
fn holder(up: &RunningCluster) -> String {
    let nodes = up.json(&["get", "nodes"]);
    let holder = nodes.as_array().unwrap().iter().find(|node| node["placements"] == 1).unwrap();
    holder["name"].as_str().unwrap().to_owned()
}

/// Runs a verb against a single controller.
fn ok_at(part: &GroupProcess, args: &[&str]) -> String {
    let (_, client) = part.controller.as_ref().expect("a controller");
    let output = millrace().args(args).args(["-e", client]).output().expect("the binary runs");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?} at {}: {stderr}", part.name);
    String::from_utf8(output.stdout).expect("output is UTF-8")
}

fn invoke(up: &RunningCluster) -> String {
    let answer = up.ok(&["invoke", "digits", "--image", &repository(SEVEN)]);
    answer.lines().next().expect("an answer has a line").to_owned()
}

#[test]
fn every_controller_serves_the_writes_of_the_others_and_all_processes_end_in_order() {
    let up = RunningCluster::group(None, 2, &[]);
    let names: Vec<_> = up.parts().into_iter().map(|part| part.name).collect();
    assert_eq!(names, ["controller-1", "controller-2", "controller-3", "worker-1", "worker-2"]);
    let status = status(&up);
    let voters = status["controllers"].as_array().unwrap().iter().filter(|it| it["voter"] == true);
    assert_eq!((voters.count(), &status["quorum"]), (3, &json!(true)));
    let said = up.ok(&["cluster", "wait", "--voters", "3", "--nodes", "2", "--timeout", "30s"]);
    assert_eq!(said, "a controller leads, 3 voters are up, 2 nodes are up\n");

    // Apply at a follower, which must forward the write to the leader.
    let follower = up.parts().into_iter().find(|part| *part != leader(&up)).unwrap();
    ok_at(&follower, &["apply", "-f", &repository("examples/digits/function.yaml")]);
    let mut answers = BTreeSet::new();
    for part in up.parts().iter().filter(|part| part.controller.is_some()) {
        eventually("a follower's gateway knows the function", || {
            let line = ["get", "functions", "-o", "json"];
            serde_json::from_str::<Value>(&ok_at(part, &line)).unwrap()["items"][0]["status"]["conditions"][0]
                ["status"]
                == "True"
        });
        let answer = ok_at(part, &["invoke", "digits", "--image", &repository(SEVEN)]);
        answers.insert(answer.lines().next().unwrap().to_owned());
    }
    assert_eq!(answers.len(), 1, "{answers:?}");

    let all = up.descendants();
    assert_eq!(all.len(), 5 + 2, "five parts and an executor for each worker");
    up.signal(Signal::TERM);
    let (ended, rest) = up.ended();
    assert!(ended.success(), "{ended}");
    assert_eq!(rest, "", "stdout has the ready line and nothing else");
    wait_gone(&all);
}

#[test]
fn no_process_of_a_group_outlives_a_killed_parent() {
    let up = RunningCluster::group(None, 2, &[]);
    let all = up.descendants();
    assert_eq!(all.len(), 5 + 2);
    up.signal(Signal::KILL);
    assert!(!up.ended().0.success());
    wait_gone(&all);
}

#[test]
fn a_second_start_resumes_the_group_at_its_previous_ports() {
    let dir = tempfile::tempdir().unwrap();
    let first = RunningCluster::group(Some(dir.path()), 1, &[]);
    first.apply_digits();
    let before = invoke(&first);
    let ready = first.ready.clone();
    let all = first.descendants();
    // Kill the processes: a second start needs nothing that an orderly stop writes.
    first.signal(Signal::KILL);
    first.ended();
    wait_gone(&all);

    let alone = millrace().args(["up", "--data-dir"]).arg(dir.path()).output().unwrap();
    let refusal = String::from_utf8_lossy(&alone.stderr).into_owned();
    assert_eq!(alone.status.code(), Some(2), "{refusal}");
    assert!(refusal.contains("--controllers 3"), "{refusal}");

    let second = RunningCluster::group(Some(dir.path()), 1, &[]);
    for key in ["cluster", "endpoints", "internal"] {
        assert_eq!(second.ready[key], ready[key], "{key}");
    }
    eventually("the function is ready again", || {
        second.run(&["invoke", "digits", "--image", &repository(SEVEN)]).status.success()
    });
    assert_eq!(invoke(&second), before);
    assert_eq!(second.apply_digits(), "function/digits unchanged\n");
}

#[test]
fn a_cluster_of_one_grows_into_a_group() {
    let dir = tempfile::tempdir().unwrap();
    let one = RunningCluster::in_dir(dir.path());
    one.apply_digits();
    let cluster = one.ready["cluster"].clone();
    one.signal(Signal::TERM);
    assert!(one.ended().0.success());

    let group = RunningCluster::group(Some(dir.path()), 1, &[]);
    assert_eq!(group.ready["cluster"], cluster);
    assert_eq!(group.apply_digits(), "function/digits unchanged\n");
}

#[test]
fn writes_continue_after_a_killed_leader_which_rejoins_by_the_printed_command() {
    let up = RunningCluster::group(None, 1, &[]);
    let killed = leader(&up);
    killed.signal(Signal::KILL);
    // Write at once: a write waits for the next leader.
    up.apply_digits();
    assert_ne!(leader(&up), killed);
    let (id, _) = killed.controller.as_ref().unwrap();
    // On a busy machine, the last check before the timeout may have seen fewer voters.
    eventually("the missing controller is named", || {
        let missing = up.refused(5, &["cluster", "wait", "--voters", "3", "--timeout", "1s"]);
        missing.contains("2 of 3 voters are up") && missing.contains(&format!("controller {id}: "))
    });

    let report =
        format!("{} (pid {}) was killed by signal 9: 2 of 3 controllers are left", killed.name, killed.pid);
    eventually("the end is reported", || up.said().contains(&report));
    let said = up.said();
    let command =
        said.lines().find_map(|line| line.trim().strip_prefix("start it again: millrace ")).unwrap();
    assert!(!command.contains("--bootstrap"), "over a lost folder, --bootstrap would begin a second cluster");
    let (_by_hand, ready) = ByHand::start(&command.split_whitespace().collect::<Vec<_>>());
    assert_eq!(ready["id"], *id);
    up.ok(&["cluster", "wait", "--voters", "3", "--timeout", "30s"]);
}

#[test]
fn no_request_fails_when_one_of_two_workers_with_the_function_is_killed() {
    let up = RunningCluster::group(None, 2, &[]);
    let folder = tempfile::tempdir().unwrap();
    let model = std::fs::canonicalize(repository("examples/digits/digits.onnx")).unwrap();
    let manifest = format!(
        "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: digits}}\nspec: {{replicas: 2, model: {{file: {}}}}}\n",
        model.display()
    );
    let file = folder.path().join("digits.yaml");
    std::fs::write(&file, manifest).unwrap();
    up.ok(&["apply", "-f", file.to_str().unwrap()]);
    eventually("both workers hold it", || {
        let nodes = up.json(&["get", "nodes"]);
        nodes.as_array().unwrap().iter().all(|node| node["hostTierBytes"].as_u64() > Some(0))
    });
    let before = invoke(&up);
    up.part("worker-1").signal(Signal::KILL);
    for _ in 0..20 {
        assert_eq!(invoke(&up), before);
    }
    eventually("the end is reported", || up.said().contains("1 of 2 workers are left"));
}

/// A cluster under LALB/O3: the requests of a function stay with the worker that has its model on a GPU.
#[test]
fn requests_under_lalb_o3_go_to_the_worker_with_the_model() {
    let up = RunningCluster::group(None, 2, &["--preset", "lalb-o3"]);
    let manifest = std::fs::read_to_string(repository("examples/digits/function.yaml")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("function.yaml");
    let model = format!("file: {}", repository("examples/digits/digits.onnx"));
    let apply = |replicas: u32| {
        let manifest = manifest.replace("file: digits.onnx", &model);
        let manifest = manifest.replace("spec:", &format!("spec:\n  replicas: {replicas}"));
        std::fs::write(&path, manifest).unwrap();
        up.ok(&["apply", "-f", path.to_str().unwrap()]);
    };
    // The model is on the GPU of the second worker before the first worker serves it too. Of equal
    // workers the router would choose the first.
    up.ok(&["cordon", "worker-1"]);
    apply(1);
    let first = invoke(&up);
    up.ok(&["uncordon", "worker-1"]);
    apply(2);
    eventually("both workers have the model", || {
        let nodes = up.json(&["get", "nodes"]);
        nodes.as_array().unwrap().iter().all(|it| it["hostTierBytes"].as_u64() > Some(0))
    });
    let policies = up.json(&["get", "policies"]);
    assert_eq!(policies["status"]["nodes"][1]["actual"]["dispatch"], "lalb-o3", "{policies}");
    for _ in 0..20 {
        assert_eq!(invoke(&up), first);
    }
    let nodes = up.json(&["get", "nodes"]);
    let models = |node: usize| nodes[node]["gpus"][0]["models"].as_array().unwrap().len();
    assert_eq!((models(0), models(1)), (0, 1), "{nodes}");
}

#[test]
fn a_function_moves_to_another_worker_when_its_only_worker_is_killed() {
    let up = RunningCluster::group(None, 2, &[]);
    up.apply_digits();
    let before = invoke(&up);
    up.part(&holder(&up)).signal(Signal::KILL);
    eventually("the function is served again", || {
        up.run(&["invoke", "digits", "--image", &repository(SEVEN)]).status.success()
    });
    assert_eq!(invoke(&up), before);
}

#[test]
fn a_node_is_drained_without_a_failed_request_and_removed_once_it_is_lost() {
    let up = RunningCluster::group(None, 2, &[]);
    up.apply_digits();
    let before = invoke(&up);
    let holder = holder(&up);
    let name = holder.as_str();
    let drained = up.ok(&["drain", name, "--timeout", "30s"]);
    assert_eq!(drained, format!("node/{name} draining\nnode/{name} drained\n"));
    assert_eq!(invoke(&up), before);
    let alive = up.refused(1, &["delete", "node", name]);
    assert!(alive.contains("NODE_STATE"), "{alive}");

    up.part(name).signal(Signal::TERM);
    eventually("the node is lost", || up.json(&["get", "node", name])["status"] == "Lost");
    up.ok(&["delete", "node", name]);
    assert_eq!(up.json(&["get", "nodes"]).as_array().unwrap().len(), 1);
    assert_eq!(invoke(&up), before);
}

#[test]
fn without_a_majority_requests_are_served_and_writes_refused() {
    let up = RunningCluster::group(None, 1, &[]);
    up.apply_digits();
    let before = invoke(&up);
    for name in ["controller-1", "controller-3"] {
        up.part(name).signal(Signal::KILL);
    }
    assert_eq!(invoke(&up), before);
    eventually("the loss of the majority is noticed", || status(&up)["quorum"] == false);
    let shown = up.ok(&["cluster", "status"]);
    assert!(shown.contains("writes are refused; 1 of 3 voters are up"), "{shown}");
    assert_eq!(up.json(&["get", "nodes", "--stale"])[0]["connected"], true);
    let refused = up.refused(1, &["delete", "function", "digits"]);
    assert!(refused.contains("NO_LEADER") && refused.contains("millrace cluster status"), "{refused}");
    assert_eq!(invoke(&up), before);
}

#[test]
fn a_client_leaves_a_hung_endpoint_for_another() {
    let up = RunningCluster::group(None, 1, &[]);
    up.apply_digits();
    let hangs = up.part("controller-1");
    hangs.signal(Signal::STOP);
    let answer = up.run(&["get", "functions"]);
    let invoked = up.run(&["invoke", "digits", "--image", &repository(SEVEN)]);
    hangs.signal(Signal::CONT);
    assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    assert!(invoked.status.success(), "{}", String::from_utf8_lossy(&invoked.stderr));
}

#[test]
fn a_killed_process_restarts_with_the_restart_flag() {
    let up = RunningCluster::group(None, 1, &["--restart"]);
    for name in ["controller-2", "worker-1"] {
        up.part(name).signal(Signal::KILL);
        eventually("the process is back", || up.said().contains(&format!("{name} is back")));
    }
    up.ok(&["cluster", "wait", "--voters", "3", "--nodes", "1", "--timeout", "30s"]);
}

#[test]
fn leadership_is_handed_over_and_a_dead_controller_is_replaced() {
    let up = RunningCluster::group(None, 1, &[]);
    up.apply_digits();
    let before = leader(&up);
    let transferred = up.ok(&["cluster", "transfer"]);
    let after = leader(&up);
    assert_ne!(after, before);
    assert!(
        transferred.starts_with(&format!("controller/{} leads in term ", after.controller.unwrap().0)),
        "{transferred}"
    );

    let dead = up.parts().into_iter().find(|part| *part != leader(&up)).unwrap();
    dead.signal(Signal::KILL);
    let id = dead.controller.as_ref().unwrap().0.to_string();
    // Until the process has ended, its port may still accept a connection and break it. The client
    // never repeats such a change.
    wait_gone(&[dead.pid]);
    let removed = up.ok(&["cluster", "remove", &id]);
    assert!(removed.starts_with(&format!("controller/{id} removed: the voters are ")), "{removed}");

    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("new").display().to_string();
    let (_, client) = leader(&up).controller.unwrap();
    let internal = status(&up)["controllers"]
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["role"] == "Leader")
        .unwrap()["internalAddress"]
        .as_str()
        .unwrap()
        .to_owned();
    let free = free();
    let (_new, ready) = ByHand::start(&[
        "controller",
        "--id",
        "4",
        "--data-dir",
        &dir,
        "--join",
        &internal,
        "--listen",
        &free,
        "--internal-listen",
        &free,
    ]);
    assert_eq!((&ready["id"], &ready["cluster"]), (&json!(4), &up.ready["cluster"]));
    up.ok(&["cluster", "wait", "--voters", "3", "--timeout", "30s"]);
    let endpoints = format!("{},{client}", ready["client"].as_str().unwrap());
    let listed = millrace().args(["get", "functions", "-e", &endpoints]).output().unwrap();
    assert!(String::from_utf8_lossy(&listed.stdout).contains("digits"), "the new controller has the state");

    // The folder of the removed controller does not bring it back.
    let said = up.refused(1, &["cluster", "promote", &id]);
    assert!(said.contains("MEMBERSHIP_REFUSED"), "{said}");
}

#[test]
fn an_empty_folder_begins_no_cluster_without_a_flag() {
    let folder = tempfile::tempdir().unwrap();
    let output = millrace()
        .args(["controller", "--listen", "127.0.0.1:0", "--internal-listen", "127.0.0.1:0", "--data-dir"])
        .arg(folder.path().join("new"))
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("--bootstrap") && stderr.contains("--join"), "{stderr}");
}
