//! Runs the binary as a user would, without this machine's own settings.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// A folder to run in, as the working directory and the home.
pub(crate) struct Sandbox {
    folder: tempfile::TempDir,
    env: Vec<(String, String)>,
}

impl Sandbox {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), env: Vec::new() }
    }

    /// Returns a sandbox in which every command calls this server.
    pub(crate) fn of(server: &impl std::fmt::Display) -> Self {
        let env = vec![("MILLRACE_ENDPOINTS".to_owned(), server.to_string())];
        Self { env, ..Self::new() }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    }

    /// Writes a manifest of a function with the small network, and the network.
    pub(crate) fn write_function(&self, name: &str) {
        self.write("mlp.onnx", millrace_model::synth::mlp());
        self.write(&format!("{name}.yaml"), manifest(name, "mlp.onnx"));
    }

    /// Runs `millrace` with the words of the line.
    pub(crate) async fn run(&self, line: &str) -> Run {
        self.run_with(&line.split_whitespace().collect::<Vec<_>>(), "").await
    }

    /// Runs `millrace` with arguments that may have spaces, and with standard input.
    pub(crate) async fn run_with(&self, args: &[&str], input: &str) -> Run {
        let mut child = Command::new(env!("CARGO_BIN_EXE_millrace"))
            .args(args)
            .current_dir(self.path())
            .env_clear()
            .env("HOME", self.path())
            .envs(self.env.iter().map(|(key, value)| (key, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        stdin.write_all(input.as_bytes()).await.unwrap();
        drop(stdin);
        let output = child.wait_with_output().await.unwrap();
        Run {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

pub(crate) fn manifest(name: &str, model: &str) -> String {
    format!(
        "apiVersion: millrace/v1\nkind: Function\nmetadata: {{name: {name}}}\nspec: {{model: {{file: {model}}}}}\n"
    )
}
