//! The memory of a controller under uploads: the controller never holds a whole model file, because
//! a child process inspects the file.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use millrace_client::{Admin, Endpoints, Error, ModelFile};
use millrace_types::Reason;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::running::{free, millrace};

/// The limit by which an upload of any size may raise a controller's memory, in KiB.
const RISE_KIB_MAX: u64 = 64 << 10;

/// A controller with a cluster of its own, without workers.
struct Controller {
    child: Child,
    client: String,
}

impl Drop for Controller {
    fn drop(&mut self) {
        // Both calls fail if the process has already ended.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Controller {
    fn start(dir: &Path) -> Self {
        let free = free();
        let mut child = millrace()
            .args(["controller", "--bootstrap", "--listen", &free, "--internal-listen", &free, "--data-dir"])
            .arg(dir)
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let ready: Value = serde_json::from_str(&line).unwrap();
        Self { child, client: ready["client"].as_str().unwrap().to_owned() }
    }

    /// Returns the peak memory so far. The kernel sums counters of each processor without stopping
    /// them, so a later result can be smaller by some pages.
    fn peak_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Uploads a model without `apply`, which would check the model first.
    fn upload(&self, model: &Path) -> Result<(), Error> {
        let file = ModelFile::open(model)?;
        Runtime::new().unwrap().block_on(async {
            let admin = Admin::new(Endpoints::new(vec![self.client.parse().unwrap()])?);
            admin.upload(&file, |_| {}).await.map(drop)
        })
    }

    /// Applies a function with this model. Returns the standard error if the apply was refused.
    fn apply(&self, dir: &Path, model: &Path) -> Result<(), String> {
        let manifest = dir.join("function.yaml");
        let function = format!(
            "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: large}}\nspec: {{runtime: onnx, model: {{file: {}}}}}\n",
            model.display()
        );
        std::fs::write(&manifest, function).unwrap();
        let apply = ["apply", "--no-wait", "-e", &self.client, "-f"];
        let output = millrace().args(apply).arg(&manifest).output().unwrap();
        match output.status.success() {
            true => Ok(()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }
}

fn synth(args: &[&str], out: &Path) -> u64 {
    let output = millrace().arg("synth").args(args).arg("--out").arg(out).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    std::fs::metadata(out).unwrap().len()
}

/// Uploads a synthetic network of at least `bytes_min` bytes, and checks the controller's memory.
fn upload(network: &[&str], bytes_min: u64) {
    let folder = tempfile::tempdir().unwrap();
    let small = folder.path().join("small.onnx");
    let large = folder.path().join("large.onnx");
    synth(&["tiny-cnn"], &small);
    let bytes = synth(network, &large);
    assert!(bytes > bytes_min, "{bytes}");
    let controller = Controller::start(&folder.path().join("data"));
    // Warm up: the first upload makes permanent allocations.
    controller.apply(folder.path(), &small).unwrap();
    let before = controller.peak_kib();
    controller.apply(folder.path(), &large).unwrap();
    let rise = controller.peak_kib().saturating_sub(before);
    eprintln!("a model of {bytes} bytes: the controller's memory rose by {rise} KiB");
    assert!(rise <= RISE_KIB_MAX, "{rise} KiB for {bytes} bytes");
}

#[test]
fn a_model_is_stored_without_being_read_into_the_controllers_memory() {
    upload(&["bert", "--layers", "2", "--vocabulary", "30522"], 128 << 20);
}

/// Run with `cargo test -p millrace-cli --test up -- --ignored a_model_of_a_gigabyte`.
#[test]
#[ignore = "takes a minute and 3 GiB of disk: scripts/nightly"]
fn a_model_of_a_gigabyte_is_stored_without_being_read_into_the_controllers_memory() {
    upload(&["bert", "--layers", "24", "--hidden", "1024", "--heads", "16", "--inner", "4096"], 1 << 30);
}

/// Returns a model file that would need hundreds of times its size in memory if it were decoded.
fn hostile() -> Vec<u8> {
    // The file is a graph of empty nodes: two bytes each in the file, hundreds of bytes decoded.
    let nodes = [0x0a, 0x00].repeat(millrace_model::MAX_MESSAGES - 16);
    let mut length = Vec::new();
    let mut rest = nodes.len();
    while rest >= 0x80 {
        length.push((rest & 0x7f) as u8 | 0x80);
        rest >>= 7;
    }
    length.push(rest as u8);
    [&[0x08, 9, 0x3a][..], &length, &nodes].concat()
}

#[test]
fn a_hostile_model_does_not_raise_the_controllers_memory() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("hostile.onnx");
    std::fs::write(&model, hostile()).unwrap();
    let controller = Controller::start(&folder.path().join("data"));
    let small = folder.path().join("small.onnx");
    synth(&["tiny-cnn"], &small);
    controller.apply(folder.path(), &small).unwrap();
    let before = controller.peak_kib();
    let refused = controller.upload(&model).unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::InvalidModel), "{refused}");
    let rise = controller.peak_kib().saturating_sub(before);
    assert!(rise <= RISE_KIB_MAX, "{rise} KiB");
    controller.apply(folder.path(), &small).unwrap();
}

#[test]
fn inspect_started_by_hand_is_refused() {
    let parent = std::process::id().to_string();
    let inspect = |parent: &str| {
        let mut command: Command = millrace();
        let output = command.args(["inspect", parent]).stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(inspect(&parent).contains("only a controller may start this command"));
    assert!(inspect("1").contains("has ended"));
}
