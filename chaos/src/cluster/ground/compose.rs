//! The cluster of `deploy/compose` as a separate compose project. The image is built from the
//! binary under test, so that no registry is needed. The harness uses `docker` and the installed
//! compose tool. Containers run on this machine, and the harness inspects and signals their
//! processes by pid, which requires root.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::owner;
use super::tools::{check_success, run_for_output};
use crate::clock;
use crate::cluster::plan::WorkerMachine;

/// The base image, as named in `deploy/compose/base-image.sh`.
const BASE: &str = "millrace-base";
/// Timeout of a command of the engine, in seconds. Some commands copy images of a hundred
/// megabytes.
const COMMAND_SECONDS: &str = "180";
/// Maximum time until a container reports that it is ready.
const READY_TIMEOUT: Duration = Duration::from_secs(90);
/// Interval between two looks at a container's state.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Time for the orderly end of a service, in seconds, as in `compose.yaml`.
const GRACE_SECONDS: &str = "45";
/// The labels with which compose marks a resource's project and service.
const PROJECT: &str = "com.docker.compose.project";
const SERVICE: &str = "com.docker.compose.service";
/// The kinds of resources of a project, besides its image, in an order in which they can be
/// removed.
const KINDS: [&str; 3] = ["container", "network", "volume"];

/// A compose project, which is removed with its volumes and its image when the value is dropped.
#[derive(Debug)]
pub(in crate::cluster) struct Compose {
    project: String,
    deploy: PathBuf,
    tool: &'static [&'static str],
    /// The published address of each controller.
    clients: [SocketAddr; 3],
    /// An empty file that is read in place of `deploy/compose/.env`, which contains the user's own
    /// settings.
    settings: PathBuf,
}

/// A container of a project. A container that is stopped and started stays the same container.
#[derive(Debug, Clone)]
pub(in crate::cluster) struct Container {
    id: String,
}

impl Compose {
    /// Removes the projects that killed harnesses left behind, and builds the image.
    pub(super) fn begin(deploy: Option<&Path>, program: &Path, root: &Path) -> anyhow::Result<Self> {
        let (deploy, tool) = check(deploy)?;
        for project in projects()?.iter().filter(|project| owner::is_orphan(project)) {
            remove(project)?;
        }
        let ports = [(); 3].map(|()| TcpListener::bind((Ipv4Addr::LOCALHOST, 0)));
        let [a, b, c] = ports.map(|it| it.and_then(|it| it.local_addr()));
        let clients = [a?, b?, c?];
        let settings = root.join("compose.env");
        std::fs::write(&settings, "").with_context(|| format!("cannot write {}", settings.display()))?;
        let compose = Self { project: owner::own(), deploy: deploy.to_owned(), tool, clients, settings };
        compose.build(program, root)?;
        Ok(compose)
    }

    /// Builds the image with the binary under test, without debugging information.
    fn build(&self, program: &Path, root: &Path) -> anyhow::Result<()> {
        let folder = root.join("image");
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let binary = folder.join("millrace");
        let stripped = Command::new("strip").arg("-o").arg(&binary).arg(program).output();
        if !stripped.is_ok_and(|output| output.status.success()) {
            std::fs::copy(program, &binary).context("cannot copy the binary")?;
        }
        let dockerfile = self.deploy.join("Dockerfile");
        let mut build = docker(&["build", "--quiet", "--target", "prebuilt", "--build-arg"]);
        build.arg(format!("BASE_IMAGE={BASE}")).arg("--file").arg(dockerfile);
        run_for_output(build.arg("--tag").arg(image(&self.project)).arg(&folder))
            .context("cannot build the image")?;
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
    }

    /// Creates and starts the three controllers and `workers` workers, each worker with the
    /// resources of `machine`. The number of controllers is fixed, because they bootstrap a cluster
    /// together.
    pub(in crate::cluster) fn up(&self, workers: u32, machine: WorkerMachine) -> anyhow::Result<()> {
        let mut command = bounded(self.tool);
        command.args(["--project-name", &self.project, "--file"]).arg(self.deploy.join("compose.yaml"));
        command.arg("--env-file").arg(&self.settings);
        command.args(["up", "-d", "--no-build"]);
        command.args((1..=self.clients.len()).map(|number| format!("controller-{number}")));
        command.args((1..=workers).map(|number| format!("worker-{number}")));
        // The user's own settings must not reach the cluster.
        command.env_clear();
        for name in ["PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG"] {
            command.envs(std::env::var_os(name).map(|value| (name, value)));
        }
        command.env("CLUSTER_IMAGE", image(&self.project));
        for (number, client) in (1..).zip(self.clients) {
            command.env(format!("CLUSTER_PORT_{number}"), client.port().to_string());
        }
        let WorkerMachine { gpus, gpu_memory, host_memory } = machine;
        command.env("CLUSTER_GPUS", gpus.to_string());
        command.env("CLUSTER_GPU_MEMORY", gpu_memory.to_string());
        command.env("CLUSTER_HOST_MEMORY", host_memory.to_string());
        run_for_output(&mut command).context("the compose project does not start").map(drop)
    }

    /// Returns every controller's address for clients, in the order of their numbers.
    pub(in crate::cluster) fn clients(&self) -> [SocketAddr; 3] {
        self.clients
    }

    /// Returns the container of a service.
    pub(in crate::cluster) fn container(&self, service: &str) -> anyhow::Result<Container> {
        let filters = [format!("label={PROJECT}={}", self.project), format!("label={SERVICE}={service}")];
        let mut list = docker(&["container", "ls", "--all", "--quiet"]);
        let id = run_for_output(list.args(filters.iter().flat_map(|it| ["--filter", it])))?.trim().to_owned();
        ensure!(!id.is_empty(), "{service} has no container");
        Ok(Container { id })
    }
}

