//! `controller`: a controller of a group, as a separate process.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::sync::Arc;

use millrace_client::Address;
use millrace_controller::config::{CLIENT_PORT, INTERNAL_PORT, SNAPSHOT_EVERY};
use millrace_controller::{
    ClusterStart, ControllerConfig, JoinAs, ObjectStoreUrl, RaftError, RunningController, StartError, Tcp,
};
use millrace_proto::trace::SpanRing;

use crate::commands::connections::ConnectionLimits;
use crate::commands::options::{
    HostNames, InitialPolicy, ParentProcess, Permission, ServerOptions, advertised,
};
use crate::config::Config;
use crate::failure::CommandFailure;
use crate::private;
use crate::process::controller::{halted, inspection, raft_runtime};
use crate::process::{self, ControllerReady, StopSignals, announce, loopback, seed};

const HELP: &str = "\
--bootstrap and --join act only on an empty data directory. In a used directory, the stored identity
decides, and both options are ignored. Without either option, an empty directory is refused: a lost
disk or a mistyped path never begins a second cluster. So pass --bootstrap once, by hand, to the first
controller of a cluster, --join to the others, and neither, or --join, where a service manager
restarts the controller.

For an unattended start, pass one controller --bootstrap together with --join and all the others. It
begins a cluster only if each of the others reports an empty directory too, and joins their cluster if
they have one. These options may stay: a lost directory begins no second cluster.

When the controller serves, one line of JSON on standard output has its addresses. A controller that
joins serves once it is a voter (or, with --learner, has the log).

Examples:
  millrace controller --id 1 --data-dir /var/lib/millrace --bootstrap
  millrace controller --id 2 --data-dir /var/lib/millrace --join 10.0.0.1:7070 \\
      --listen 10.0.0.2:8080 --internal-listen 10.0.0.2:7070 --insecure
  millrace cluster status -e 10.0.0.1:8080,10.0.0.2:8080";

/// The smallest interval between two snapshots, in log entries. With a smaller one, a group does
/// little else.
const SNAPSHOT_EVERY_MIN: u64 = 100;

/// Run one controller.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct Args {
    /// The controller's id in the group; never reused, not even after the controller was removed.
    #[arg(long, value_name = "N", default_value = "1")]
    id: NonZeroU64,
    /// The directory of all the controller's files; no other process may use it.
    #[arg(long, value_name = "DIR", env = "MILLRACE_DATA_DIR")]
    data_dir: PathBuf,
    /// Begin a cluster with this controller as its only member; with --join, only if every controller that
    /// --join names reports an empty directory too.
    #[arg(long)]
    bootstrap: bool,
    /// Join the cluster of these controllers, by their internal addresses; one that answers is
    /// enough.
    #[arg(long, value_delimiter = ',', value_name = "HOST:PORT")]
    join: Vec<Address>,
    /// Join as a learner: receive the log and serve, without a vote until promoted.
    #[arg(long, requires = "join", conflicts_with = "bootstrap")]
    learner: bool,
    /// The listen address for clients; port 0 selects a free port.
    #[arg(long, value_name = "ADDRESS", default_value_t = loopback(CLIENT_PORT))]
    listen: SocketAddr,
    /// The listen address for workers and other controllers; port 0 selects a free port.
    #[arg(long, value_name = "ADDRESS", default_value_t = loopback(INTERNAL_PORT))]
    internal_listen: SocketAddr,
    /// The address at which clients reach this controller [default: the listen address].
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<Address>,
    /// The address at which workers and other controllers reach this controller [default: the
    /// listen address].
    #[arg(long, value_name = "HOST:PORT")]
    internal_advertise: Option<Address>,
    /// The number of log entries between two snapshots. A smaller number needs less disk and
    /// shortens the start, but writes the whole state more often.
    #[arg(
        long,
        value_name = "N",
        default_value_t = SNAPSHOT_EVERY,
        value_parser = clap::value_parser!(u64).range(SNAPSHOT_EVERY_MIN..)
    )]
    snapshot_every: u64,
    /// Serve the fault service on the internal address: every process that reaches it may move this
    /// controller's clock and stall its disk. For tests only.
    #[arg(long)]
    enable_fault_injection: bool,
    /// Keep model files in an object store that all controllers of the group share:
    /// s3://BUCKET/PREFIX (credentials and endpoint from the AWS_ environment variables) or
    /// file:///SHARED/FOLDER. All controllers need the same value. Also MILLRACE_ARTIFACTS, or
    /// `artifacts` in the settings file.
    #[arg(long, value_name = "URL")]
    artifacts: Option<ObjectStoreUrl>,
    #[command(flatten)]
    policy: InitialPolicy,
    #[command(flatten)]
    host_names: HostNames,
    #[command(flatten)]
    connections: ConnectionLimits,
    #[command(flatten)]
    options: ServerOptions,
    #[command(flatten)]
    origin: ParentProcess,
}

