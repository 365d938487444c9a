//! A compose project for the test. Dropping it removes it with its image and volumes, even after a
//! failed test.

use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::NamedTempFile;

pub(crate) const SERVICES: [&str; 6] =
    ["controller-1", "controller-2", "controller-3", "worker-1", "worker-2", "worker-3"];

/// The base image, by the name in `deploy/compose/base-image.sh`.
const BASE: &str = "millrace-base";
/// The longest time of any step before the step counts as hung.
const PATIENCE: Duration = Duration::from_secs(60);
/// The longest time of an engine command in seconds: it copies images of a hundred megabytes.
const COMMAND_SECONDS: &str = "120";

/// A running cluster.
pub(crate) struct Cluster {
    project: String,
    image: String,
    ports: [u16; 3],
    /// The words of the available compose tool.
    tool: &'static [&'static str],
    /// An empty file in place of `deploy/compose/.env`, which has the user's own settings.
    settings: NamedTempFile,
    /// The controllers' client ports, separated by commas.
    pub(crate) endpoints: String,
}

/// Returns the path of a file in the repository.
pub(crate) fn repository(path: &str) -> String {
    format!("{}/../{path}", env!("CARGO_MANIFEST_DIR"))
}

impl Cluster {
    /// Builds the image and starts everything. If that is impossible, prints the reason and returns
    /// `None`.
    pub(crate) fn up() -> Option<Self> {
        let tool = match compose_tool() {
            Ok(tool) => tool,
            Err(missing) => {
                eprintln!("SKIPPED: the compose cluster was not run: {missing}");
                return None;
            }
        };
        let project = format!("millrace-test-{}", std::process::id());
        let ports = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
        let ports = ports.map(|listener| listener.local_addr().unwrap().port());
        let endpoints = ports.map(|port| format!("127.0.0.1:{port}")).join(",");
        let settings = NamedTempFile::new().unwrap();
        let image = format!("{project}:latest");
        let cluster = Self { project, image, ports, tool, settings, endpoints };
        cluster.build();
        // Remove the rest of a killed run with the same pid. Usually there is none.
        cluster.command(&["down", "--volumes", "--timeout", "0"]).output().unwrap();
        cluster.compose(&["up", "-d", "--no-build"]);
        Some(cluster)
    }

    /// Builds the image with the binary under test, without its debugging information.
    fn build(&self) {
        let folder = tempfile::tempdir().unwrap();
        let binary = folder.path().join("millrace");
        let built = env!("CARGO_BIN_EXE_millrace");
        let stripped = Command::new("strip").arg("-o").arg(&binary).arg(built).output();
        if !stripped.is_ok_and(|output| output.status.success()) {
            std::fs::copy(built, &binary).unwrap();
        }
        let dockerfile = repository("deploy/compose/Dockerfile");
        let base = format!("BASE_IMAGE={BASE}");
        let mut build = docker(&["build", "--quiet", "--target", "prebuilt", "--build-arg", &base]);
        build.args(["--file", &dockerfile, "--tag", &self.image]).arg(folder.path());
        done(build);
    }

