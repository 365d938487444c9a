//! The output of `get` for a function, applied again.

use super::{cluster, json_of, ok};

#[tokio::test]
async fn a_printed_function_can_be_applied_again_and_copied_without_its_file() {
    let (server, sandbox) = cluster().await;
    sandbox.write_function("digits");
    ok(sandbox.run("apply -f digits.yaml").await);
    let apply = async |shown: &str, more: &[&str]| {
        sandbox.run_with(&[&["apply", "-f", "-"], more].concat(), shown).await
    };
    let yaml = ok(sandbox.run("get function digits -o yaml").await);
    let json = ok(sandbox.run("get function digits -o json").await);
    let list = ok(sandbox.run("get functions -o yaml").await);
    for shown in [&yaml, &json, &list] {
        assert_eq!(ok(apply(shown, &[]).await), "function/digits unchanged\n", "{shown}");
    }
    let copy = yaml.replace("  name: digits", "  name: copy");
    assert_eq!(ok(apply(&copy, &["--dry-run"]).await), "function/copy created (dry run)\n");
    assert_eq!(server.function_names(), ["digits"]);
    assert_eq!(ok(apply(&copy, &[]).await), "function/copy created\n");
    assert_eq!((server.uploads(), server.function_names().len()), (1, 2), "the cluster had the model");
    let deleted = ok(sandbox.run_with(&["delete", "-f", "-"], &copy).await);
    assert_eq!(deleted, "function/copy deleted\n");

    let document = json_of(sandbox.run("get function digits -o json").await);
    let digest = document["spec"]["model"]["digest"].as_str().unwrap();
    let unknown = copy.replace(digest, &format!("sha256:{}", "0".repeat(64)));
    let run = apply(&unknown, &[]).await;
    assert_eq!((run.code, run.stdout.as_str()), (3, ""));
    let says = "standard input: function copy: the cluster does not have sha256:000";
    assert!(run.stderr.contains(says), "{}", run.stderr);
    assert!(run.stderr.contains("hint: name the file in place of its digest"), "{}", run.stderr);
    assert_eq!(server.function_names(), ["digits"]);
}
