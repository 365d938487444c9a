//! Workflows on the command line, against a small server in this process.

use crate::fake::Fake;
use crate::support::{Run, Sandbox, manifest};

/// Returns a workflow of consecutive steps.
fn workflow(name: &str, runs: &[&str]) -> String {
    let source = |index: usize| match index {
        0 => "input.x".to_owned(),
        after => format!("s{}.y", after - 1),
    };
    let step = |(index, run)| format!("    - {{name: s{index}, {run}, inputs: {{x: {}}}}}\n", source(index));
    let steps: String = runs.iter().enumerate().map(step).collect();
    format!(
        "apiVersion: millrace/v1\nkind: Workflow\nmetadata: {{name: {name}}}\nspec:\n  inputs: [x]\n  steps:\n{steps}  outputs: {{y: s{}.y}}\n",
        runs.len() - 1
    )
}

/// Returns a server, and a sandbox with two functions and two workflows, the outer workflow in the
/// first file.
async fn cluster() -> (Fake, Sandbox) {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    sandbox.write("a-outer.yaml", workflow("outer", &["workflow: inner", "function: two"]));
    sandbox.write("b-inner.yaml", workflow("inner", &["function: one"]));
    sandbox.write_function("one");
    sandbox.write_function("two");
    (server, sandbox)
}

fn ok(run: Run) -> String {
    assert_eq!(run.code, 0, "{run:?}");
    run.stdout
}

/// Checks that a line is refused with this message, and that nothing was stored.
async fn refused(server: &Fake, sandbox: &Sandbox, line: &str, code: i32, says: &str) {
    let run = sandbox.run(line).await;
    assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{line}: {run:?}");
    assert!(run.stderr.contains(says), "{line}: {}", run.stderr);
    assert_eq!((server.uploads(), server.function_names().len()), (0, 0), "{line}");
}

#[tokio::test]
async fn functions_and_workflows_of_a_folder_are_applied_in_dependency_order() {
    let (server, sandbox) = cluster().await;
    let lines = |word: &str| {
        ["function/one", "function/two", "workflow/inner", "workflow/outer"]
            .map(|title| format!("{title} {word}\n"))
            .concat()
    };
    assert_eq!(ok(sandbox.run("apply -f . --dry-run").await), lines("created (dry run)"));
    assert_eq!((server.uploads(), server.function_names().len()), (0, 0));
    assert_eq!(ok(sandbox.run("apply -f .").await), lines("created"));
    assert_eq!(ok(sandbox.run("apply -f .").await), lines("unchanged"));
    assert_eq!(ok(sandbox.run("apply -f . --dry-run").await), lines("unchanged (dry run)"));
    assert_eq!(server.uploads(), 1, "both functions share one model");

    // The functions are stored, so the workflows can be applied alone.
    sandbox.write("b-inner.yaml", workflow("inner", &["function: one", "function: two"]));
    let alone = ok(sandbox.run("apply -f a-outer.yaml -f b-inner.yaml --dry-run").await);
    assert_eq!(alone, "workflow/inner configured (dry run)\nworkflow/outer unchanged (dry run)\n");
    let alone = ok(sandbox.run("apply -f b-inner.yaml -o yaml").await);
    assert!(
        alone.starts_with("apiVersion: millrace/v1\nkind: Workflow\nmetadata:\n  name: inner\n"),
        "{alone}"
    );

    let order = ["workflow/outer", "workflow/inner", "function/one", "function/two"];
    let tried = ok(sandbox.run("delete -f . --dry-run").await);
    assert_eq!(tried, order.map(|title| format!("{title} deleted (dry run)\n")).concat());
    let deleted = ok(sandbox.run("delete -f .").await);
    assert_eq!(deleted, order.map(|title| format!("{title} deleted\n")).concat());
}

