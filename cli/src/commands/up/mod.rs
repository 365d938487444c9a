//! `up`: a cluster on this machine. With one controller all of it but the executors is this process;
//! with more, each controller and worker is a process of its own, watched by this one.

mod group;
mod single;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;

use millrace_proto::trace::Kept;

use crate::cluster::WORKERS_MAX;
use crate::commands::options::{AllConnections, FirstPolicy, HostNames, Machine, ServerOptions};
use crate::commands::worker::WORKER_PORT;
use crate::config::Config;
use crate::failure::Failure;
use crate::process::{ephemeral_dir, loopback};

const CLIENT_PORT: u16 = 8080;
const INTERNAL_PORT: u16 = 7070;

const EXAMPLES: &str = "\
When the cluster is up, one line of JSON on standard output says where it listens.

With more than one controller, each controller and worker is a process of its own, whose pid is in
that line: kill any of them to see what happens. One that ends is reported, with the command that
starts it again; only with --restart this process does that. Where a folder holds a group already,
its controllers take the ports they had, as they know each other by them.

Examples:
  millrace up                                   two emulated GPUs, kept in the usual place
  millrace up --ephemeral --listen 127.0.0.1:0  nothing kept, a free port
  millrace up --gpus 4 --gpu-memory 2GiB --data-dir ./data
  millrace up --ephemeral --preset torpor       scheduled as in the Torpor paper
  millrace up --controllers 3 --workers 2 --data-dir ./group";

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
    /// How many controllers: 1, 3 or 5. A group of 3 goes on without one of them, a group of 5
    /// without two.
    #[arg(long, value_name = "N", default_value = "1", value_parser = controllers)]
    controllers: NonZeroU32,
    /// How many workers.
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=i64::from(WORKERS_MAX))
    )]
    workers: u32,
    #[command(flatten)]
    machine: Machine,
    #[command(flatten)]
    policy: FirstPolicy,
    /// Where clients connect; other controllers take the next ports. Port 0 takes free ones.
    #[arg(long, value_name = "ADDRESS", default_value_t = loopback(CLIENT_PORT))]
    listen: SocketAddr,
    /// Where workers and controllers connect; other controllers take the next ports [default:
    /// 127.0.0.1:7070, or free ports with --ephemeral].
    #[arg(long, value_name = "ADDRESS")]
    internal_listen: Option<SocketAddr>,
    /// Where the first worker listens; the others take the next ports [default: 127.0.0.1:7080, or
    /// free ports with --ephemeral].
    #[arg(long, value_name = "ADDRESS")]
    worker_listen: Option<SocketAddr>,
    /// Start a controller or worker that ended again, a little later each time.
    #[arg(long)]
    restart: bool,
    #[command(flatten)]
    host_names: HostNames,
    #[command(flatten)]
    connections: AllConnections,
    #[command(flatten)]
    options: ServerOptions,
}

pub(crate) async fn run(args: Args, config: &Config, spans: Option<Kept>) -> Result<(), Failure> {
    let (data_dir, _kept) = args.data_dir()?;
    args.options.check_exposed(args.worker())?;
    match args.controllers.get() {
        1 => single::run(&args, config, data_dir, spans).await,
        _ => group::run(&args, config, data_dir).await,
    }
}

impl Args {
    /// Whether this process is a controller and a worker itself.
    pub(crate) fn serves(&self) -> bool {
        self.controllers.get() == 1
    }

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

    fn internal(&self) -> SocketAddr {
        self.internal_listen.unwrap_or_else(|| self.usual(INTERNAL_PORT))
    }

    fn worker(&self) -> SocketAddr {
        self.worker_listen.unwrap_or_else(|| self.usual(WORKER_PORT))
    }

    fn usual(&self, port: u16) -> SocketAddr {
        loopback(if self.ephemeral { 0 } else { port })
    }

    fn workers(&self) -> NonZeroU32 {
        NonZeroU32::new(self.workers).unwrap_or(NonZeroU32::MIN)
    }

    /// What happens to things at the end, for people.
    fn kept(&self, data_dir: &std::path::Path) -> String {
        match self.ephemeral {
            true => "nothing is kept".to_owned(),
            false => format!("everything is kept in {}", data_dir.display()),
        }
    }
}

fn controllers(text: &str) -> Result<NonZeroU32, String> {
    match text.parse::<NonZeroU32>() {
        Ok(number) if matches!(number.get(), 1 | 3 | 5) => Ok(number),
        _ => Err("write 1, 3 or 5: a group goes on while more than half of it is up, so that an even number stands no more failures than one less".to_owned()),
    }
}

fn usual_data_dir() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let data = folder("XDG_DATA_HOME").or_else(|| Some(folder("HOME")?.join(".local/share")))?;
    Some(data.join("millrace"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    pub(super) fn args(line: &[&str]) -> Args {
        options(line).unwrap()
    }

    #[test]
    fn an_ephemeral_cluster_takes_free_ports_and_leaves_nothing() {
        let args = args(&["--ephemeral"]);
        let (dir, kept) = args.data_dir().unwrap();
        assert_eq!((args.listen, args.internal(), args.worker()), (loopback(8080), loopback(0), loopback(0)));
        drop(kept);
        assert!(!dir.exists());
    }

    #[test]
    fn the_usual_cluster_has_the_documented_ports() {
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
