//! Attackers: a separate process that attacks every port of a cluster as hostile clients may, from
//! given addresses, by a seed, and limited to a share of a processor.
//!
//! ```text
//!   scenario ──arguments──► child: governor ──► attacks, each on every port ──► servers
//!       ◄──lines of JSON: the start of each attack, and the counts at the end
//! ```
//!
//! The child is the harness's own program with a hidden subcommand ([`AttackOrders`]). The child
//! ends when its time is over, or when its standard input is closed, because its harness is gone
//! then. Everything is bounded: each attack in connections, bytes and repetitions, and the whole in
//! time.
//!
//! Deliberately absent: messages that a server is right to obey, such as the vote or the join of a
//! peer. These attacks do not test the trust of internal ports in their peers.

mod attacker;
mod attacks;
mod governor;
mod port;
mod schedule;
mod wire;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use clap::ValueEnum;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

pub use self::attacker::AttackCounts;
use self::attacker::{AttackTally, Attacker};
use self::attacks::Attack;
use self::governor::ProcessorPace;
pub(crate) use self::governor::{SHARE, share_of};
pub use self::port::{PortKind, ServerPort};
use self::schedule::AttackTurn;
use crate::clock;

/// The name of the hidden subcommand.
pub const SUBCOMMAND: &str = "attack";
/// Maximum number of the attackers' source addresses.
pub const SOURCES_MAX: usize = 3;
/// Maximum time between the beginning of a turn and the start of an attack on a port; in a short turn, half
/// of the turn. The attackers of different ports do not act at the same moments.
const START_WITHIN: Duration = Duration::from_secs(1);
/// Multiplications of the control run between two calls of the governor: well under a millisecond.
const BURN_STEP: u32 = 100_000;

/// The work on which attackers spend their share of a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AttackerWork {
    /// Attacks on the ports.
    Attack,
    /// Multiplications without any connection, for the control run.
    Burn,
}

impl AttackerWork {
    fn word(self) -> &'static str {
        match self {
            Self::Attack => "attack",
            Self::Burn => "burn",
        }
    }
}

/// The orders of a process of attackers, which are its command-line arguments.
#[derive(Debug, Clone, clap::Args)]
pub struct AttackOrders {
    /// Kind of work on which attackers spend their share.
    #[arg(long)]
    pub work: AttackerWork,
    /// Seed of all random choices.
    #[arg(long)]
    pub seed: u64,
    /// Duration of all attacks together.
    #[arg(long, value_parser = humantime::parse_duration)]
    pub lasts: Duration,
    /// Source addresses of connections.
    #[arg(long, value_delimiter = ',')]
    pub from: Vec<IpAddr>,
    /// Ports under attack.
    #[arg(long, value_delimiter = ',')]
    pub ports: Vec<ServerPort>,
    /// Function that some requests name: an `mlp` of `millrace synth`.
    #[arg(long)]
    pub function: String,
}

impl AttackOrders {
    /// Returns the orders as command-line arguments.
    #[must_use]
    pub fn words(&self) -> Vec<String> {
        let list = |items: Vec<String>| items.join(",");
        let flags = [
            ("--work", self.work.word().to_owned()),
            ("--seed", self.seed.to_string()),
            ("--lasts", humantime::format_duration(self.lasts).to_string()),
            ("--from", list(self.from.iter().map(ToString::to_string).collect())),
            ("--ports", list(self.ports.iter().map(ToString::to_string).collect())),
            ("--function", self.function.clone()),
        ];
        let words = flags.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
        std::iter::once(SUBCOMMAND.to_owned()).chain(words).collect()
    }
}

/// A line that attackers print.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AttackerLine {
    /// An attack begins, alone or together with all others.
    Begins(String),
    /// All attacks have ended.
    Done(AttackSummary),
}

/// The summary of a process of attackers.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttackSummary {
    /// The processor time of the process, in milliseconds.
    pub used_ms: u64,
    /// The elapsed time, in milliseconds.
    pub passed_ms: u64,
    /// The maximum overdraft of the process's share, in milliseconds.
    pub overdraft_ms: u64,
    /// The counts of each attack, by its name.
    pub attacks: BTreeMap<String, AttackCounts>,
}

/// Carries out orders until their time is over or standard input is closed.
///
/// # Errors
/// If the orders cannot be carried out.
pub fn run(orders: &AttackOrders) -> anyhow::Result<()> {
    ensure!(!orders.from.is_empty(), "attackers need a source address: name one with --from");
    ensure!(
        orders.from.len() <= SOURCES_MAX,
        "attackers have at most {SOURCES_MAX} source addresses: name fewer with --from"
    );
    raise_descriptors()?;
    // A single thread: a second one would use a second processor, beyond the governor's share of
    // one.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        tokio::select! {
            done = carry_out(orders) => done,
            () = closed_stdin() => Err(anyhow!("the harness is gone")),
        }
    })?;
    say(&AttackerLine::Done(done))?;
    // A read of standard input still blocks a thread of the runtime, so the shutdown must not wait
    // for it.
    runtime.shutdown_background();
    Ok(())
}