impl Drop for Compose {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.project) {
            eprintln!("cannot remove the compose project {}: {error:#}", self.project);
        }
    }
}

impl Container {
    /// Starts the container, unless it runs, and waits until it reports that it is ready. Returns
    /// its pid on this machine, or its exit status.
    pub(in crate::cluster) async fn start(&self) -> anyhow::Result<Result<u32, ExitStatus>> {
        self.command(&["container", "start"]).await?;
        let began = self.inspect("{{.State.StartedAt}}").await?;
        let deadline = clock::now() + READY_TIMEOUT;
        while clock::now() < deadline {
            let state = self.inspect("{{.State.Running}} {{.State.ExitCode}}").await?;
            if let Some(code) = state.strip_prefix("false ") {
                return Ok(Err(status(code)?));
            }
            // The ready line is the only output on standard output.
            if !self.command(&["container", "logs", "--since", &began]).await?.stdout.is_empty() {
                return Ok(Ok(self.inspect("{{.State.Pid}}").await?.parse()?));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        bail!("the container is not ready after {READY_TIMEOUT:?}")
    }

    /// Kills the container with SIGKILL, and waits for its end. The engine does not restart a
    /// container that was killed on request.
    pub(in crate::cluster) async fn kill(&self) -> anyhow::Result<()> {
        self.command(&["container", "kill", "--signal", "KILL"]).await?;
        self.command(&["container", "wait"]).await.map(drop)
    }

    /// Sends SIGTERM, and waits for the end of the container.
    pub(in crate::cluster) async fn end(&self) -> anyhow::Result<ExitStatus> {
        self.command(&["container", "stop", "--time", GRACE_SECONDS]).await?;
        status(&self.inspect("{{.State.ExitCode}}").await?)
    }

    /// Returns the whole log of the container.
    pub(in crate::cluster) async fn log(&self) -> anyhow::Result<Vec<u8>> {
        let Output { stdout, stderr, .. } = self.command(&["container", "logs"]).await?;
        Ok([stderr, stdout].concat())
    }

    async fn inspect(&self, format: &str) -> anyhow::Result<String> {
        let output = self.command(&["container", "inspect", "--format", format]).await?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    async fn command(&self, words: &[&str]) -> anyhow::Result<Output> {
        let mut command = tokio::process::Command::from(docker(words));
        command.arg(&self.id).stdin(Stdio::null()).kill_on_drop(true);
        let output = command.output().await.context("cannot run docker")?;
        check_success(command.as_std(), output)
    }
}

fn status(code: &str) -> anyhow::Result<ExitStatus> {
    let code: i32 = code.parse().with_context(|| format!("{code:?} is not an exit code"))?;
    Ok(ExitStatus::from_raw(code << 8))
}

fn image(project: &str) -> String {
    format!("{project}:latest")
}

/// Returns the folder of the compose file and the compose tool, if every requirement is met.
pub(super) fn check(deploy: Option<&Path>) -> anyhow::Result<(&Path, &'static [&'static str])> {
    let deploy = deploy
        .context("there is no deploy/compose here: run the command in the repository, or name the folder with --deploy")?;
    Ok((deploy, tool()?))
}

/// Returns the installed compose tool, if every other requirement is met.
fn tool() -> anyhow::Result<&'static [&'static str]> {
    ensure!(rustix::process::geteuid().is_root(), "killing the processes of containers requires root");
    run_for_output(&mut docker(&["info"])).context("no Docker Engine answers here")?;
    let tools: [&'static [&'static str]; 2] = [&["docker", "compose"], &["docker-compose"]];
    let works = |tool: &&[&str]| run_for_output(bounded(tool).arg("version")).is_ok();
    let found = tools.into_iter().find(works);
    run_for_output(&mut docker(&["image", "inspect", BASE]))
        .with_context(|| format!("there is no image {BASE}: build it with deploy/compose/base-image.sh"))?;
    found.context("there is neither 'docker compose' nor 'docker-compose'")
}

/// Returns every project that has resources in the engine.
fn projects() -> anyhow::Result<BTreeSet<String>> {
    let mut projects = BTreeSet::new();
    for kind in KINDS {
        let format = format!("{{{{.Label {PROJECT:?}}}}}");
        let mut list = docker(&[kind, "ls", "--filter", &format!("label={PROJECT}"), "--format", &format]);
        list.args((kind == "container").then_some("--all"));
        projects.extend(run_for_output(&mut list)?.lines().map(str::to_owned));
    }
    Ok(projects)
}

/// Removes all resources of a project.
fn remove(project: &str) -> anyhow::Result<()> {
    for kind in KINDS {
        let mut list = docker(&[kind, "ls", "--quiet", "--filter", &format!("label={PROJECT}={project}")]);
        list.args((kind == "container").then_some("--all"));
        let ids = run_for_output(&mut list)?;
        if !ids.trim().is_empty() {
            let mut gone = docker(&[kind, "rm"]);
            gone.args((kind != "network").then_some("--force"));
            run_for_output(gone.args(ids.split_whitespace()))?;
        }
    }
    let image = image(project);
    if !run_for_output(&mut docker(&["image", "ls", "--quiet", &image]))?.trim().is_empty() {
        run_for_output(&mut docker(&["image", "rm", "--force", &image]))?;
    }
    Ok(())
}

fn docker(words: &[&str]) -> Command {
    let mut command = bounded(&["docker"]);
    command.args(words);
    command
}

/// Returns a command with a timeout.
fn bounded(words: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", COMMAND_SECONDS]).args(words);
    command
}
