//! The scenario with hostile clients, in two runs over one cluster. In the first run, attackers
//! have their own addresses, and no other client may notice them. A control before this run uses
//! the same share of a processor without a connection. In the second run, attackers have the
//! clients' address, so that servers cannot tell the two apart: the cluster has to survive and to
//! recover.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use millrace_client::Admin;
use rand::Rng as _;
use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::stage::ScenarioStage;
use crate::cluster::{
    ClusterProcess, ProcessUsage, ResidentMemory, StatusGoal, descendants, descriptors_max, is_alive,
    processor_time, reset_peak, until_within,
};
use crate::history::{AdminOp, RequestRecord};
use crate::hostile::{AttackOrders, AttackSummary, AttackerLine, AttackerWork, share_of};
use crate::load::NewConnectionClients;
use crate::oracle::healthy::ALLOWANCE;
use crate::oracle::hostile::{self as judge, ClientLatencies, ClusterReading, NORMAL_WITHIN, ServerUsage};
use crate::timeline::seconds;

/// Addresses that only attackers use.
const ELSEWHERE: [IpAddr; 3] = [
    IpAddr::V4(Ipv4Addr::new(127, 0, 1, 1)),
    IpAddr::V4(Ipv4Addr::new(127, 0, 1, 2)),
    IpAddr::V4(Ipv4Addr::new(127, 0, 1, 3)),
];
/// The address of all clients.
const BESIDE: [IpAddr; 1] = [IpAddr::V4(Ipv4Addr::LOCALHOST)];
const READ_EVERY: Duration = Duration::from_secs(1);
/// Maximum wait for the cluster's status.
const STATUS_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum wait for the attackers' end after their time is over.
const OVERTIME: Duration = Duration::from_secs(30);
/// Maximum duration of a request that began in the first run and is not lost.
const REQUESTS_END_WITHIN: Duration = Duration::from_secs(12);
/// The name of the first run in checks.
const FIRST: &str = "from elsewhere";
/// The name of the second run in checks.
const SECOND: &str = "from beside";

/// A period with attackers, or the control.
struct AttackPhase {
    begun: Duration,
    ended: Duration,
    done: AttackSummary,
    /// The turns of the attacks, and of all attacks together.
    turns: Vec<AttackTurn>,
    watched: WatchedProcesses,
    /// The readings: the first from before the phase, the last from its end.
    readings: Vec<ClusterReading>,
}

/// The beginning of an attack's turn.
struct AttackTurn {
    name: String,
    begun: Duration,
    /// Processor time of the servers before the turn.
    servers_used: Duration,
}

struct WatchedProcesses {
    servers: Vec<(String, u32)>,
    executors: Vec<u32>,
    admin: Admin,
}

pub(super) async fn play(stage: &mut ScenarioStage, lasts: Duration) -> anyhow::Result<()> {
    if stage.cluster.caps().is_none() {
        stage.timeline.saw("this binary supports no connection limits: the cluster was started without them");
    }
    let control = stage.first_run(lasts).await?;
    stage.second_run(lasts, &control).await
}

