//! `policy`: the scheduling policy of the nodes, which can change while they run.

use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use millrace_client::{PolicyChange, messages as wire};
use millrace_proto::convert::policy_settings;
use millrace_types::PolicySpec;
use millrace_types::policy::{
    AlphaReading, Batches, DispatchName, EvictionName, GpuSharingName, HostLinksName, PresetName,
    SLO_WINDOW_MAX, Setting, TransferSharingName,
};

use crate::clock;
use crate::commands::options::named;
use crate::failure::CommandFailure;
use crate::output::{ListOutput, list, policies, print};
use crate::progress;
use crate::session::ClusterSession;

/// The interval between two looks at the nodes.
const PAUSE: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Every node changes at once, with its waiting requests; no request is refused for it. A preset is a
bundle of settings; the other options replace parts of it. A setting that is not named stays unchanged.

Examples:
  millrace policy set --preset torpor
  millrace policy set --preset lalb-o3 --overtakes-max 50 --unset alpha --dry-run
  millrace policy set --gpu-sharing slices               several requests at once on each GPU
  millrace policy set --unset preset,eviction            the default preset, with its own eviction
  millrace get policies                                  the policy, and the settings in force on each node
  millrace get policy -o yaml                            the same for 'millrace apply -f FILE'
  millrace policy history                                the last changes: time, author and settings";

/// See and change the scheduling policy of the nodes while they run.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    Set(Set),
    /// Show the last changes, the newest first.
    History(History),
}

/// The output options of `history`.
#[derive(Debug, clap::Args)]
struct History {
    #[command(flatten)]
    output: ListOutput,
}

/// Change the scheduling policy.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
struct Set {
    /// The bundle of settings to start from: Millrace's own (unified), the Torpor paper's (torpor),
    /// the LALB paper's (lalb-o3), or order of arrival (fifo).
    #[arg(long, value_name = "NAME", value_parser = named(PresetName::ALL, PresetName::name))]
    preset: Option<PresetName>,
    /// The rule that assigns requests to GPUs.
    #[arg(long, value_name = "NAME", value_parser = named(DispatchName::ALL, DispatchName::name))]
    dispatch: Option<DispatchName>,
    /// The rule that selects the models to evict from a GPU.
    #[arg(long, value_name = "NAME", value_parser = named(EvictionName::ALL, EvictionName::name))]
    eviction: Option<EvictionName>,
    /// The number of times a waiting request may be overtaken, under lalb-o3 and unified. Under
    /// unified, if the oldest request that was overtaken so often has a deadline, one turn in ten
    /// goes by age until it runs; with 0, all turns do.
    #[arg(long, value_name = "N")]
    overtakes_max: Option<u32>,
    /// The way in which torpor's alpha follows the share of functions that comply.
    #[arg(long, value_name = "NAME", value_parser = named(AlphaReading::ALL, AlphaReading::name))]
    alpha: Option<AlphaReading>,
    /// Whether requests run as one batch if their functions allow it.
    #[arg(long, value_name = "NAME", value_parser = named(Batches::ALL, Batches::name))]
    batching: Option<Batches>,
    /// The number of a function's last requests that decide whether it meets its objective, under
    /// torpor and unified [default: all requests so far].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(SLO_WINDOW_MAX)))]
    slo_window: Option<u32>,
    /// The rule by which transfers between host memory and GPUs share links, each direction
    /// separately: each transfer at the rate that meets the deadline of its waiting request
    /// (faastube), in turns (fair), or in order of arrival (fifo).
    #[arg(long, value_name = "NAME", value_parser = named(TransferSharingName::ALL, TransferSharingName::name))]
    transfer_sharing: Option<TransferSharingName>,
    /// The PCIe links that data crosses between host memory and a GPU: the GPU's own (own), or also
    /// idle links of other GPUs, which forward over NVLinks (all).
    #[arg(long, value_name = "WHICH", value_parser = named(HostLinksName::ALL, HostLinksName::name))]
    host_links: Option<HostLinksName>,
    /// The sharing of a GPU: a request has the whole GPU while it runs (off), or several requests run at
    /// once, each on its own part of the GPU's SMs (slices). GPUs that cannot be shared stay as they are.
    #[arg(long, value_name = "MODE", value_parser = named(GpuSharingName::ALL, GpuSharingName::name))]
    gpu_sharing: Option<GpuSharingName>,
    /// The settings to return to the preset's values.
    #[arg(long, value_delimiter = ',', value_name = "SETTING", value_parser = setting())]
    unset: Vec<Setting>,
    /// Check everything, change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Refuse unless the policy is at this version, as 'get policies -o json' prints it.
    #[arg(long, value_name = "VERSION")]
    resource_version: Option<u64>,
    /// The longest time to wait until every node has received the policy.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s")]
    timeout: Duration,
    /// Do not wait for the nodes.
    #[arg(long)]
    no_wait: bool,
}

/// The settings, each written as the flag.
const FLAGS: [&str; 10] = [
    "preset",
    "dispatch",
    "eviction",
    "overtakes-max",
    "alpha",
    "batching",
    "slo-window",
    "transfer-sharing",
    "host-links",
    "gpu-sharing",
];

/// Parses a setting, written as the flag.
fn setting() -> impl TypedValueParser<Value = Setting> {
    PossibleValuesParser::new(FLAGS).try_map(|flag| flag.replace('-', "_").parse::<Setting>())
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    match args.verb {
        Verb::Set(set) => change(set, session).await,
        Verb::History(History { output }) => {
            let changes = session.admin.policy_changes().await?;
            let table = policies::changes(&changes);
            let documents: Vec<_> = changes.into_iter().map(policies::PolicyChangeDocument::from).collect();
            list(output.output, &documents, &table, "the policy was never changed")
        }
    }
}