pub(crate) async fn run(args: Args, settings: &Config, kept: Option<SpanRing>) -> Result<(), CommandFailure> {
    args.origin.tie_lifetime()?;
    private::tighten(&args.data_dir)?;
    // Listen for signals before anything starts, so that no signal is missed.
    let mut stop = StopSignals::new()?;
    let raft = raft_runtime()?;
    let config = ControllerConfig { kept, raft_runtime: Some(raft.handle()), ..args.config(settings)? };
    let mut controller = tokio::select! {
        controller = millrace_controller::start(config, Arc::new(Tcp)) => controller.map_err(refused)?,
        () = stop.asked() => return Ok(()),
    };
    announce(&line(&controller))?;
    let ended = tokio::select! {
        () = stop.asked() => Ok(()),
        error = controller.failed() => Err(halted(&error)),
    };
    process::print_stopping(args.options.grace);
    tokio::select! {
        cut = controller.shutdown(args.options.grace) => {
            if cut > 0 {
                tracing::warn!(
                    connections = cut,
                    "cut connections at the end of the grace period: set a longer --grace"
                );
            }
            ended
        }
        () = stop.asked() => Err(process::stopped_at_once()),
    }
}

fn refused(error: StartError) -> CommandFailure {
    let hint = match &error {
        StartError::Raft(RaftError::Empty(_)) => {
            "begin a cluster here with --bootstrap, or join one with --join HOST:PORT"
        }
        StartError::Raft(RaftError::NeverJoined(_)) => "name a controller of the group: --join HOST:PORT",
        _ => return CommandFailure::failed(format!("controller: {error}")),
    };
    CommandFailure::failed(format!("controller: {error}")).hint(hint)
}

fn line(controller: &RunningController) -> ControllerReady {
    ControllerReady {
        ready: true,
        role: "controller".to_owned(),
        id: controller.id().0,
        cluster: controller.cluster_id().to_string(),
        client: controller.client_addr().to_string(),
        internal: controller.internal_addr().to_string(),
        pid: std::process::id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
    }
}

impl Args {
    /// Returns the process name in spans.
    pub(crate) fn process_name(&self) -> String {
        format!("controller-{}", self.id)
    }

    fn config(&self, settings: &Config) -> Result<ControllerConfig, CommandFailure> {
        self.options.check_exposed(self.listen)?;
        self.options.check_exposed(self.internal_listen)?;
        if self.options.allows(Permission::Processes) {
            return Err(CommandFailure::usage("--allow processes: a controller runs no programs")
                .hint("start the workers with it"));
        }
        let internal =
            advertised(self.internal_advertise.as_ref(), self.internal_listen, "--internal-advertise")?;
        let mut defaults = ControllerConfig::new(self.data_dir.clone(), seed()?);
        [defaults.limits.client, defaults.limits.internal] = self.connections.of_controller()?;
        Ok(ControllerConfig {
            id: millrace_controller::ControllerId(self.id.get()),
            start: self.start(),
            client_listen: self.listen,
            internal_listen: self.internal_listen,
            internal_advertise: internal,
            client_advertise: advertised(self.advertise.as_ref(), self.listen, "--advertise")?,
            snapshot_every: self.snapshot_every,
            preset: self.policy.preset,
            artifacts: self.artifacts.as_ref().or(settings.artifacts.as_ref()).cloned(),
            inspection: inspection()?,
            allow_faults: self.options.allows(Permission::Faults),
            fault_injection: self.enable_fault_injection,
            insecure: self.options.insecure,
            host_names: self.host_names.all(),
            ..defaults
        })
    }

