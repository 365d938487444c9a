//! The six workflows of FaaSTube's table 1: runs the commands of examples/workflows/README.md
//! unchanged, except that the networks are the small ones and the test starts the server.

use std::collections::BTreeSet;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use image::codecs::png::{CompressionType, FilterType, PngEncoder};
use image::{ExtendedColorType, ImageEncoder as _};
use serde_json::Value;
use tempfile::TempDir;

use crate::functions::{MODULE, built, commands, run, stop};
use crate::running::{RunningCluster, eventually, repository};

const PAGE: &str = "examples/workflows/README.md";
/// The position of the height in a PNG file.
const HEIGHT: Range<usize> = 20..24;

/// Creates a folder in which the page's paths are valid, and finds the library for its Python
/// function. Returns `None` if a requirement is missing.
fn folder() -> Option<(TempDir, PathBuf)> {
    let Some(library) = built("libmillrace_function.so") else {
        eprintln!("skipped: libmillrace_function.so was not built: run 'cargo test --workspace'");
        return None;
    };
    if !Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: there is no python3");
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("examples/workflows");
    std::fs::create_dir_all(&to).unwrap();
    for file in std::fs::read_dir(repository("examples/workflows")).unwrap() {
        let file = file.unwrap();
        // Skip folders, among them the networks if a user has generated them.
        if file.file_type().unwrap().is_file() {
            std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
        }
    }
    Some((folder, library))
}

fn cluster(library: &Path) -> RunningCluster {
    let args = ["--allow", "processes", "--gpus", "2", "--keep-spans", "20000"];
    let module = repository(MODULE);
    RunningCluster::ephemeral_with(
        &args,
        &[("FUNCTION_LIBRARY", library), ("PYTHONPATH", Path::new(&module))],
    )
}

/// Returns the steps of a request, once for each run.
fn steps(up: &RunningCluster, id: &str) -> Vec<String> {
    let mut steps = Vec::new();
    eventually("the trace is complete", || {
        let shown = up.run(&["trace", id, "-o", "json"]);
        let Ok(trace) = serde_json::from_slice::<Value>(&shown.stdout) else { return false };
        let spans = trace["spans"].as_array().unwrap();
        let ids: BTreeSet<_> = spans.iter().filter_map(|span| span["id"].as_str()).collect();
        let is_root = |span: &&Value| span["parent"].as_str().is_none_or(|id| !ids.contains(id));
        let run = spans.iter().filter(|span| span["name"] == "step");
        steps = run.map(|span| span["attributes"]["millrace.step"].as_str().unwrap().to_owned()).collect();
        steps.sort();
        // The request's own span arrives last.
        let roots: Vec<_> = spans.iter().filter(is_root).collect();
        matches!(roots[..], [root] if root["name"] != "step")
    });
    steps
}

/// Returns the names and shapes of the outputs.
fn shapes(answer: &Value) -> Vec<(&str, Vec<u64>)> {
    let outputs = answer["outputs"].as_array().unwrap().iter();
    let shape =
        |output: &Value| output["shape"].as_array().unwrap().iter().filter_map(Value::as_u64).collect();
    outputs.map(|output| (output["name"].as_str().unwrap(), shape(output))).collect()
}

type Expected<'a> = (&'a str, &'a str, &'a str, &'a [(&'a str, &'a [u64])]);

/// The requests of the page: the id, the workflow, the steps that run, and the outputs.
const EXPECTED: [Expected<'static>; 8] = [
    (
        "traffic-1",
        "traffic-monitor",
        "decode detect people postprocess preprocess vehicles",
        &[("people", &[8, 16]), ("vehicles", &[4, 16])],
    ),
    (
        "traffic-2",
        "traffic-monitor",
        "decode detect people postprocess preprocess",
        &[("people", &[5, 16]), ("vehicles", &[0, 16])],
    ),
    ("driving-1", "auto-driving", "blur decode denoise segment", &[("picture", &[1, 768, 1280, 3])]),
    ("video-1", "video-editing", "decode faces faces faces preprocess recognise", &[("people", &[5, 512])]),
    (
        "image-1",
        "image-editing",
        "alexnet decode denoise resnet vote",
        &[("label", &[1]), ("probabilities", &[1, 1000])],
    ),
    (
        "social-1",
        "social-media",
        "decode judge preprocess read",
        &[("tokens", &[1, 24]), ("scores", &[1, 2])],
    ),
    ("social-2", "social-media", "decode preprocess read", &[("tokens", &[1, 0]), ("scores", &[0, 2])]),
    ("yelp-1", "yelp", "filter reply", &[("scores", &[8, 2]), ("reply", &[8, 32])]),
];