impl Set {
    /// Returns the new values, and the names of the settings to change.
    fn change(&self) -> Result<PolicyChange, CommandFailure> {
        let spec = PolicySpec {
            dispatch: self.dispatch,
            eviction: self.eviction,
            overtakes_max: self.overtakes_max,
            alpha: self.alpha,
            batching: self.batching,
            slo_window: self.slo_window,
            preset: self.preset,
            transfer_sharing: self.transfer_sharing,
            host_links: self.host_links,
            gpu_sharing: self.gpu_sharing,
        };
        let set = spec.settings();
        let unset = |it: &&Setting| self.unset.contains(it);
        let is_set = |it: &&Setting| set.iter().any(|(name, _)| *name == it.name());
        if let Some(both) = Setting::ALL.iter().find(|it| unset(it) && is_set(it)) {
            let flag = flag(*both);
            return Err(
                CommandFailure::usage(format!("--{flag} is both set and unset")).hint("name it only once")
            );
        }
        let named = Setting::ALL.iter().filter(|it| unset(it) || is_set(it));
        let fields: Vec<_> = named.map(|it| it.name().to_owned()).collect();
        if fields.is_empty() {
            return Err(CommandFailure::usage("no setting is named")
                .hint("name a setting, such as --preset NAME, or --unset preset"));
        }
        Ok(PolicyChange {
            spec,
            fields: Some(fields),
            dry_run: self.dry_run,
            resource_version: self.resource_version,
        })
    }
}

async fn change(set: Set, session: &ClusterSession) -> Result<(), CommandFailure> {
    let about =
        |error: millrace_client::Error| CommandFailure::from(error).about(format_args!("policy/cluster"));
    let policy = session.admin.update_policy(&set.change()?).await.map_err(about)?;
    let said = told(&policy);
    if set.dry_run {
        return print(&format!("policy/cluster {said} (dry run)"));
    }
    print(&format!("policy/cluster {said} (change {})", policy.generation))?;
    if set.no_wait {
        return Ok(());
    }
    let line = progress::waiting("waiting for the nodes");
    let heard = async {
        loop {
            let now = session.admin.policy().await?;
            if now.nodes.iter().all(|node| node.generation >= policy.generation) {
                return Ok::<_, CommandFailure>(());
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    let heard = tokio::time::timeout_at(clock::now() + set.timeout, heard).await;
    line.finish_and_clear();
    match heard {
        Ok(heard) => heard,
        Err(_) => {
            let timeout = humantime::format_duration(set.timeout);
            Err(CommandFailure::timed_out(format!("not every node has received the policy after {timeout}"))
                .hint("the policy is set: 'millrace get policies' shows the nodes that have it"))
        }
    }
}

/// Returns the command that restores the default policy.
pub(crate) fn restore_command() -> String {
    format!("millrace policy set --unset {}", FLAGS.join(","))
}

/// Returns the flag of a setting, without the dashes.
fn flag(setting: Setting) -> String {
    setting.name().replace('_', "-")
}

/// Returns the policy's settings as command-line words.
fn told(policy: &wire::Policy) -> String {
    let spec = policy_settings(policy.spec.as_ref().unwrap_or(&Default::default())).unwrap_or_default();
    let said: Vec<_> = spec
        .settings()
        .into_iter()
        .map(|(name, value)| format!("{} {value}", name.replace('_', "-")))
        .collect();
    if said.is_empty() { "the default preset".to_owned() } else { said.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::testing::options;

    fn change(words: &[&str]) -> Result<PolicyChange, CommandFailure> {
        options::<Set>(words).unwrap().change()
    }

    #[test]
    fn a_change_has_only_the_named_settings() {
        let fields = |words: &[&str]| change(words).unwrap().fields.unwrap();
        assert_eq!(fields(&["--dispatch", "torpor", "--batching", "off"]), ["dispatch", "batching"]);
        assert_eq!(fields(&["--unset", "overtakes-max,alpha"]), ["overtakes_max", "alpha"]);
        let lalb = change(&["--dispatch", "lalb-o3", "--overtakes-max", "7"]).unwrap().spec;
        assert_eq!((lalb.dispatch, lalb.overtakes_max), (Some(DispatchName::LalbO3), Some(7)));
        assert!(change(&[]).is_err(), "no setting is named");
        assert!(
            change(&["--dispatch", "fifo", "--unset", "dispatch"]).is_err(),
            "a setting is both set and unset"
        );
        let preset = change(&["--preset", "torpor", "--host-links", "all", "--unset", "slo-window"]).unwrap();
        assert_eq!(preset.fields.unwrap(), ["preset", "slo_window", "host_links"]);
    }

    #[test]
    fn every_setting_can_be_unset() {
        for &setting in Setting::ALL {
            let fields = change(&["--unset", &flag(setting)]).unwrap().fields.unwrap();
            assert_eq!(fields, [setting.name()]);
        }
    }

    #[test]
    fn a_baseline_of_the_simulator_is_refused_with_the_policies_that_can_be_set() {
        let refused = options::<Set>(["--dispatch", "native"]).unwrap_err().to_string();
        assert!(refused.contains("unified, torpor, lalb-o3, lalb, fifo"), "{refused}");
    }
}
