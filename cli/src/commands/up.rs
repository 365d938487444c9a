//! `up`: a cluster on this machine, in one process but for the executors.

use std::net::{Ipv4Addr, SocketAddr};
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use millrace_device::topology::{DEFAULT_PRESET, Description, names};
use millrace_types::Bytes;
use millrace_types::topology::Topology;
use millrace_worker::service::Faults;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::cluster::{Cluster, Plan, WORKERS_MAX};
use crate::failure::Failure;
use crate::output::print;

const CLIENT_PORT: u16 = 8080;
const INTERNAL_PORT: u16 = 7070;
const WORKER_PORT: u16 = 7080;

const EXAMPLES: &str = "\
When the cluster is up, one line of JSON on standard output says where it listens.

Examples:
  millrace up                                   two emulated GPUs, kept in the usual place
  millrace up --ephemeral --listen 127.0.0.1:0  nothing kept, a free port
  millrace up --gpus 4 --gpu-memory 2GiB --data-dir ./data";

/// Run a cluster on this machine.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// Where everything is kept [default: $XDG_DATA_HOME/millrace or ~/.local/share/millrace].
    #[arg(long, value_name = "DIR", env = "MILLRACE_DATA_DIR")]
    data_dir: Option<PathBuf>,
    /// Keep nothing: a temporary folder, removed at the end.
    #[arg(long, conflicts_with = "data_dir")]
    ephemeral: bool,
    /// How many workers.
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX))
    )]
    workers: u32,
    /// How many GPUs each worker has [default: as many as the topology].
    #[arg(long, value_name = "N")]
    gpus: Option<NonZeroU32>,
    /// Each GPU's memory, such as 2GiB [default: the topology's].
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<Bytes>,
    /// Which GPUs and links to emulate.
    #[arg(long, value_name = "NAME", default_value = DEFAULT_PRESET, value_parser = names())]
    topology: String,
    /// The most host memory that one worker's models may take.
    #[arg(long, value_name = "SIZE", default_value = "8GiB")]
    host_memory: Bytes,
    /// Where clients connect; port 0 takes a free one.
    #[arg(long, value_name = "ADDRESS", default_value_t = loopback(CLIENT_PORT))]
    listen: SocketAddr,
    /// Where workers and controllers connect [default: 127.0.0.1:7070, or a free port with
    /// --ephemeral].
    #[arg(long, value_name = "ADDRESS")]
    internal_listen: Option<SocketAddr>,
    /// Where the first worker listens; the others take the next ports [default: 127.0.0.1:7080, or
    /// free ports with --ephemeral].
    #[arg(long, value_name = "ADDRESS")]
    worker_listen: Option<SocketAddr>,
    /// How long requests under way may take when it is stopped.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s")]
    grace: Duration,
    /// Obey fault injection through the admin API: for tests of what faults cost.
    #[arg(long)]
    allow_faults: bool,
    /// Listen at other addresses than loopback, without encryption or authentication.
    #[arg(long)]
    insecure: bool,
}

pub(crate) async fn run(args: Args) -> Result<(), Failure> {
    // Before anything starts, so that no signal is missed.
    let mut stop = Stop::new()?;
    let (data_dir, _kept) = args.data_dir()?;
    let plan = args.plan(data_dir)?;
    let kept = match args.ephemeral {
        true => "nothing is kept".to_owned(),
        false => format!("everything is kept in {}", plan.data_dir.display()),
    };
    let mut cluster = tokio::select! {
        cluster = Cluster::start(plan) => cluster?,
        () = stop.asked() => return Ok(()),
    };
    announce(&cluster, &kept)?;
    let ended = tokio::select! {
        () = stop.asked() => Ok(()),
        failure = cluster.failed() => Err(failure),
    };
    eprintln!("stopping: requests under way get {} (again to stop at once)", text(args.grace));
    tokio::select! {
        () = cluster.shutdown(args.grace) => ended,
        // Dropping the cluster ends it, executors included.
        () = stop.asked() => Err(Failure::failed("stopped at once: requests under way were cut short")),
    }
}

impl Args {
    /// Where to keep things, and what removes it at the end.
    fn data_dir(&self) -> Result<(PathBuf, Option<tempfile::TempDir>), Failure> {
        if self.ephemeral {
            let folder = ephemeral_dir()?;
            return Ok((folder.path().to_owned(), Some(folder)));
        }
        let named = self.data_dir.clone().or_else(usual_data_dir);
        let dir = named.ok_or_else(|| {
            Failure::usage("there is no home folder to keep things in")
                .hint("name a folder with --data-dir, or keep nothing with --ephemeral")
        })?;
        Ok((dir, None))
    }

