//! The operations of a running cluster: its policy, its long-running operations and its logs.

use serde_json::{Value, json};

use crate::running::{RunningCluster, eventually, millrace};

/// Returns the id of the operation that a verb reports to have started.
fn begun(said: &str) -> String {
    said.trim().rsplit_once("operation/").unwrap_or_else(|| panic!("no operation: {said}")).1.to_owned()
}

fn operation(up: &RunningCluster, id: &str) -> Value {
    up.json(&["get", "operations"]).as_array().unwrap().iter().find(|it| it["id"] == id).unwrap().clone()
}

#[test]
fn up_and_the_simulator_without_options_have_the_same_policy() {
    let simulated =
        millrace().args(["sim", "--functions", "8", "--minutes", "1", "-o", "json"]).output().unwrap();
    let rows: Value = serde_json::from_slice(&simulated.stdout).unwrap();
    let up = RunningCluster::ephemeral(&[]);
    let actual = || up.json(&["get", "policies"])["status"]["nodes"][0]["actual"].clone();
    eventually("a node that reports its policy", || actual().is_object());
    assert_eq!(rows[0]["settings"], actual());
    assert_eq!(rows[0]["withObjective"], 8, "the deadlines of the paper: {rows}");
}

#[test]
fn the_policy_the_operations_and_the_logs_of_a_group_can_be_read_and_changed() {
    let up = RunningCluster::group(None, 2, &["--preset", "fifo"]);
    up.apply_digits();

    let policy = up.json(&["get", "policies"]);
    assert_eq!(policy["spec"], json!({"preset": "fifo"}), "the first policy of the cluster");
    let set = up.ok(&["policy", "set", "--preset", "lalb-o3", "--overtakes-max", "9"]);
    assert_eq!(set, "policy/cluster preset lalb-o3, overtakes-max 9 (change 2)\n");
    let dry = up.ok(&["policy", "set", "--unset", "overtakes-max", "--dry-run"]);
    assert_eq!(dry, "policy/cluster preset lalb-o3 (dry run)\n");
    up.ok(&[
        "policy",
        "set",
        "--preset",
        "torpor",
        "--transfer-sharing",
        "faastube",
        "--unset",
        "overtakes-max",
    ]);
    let policy = up.json(&["get", "policies"]);
    let wanted = json!({"preset": "torpor", "transferSharing": "faastube"});
    assert_eq!((&policy["spec"], &policy["metadata"]["generation"]), (&wanted, &json!(3)));
    let actual = &policy["status"]["nodes"][0]["actual"];
    assert_eq!((&actual["dispatch"], &actual["transferSharing"]), (&json!("torpor"), &json!("faastube")));
    assert!(
        policy["status"]["nodes"].as_array().unwrap().iter().all(|node| node["obeys"] == true),
        "{policy}"
    );
    let history = up.json(&["policy", "history"]);
    let changes: Vec<_> = history.as_array().unwrap().iter().map(|it| &it["spec"]).collect();
    let first = [json!({"preset": "lalb-o3", "overtakesMax": 9}), json!({"preset": "fifo"})];
    assert_eq!(changes, [&wanted, &first[0], &first[1]]);

    let folder = tempfile::tempdir().unwrap();
    let manifest = folder.path().join("policy.yaml");
    let shown = up.ok(&["get", "policy", "-o", "yaml"]);
    std::fs::write(&manifest, shown.replace("preset: torpor", "preset: fifo")).unwrap();
    let applied = up.ok(&["apply", "-f", manifest.to_str().unwrap()]);
    assert_eq!(applied, "policy/cluster configured: preset fifo (was torpor)\n");
    let policy = up.json(&["get", "policies"]);
    assert_eq!(policy["spec"], json!({"preset": "fifo", "transferSharing": "faastube"}));
    assert!(
        policy["status"]["nodes"].as_array().unwrap().iter().all(|node| node["obeys"] == true),
        "{policy}"
    );

    // The other node is cordoned, so the function cannot move.
    let nodes = up.json(&["get", "nodes"]);
    let (holders, others): (Vec<_>, Vec<_>) =
        nodes.as_array().unwrap().iter().partition(|node| node["placements"] == 1);
    let [holder, other] = [&holders[0]["name"], &others[0]["name"]].map(|it| it.as_str().unwrap());
    up.ok(&["cordon", other]);
    let id = begun(&up.ok(&["drain", holder, "--no-wait"]));
    let drain = operation(&up, &id);
    let stands = (&drain["state"], &drain["done"], &drain["total"], &drain["cancellable"]);
    assert_eq!(stands, (&json!("Running"), &json!(0), &json!(1), &json!(true)), "{drain}");
    assert!(drain["message"].as_str().unwrap().starts_with("no other node takes functions"), "{drain}");
    let late = up.refused(5, &["operation", "wait", &id, "--timeout", "100ms"]);
    assert!(late.contains("still runs after 100ms"), "{late}");
    let cancelled = up.ok(&["operation", "cancel", &id]);
    assert_eq!(cancelled, format!("operation/{id} DrainNode of node/{holder}: cancelled, 0/1\n"));
    assert_eq!(up.json(&["get", "node", holder])["scheduling"], "Cordoned");
    up.ok(&["uncordon", other]);
    let id = begun(&up.ok(&["drain", holder, "--no-wait"]));
    let drained = up.ok(&["operation", "wait", &id, "--timeout", "30s"]);
    assert_eq!(drained, format!("operation/{id} DrainNode of node/{holder}: succeeded, 1/1\n"));
    up.refused(3, &["operation", "wait", "999999"]);

    let all = up.ok(&["logs", "--tail", "7"]);
    assert_eq!(all.lines().count(), 7, "{all}");
    let lines = up.ok(&["logs", holder, "controller-2", "-o", "json"]);
    for line in lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()) {
        assert!(line["process"] == holder || line["process"] == "controller-2", "{line}");
    }
    let nobody = up.refused(3, &["logs", "nobody"]);
    assert!(nobody.contains("NODE_NOT_FOUND"), "{nobody}");

    let leader = up.json(&["cluster", "status"])["leader"].as_u64().unwrap();
    let leaving = (leader % 3 + 1).to_string();
    let said = up.ok(&["cluster", "remove", &leaving, "--no-wait"]);
    let begun_first = said.starts_with(&format!("controller/{leaving} is being removed: operation/"));
    assert!(
        begun_first || said.starts_with(&format!("controller/{leaving} removed: the voters are ")),
        "{said}"
    );
    let operations = up.json(&["get", "operations"]);
    let id = operations[0]["id"].as_str().unwrap();
    let removed = up.ok(&["operation", "wait", id, "--timeout", "30s"]);
    assert_eq!(removed, format!("operation/{id} RemoveController of controller/{leaving}: succeeded\n"));
}
