//! `policy`: how nodes schedule, changed while they run.

use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use millrace_client::{PolicyChange, messages as wire};
use millrace_proto::convert::policy_settings;
use millrace_types::PolicySpec;
use millrace_types::policy::{
    AlphaReading, Batches, DispatchName, EvictionName, HostLinksName, PresetName, SLO_WINDOW_MAX, Setting,
    TransferSharingName,
};

use crate::clock;
use crate::commands::options::named;
use crate::failure::Failure;
use crate::output::{Output, list, policies, print};
use crate::progress;
use crate::session::Session;

/// How often nodes are looked at.
const PAUSE: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Every node changes at once, with the requests that wait there; no request is refused for it. A preset is a
bundle of settings; the other options replace parts of it. A setting that is not named stays as it is.

Examples:
  millrace policy set --preset torpor
  millrace policy set --preset lalb-o3 --overtakes-max 50 --unset alpha --dry-run
  millrace policy set --unset preset,eviction            the default preset, with its own eviction
  millrace get policies                                  the policy, and the settings in force on each node
  millrace get policy -o yaml                            the same for 'millrace apply -f FILE'
  millrace policy history                                who changed what, and when";

/// See and change how nodes schedule while they run.
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

/// How to print them.
#[derive(Debug, clap::Args)]
struct History {
    #[command(flatten)]
    output: Output,
}

/// Change how nodes schedule.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
struct Set {
    /// The bundle of settings to begin with: Millrace's own (unified), the Torpor paper's (torpor), the LALB
    /// paper's (lalb-o3), or order of arrival (fifo).
    #[arg(long, value_name = "NAME", value_parser = named(PresetName::ALL, PresetName::name))]
    preset: Option<PresetName>,
    /// Which request goes to which GPU.
    #[arg(long, value_name = "NAME", value_parser = named(DispatchName::ALL, DispatchName::name))]
    dispatch: Option<DispatchName>,
    /// Which models make room first on a GPU.
    #[arg(long, value_name = "NAME", value_parser = named(EvictionName::ALL, EvictionName::name))]
    eviction: Option<EvictionName>,
    /// Times a waiting request may be overtaken, under lalb-o3 and unified. Under unified, while the oldest
    /// that was overtaken so often has a deadline, one turn in ten goes by age; with 0 all do.
    #[arg(long, value_name = "N")]
    overtakes_max: Option<u32>,
    /// How torpor's alpha follows the share of functions that comply.
    #[arg(long, value_name = "NAME", value_parser = named(AlphaReading::ALL, AlphaReading::name))]
    alpha: Option<AlphaReading>,
    /// Whether requests run as one where their functions allow it.
    #[arg(long, value_name = "NAME", value_parser = named(Batches::ALL, Batches::name))]
    batching: Option<Batches>,
    /// The last N requests of a function say whether it meets its objective, under torpor and unified; unless
    /// set, all requests so far.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(SLO_WINDOW_MAX)))]
    slo_window: Option<u32>,
    /// How transfers between host memory and GPUs share links, each direction by itself: each at the rate that
    /// meets the deadline of the request that waits for it (faastube), in turns (fair), or in order of arrival
    /// (fifo).
    #[arg(long, value_name = "NAME", value_parser = named(TransferSharingName::ALL, TransferSharingName::name))]
    transfer_sharing: Option<TransferSharingName>,
    /// The PCIe links that data crosses between host memory and a GPU: its own, or idle ones of other GPUs too,
    /// which forward over NVLinks (all).
    #[arg(long, value_name = "WHICH", value_parser = named(HostLinksName::ALL, HostLinksName::name))]
    host_links: Option<HostLinksName>,
    /// Settings that are to be the preset's.
    #[arg(long, value_delimiter = ',', value_name = "SETTING", value_parser = setting())]
    unset: Vec<Setting>,
    /// Every check, nothing changed.
    #[arg(long)]
    dry_run: bool,
    /// Refuse unless the policy is at this version ('get policies -o json' has it).
    #[arg(long, value_name = "VERSION")]
    resource_version: Option<u64>,
    /// How long to wait until every node has heard of it.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, default_value = "10s")]
    timeout: Duration,
    /// Only say so.
    #[arg(long)]
    no_wait: bool,
}

/// A setting as its flag is written.
fn setting() -> impl TypedValueParser<Value = Setting> {
    const FLAGS: [&str; 9] = [
        "preset",
        "dispatch",
        "eviction",
        "overtakes-max",
        "alpha",
        "batching",
        "slo-window",
        "transfer-sharing",
        "host-links",
    ];
    PossibleValuesParser::new(FLAGS).try_map(|flag| flag.replace('-', "_").parse::<Setting>())
}

pub(crate) async fn run(args: Args, session: &Session) -> Result<(), Failure> {
    match args.verb {
        Verb::Set(set) => change(set, session).await,
        Verb::History(History { output }) => {
            let changes = session.admin.policy_changes().await?;
            let table = policies::changes(&changes);
            let documents: Vec<_> = changes.into_iter().map(policies::Change::from).collect();
            list(output.output, &documents, &table, "nobody ever changed the policy")
        }
    }
}

impl Set {
    /// What is set, and what of it is meant.
    fn change(&self) -> Result<PolicyChange, Failure> {
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
        };
        let set = spec.settings();
        let unset = |it: &&Setting| self.unset.contains(it);
        let is_set = |it: &&Setting| set.iter().any(|(name, _)| *name == it.name());
        if let Some(both) = Setting::ALL.iter().find(|it| unset(it) && is_set(it)) {
            let flag = flag(*both);
            return Err(Failure::usage(format!("--{flag} is both set and unset")).hint("name it once"));
        }
        let named = Setting::ALL.iter().filter(|it| unset(it) || is_set(it));
        let fields: Vec<_> = named.map(|it| it.name().to_owned()).collect();
        if fields.is_empty() {
            return Err(Failure::usage("no setting is named")
                .hint("name one, such as --preset NAME; or --unset preset"));
        }
        let (dry_run, resource_version) = (self.dry_run, self.resource_version);
        Ok(PolicyChange { spec, fields: Some(fields), dry_run, resource_version })
    }
}

async fn change(set: Set, session: &Session) -> Result<(), Failure> {
    let about = |error: millrace_client::Error| Failure::from(error).about(format_args!("policy/cluster"));
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
                return Ok::<_, Failure>(());
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
            Err(Failure::timed_out(format!("not every node has heard of it after {timeout}"))
                .hint("it is set: 'millrace get policies' shows who has"))
        }
    }
}

/// The flag of a setting, without its dashes.
fn flag(setting: Setting) -> String {
    setting.name().replace('_', "-")
}

/// The policy as it is typed.
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

    fn change(words: &[&str]) -> Result<PolicyChange, Failure> {
        options::<Set>(words).unwrap().change()
    }

    #[test]
    fn what_is_named_is_meant_and_no_more() {
        let fields = |words: &[&str]| change(words).unwrap().fields.unwrap();
        assert_eq!(fields(&["--dispatch", "torpor", "--batching", "off"]), ["dispatch", "batching"]);
        assert_eq!(fields(&["--unset", "overtakes-max,alpha"]), ["overtakes_max", "alpha"]);
        let lalb = change(&["--dispatch", "lalb-o3", "--overtakes-max", "7"]).unwrap().spec;
        assert_eq!((lalb.dispatch, lalb.overtakes_max), (Some(DispatchName::LalbO3), Some(7)));
        assert!(change(&[]).is_err(), "nothing is named");
        assert!(change(&["--dispatch", "fifo", "--unset", "dispatch"]).is_err(), "it is both");
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