    /// Returns a command of the compose tool for this project.
    fn command(&self, words: &[&str]) -> Command {
        let mut command = bounded(self.tool);
        let file = repository("deploy/compose/compose.yaml");
        command.args(["--project-name", &self.project, "--file", &file]);
        command.arg("--env-file").arg(self.settings.path()).args(words);
        // The user's own settings must not reach the cluster.
        command.env_clear();
        for name in ["PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG"] {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        command.env("CLUSTER_IMAGE", &self.image);
        for (number, port) in (1..).zip(self.ports) {
            command.env(format!("CLUSTER_PORT_{number}"), port.to_string());
        }
        command.env("CLUSTER_GPU_MEMORY", "256MiB").env("CLUSTER_HOST_MEMORY", "256MiB");
        command
    }

    fn compose(&self, words: &[&str]) -> String {
        done(self.command(words))
    }

    /// Runs a verb of the binary under test, from outside. Returns the standard output.
    pub(crate) fn ok(&self, words: &[&str]) -> String {
        verb(words, &self.endpoints)
    }

    /// Starts another container of the image, without arguments.
    pub(crate) fn alone(&self) -> SingleContainer {
        let name = format!("{}-alone", self.project);
        done(docker(&["run", "--detach", "--name", &name, "--publish", "127.0.0.1::8080", &self.image]));
        let mut alone = SingleContainer { name, endpoint: String::new() };
        let published = done(docker(&["port", &alone.name, "8080"]));
        published.trim().clone_into(&mut alone.endpoint);
        alone
    }

    /// Waits until every controller votes and every GPU is up.
    pub(crate) fn wait_whole(&self) {
        self.ok(&["cluster", "wait", "--voters", "3", "--nodes", "3", "--timeout", "60s"]);
    }

    /// Waits until the engine's own health checks pass for every service.
    pub(crate) fn wait_healthy(&self) {
        for service in SERVICES {
            eventually(&format!("{service} is healthy"), || {
                self.inspect(service, "{{.State.Health.Status}}") == "healthy"
            });
        }
    }

    pub(crate) fn leader(&self) -> u64 {
        let mut leader = None;
        eventually("a controller leads", || {
            let status: Value = serde_json::from_str(&self.ok(&["cluster", "status", "-o", "json"])).unwrap();
            leader = status["leader"].as_u64();
            leader.is_some()
        });
        leader.unwrap()
    }

    /// Kills a service's process (`kill -9`) without a request to the engine.
    pub(crate) fn kill(&self, service: &str) {
        let pid = self.inspect(service, "{{.State.Pid}}").parse().unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
        let restarts = || self.inspect(service, "{{.RestartCount}}") != "0";
        eventually(&format!("{service} is started again"), restarts);
    }

    /// Stops a service in order, and starts it again.
    pub(crate) fn restart(&self, service: &str) {
        self.compose(&["restart", "--timeout", "45", service]);
        let said = self.compose(&["logs", service]);
        assert!(said.contains("stopping: requests under way get"), "{service} received no signal: {said}");
    }

    fn inspect(&self, service: &str, format: &str) -> String {
        let container = self.compose(&["ps", "-q", service]);
        done(docker(&["inspect", "--format", format, container.trim()])).trim().to_owned()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", text(&self.command(&["ps"]).output().unwrap()));
            eprintln!("{}", text(&self.command(&["logs", "--tail=40"]).output().unwrap()));
        }
        let down = self.command(&["down", "--volumes", "--timeout", "5"]).output();
        let removed = docker(&["rmi", "--force", &self.image]).output();
        for output in [down, removed] {
            if !output.as_ref().is_ok_and(|output| output.status.success()) {
                eprintln!("{} may be left: {output:?}", self.project);
            }
        }
    }
}

/// A cluster in a container. Dropping the value removes the container.
pub(crate) struct SingleContainer {
    name: String,
    endpoint: String,
}

impl SingleContainer {
    /// Runs a verb of the binary under test, from outside. Returns the standard output.
    pub(crate) fn ok(&self, words: &[&str]) -> String {
        verb(words, &self.endpoint)
    }

    /// Stops the container in order. Returns the exit status.
    pub(crate) fn stop(&self) -> String {
        done(docker(&["stop", "--time", "45", &self.name]));
        done(docker(&["inspect", "--format", "{{.State.ExitCode}}", &self.name])).trim().to_owned()
    }
}

impl Drop for SingleContainer {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", text(&docker(&["logs", "--tail=40", &self.name]).output().unwrap()));
        }
        let removed = docker(&["rm", "--force", "--volumes", &self.name]).output();
        if !removed.as_ref().is_ok_and(|output| output.status.success()) {
            eprintln!("{} may be left: {removed:?}", self.name);
        }
    }
}

/// Runs a verb of the binary under test. Returns the standard output.
fn verb(words: &[&str], endpoints: &str) -> String {
    let mut command = bounded(&[env!("CARGO_BIN_EXE_millrace")]);
    command.env_clear().env("HOME", "/nonexistent").args(words).args(["-e", endpoints]);
    done(command)
}

/// Returns the available compose tool, or the first missing requirement.
fn compose_tool() -> Result<&'static [&'static str], String> {
    let succeeds = |mut command: Command| command.output().is_ok_and(|output| output.status.success());
    if !rustix::process::geteuid().is_root() {
        return Err("the test kills containers' processes, so it must run as root".to_owned());
    }
    if !succeeds(docker(&["info"])) {
        return Err("no Docker Engine answers on this machine".to_owned());
    }
    let tools: [&'static [&'static str]; 2] = [&["docker", "compose"], &["docker-compose"]];
    let works = |tool: &&[&str]| {
        let mut version = bounded(tool);
        version.arg("version");
        succeeds(version)
    };
    let tool =
        tools.into_iter().find(works).ok_or("there is neither 'docker compose' nor 'docker-compose'")?;
    if !succeeds(docker(&["image", "inspect", BASE])) {
        return Err(format!("there is no image {BASE}: build it with deploy/compose/base-image.sh"));
    }
    Ok(tool)
}

fn docker(words: &[&str]) -> Command {
    let mut command = bounded(&["docker"]);
    command.args(words);
    command
}

/// Returns a command with a time limit.
fn bounded(words: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", COMMAND_SECONDS]).args(words).current_dir(Path::new("/"));
    command
}

/// Runs a command that must succeed. Returns the standard output.
fn done(mut command: Command) -> String {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}: {}", output.status, text(&output));
    String::from_utf8(output.stdout).unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Polls until the condition holds. The watched state belongs to other processes, which cannot
/// notify the test.
#[allow(clippy::disallowed_methods, reason = "real processes in real time")]
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !so() {
        assert!(Instant::now() < deadline, "not after {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}
