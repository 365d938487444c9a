//! The options of `up`.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;

use millrace_controller::config::{CLIENT_PORT, INTERNAL_PORT};

use crate::cluster::WORKERS_MAX;
use crate::commands::connections::ConnectionLimits;
use crate::commands::options::{HostNames, InitialPolicy, ServerOptions, WORKER_PORT, WorkerOptions};
use crate::failure::CommandFailure;
use crate::process::{ephemeral_dir, loopback};

const EXAMPLES: &str = "\
When the cluster is up, one line of JSON on standard output has its addresses.

With more than one controller, each controller and worker is a separate process, and that line has
the pids: kill any of them to see the effect. The end of a process is reported with the command that
restarts it; with --restart, this process does that. If a folder already holds a group, its controllers
listen at their previous ports, by which they know each other.

Examples:
  millrace up                                   two emulated GPUs, data in the default folder
  millrace up --ephemeral --listen 127.0.0.1:0  no data kept, a free port
  millrace up --gpus 4 --gpu-memory 2GiB --data-dir ./data
  millrace up --ephemeral --preset torpor       scheduled as in the Torpor paper
  millrace up --controllers 3 --workers 2 --data-dir ./group";

/// Run a cluster on this machine.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    /// The folder for all data [default: $MILLRACE_DATA_DIR, $XDG_DATA_HOME/millrace or
    /// ~/.local/share/millrace].
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Keep no data: use a temporary folder that is removed at the end.
    #[arg(long, conflicts_with = "data_dir")]
    ephemeral: bool,
    /// The number of controllers: 1, 3 or 5. A group of 3 tolerates the loss of one, a group of 5
    /// the loss of two.
    #[arg(long, value_name = "N", default_value = "1", value_parser = controllers)]
    pub(super) controllers: NonZeroU32,
    /// The number of workers.
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX))
    )]
    workers: u32,
    #[command(flatten)]
    pub(super) machine: WorkerOptions,
    #[command(flatten)]
    pub(super) policy: InitialPolicy,
    /// The listen address of the first controller for clients; the other controllers listen on the next
    /// ports. Port 0 selects free ports.
    #[arg(long, value_name = "ADDRESS", default_value_t = loopback(CLIENT_PORT))]
    pub(super) listen: SocketAddr,
    /// The listen address of the first controller for workers and other controllers; the other controllers
    /// listen on the next ports [default: 127.0.0.1:7070, or free ports with --ephemeral].
    #[arg(long, value_name = "ADDRESS")]
    pub(super) internal_listen: Option<SocketAddr>,
    /// The listen address of the first worker; the others use the next ports [default:
    /// 127.0.0.1:7080, or free ports with --ephemeral].
    #[arg(long, value_name = "ADDRESS")]
    worker_listen: Option<SocketAddr>,
    /// Restart a controller or worker that ended, after growing waits.
    #[arg(long)]
    pub(super) restart: bool,
    #[command(flatten)]
    pub(super) host_names: HostNames,
    #[command(flatten)]
    pub(super) connections: ConnectionLimits,
    #[command(flatten)]
    pub(super) options: ServerOptions,
}

impl Args {
    /// Returns whether this process is a controller and a worker itself.
    pub(crate) fn serves(&self) -> bool {
        self.controllers.get() == 1
    }

    /// Returns the data directory, and the guard that removes a temporary one at the end.
    pub(super) fn data_dir(&self) -> Result<(PathBuf, Option<tempfile::TempDir>), CommandFailure> {
        if self.ephemeral {
            let folder = ephemeral_dir()?;
            return Ok((folder.path().to_owned(), Some(folder)));
        }
        let named = self.data_dir.clone().or_else(usual_data_dir);
        let dir = named.ok_or_else(|| {
            CommandFailure::usage("there is no home folder for the data")
                .hint("name a folder with --data-dir, or keep no data with --ephemeral")
        })?;
        Ok((dir, None))
    }

    pub(super) fn internal(&self) -> SocketAddr {
        self.internal_listen.unwrap_or_else(|| self.usual(INTERNAL_PORT))
    }

    pub(super) fn worker(&self) -> SocketAddr {
        self.worker_listen.unwrap_or_else(|| self.usual(WORKER_PORT))
    }

    pub(super) fn usual(&self, port: u16) -> SocketAddr {
        loopback(if self.ephemeral { 0 } else { port })
    }

    pub(super) fn workers(&self) -> NonZeroU32 {
        NonZeroU32::new(self.workers).unwrap_or(NonZeroU32::MIN)
    }

    /// Describes for people whether data is kept at the end.
    pub(super) fn kept(&self, data_dir: &std::path::Path) -> String {
        match self.ephemeral {
            true => "no data is kept".to_owned(),
            false => format!("data is kept in {}", data_dir.display()),
        }
    }
}

fn controllers(text: &str) -> Result<NonZeroU32, String> {
    match text.parse::<NonZeroU32>() {
        Ok(number) if matches!(number.get(), 1 | 3 | 5) => Ok(number),
        _ => Err("write 1, 3 or 5: a group needs a majority, so an even number tolerates no more failures than the odd number below".to_owned()),
    }
}

/// Returns the folder for data if none is named. The variable is read here and not by the option, because it
/// does not conflict with `--ephemeral`.
fn usual_data_dir() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    if let Some(named) = folder("MILLRACE_DATA_DIR") {
        return Some(named);
    }
    let data = folder("XDG_DATA_HOME").or_else(|| Some(folder("HOME")?.join(".local/share")))?;
    Some(data.join("millrace"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    fn args(line: &[&str]) -> Args {
        options(line).unwrap()
    }

    #[test]
    fn an_ephemeral_cluster_uses_free_ports_and_leaves_no_data() {
        let args = args(&["--ephemeral"]);
        let (dir, kept) = args.data_dir().unwrap();
        assert_eq!((args.listen, args.internal(), args.worker()), (loopback(8080), loopback(0), loopback(0)));
        drop(kept);
        assert!(!dir.exists());
    }

    #[test]
    fn the_default_cluster_has_the_documented_ports() {
        let args = args(&["--data-dir", "d"]);
        assert_eq!(
            (args.listen, args.internal(), args.worker()),
            (loopback(8080), loopback(7070), loopback(7080))
        );
    }

    #[test]
    fn a_group_has_an_odd_number_of_controllers() {
        for number in ["0", "2", "4", "7", "x"] {
            let refused = options::<Args>(["--controllers", number]).unwrap_err();
            assert!(refused.to_string().contains("1, 3 or 5"), "{refused}");
        }
        assert_eq!(args(&["--controllers", "5"]).controllers.get(), 5);
    }
}