#[test]
fn six_workflows_run_on_one_cluster_with_the_branches_of_their_inputs() {
    let Some((folder, library)) = folder() else { return };
    let up = cluster(&library);
    let mut answers = Vec::new();
    for line in commands(PAGE) {
        if line.contains("millrace synth ") {
            run(&up, folder.path(), &format!("{line} --small"));
        } else if line.contains("millrace invoke ") {
            answers.push(run(&up, folder.path(), &format!("{line} -o json")));
        } else {
            run(&up, folder.path(), &line);
        }
    }
    let answers: Vec<Value> = answers.iter().map(|answer| serde_json::from_str(answer).unwrap()).collect();
    assert_eq!(answers.len(), EXPECTED.len());
    for (answer, (id, workflow, ran, outputs)) in answers.iter().zip(EXPECTED) {
        assert_eq!(
            (answer["id"].as_str(), answer["model_name"].as_str()),
            (Some(id), Some(workflow)),
            "{answer}"
        );
        let mut found = shapes(answer);
        found.sort();
        let mut expected: Vec<_> = outputs.iter().map(|(name, shape)| (*name, shape.to_vec())).collect();
        expected.sort();
        assert_eq!(found, expected, "{id}");
        assert_eq!(steps(&up, id).join(" "), ran, "{id}");
    }
    stop(up);
}

#[test]
fn png_files_of_every_filter_are_decoded_and_malformed_files_are_refused() {
    let Some((folder, library)) = folder() else { return };
    let up = cluster(&library);
    run(&up, folder.path(), "millrace apply -f examples/workflows/decode.yaml");
    let height = 30;
    let width = 40;
    let pixels: Vec<u8> = (0..height * width * 3).map(|at| (at * at % 251) as u8).collect();
    let filters = [FilterType::NoFilter, FilterType::Sub, FilterType::Up, FilterType::Avg, FilterType::Paeth];
    let mut files = Vec::new();
    for filter in filters {
        let encoder = PngEncoder::new_with_quality(&mut files, CompressionType::Fast, filter);
        encoder.write_image(&pixels, width, height, ExtendedColorType::Rgb8).unwrap();
    }
    let path = folder.path().join("frames.pngs");
    let decode = |data: &[u8]| {
        std::fs::write(&path, data).unwrap();
        up.run(&["invoke", "decode-png", "-o", "json", "--raw", &format!("png={}", path.display())])
    };
    let decoded: Value = serde_json::from_slice(&decode(&files).stdout).unwrap();
    assert_eq!(shapes(&decoded), [("pixels", vec![5, 30, 40, 3])]);
    let data = decoded["outputs"][0]["data"].as_array().unwrap();
    let data: Vec<u8> = data.iter().map(|value| u8::try_from(value.as_u64().unwrap()).unwrap()).collect();
    assert!(data == pixels.repeat(filters.len()), "the pixels differ");

    let mut flat = files.clone();
    flat[HEIGHT].fill(0);
    let wrong = [
        (&files[..files.len() - 5], "cut short"),
        (b"#!/bin/sh".as_slice(), "is not a PNG"),
        (flat.as_slice(), "40x0"),
    ];
    for (data, says) in wrong {
        let refused = String::from_utf8(decode(data).stderr).unwrap();
        assert!(refused.contains(says), "{refused}");
    }
    stop(up);
}