impl ScenarioStage {
    /// Runs the control and the attackers at their own addresses. Returns the summary of the
    /// control.
    async fn first_run(&mut self, lasts: Duration) -> anyhow::Result<AttackSummary> {
        let addresses = self.cluster.addresses();
        let newcomers = NewConnectionClients::begin(
            addresses,
            self.targets.clone(),
            self.timeline.clone(),
            &mut self.rng,
        );
        self.calm().await;
        let control = self.under_attackers(AttackerWork::Burn, &ELSEWHERE, lasts).await?;
        self.fault();
        let attacked = self.under_attackers(AttackerWork::Attack, &ELSEWHERE, lasts).await?;
        let gaps = [self.load.writes.gap_max(), self.load.answers.gap_max()];
        let as_before = self.as_before(&attacked).await;
        let until = self.timeline.now();
        // Requests that have begun by then are judged, however long they take.
        tokio::time::sleep(REQUESTS_END_WITHIN).await;

        let fresh = newcomers.requests();
        newcomers.end().await?;
        let kept = self.load.requests();
        let all: Vec<RequestRecord> = kept.iter().chain(&fresh).cloned().collect();
        let met = |it: &&RequestRecord| it.ended >= control.begun && it.begun <= until;
        let all: Vec<RequestRecord> = all.iter().filter(met).cloned().collect();
        self.checks.push(judge::unharmed(FIRST, &all));
        let of = |phase: &AttackPhase| ClientLatencies {
            kept: latencies(&kept, phase),
            new: latencies(&fresh, phase),
        };
        self.checks.push(judge::latency(FIRST, &of(&control), &of(&attacked)));
        self.tell_turns(&control, &all);
        self.tell_turns(&attacked, &all);
        let took: Vec<_> = latencies(&kept, &attacked);
        let writes = self.writes(&attacked);
        self.checks.extend([
            judge::goes_on(format!("{FIRST}: admin writes go on"), &writes, gaps[0]),
            judge::goes_on(format!("{FIRST}: requests are answered throughout"), &took, gaps[1]),
        ]);
        let went_on = self.judge_run(FIRST, &control.done, attacked, as_before).await;
        ensure!(went_on, "a process ended in the first run: there is no second");
        Ok(control.done)
    }

    /// Runs the attackers at the clients' address.
    async fn second_run(&mut self, lasts: Duration, control: &AttackSummary) -> anyhow::Result<()> {
        // From here on, requests of a client at the attackers' address may be lost.
        self.excused_from = Some(self.timeline.now());
        if self.cluster.caps().is_some() {
            let wanted = self.wanted(StatusGoal::LAG_UNDER_LOAD);
            self.cluster.drop_address_caps(wanted).await?;
            self.fault();
            self.resumed().await?;
            self.served().await?;
            self.calm().await;
        }
        let attacked = self.under_attackers(AttackerWork::Attack, &BESIDE, lasts).await?;
        let as_before = self.as_before(&attacked).await;
        self.judge_run(SECOND, control, attacked, as_before).await;
        Ok(())
    }

    /// Makes the checks of both runs. Returns whether every process still runs.
    async fn judge_run(
        &mut self,
        run: &str,
        control: &AttackSummary,
        attacked: AttackPhase,
        as_before: Result<Duration, String>,
    ) -> bool {
        let mut readings = attacked.readings;
        // A process may end after the attack, as a late effect of the attack.
        let last = self.read(&attacked.watched).await;
        let went_on = last.ended.is_empty();
        readings.push(last);
        let connections = self.connections();
        self.checks.extend([
            judge::processes(run, &readings),
            judge::leaders(run, &readings),
            judge::memory(run, &readings),
            judge::descriptors(run, &readings, &connections),
            judge::normal(run, as_before),
            judge::attackers(run, control, &attacked.done),
        ]);
        went_on
    }

    /// Runs attackers for this time, and observes the cluster meanwhile.
    async fn under_attackers(
        &mut self,
        work: AttackerWork,
        from: &[IpAddr],
        lasts: Duration,
    ) -> anyhow::Result<AttackPhase> {
        let function = self.targets.names().next().context("there is a function")?.to_owned();
        let ports = self.cluster.ports();
        let orders =
            AttackOrders { work, seed: self.rng.random(), lasts, from: from.to_vec(), ports, function };
        let watched = self.watched()?;
        for (_, pid) in &watched.servers {
            reset_peak(*pid)?;
        }
        let mut readings = vec![self.read(&watched).await];
        let begun = self.timeline.now();
        let addresses: Vec<_> = from.iter().map(ToString::to_string).collect();
        let addresses = addresses.join(", ");
        self.timeline.did(match work {
            AttackerWork::Burn => format!("the control uses half a processor for {}", seconds(lasts)),
            AttackerWork::Attack => format!("attackers connect from {addresses} for {}", seconds(lasts)),
        });
        let mut attackers = Attackers::start(&orders)?;
        let mut looks = tokio::time::interval(READ_EVERY);
        looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let turn =
            |name| AttackTurn { name, begun: self.timeline.now(), servers_used: watched.servers_used() };
        let mut turns = vec![turn("nothing yet".to_owned())];
        let done = loop {
            tokio::select! {
                line = attackers.says() => match line? {
                    AttackerLine::Begins(attack) => {
                        self.timeline.fault(format!("attackers: {attack}"));
                        turns.push(turn(attack));
                    }
                    AttackerLine::Done(done) => break done,
                },
                _ = looks.tick() => readings.push(self.read(&watched).await),
            }
            let late = self.timeline.now() > begun + lasts + OVERTIME;
            ensure!(!late, "attackers do not end when their time is over");
        };
        attackers.end().await?;
        turns.push(turn("the end".to_owned()));
        let ended = self.timeline.now();
        self.tell(&done);
        readings.push(self.read(&watched).await);
        Ok(AttackPhase { begun, ended, done, turns, watched, readings })
    }

