//! `policy`: how nodes schedule, changed while they run.

use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use millrace_client::{PolicyChange, messages as wire};
use millrace_types::PolicySpec;
use millrace_types::policy::{AlphaReading, Batches, DispatchName, EvictionName, SLO_WINDOW_MAX, Setting};

use crate::clock;
use crate::failure::Failure;
use crate::output::{Output, list, policies, print};
use crate::progress;
use crate::session::Session;

/// How often nodes are looked at.
const PAUSE: Duration = Duration::from_millis(100);

const EXAMPLES: &str = "\
Every node changes at once, with all that waits there; nothing is refused for it. What is not named stays
as it is, and what was never set is as each worker was started. A worker that was started with a policy that
binds early (native, nonswap, infless-ka) keeps it.

Examples:
  millrace policy set --dispatch torpor --eviction torpor
  millrace policy set --dispatch lalb-o3 --overtakes-max 50 --unset alpha --dry-run
  millrace policy set --unset dispatch,eviction          as each worker was started
  millrace get policies                                  what is wanted, and what each node does
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
    /// Of each function the last N requests say whether it meets its objective, under torpor, random and
    /// unified; unless set, all there ever were.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(SLO_WINDOW_MAX)))]
    slo_window: Option<u32>,
    /// Settings that are to be as each worker was started.
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

fn named<T>(all: &'static [T], name: fn(T) -> &'static str) -> impl TypedValueParser<Value = T>
where
    T: std::str::FromStr<Err: std::error::Error + Send + Sync + 'static> + Copy + Send + Sync + 'static,
{
    PossibleValuesParser::new(all.iter().map(move |&it| name(it))).try_map(|name| name.parse::<T>())
}

/// A setting as its flag is written.
fn setting() -> impl TypedValueParser<Value = Setting> {
    PossibleValuesParser::new(["dispatch", "eviction", "overtakes-max", "alpha", "batching", "slo-window"])
        .try_map(|flag| flag.replace('-', "_").parse::<Setting>())
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
        };
        let set = spec.settings();
        let unset = |it: &&Setting| self.unset.contains(it);
        let is_set = |it: &&Setting| set.iter().any(|(name, _)| *name == it.name());
        if let Some(both) = Setting::ALL.iter().find(|it| unset(it) && is_set(it)) {
            let flag = both.name().replace('_', "-");
            return Err(Failure::usage(format!("--{flag} is both set and unset")).hint("name it once"));
        }
        let named = Setting::ALL.iter().filter(|it| unset(it) || is_set(it));
        let fields: Vec<_> = named.map(|it| it.name().to_owned()).collect();
        if fields.is_empty() {
            return Err(Failure::usage("no setting is named")
                .hint("name one, such as --dispatch NAME; or --unset dispatch"));
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
                return Ok::<_, Failure>(now);
            }
            tokio::time::sleep(PAUSE).await;
        }
    };
    let heard = tokio::time::timeout_at(clock::now() + set.timeout, heard).await;
    line.finish_and_clear();
    match heard {
        Ok(heard) => {
            let heard = heard?;
            // What another set since is theirs to be warned of.
            if heard.generation == policy.generation {
                policies::warnings(&heard).for_each(|warning| eprintln!("warning: {warning}"));
            }
            Ok(())
        }
        Err(_) => {
            let timeout = humantime::format_duration(set.timeout);
            Err(Failure::timed_out(format!("not every node has heard of it after {timeout}"))
                .hint("it is set: 'millrace get policies' shows who has"))
        }
    }
}

/// What is wanted, as it was typed.
fn told(policy: &wire::Policy) -> String {
    let spec = policy.spec.clone().unwrap_or_default();
    let number = |number: Option<u32>| number.map(|number| number.to_string()).unwrap_or_default();
    let settings = [
        ("dispatch", spec.dispatch),
        ("eviction", spec.eviction),
        ("overtakes-max", number(spec.overtakes_max)),
        ("alpha", spec.alpha),
        ("batching", spec.batching),
        ("slo-window", number(spec.slo_window)),
    ];
    let set = settings.into_iter().filter(|(_, value)| !value.is_empty());
    let said: Vec<_> = set.map(|(name, value)| format!("{name} {value}")).collect();
    if said.is_empty() { "as each worker was started".to_owned() } else { said.join(", ") }
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
        assert!(change(&["--dispatch", "lb", "--unset", "dispatch"]).is_err(), "it is both");
    }

    #[test]
    fn policies_that_bind_early_cannot_be_set() {
        let refused = options::<Set>(["--dispatch", "native"]).unwrap_err().to_string();
        assert!(refused.contains("simpleswap"), "{refused}");
    }
}