#[tokio::test]
async fn nothing_is_stored_when_a_workflow_is_refused() {
    let (server, sandbox) = cluster().await;
    sandbox.write("cnn.onnx", millrace_model::synth::tiny_cnn());
    sandbox.write("two.yaml", manifest("two", "cnn.onnx"));
    let edge = "a-outer.yaml: workflow outer: s0.y has shape [";
    refused(&server, &sandbox, "apply -f .", 2, edge).await;

    sandbox.write_function("two");
    let missing = "a-outer.yaml: workflow outer: step \"s0\" runs workflow \"inner\", which does not exist";
    refused(&server, &sandbox, "apply -f a-outer.yaml -f one.yaml -f two.yaml", 2, missing).await;

    sandbox.write("b-inner.yaml", workflow("inner", &["workflow: outer"]));
    let cycle = "workflows run each other: outer -> inner -> outer";
    refused(&server, &sandbox, "apply -f .", 2, cycle).await;

    sandbox.write("b-inner.yaml", workflow("one", &["function: two"]));
    refused(&server, &sandbox, "apply -f .", 2, "workflow default/one has the name of a function in").await;
}

#[tokio::test]
async fn a_workflow_with_the_name_of_a_stored_function_is_refused_before_anything_is_stored() {
    let (server, sandbox) = cluster().await;
    ok(sandbox.run("apply -f one.yaml").await);
    sandbox.write("b-inner.yaml", workflow("one", &["function: two"]));
    let run = sandbox.run("apply -f b-inner.yaml -f two.yaml").await;
    assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
    assert!(run.stderr.contains("workflow/one: default/one is a function already: choose"), "{}", run.stderr);
    assert_eq!(server.function_names(), ["one"]);
}

#[tokio::test]
async fn workflows_are_listed_shown_described_and_deleted() {
    let (_server, sandbox) = cluster().await;
    let empty = sandbox.run("get workflows").await;
    assert!(empty.code == 0 && empty.stderr.contains("tenant default has no workflows"), "{empty:?}");
    ok(sandbox.run("apply -f .").await);
    let table = "\
NAME    READY   STEPS   SLO   AGE
inner   True    1       -     -
outer   True    2       -     -
";
    for listing in ["get workflows", "get wf -A"] {
        assert_eq!(ok(sandbox.run(listing).await), table);
    }
    let one = ok(sandbox.run("get workflow/outer -o wide").await);
    assert!(one.lines().nth(1).unwrap().contains("workflow/inner,two"), "{one}");
    let list: serde_json::Value = serde_json::from_str(&ok(sandbox.run("get wf -o json").await)).unwrap();
    assert_eq!(list["items"][1]["spec"]["steps"][0]["workflow"], "inner");
    let described = ok(sandbox.run("describe workflow outer").await);
    let graph = "\
Graph:
  (input)    x
  s0         workflow/inner   x <- input.x
  s1         function/two     x <- s0.y
  (output)   y <- s1.y
";
    assert!(described.ends_with(graph), "{described}");

    assert_eq!(ok(sandbox.run("delete wf/outer --dry-run").await), "workflow/outer deleted (dry run)\n");
    assert_eq!(
        ok(sandbox.run("delete workflow outer inner").await),
        "workflow/outer deleted\nworkflow/inner deleted\n"
    );
    let gone = sandbox.run("delete workflow outer").await;
    assert!(gone.code == 3 && gone.stderr.contains("get workflows --all-tenants"), "{gone:?}");
    assert_eq!(ok(sandbox.run("delete workflow outer --ignore-not-found").await), "");
    assert_eq!(sandbox.run("describe workflow outer").await.code, 3);
}

#[tokio::test]
async fn a_refused_deletion_does_not_stop_the_others() {
    let (server, sandbox) = cluster().await;
    ok(sandbox.run("apply -f .").await);
    sandbox.write_function("three");
    ok(sandbox.run("apply -f three.yaml").await);
    // `outer` runs `two`, in a dry run as in a real run.
    for suffix in [" --dry-run", ""] {
        let run = sandbox.run(&format!("delete function none two three{suffix}")).await;
        assert_eq!(run.code, 3, "{run:?}");
        assert!(run.stdout.starts_with("function/three deleted"), "{run:?}");
        for says in ["function/none: ", "function/two: workflow outer runs it (IN_USE)"] {
            assert!(run.stderr.contains(says), "{says}: {run:?}");
        }
    }
    assert_eq!(server.function_names(), ["one", "two"]);
    // The order matters in a dry run as in a real run.
    let inner_first = sandbox.run("delete workflow inner outer --dry-run").await;
    assert_eq!((inner_first.code, inner_first.stdout.as_str()), (1, "workflow/outer deleted (dry run)\n"));
}