    /// Waits until the cluster is as before the attack. Returns the time, or the reason why the
    /// cluster is not as before.
    async fn as_before(&self, phase: &AttackPhase) -> Result<Duration, String> {
        let before = phase.readings.first().cloned().unwrap_or_default();
        let ended = phase.readings.last().and_then(|it| it.ended.first());
        if let Some(name) = ended {
            return Err(format!("{name} has ended"));
        }
        let begun = self.timeline.now();
        let back = until_within(NORMAL_WITHIN * ALLOWANCE, "all is as before the attack", async || {
            let reading = self.read(&phase.watched).await;
            if let Some(why) = judge::not_as_before(&before, &reading) {
                return Some(why);
            }
            self.not_served().await
        });
        back.await.map_err(|error| format!("{error:#}"))?;
        let took = self.timeline.now() - begun;
        self.timeline.saw(format!("all is as before {} after the attack", seconds(took)));
        Ok(took)
    }

    /// Returns a function that a gateway does not serve to a new client.
    async fn not_served(&self) -> Option<String> {
        for id in self.cluster.controller_ids() {
            for name in self.targets.names() {
                let asked = match self.cluster.endpoint_of(id) {
                    Ok(endpoint) => self.targets.ask(name, endpoint).await,
                    Err(error) => Err(error),
                };
                if let Err(error) = asked {
                    return Some(format!("controller {id} does not serve {name}: {error:#}"));
                }
            }
        }
        None
    }

    fn watched(&self) -> anyhow::Result<WatchedProcesses> {
        let mut servers = Vec::new();
        for id in self.cluster.controller_ids() {
            let process = ClusterProcess::Controller(id);
            servers.push((process.to_string(), self.cluster.pid(&process)?));
        }
        for name in self.cluster.worker_names() {
            servers.push((name.clone(), self.cluster.worker_pid(&name)?));
        }
        let executors = servers.iter().flat_map(|(_, pid)| descendants(*pid)).collect();
        Ok(WatchedProcesses { servers, executors, admin: self.cluster.admin()? })
    }

    async fn read(&self, watched: &WatchedProcesses) -> ClusterReading {
        let mut reading = ClusterReading { at: self.timeline.now(), ..ClusterReading::default() };
        for (name, pid) in &watched.servers {
            // A process may end between the two readings.
            let taken = ProcessUsage::of(*pid).and_then(|usage| Ok((usage, ResidentMemory::of(*pid)?)));
            match taken {
                Ok((usage, memory)) if is_alive(*pid) => {
                    let server =
                        ServerUsage { peak: memory.peak, private: usage.private, descriptors: usage.fds };
                    reading.servers.insert(name.clone(), server);
                }
                _ => {
                    reading.ended.insert(name.clone());
                }
            }
        }
        for pid in watched.executors.iter().filter(|&&pid| !is_alive(pid)) {
            reading.ended.insert(format!("executor {pid}"));
        }
        let status = tokio::time::timeout(STATUS_TIMEOUT, watched.admin.cluster_status()).await;
        if let Ok(Ok(status)) = status {
            reading.leader = (status.quorum && status.leader != 0).then_some((status.leader, status.term));
        }
        reading
    }