    fn start(&self) -> ClusterStart {
        let others = || self.join.iter().map(|address| address.authority().to_owned()).collect();
        match self.join.as_slice() {
            [] if self.bootstrap => ClusterStart::Bootstrap,
            [] => ClusterStart::Reopen,
            _ if self.bootstrap => ClusterStart::Found { with: others() },
            _ if self.learner => ClusterStart::Join { at: others(), role: JoinAs::Learner },
            _ => ClusterStart::Join { at: others(), role: JoinAs::Voter },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    fn args(line: &str) -> Result<Args, clap::Error> {
        options(["--data-dir", "d"].into_iter().chain(line.split_whitespace()))
    }

    #[test]
    fn an_empty_folder_begins_a_cluster_only_on_request() {
        assert_eq!(args("").unwrap().start(), ClusterStart::Reopen);
        assert_eq!(args("--bootstrap").unwrap().start(), ClusterStart::Bootstrap);
        let at = vec!["a:1".to_owned(), "b:2".to_owned()];
        let joins = |role| ClusterStart::Join { at: at.clone(), role };
        assert_eq!(args("--join a:1,b:2").unwrap().start(), joins(JoinAs::Voter));
        assert_eq!(args("--join a:1 --join b:2 --learner").unwrap().start(), joins(JoinAs::Learner));
        let founds = ClusterStart::Found { with: at.clone() };
        assert_eq!(args("--bootstrap --join a:1,b:2").unwrap().start(), founds);
    }

    #[test]
    fn contradictory_options_are_refused() {
        for line in
            ["--learner", "--bootstrap --join a:1 --learner", "--bootstrap --learner", "--id 0", "--join a"]
        {
            assert!(args(line).is_err(), "{line}");
        }
    }

    fn settings(artifacts: Option<&str>) -> Config {
        Config { artifacts: artifacts.map(|url| url.parse().unwrap()), ..Config::empty() }
    }

    #[test]
    fn the_artifacts_flag_overrides_the_settings() {
        let said = |line: &str, settings: &Config| {
            args(line).unwrap().config(settings).unwrap().artifacts.map(|place| place.to_string())
        };
        let configured = settings(Some("s3://models"));
        assert_eq!(said("", &settings(None)), None);
        assert_eq!(said("", &configured).as_deref(), Some("s3://models"));
        assert_eq!(said("--artifacts file:///mnt/m", &configured).as_deref(), Some("file:///mnt/m"));
        assert!(args("--artifacts /mnt/m").is_err());
    }

    #[test]
    fn faults_are_served_only_on_request_and_off_loopback_only_with_insecure() {
        let injected =
            |line: &str| args(line).unwrap().config(&settings(None)).map(|config| config.fault_injection);
        assert_eq!(injected(""), Ok(false));
        assert_eq!(injected("--allow faults"), Ok(false), "--allow faults is for executors");
        assert_eq!(injected("--enable-fault-injection"), Ok(true));
        let exposed = "--enable-fault-injection --internal-listen 10.0.0.1:7070";
        assert!(injected(exposed).unwrap_err().hint.unwrap().contains("--insecure"));
        assert_eq!(injected(&format!("{exposed} --insecure")), Ok(true));
    }

    #[test]
    fn a_controller_cannot_allow_programs() {
        let refused = args("--allow processes").unwrap().config(&settings(None)).unwrap_err();
        assert_eq!(refused.message.as_deref(), Some("--allow processes: a controller runs no programs"));
    }

    #[test]
    fn a_listener_on_all_addresses_needs_an_advertised_address() {
        let refused = args("--listen 0.0.0.0:1 --insecure").unwrap().config(&settings(None)).unwrap_err();
        assert!(refused.hint.unwrap().contains("--advertise"));
        let config =
            args("--listen 0.0.0.0:1 --insecure --advertise h:1").unwrap().config(&settings(None)).unwrap();
        assert_eq!((config.client_advertise, config.internal_advertise), (Some("h:1".into()), None));
    }
}
