//! The cluster of `deploy/compose` as a project of its own: built from the binary under test, so that
//! no registry is needed, and driven with `docker` and the compose tool that is here. Containers run on
//! this machine: their processes are seen and signalled by their pids, which takes root.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Output, Stdio};
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::owner;
use super::tools::{said, succeeded};
use crate::clock;
use crate::cluster::Machine;

/// The base image, as `deploy/compose/base-image.sh` names it.
const BASE: &str = "millrace-base";
/// How long a command of the engine may take, in seconds: it copies images of a hundred megabytes.
const COMMAND_SECONDS: &str = "180";
/// How long a container may take to say that it is ready.
const READY_TIMEOUT: Duration = Duration::from_secs(90);
/// How often that is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a service gets that is to end: what `compose.yaml` gives it.
const GRACE_SECONDS: &str = "45";
/// How compose marks what is a project's, and which service it is.
const PROJECT: &str = "com.docker.compose.project";
const SERVICE: &str = "com.docker.compose.service";
/// The kinds of things that a project has, besides its image, in the order in which they can go.
const KINDS: [&str; 3] = ["container", "network", "volume"];

/// A compose project. It goes, with its volumes and its image, when it is dropped.
#[derive(Debug)]
pub(in crate::cluster) struct Compose {
    project: String,
    deploy: PathBuf,
    tool: &'static [&'static str],
    /// Where each controller is published.
    clients: [SocketAddr; 3],
    /// Read in place of `deploy/compose/.env`, which has the user's own settings. There is nothing in it.
    settings: PathBuf,
}

/// A container of a project: stopped and started again, it is the same one.
#[derive(Debug, Clone)]
pub(in crate::cluster) struct Container {
    id: String,
}

impl Compose {
    /// Builds the image. Removes first what harnesses left behind that were killed.
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

    /// The image with the binary under test, without its debugging information.
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
        said(build.arg("--tag").arg(image(&self.project)).arg(&folder)).context("cannot build the image")?;
        std::fs::remove_dir_all(&folder).with_context(|| format!("cannot remove {}", folder.display()))
    }

    /// Makes and starts so many of its services, each worker with such GPUs. Controllers are always
    /// three: they begin a cluster together.
    pub(in crate::cluster) fn up(&self, workers: u32, machine: Machine) -> anyhow::Result<()> {
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
        let Machine { gpus, gpu_memory, host_memory } = machine;
        command.env("CLUSTER_GPUS", gpus.to_string());
        command.env("CLUSTER_GPU_MEMORY", gpu_memory.to_string());
        command.env("CLUSTER_HOST_MEMORY", host_memory.to_string());
        said(&mut command).context("the compose project does not start").map(drop)
    }

    /// Every controller's address for clients, in the order of their numbers.
    pub(in crate::cluster) fn clients(&self) -> [SocketAddr; 3] {
        self.clients
    }

    /// The container of a service.
    pub(in crate::cluster) fn container(&self, service: &str) -> anyhow::Result<Container> {
        let filters = [format!("label={PROJECT}={}", self.project), format!("label={SERVICE}={service}")];
        let mut list = docker(&["container", "ls", "--all", "--quiet"]);
        let id = said(list.args(filters.iter().flat_map(|it| ["--filter", it])))?.trim().to_owned();
        ensure!(!id.is_empty(), "{service} has no container");
        Ok(Container { id })
    }
}

impl Drop for Compose {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.project) {
            eprintln!("{} may be left: {error:#}", self.project);
        }
    }
}