    /// Records the counts of every attack in the timeline.
    fn tell(&self, done: &AttackSummary) {
        for (name, counts) in &done.attacks {
            self.timeline.saw(format!(
                "attackers: {name}: {} connections, {} not accepted; {} sent, {} accepted, {} refused, {} ended; {:.1} MiB",
                counts.connections,
                counts.unconnected,
                counts.sent,
                counts.accepted,
                counts.refused,
                counts.ended,
                counts.bytes as f64 / f64::from(1 << 20)
            ));
        }
    }

    /// Records the other clients' latencies and the servers' processor time in the turn of each
    /// attack.
    fn tell_turns(&self, phase: &AttackPhase, requests: &[RequestRecord]) {
        for (turn, next) in phase.turns.iter().zip(phase.turns.iter().skip(1)) {
            let within = requests.iter().filter(|it| (turn.begun..next.begun).contains(&it.begun));
            let took: Vec<_> = within.map(|it| it.ended - it.begun).collect();
            let share = share_of(next.servers_used - turn.servers_used, next.begun - turn.begun);
            self.timeline.saw(format!(
                "under {}: the others' p99 {} of {} requests; servers took {share:.2} of a processor",
                turn.name,
                judge::millis(judge::p99(&took)),
                took.len(),
            ));
        }
    }

    /// Returns the latencies of acknowledged writes under attack. An enable does not count, because
    /// an enable waits until its function is ready.
    fn writes(&self, phase: &AttackPhase) -> Vec<Duration> {
        let operations = self.load.history.by_key();
        let writes = operations.values().flatten().filter(|it| {
            it.is_done() && matches!(it.op, AdminOp::Apply(_) | AdminOp::Delete) && phase.has(it.invoked)
        });
        writes.map(|it| it.returned - it.invoked).collect()
    }

    /// Returns the maximum connections of each server: the limits of its ports, or half of its
    /// descriptors.
    fn connections(&self) -> BTreeMap<String, u64> {
        let caps = self.cluster.caps();
        let half_of_all = |pid: u32| descriptors_max(pid).unwrap_or(u64::MAX) / 2;
        let watched = self.watched().map(|it| it.servers).unwrap_or_default();
        let each = watched.into_iter().map(|(name, pid)| {
            let ports = if name.starts_with("controller") { 2 } else { 1 };
            (name, caps.map_or_else(|| half_of_all(pid), |caps| caps.of_process(ports)))
        });
        each.collect()
    }
}

impl WatchedProcesses {
    /// Returns the processor time of the servers, without executors.
    fn servers_used(&self) -> Duration {
        self.servers.iter().filter_map(|(_, pid)| processor_time(*pid).ok()).sum()
    }
}

impl AttackPhase {
    fn has(&self, at: Duration) -> bool {
        (self.begun..=self.ended).contains(&at)
    }
}

fn latencies(requests: &[RequestRecord], phase: &AttackPhase) -> Vec<Duration> {
    requests.iter().filter(|it| phase.has(it.begun)).map(|it| it.ended - it.begun).collect()
}

/// The process of attackers, which ends with this value or with the harness.
struct Attackers {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// The child's standard input, whose end ends the child.
    _stdin: ChildStdin,
}

impl Attackers {
    fn start(orders: &AttackOrders) -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(&program);
        command.args(orders.words()).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
        let stdout = child.stdout.take().context("stdout is piped")?;
        let stdin = child.stdin.take().context("stdin is piped")?;
        Ok(Self { child, lines: BufReader::new(stdout).lines(), _stdin: stdin })
    }

    async fn says(&mut self) -> anyhow::Result<AttackerLine> {
        let line = self.lines.next_line().await.context("cannot read the attackers' output")?;
        let line = line.context("attackers ended before their time was over")?;
        serde_json::from_str(&line).with_context(|| format!("cannot parse the attackers' line {line:?}"))
    }

    async fn end(mut self) -> anyhow::Result<()> {
        let ended = tokio::time::timeout(OVERTIME, self.child.wait()).await;
        let status = ended
            .context("attackers do not end after their last line")?
            .context("a child can be waited for")?;
        ensure!(status.success(), "attackers ended with {status}");
        Ok(())
    }
}
