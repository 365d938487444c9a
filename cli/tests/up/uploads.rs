//! A model file never lies in a controller's memory, whole or compiled: another process looks into it.

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use millrace_client::{Admin, Endpoints, Error, ModelFile};
use millrace_types::Reason;
use serde_json::Value;
use tokio::runtime::Runtime;

use crate::running::{free, millrace};

/// How far a controller's memory may rise while it takes a model file, however large.
const RISE_KIB_MAX: u64 = 64 << 10;

/// A controller of its own cluster, without workers.
struct Controller {
    child: Child,
    client: String,
}

impl Drop for Controller {
    fn drop(&mut self) {
        // Both fail when it has ended already.
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

    /// The most memory that it had at a time so far. The kernel adds it up from counters of each
    /// processor without stopping them, so a later answer can be smaller by some pages.
    fn peak_kib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    /// Uploads a model without `apply`, which checks models itself first.
    fn upload(&self, model: &Path) -> Result<(), Error> {
        let file = ModelFile::open(model)?;
        Runtime::new().unwrap().block_on(async {
            let admin = Admin::new(Endpoints::new(vec![self.client.parse().unwrap()])?);
            admin.upload(&file, |_| {}).await.map(drop)
        })
    }

    /// Applies a function with this model; what was said if it was refused.
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

/// Uploads a synthetic network of at least so many bytes.
fn upload(network: &[&str], bytes_min: u64) {
    let folder = tempfile::tempdir().unwrap();
    let (small, large) = (folder.path().join("small.onnx"), folder.path().join("large.onnx"));
    synth(&["tiny-cnn"], &small);
    let bytes = synth(network, &large);
    assert!(bytes > bytes_min, "{bytes}");
    let controller = Controller::start(&folder.path().join("data"));
    // What any upload takes for good.
    controller.apply(folder.path(), &small).unwrap();
    let before = controller.peak_kib();
    controller.apply(folder.path(), &large).unwrap();
    let rise = controller.peak_kib().saturating_sub(before);
    eprintln!("a model of {bytes} bytes: the controller's memory rose by {rise} KiB");
    assert!(rise <= RISE_KIB_MAX, "{rise} KiB for {bytes} bytes");
}

#[test]
fn a_model_is_taken_without_being_read_into_the_controllers_memory() {
    upload(&["bert", "--layers", "2", "--vocabulary", "30522"], 128 << 20);
}

/// `cargo test -p millrace-cli --test up -- --ignored a_model_of_a_gigabyte`
#[test]
#[ignore = "takes a minute and 3 GiB of disk"]
fn a_model_of_a_gigabyte_is_taken_without_being_read_into_the_controllers_memory() {
    upload(&["bert", "--layers", "24", "--hidden", "1024", "--heads", "16", "--inner", "4096"], 1 << 30);
}

/// A model file that would take hundreds of times its bytes of memory if it were decoded.
fn hostile() -> Vec<u8> {
    // One graph of empty nodes: two bytes each on the wire, hundreds decoded.
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
fn a_hostile_model_costs_the_controller_nothing() {
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
fn a_person_who_starts_an_inspection_is_told_whose_it_is() {
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