/// Returns the names of all attacks.
pub(crate) fn attack_names() -> impl Iterator<Item = &'static str> {
    Attack::ALL.into_iter().map(Attack::name)
}

async fn carry_out(orders: &AttackOrders) -> anyhow::Result<AttackSummary> {
    if orders.work == AttackerWork::Attack {
        attacks::prepare();
    }
    let begun = clock::now();
    let pace = ProcessorPace::begin()?;
    let tally = AttackTally::default();
    match orders.work {
        AttackerWork::Burn => burn(&pace, orders.lasts).await,
        // The control and the attack use the same share: attacks have priority, and multiplications
        // fill the rest.
        AttackerWork::Attack => {
            let (attacked, ()) = tokio::join!(attack(orders, &pace, &tally), burn(&pace, orders.lasts));
            attacked?;
        }
    }
    let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
    Ok(AttackSummary {
        used_ms: millis(pace.used()),
        passed_ms: millis(begun.elapsed()),
        overdraft_ms: millis(pace.overdraft()),
        attacks: tally.counts(),
    })
}

async fn burn(pace: &ProcessorPace, lasts: Duration) {
    let until = clock::now() + lasts;
    let mut product = 1u32;
    while clock::now() < until {
        for step in 1..=BURN_STEP {
            product = std::hint::black_box(product.wrapping_mul(step | 1));
        }
        pace.keep_spare().await;
        tokio::task::yield_now().await;
    }
}

/// Runs every attack in turns, then all of them together.
async fn attack(orders: &AttackOrders, pace: &ProcessorPace, tally: &AttackTally) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(orders.seed);
    let sources: Arc<[IpAddr]> = orders.from.clone().into();
    let function: Arc<str> = orders.function.as_str().into();
    for AttackTurn { attacks, lasts } in schedule::turns(&Attack::ALL, orders.lasts, &mut rng) {
        let said = if attacks.len() == 1 { attacks[0].name() } else { "all of them together" };
        say(&AttackerLine::Begins(said.to_owned()))?;
        let mut going_on = JoinSet::new();
        let mut ends = Vec::new();
        for &attack in &attacks {
            for &port in &orders.ports {
                let attacker = Attacker {
                    port,
                    sources: sources.clone(),
                    alone: attacks.len() == 1,
                    function: function.clone(),
                    rng: StdRng::seed_from_u64(rng.random()),
                    pace: pace.clone(),
                    counts: tally.of(attack.name()),
                };
                let after = rng.random_range(Duration::ZERO..=START_WITHIN.min(lasts / 2));
                ends.push(going_on.spawn(async move {
                    tokio::time::sleep(after).await;
                    attack.carry_out(attacker).await;
                }));
            }
        }
        let all = async { while going_on.join_next().await.is_some() {} };
        let _over = tokio::time::timeout(lasts, all).await;
        // The end of a task drops the connections that the attack still holds. One port after the other,
        // because thousands of connections at once would exceed the share of the processor.
        for end in ends {
            pace.keep().await;
            end.abort();
            tokio::task::yield_now().await;
        }
        going_on.shutdown().await;
    }
    Ok(())
}

async fn closed_stdin() {
    // The harness sends no input, so a read ends only with the harness.
    let read = || std::io::stdin().read(&mut [0; 1]);
    let _end = tokio::task::spawn_blocking(read).await;
}

fn say(line: &AttackerLine) -> anyhow::Result<()> {
    println!("{}", serde_json::to_string(line)?);
    Ok(())
}

/// Raises the limit of descriptors, because thousands of connections need as many.
fn raise_descriptors() -> anyhow::Result<()> {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
        .context("cannot raise the limit of descriptors")
}

#[cfg(test)]
mod tests {
    use clap::{Args as _, FromArgMatches as _};

    use super::*;

    #[test]
    fn orders_are_read_back_from_their_command_line() {
        let orders = AttackOrders {
            work: AttackerWork::Attack,
            seed: 7,
            lasts: Duration::from_millis(1_500),
            from: vec![[127, 0, 1, 1].into(), [127, 0, 1, 2].into()],
            ports: ["client=127.0.0.1:20000", "worker=127.0.0.1:20001"]
                .map(|it| it.parse().unwrap())
                .to_vec(),
            function: "everywhere".to_owned(),
        };
        let command = AttackOrders::augment_args(clap::Command::new(SUBCOMMAND));
        let matches = command.try_get_matches_from(orders.words()).unwrap();
        let read = AttackOrders::from_arg_matches(&matches).unwrap();
        assert_eq!(read.words(), orders.words());
        assert!("peer=127.0.0.1:1".parse::<ServerPort>().unwrap_err().to_string().contains("peer"));
    }
}