    fn plan(&self, data_dir: PathBuf) -> Result<Plan, Failure> {
        let port = |port| loopback(if self.ephemeral { 0 } else { port });
        let worker = self.worker_listen.unwrap_or_else(|| port(WORKER_PORT));
        if !worker.ip().is_loopback() && !self.insecure {
            return Err(Failure::usage(format!(
                "listening at {worker} would serve anyone who can reach it, without encryption or authentication"
            ))
            .hint("listen on 127.0.0.1, or add --insecure if that is meant"));
        }
        Ok(Plan {
            data_dir,
            client: self.listen,
            internal: self.internal_listen.unwrap_or_else(|| port(INTERNAL_PORT)),
            worker,
            workers: NonZeroU32::new(self.workers).unwrap_or(NonZeroU32::MIN),
            topology: topology(&self.topology, self.gpus, self.gpu_memory)?,
            host_memory: self.host_memory,
            faults: if self.allow_faults { Faults::Obey } else { Faults::Refuse },
            insecure: self.insecure,
        })
    }
}

/// A preset with its number of GPUs and memory changed.
pub(crate) fn topology(
    name: &str,
    gpus: Option<NonZeroU32>,
    memory: Option<Bytes>,
) -> Result<Topology, Failure> {
    let usage = |error: millrace_device::topology::Error| Failure::usage(error.to_string());
    if memory == Some(Bytes::ZERO) {
        return Err(Failure::usage(
            "a GPU without memory runs nothing: give --gpu-memory a size such as 1GiB",
        ));
    }
    let mut description = Description::preset(name).map_err(usage)?;
    if let Some(gpus) = gpus {
        description = description.with_gpus(gpus).map_err(usage)?;
    }
    if let Some(memory) = memory {
        description = description.with_memory(memory);
    }
    Ok(description.build())
}

/// A folder that goes away with the process.
pub(crate) fn ephemeral_dir() -> Result<tempfile::TempDir, Failure> {
    tempfile::Builder::new()
        .prefix("millrace-")
        .tempdir()
        .map_err(|error| Failure::failed(format!("cannot make a temporary folder: {error}")))
}

pub(crate) fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn usual_data_dir() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let data = folder("XDG_DATA_HOME").or_else(|| Some(folder("HOME")?.join(".local/share")))?;
    Some(data.join("millrace"))
}

fn text(span: Duration) -> String {
    humantime::format_duration(span).to_string()
}

/// Tells people on stderr and programs on stdout.
fn announce(cluster: &Cluster, kept: &str) -> Result<(), Failure> {
    let client = cluster.client_addr();
    eprintln!(
        "millrace is up: clients at {client} (gRPC and REST), {kept}\n\
         next: millrace apply -e {client} -f FUNCTION.yaml, millrace ps -e {client}; Ctrl-C stops it"
    );
    let line = json!({
        "ready": true,
        "cluster": cluster.id(),
        "client": client.to_string(),
        "internal": cluster.internal_addr().to_string(),
        "workers": cluster.worker_addrs().iter().map(ToString::to_string).collect::<Vec<_>>(),
        "pid": std::process::id(),
        "version": env!("CARGO_PKG_VERSION"),
    });
    print(&line.to_string())
}

/// Ctrl-C and what service managers send.
pub(crate) struct Stop {
    interrupt: tokio::signal::unix::Signal,
    terminate: tokio::signal::unix::Signal,
}

impl Stop {
    pub(crate) fn new() -> Result<Self, Failure> {
        let listen = |kind| {
            signal(kind).map_err(|error| Failure::failed(format!("cannot listen for signals: {error}")))
        };
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// Returns at the next signal.
    pub(crate) async fn asked(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn args(line: &[&str]) -> Args {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        Line::parse_from(["up"].iter().chain(line)).args
    }

    #[test]
    fn an_ephemeral_cluster_takes_free_ports_and_leaves_nothing() {
        let args = args(&["--ephemeral"]);
        let (dir, kept) = args.data_dir().unwrap();
        let plan = args.plan(dir.clone()).unwrap();
        assert_eq!((plan.client, plan.internal, plan.worker), (loopback(8080), loopback(0), loopback(0)));
        drop(kept);
        assert!(!dir.exists());
    }

    #[test]
    fn the_usual_cluster_has_the_documented_ports() {
        let plan = args(&["--data-dir", "d"]).plan("d".into()).unwrap();
        assert_eq!(
            (plan.client, plan.internal, plan.worker),
            (loopback(8080), loopback(7070), loopback(7080))
        );
    }

    #[test]
    fn other_addresses_than_loopback_have_to_be_meant() {
        let line = ["--ephemeral", "--worker-listen", "0.0.0.0:1"];
        let refused = args(&line).plan("d".into()).unwrap_err();
        assert!(refused.hint.unwrap().contains("--insecure"));
        let meant = [&line[..], &["--insecure"]].concat();
        assert!(args(&meant).plan("d".into()).is_ok());
    }

    #[test]
    fn gpus_are_what_was_asked_for() {
        let plan = args(&["--ephemeral", "--gpus", "3", "--gpu-memory", "2GiB"]).plan("d".into()).unwrap();
        let memory: Vec<_> = plan.topology.gpus.iter().map(|gpu| gpu.memory).collect();
        assert_eq!(memory, [Bytes::gib(2); 3]);
        assert!(topology("emulated", None, Some(Bytes::ZERO)).is_err());
    }
}
