//! The command-line arguments.

use clap::{Parser, Subcommand};
use millrace_proto::logs::{DEMO, UP};

use crate::commands::{
    apply, autoscale, billing, cluster, completions, controller, delete, demo, describe, events, get, health,
    inspect, invoke, logs, operation, policy, profile, ps, scheduling, sim, slices, synth, tenant, top,
    trace, up, version, worker,
};
use crate::config::{Config, Global};
use crate::failure::EXIT_CODES;
use crate::load;
use crate::telemetry::ProcessIdentity;

const ENVIRONMENT: &str = "\
Settings come from a file, then the environment, then flags; the last of them wins. The file is
$XDG_CONFIG_HOME/millrace/config.toml (or ~/.config/millrace/config.toml) unless --config names one.
A key such as log_format is MILLRACE_LOG_FORMAT in the environment.";

/// Serverless GPU inference.
#[derive(Debug, Parser)]
#[command(
    name = "millrace",
    version,
    max_term_width = 100,
    after_help = EXIT_CODES,
    after_long_help = format!("{ENVIRONMENT}\n\n{EXIT_CODES}")
)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The verbs of the command line.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Up(up::Args),
    Controller(controller::Args),
    Worker(worker::Args),
    Autoscale(autoscale::Args),
    Demo(demo::Args),
    Apply(apply::Args),
    Get(get::Args),
    Describe(describe::Args),
    Events(events::Args),
    Delete(delete::Args),
    Invoke(invoke::Args),
    Ps(ps::Args),
    Billing(billing::Args),
    Load(load::Args),
    Logs(logs::Args),
    Operation(operation::Args),
    Policy(policy::Args),
    Profile(profile::Args),
    Sim(sim::Args),
    Slices(slices::Args),
    Tenant(tenant::Args),
    Top(top::Args),
    Trace(trace::Args),
    Cluster(cluster::Args),
    Health(health::Args),
    Cordon(scheduling::Cordon),
    Drain(scheduling::Drain),
    Uncordon(scheduling::Uncordon),
    Synth(synth::Args),
    Version(version::Args),
    Completions(completions::Args),
    /// Run an executor of a worker; the worker's socket is standard input.
    #[command(hide = true)]
    Executor,
    /// Check the model file on standard input for a controller.
    #[command(hide = true)]
    Inspect(inspect::Args),
    /// Replace this process, which a worker started, by a user's program.
    #[command(hide = true)]
    Program,
}

impl Command {
    /// Returns the process's identity in its spans.
    pub(crate) fn process(&self) -> ProcessIdentity {
        let (service, name, serves) = match self {
            Self::Up(args) => ("millrace", UP.to_owned(), args.serves()),
            Self::Demo(args) => ("millrace", DEMO.to_owned(), args.reads_traces()),
            Self::Controller(args) => ("millrace-controller", args.process_name(), true),
            Self::Worker(args) => ("millrace-worker", args.process_name(), true),
            _ => ("millrace-client", "client".to_owned(), false),
        };
        ProcessIdentity { service, name, serves }
    }

    /// Returns whether the process is a server whose files other users of the machine must not
    /// read.
    pub(crate) fn keeps_data(&self) -> bool {
        matches!(self, Self::Up(_) | Self::Controller(_) | Self::Worker(_) | Self::Demo(_))
    }

    /// Returns the settings with the verb's own overrides.
    pub(crate) fn with_overrides(&self, config: Config) -> Config {
        match self {
            Self::Demo(args) => args.settle(config),
            _ => config,
        }
    }

    /// Returns the log filter if neither a flag nor a setting names one. Servers log their state;
    /// other verbs log only warnings.
    pub(crate) fn default_log(&self) -> &'static str {
        match self {
            // openraft logs every start and change. While a controller is away, openraft logs that
            // forty times a second and at every read, although the leader logs the absence once
            // itself. An error that ends openraft's core ends the process with an error of ours.
            Self::Up(_) | Self::Controller(_) | Self::Worker(_) => {
                "info,openraft=error,openraft::replication=off,openraft::core::raft_core=off"
            }
            _ => "warn",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;
    use millrace_client::Address;

    #[test]
    fn the_argument_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_and_verb_has_a_help_text() {
        fn check(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{}", command.get_name());
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{} {}", command.get_name(), arg.get_id());
            }
            command.get_subcommands().for_each(check);
        }
        check(&Cli::command());
    }

    #[test]
    fn endpoints_are_accepted_as_a_list_and_as_repeated_flags() {
        let cli =
            Cli::parse_from(["millrace", "ps", "-e", "a:1,b:2", "--endpoint", "c:3", "--endpoints", "d:4"]);
        let names: Vec<_> = cli.global.endpoint.iter().map(Address::authority).collect();
        assert_eq!(names, ["a:1", "b:2", "c:3", "d:4"]);
    }
}
