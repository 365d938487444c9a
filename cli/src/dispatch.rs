//! Runs the verb of a command line.

use clap::CommandFactory as _;
use millrace_proto::trace::SpanRing;
use tokio::runtime::Runtime;
use tracing::{Instrument as _, info_span};

use crate::args::{Cli, Command};
use crate::commands::{
    apply, autoscale, billing, cluster, completions, controller, delete, demo, describe, events, get, health,
    invoke, logs, operation, policy, profile, ps, scheduling, sim, slices, synth, tenant, top, trace, up,
    version, worker,
};
use crate::config::Config;
use crate::failure::CommandFailure;
use crate::load;
use crate::session::ClusterSession;

/// Runs a verb. Must be called outside the runtime, because some verbs bring their own.
pub(crate) fn run(
    command: Command,
    config: Config,
    kept: Option<SpanRing>,
    runtime: &Runtime,
) -> Result<(), CommandFailure> {
    match command {
        Command::Completions(args) => completions::run(&args, &mut Cli::command()),
        Command::Load(args) => load::run(&args, &config),
        Command::Sim(args) => sim::run(&args),
        Command::Slices(args) => slices::run(&args),
        Command::Synth(args) => synth::run(&args),
        Command::Up(args) => runtime.block_on(up::run(args, &config, kept)),
        Command::Controller(args) => runtime.block_on(controller::run(args, &config, kept)),
        Command::Worker(args) => runtime.block_on(worker::run(args, kept)),
        Command::Demo(args) => runtime.block_on(demo::run(args, config, kept)),
        Command::Health(args) => runtime.block_on(health::run(args)),
        command => runtime.block_on(call(command, config)),
    }
}

/// Runs a verb that calls a cluster, under a single span.
async fn call(command: Command, config: Config) -> Result<(), CommandFailure> {
    let session = ClusterSession::new(config)?;
    match command {
        Command::Apply(args) => apply::run(args, &session).instrument(info_span!("apply")).await,
        Command::Get(args) => get::run(args, &session).instrument(info_span!("get")).await,
        Command::Describe(args) => describe::run(args, &session).instrument(info_span!("describe")).await,
        Command::Delete(args) => delete::run(args, &session).instrument(info_span!("delete")).await,
        Command::Invoke(args) => invoke::run(args, &session).instrument(info_span!("invoke")).await,
        Command::Billing(args) => billing::run(args, &session).instrument(info_span!("billing")).await,
        Command::Ps(args) => ps::run(args, &session).instrument(info_span!("ps")).await,
        Command::Cordon(args) => scheduling::cordon(args, &session).instrument(info_span!("cordon")).await,
        Command::Drain(args) => scheduling::drain(args, &session).instrument(info_span!("drain")).await,
        Command::Uncordon(args) => {
            scheduling::uncordon(args, &session).instrument(info_span!("uncordon")).await
        }
        Command::Operation(args) => operation::run(args, &session).await,
        Command::Policy(args) => policy::run(args, &session).instrument(info_span!("policy")).await,
        Command::Profile(args) => profile::run(args, &session).await,
        Command::Tenant(args) => tenant::run(args, &session).instrument(info_span!("tenant")).await,
        // These verbs have no span of their own. A span is exported when it ends: the span of a
        // watch would last as long as the watch, and the span of `trace` would appear in its own
        // output.
        Command::Events(args) => events::run(args, &session).await,
        Command::Logs(args) => logs::run(args, &session).await,
        Command::Top(args) => top::run(args, &session).await,
        Command::Trace(args) => trace::run(args, &session).await,
        Command::Cluster(args) => cluster::run(args, &session).instrument(info_span!("cluster")).await,
        Command::Autoscale(args) => autoscale::run(args, &session).await,
        Command::Version(args) => version::run(args, &session).instrument(info_span!("version")).await,
        // `run` handles these verbs, which need no session.
        Command::Completions(_)
        | Command::Controller(_)
        | Command::Demo(_)
        | Command::Executor
        | Command::Health(_)
        | Command::Inspect(_)
        | Command::Load(_)
        | Command::Program
        | Command::Sim(_)
        | Command::Slices(_)
        | Command::Synth(_)
        | Command::Up(_)
        | Command::Worker(_) => Ok(()),
    }
}