impl Container {
    /// Starts it, unless it runs, and waits until it says that it is ready. Its pid on this machine,
    /// or how it ended.
    pub(in crate::cluster) async fn start(&self) -> anyhow::Result<Result<u32, ExitStatus>> {
        self.command(&["container", "start"]).await?;
        let began = self.inspect("{{.State.StartedAt}}").await?;
        let deadline = clock::now() + READY_TIMEOUT;
        while clock::now() < deadline {
            let state = self.inspect("{{.State.Running}} {{.State.ExitCode}}").await?;
            if let Some(code) = state.strip_prefix("false ") {
                return Ok(Err(status(code)?));
            }
            // Of what it prints only its ready line is on standard output.
            if !self.command(&["container", "logs", "--since", &began]).await?.stdout.is_empty() {
                return Ok(Ok(self.inspect("{{.State.Pid}}").await?.parse()?));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        bail!("it does not say within {READY_TIMEOUT:?} that it is ready")
    }

    /// kill -9, and waits until it is gone. The engine does not start it again: it was asked to.
    pub(in crate::cluster) async fn kill(&self) -> anyhow::Result<()> {
        self.command(&["container", "kill", "--signal", "KILL"]).await?;
        self.command(&["container", "wait"]).await.map(drop)
    }

    /// SIGTERM, and waits until it has ended.
    pub(in crate::cluster) async fn end(&self) -> anyhow::Result<ExitStatus> {
        self.command(&["container", "stop", "--time", GRACE_SECONDS]).await?;
        status(&self.inspect("{{.State.ExitCode}}").await?)
    }

    /// All that it logged.
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
        succeeded(command.as_std(), output)
    }
}

fn status(code: &str) -> anyhow::Result<ExitStatus> {
    let code: i32 = code.parse().with_context(|| format!("{code:?} is no exit code"))?;
    Ok(ExitStatus::from_raw(code << 8))
}

fn image(project: &str) -> String {
    format!("{project}:latest")
}

/// The folder of the compose file and the compose tool, if everything that it takes is here.
pub(super) fn check(deploy: Option<&Path>) -> anyhow::Result<(&Path, &'static [&'static str])> {
    let deploy = deploy
        .context("no deploy/compose here: run it in the repository, or name that folder with --deploy")?;
    Ok((deploy, tool()?))
}

/// The compose tool that is here, if everything else is as well.
fn tool() -> anyhow::Result<&'static [&'static str]> {
    ensure!(rustix::process::geteuid().is_root(), "killing containers' processes takes root");
    said(&mut docker(&["info"])).context("no Docker Engine answers here")?;
    let tools: [&'static [&'static str]; 2] = [&["docker", "compose"], &["docker-compose"]];
    let works = |tool: &&[&str]| said(bounded(tool).arg("version")).is_ok();
    let found = tools.into_iter().find(works);
    said(&mut docker(&["image", "inspect", BASE]))
        .with_context(|| format!("there is no image {BASE}: make it with deploy/compose/base-image.sh"))?;
    found.context("there is neither 'docker compose' nor 'docker-compose'")
}

/// Every project of which the engine has something.
fn projects() -> anyhow::Result<BTreeSet<String>> {
    let mut projects = BTreeSet::new();
    for kind in KINDS {
        let format = format!("{{{{.Label {PROJECT:?}}}}}");
        let mut list = docker(&[kind, "ls", "--filter", &format!("label={PROJECT}"), "--format", &format]);
        list.args((kind == "container").then_some("--all"));
        projects.extend(said(&mut list)?.lines().map(str::to_owned));
    }
    Ok(projects)
}

/// Removes all that a project has.
fn remove(project: &str) -> anyhow::Result<()> {
    for kind in KINDS {
        let mut list = docker(&[kind, "ls", "--quiet", "--filter", &format!("label={PROJECT}={project}")]);
        list.args((kind == "container").then_some("--all"));
        let ids = said(&mut list)?;
        if !ids.trim().is_empty() {
            let mut gone = docker(&[kind, "rm"]);
            gone.args((kind != "network").then_some("--force"));
            said(gone.args(ids.split_whitespace()))?;
        }
    }
    let image = image(project);
    if !said(&mut docker(&["image", "ls", "--quiet", &image]))?.trim().is_empty() {
        said(&mut docker(&["image", "rm", "--force", &image]))?;
    }
    Ok(())
}

fn docker(words: &[&str]) -> Command {
    let mut command = bounded(&["docker"]);
    command.args(words);
    command
}

/// A command that ends.
fn bounded(words: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", COMMAND_SECONDS]).args(words);
    command
}
