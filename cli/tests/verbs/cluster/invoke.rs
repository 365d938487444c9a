//! Inference requests from the command line.

use serde_json::json;

use super::{cluster, json_of, ok};

#[tokio::test]
async fn invoke_prints_values_request_id_and_split() {
    let (_server, sandbox) = cluster().await;
    let printed = ok(sandbox.run("invoke echo --json [[1,2.5]] --request-id mine").await);
    let expected = "\
x  FP32 [1, 2]
  1.0000  2.5000
echo  request mine
total 2.00 ms = queue 100 µs + swap 0 + run 1.50 ms + other 400 µs
";
    assert_eq!(printed, expected);
    let document = json_of(sandbox.run("invoke echo --json {\"x\":[1,2,3,4]} --request-id r -o json").await);
    let output = json!({"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1.0, 2.0, 3.0, 4.0]});
    assert_eq!((&document["outputs"], &document["id"]), (&json!([output]), &json!("r")));
    assert_eq!(document["split"]["run_ms"], 1.5);
}

#[tokio::test]
async fn invoke_reads_files_of_bytes_and_of_json() {
    let (_server, sandbox) = cluster().await;
    sandbox.write("x.bin", [1.0f32, 2.0].map(f32::to_le_bytes).concat());
    sandbox.write(
        "x.json",
        r#"{"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}"#,
    );
    for line in
        ["invoke echo --raw x=x.bin", "invoke echo --raw x=x.bin:FP32:1x2", "invoke echo --json @x.json"]
    {
        let document = json_of(sandbox.run(&format!("{line} -o json")).await);
        assert_eq!(document["outputs"][0]["data"], json!([1.0, 2.0]), "{line}");
    }
    let piped = sandbox.run_with(&["invoke", "echo", "--json", "@-", "-o", "json"], "[1, 2]").await;
    assert_eq!(json_of(piped)["outputs"][0]["shape"], json!([1, 2]));
}

#[tokio::test]
async fn invoke_reads_pictures_and_prints_the_best_classes() {
    let (_server, sandbox) = cluster().await;
    let picture = image::GrayImage::from_raw(2, 2, vec![0, 51, 204, 0]).unwrap();
    picture.save(sandbox.path().join("p.png")).unwrap();
    sandbox.write("labels.txt", "zero\none\ntwo\nthree\n");
    let printed = ok(sandbox.run("invoke image --image p.png --top 2").await);
    assert!(printed.starts_with("p.png: 2 (80.0%), 1 (20.0%)\n"), "{printed}");
    let printed =
        ok(sandbox.run("invoke image --image p.png --image p.png --labels labels.txt --top 1").await);
    assert!(printed.starts_with("p.png: two (80.0%)\np.png: two (80.0%)\n"), "{printed}");
}

#[tokio::test]
async fn invoke_refuses_invalid_inputs_before_sending() {
    let (_server, sandbox) = cluster().await;
    for (line, says) in [
        ("invoke echo --json [1,2,3]", "do not fill shape [N, 2]"),
        ("invoke echo --json {\"y\":[1,2]}", "its inputs are: x"),
        ("invoke echo --raw x=none.bin", "cannot read none.bin"),
        ("invoke echo", "--json"),
        ("invoke echo --json [1,2] --image a.png", "cannot be used with"),
    ] {
        let run = sandbox.run(line).await;
        assert_eq!(run.code, 2, "{line}: {run:?}");
        assert!(run.stderr.contains(says), "{line}: {}", run.stderr);
    }
}

#[tokio::test]
async fn a_refusal_and_a_timeout_have_their_reasons_and_exit_codes() {
    let (_server, sandbox) = cluster().await;
    let run = sandbox.run("invoke full --json [1,2]").await;
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("the queue is full: 4 of 4 requests wait (QUEUE_FULL)"), "{}", run.stderr);
    assert!(run.stderr.contains("hint: the cluster is full"), "{}", run.stderr);
    let run = sandbox.run("invoke silent --json [1,2] --timeout 20ms").await;
    assert_eq!(run.code, 5, "{run:?}");
}
