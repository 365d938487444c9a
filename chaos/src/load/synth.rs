//! Models of the cluster's own generator of models, `millrace synth`.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, bail};
use millrace_client::{Admin, ModelFile};
use millrace_types::Digest;
use tokio::process::Command;

/// A model that `millrace synth` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SynthModel {
    /// The kind of network, with one FP32 input.
    pub kind: &'static str,
    /// The seed of the weights. Another seed gives another file, with other answers.
    pub seed: u64,
}

/// Writes a model with the cluster's own generator of models, and uploads the model.
pub(super) async fn upload(
    network: SynthModel,
    program: &Path,
    root: &Path,
    admin: &Admin,
) -> anyhow::Result<Digest> {
    let SynthModel { kind, seed } = network;
    let path = root.join(format!("{kind}-{seed}.onnx"));
    synthesize(&[kind, "--seed", &seed.to_string()], program, &path, admin).await
}

/// Writes the model that the arguments describe, and uploads the model.
pub(super) async fn synthesize(
    words: &[&str],
    program: &Path,
    path: &Path,
    admin: &Admin,
) -> anyhow::Result<Digest> {
    let mut command = Command::new(program);
    // The user's own settings must not reach the generator: MILLRACE_BINARY, a setting of the
    // harness, is unknown to the generator.
    command.env_clear().arg("synth").args(words).arg("--out").arg(path).stdin(Stdio::null());
    let output = command.output().await.with_context(|| format!("cannot run {}", program.display()))?;
    if !output.status.success() {
        bail!("'millrace synth' fails: {}", String::from_utf8_lossy(&output.stderr));
    }
    let file = ModelFile::open(path)?;
    admin.upload(&file, |_| {}).await.context("the cluster does not accept the model")?;
    // The cluster has the file now, and hundreds of such files are gigabytes.
    std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))?;
    Ok(file.digest())
}