#[tokio::test]
async fn workflows_nested_too_deeply_are_refused_before_anything_is_stored() {
    let server = Fake::start().await;
    let sandbox = Sandbox::of(&server.address);
    sandbox.write_function("f");
    let nested = |level: usize| match level {
        0 => workflow("n0", &["function: f"]),
        level => workflow(&format!("n{level}"), &[&format!("workflow: n{}", level - 1)]),
    };
    for level in 0..=5 {
        sandbox.write(&format!("n{level}.yaml"), nested(level));
    }
    for line in ["apply -f .", "apply -f . --dry-run"] {
        refused(&server, &sandbox, line, 2, "inside another workflow the depth would exceed 4").await;
    }
    ok(sandbox.run("apply -f f.yaml -f n0.yaml -f n1.yaml -f n2.yaml -f n3.yaml -f n4.yaml").await);
    // Nesting below the stored workflows counts too.
    sandbox.write("base.yaml", workflow("base", &["function: f"]));
    sandbox.write("n0.yaml", workflow("n0", &["workflow: base"]));
    let deeper = sandbox.run("apply -f base.yaml -f n0.yaml").await;
    assert_eq!((deeper.code, deeper.stdout.as_str()), (2, ""), "{deeper:?}");
    assert!(deeper.stderr.contains("the stored workflow n4 runs this item"), "{}", deeper.stderr);
}

#[tokio::test]
async fn a_function_that_would_break_a_stored_workflow_is_refused_before_its_upload() {
    let (server, sandbox) = cluster().await;
    ok(sandbox.run("apply -f .").await);
    sandbox.write("cnn.onnx", millrace_model::synth::tiny_cnn());
    sandbox.write("two.yaml", manifest("two", "cnn.onnx"));
    for line in ["apply -f two.yaml", "apply -f two.yaml --dry-run"] {
        let run = sandbox.run(line).await;
        assert_eq!((run.code, run.stdout.as_str(), server.uploads()), (2, "", 1), "{run:?}");
        for says in ["the stored workflow outer", "millrace delete workflow outer"] {
            assert!(run.stderr.contains(says), "{says}: {}", run.stderr);
        }
    }
    // A workflow in the same apply that no longer runs the function is stored first.
    sandbox.write("a-outer.yaml", workflow("outer", &["workflow: inner"]));
    let lines = |suffix| format!("workflow/outer configured{suffix}\nfunction/two configured{suffix}\n");
    let both = "apply -f two.yaml -f a-outer.yaml";
    assert_eq!(ok(sandbox.run(&format!("{both} --dry-run")).await), lines(" (dry run)"));
    assert_eq!(server.uploads(), 1);
    assert!(ok(sandbox.run(both).await).starts_with("workflow/outer configured\nfunction/two "));
}

#[tokio::test]
async fn a_dry_run_refuses_a_function_with_the_name_of_a_workflow() {
    let (server, sandbox) = cluster().await;
    ok(sandbox.run("apply -f .").await);
    sandbox.write("cnn.onnx", millrace_model::synth::tiny_cnn());
    sandbox.write("inner.yaml", manifest("inner", "cnn.onnx"));
    let run = sandbox.run("apply -f inner.yaml --dry-run").await;
    assert_eq!((run.code, run.stdout.as_str(), server.uploads()), (1, "", 1), "{run:?}");
    assert!(
        run.stderr.contains("function/inner: default/inner is a workflow already: choose"),
        "{}",
        run.stderr
    );
}

#[tokio::test]
async fn invoke_refuses_a_name_of_another_kind() {
    let (_server, sandbox) = cluster().await;
    ok(sandbox.run("apply -f .").await);
    for (name, says) in [("function/inner", "no function"), ("wf/one", "no workflow")] {
        let run = sandbox.run(&format!("invoke {name} --json [1]")).await;
        assert_eq!(run.code, 3, "{run:?}");
        assert!(run.stderr.contains(says), "{says}: {}", run.stderr);
    }
}
