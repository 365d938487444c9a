//! The demo's chaos: executors are killed under load. Every request must be answered, with the same
//! result as without kills.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use millrace_client::{InferRequest, Inference, Tensor};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;

use crate::clock;
use crate::failure::CommandFailure;
use crate::output::text;
use crate::session::ClusterSession;

/// The longest wait for a killed executor's replacement, and for responses.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(2);

/// A request, and its response while no executor was killed.
pub(super) type ExpectedResponse = (InferRequest, Vec<Tensor>);

/// The load and the kills.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChaosPlan {
    /// The noun for the requests, in the plural.
    pub(super) what: &'static str,
    /// The number of requests in flight at any time.
    pub(super) clients: usize,
    /// The number of executors to kill, one after another.
    pub(super) kills: u32,
    /// The number of responses between an executor's return and the next kill, so that the load is
    /// steady again.
    pub(super) steady: usize,
    pub(super) evidence: Evidence,
}

/// The evidence that a kill hit a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Evidence {
    /// No evidence, because no spans are kept.
    None,
    /// The trace of the request.
    Traces,
}

/// The state that the clients share.
#[derive(Default)]
struct ChaosLoad {
    done: AtomicBool,
    answered: AtomicUsize,
    /// The ids of the unanswered requests. Every client writes the set, so it is behind a lock,
    /// held for a single operation on a small set.
    under_way: Mutex<BTreeSet<String>>,
}

impl ChaosLoad {
    fn under_way(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The results of a client.
#[derive(Default)]
struct ClientResults {
    latencies: Vec<Duration>,
    problems: Vec<String>,
}

/// An executor in the cluster's report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Executor {
    gpu: u32,
    pid: u32,
}

pub(super) async fn run(
    session: &ClusterSession,
    known: Vec<ExpectedResponse>,
    storm: ChaosPlan,
) -> Result<(), CommandFailure> {
    let ChaosPlan { what, clients, kills, .. } = storm;
    println!("Chaos: {clients} clients send without a pause, and {kills} executors are killed (kill -9).");
    let known: Arc<[ExpectedResponse]> = known.into();
    let load = Arc::new(ChaosLoad::default());
    let mut senders = JoinSet::new();
    for number in 0..clients {
        senders.spawn(send(session.inference(), known.clone(), load.clone(), number));
    }
    let killed = kill_executors(session, &load, storm).await;
    load.done.store(true, Ordering::Relaxed);
    let tallies = senders.join_all().await;
    let hit = killed?;
    report(tallies, what)?;
    if storm.evidence == Evidence::Traces {
        println!(
            "Over {kills} kills each answer was the same, byte for byte; {hit} {what} lost an executor under a"
        );
        println!("step and ran that step again, as their traces show.\n");
    }
    Ok(())
}

/// Sends each request once, before any kill.
pub(super) async fn record_expected_responses(
    inference: &Inference,
    requests: Vec<InferRequest>,
) -> Result<Vec<ExpectedResponse>, CommandFailure> {
    let mut known = Vec::with_capacity(requests.len());
    for request in requests {
        let answer = inference.infer(request.clone()).await?;
        known.push((request, answer.outputs));
    }
    Ok(known)
}

async fn send(
    inference: Inference,
    known: Arc<[ExpectedResponse]>,
    load: Arc<ChaosLoad>,
    number: usize,
) -> ClientResults {
    let mut tally = ClientResults::default();
    let mut turn = number;
    while !load.done.load(Ordering::Relaxed) {
        let (request, expected) = &known[turn % known.len()];
        let id = format!("chaos-{number}-{turn}");
        let request = InferRequest { id: Some(id.clone()), ..request.clone() };
        turn += 1;
        load.under_way().insert(id.clone());
        let started = clock::now();
        match inference.infer(request).await {
            Ok(answer) if answer.outputs == *expected => tally.latencies.push(started.elapsed()),
            Ok(answer) => tally.problems.push(format!("{} has a wrong answer", answer.request_id)),
            Err(error) => tally.problems.push(error.to_string()),
        }
        load.under_way().remove(&id);
        load.answered.fetch_add(1, Ordering::Relaxed);
    }
    tally
}

/// Kills executors in turn. Returns the number of requests that lost an executor and ran
/// again, if traces are kept.
async fn kill_executors(
    session: &ClusterSession,
    load: &ChaosLoad,
    storm: ChaosPlan,
) -> Result<usize, CommandFailure> {
    let mut hit = 0;
    steady(load, storm.steady).await?;
    for turn in 0..storm.kills {
        let executors = executors(session).await?;
        let victim = executors[turn as usize % executors.len()];
        let under_way = load.under_way().clone();
        kill(victim)?;
        let started = clock::now();
        let back = returned(session, victim).await?;
        let took = text::latency(started.elapsed());
        println!(
            "  GPU {}: executor {} killed; {} is back in its place after {took}",
            victim.gpu, victim.pid, back.pid
        );
        steady(load, storm.steady).await?;
        if storm.evidence == Evidence::Traces {
            hit += ran_again(session, &under_way).await;
        }
    }
    Ok(hit)
}

/// Returns the number of these requests whose trace has a failed run. A request without a trace is
/// not counted.
async fn ran_again(session: &ClusterSession, ids: &BTreeSet<String>) -> usize {
    let mut count = 0;
    for id in ids {
        let Ok(trace) = session.admin.trace(id).await else { continue };
        let failed = trace.spans.iter().any(|span| span.name == "run" && !span.error.is_empty());
        count += usize::from(failed);
    }
    count
}

/// Waits for a number of further responses.
async fn steady(load: &ChaosLoad, answers: usize) -> Result<(), CommandFailure> {
    let goal = load.answered.load(Ordering::Relaxed) + answers;
    let deadline = clock::now() + PATIENCE;
    while load.answered.load(Ordering::Relaxed) < goal {
        if clock::now() >= deadline {
            return Err(CommandFailure::timed_out(format!(
                "fewer than {answers} answers in {}",
                text::latency(PATIENCE)
            )));
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// Returns every executor that is up, at least one.
async fn executors(session: &ClusterSession) -> Result<Vec<Executor>, CommandFailure> {
    let nodes = session.admin.nodes().await?;
    let up: Vec<_> = nodes
        .iter()
        .flat_map(|node| &node.gpus)
        .filter(|gpu| gpu.health == "Up" && gpu.executor_pid > 0)
        .map(|gpu| Executor { gpu: gpu.index, pid: gpu.executor_pid })
        .collect();
    if up.is_empty() { Err(CommandFailure::failed("no executor is up")) } else { Ok(up) }
}

fn kill(executor: Executor) -> Result<(), CommandFailure> {
    let pid = i32::try_from(executor.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| CommandFailure::failed(format!("{} is not a process id", executor.pid)))?;
    kill_process(pid, Signal::KILL)
        .map_err(|error| CommandFailure::failed(format!("cannot kill executor {}: {error}", executor.pid)))
}

/// Waits for another executor in place of a killed one.
async fn returned(session: &ClusterSession, killed: Executor) -> Result<Executor, CommandFailure> {
    let deadline = clock::now() + PATIENCE;
    loop {
        let now = executors(session).await.unwrap_or_default();
        if let Some(back) = now.into_iter().find(|it| it.gpu == killed.gpu && it.pid != killed.pid) {
            return Ok(back);
        }
        if clock::now() >= deadline {
            return Err(CommandFailure::timed_out(format!(
                "the executor of GPU {} did not come back",
                killed.gpu
            )));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn report(tallies: Vec<ClientResults>, noun: &str) -> Result<(), CommandFailure> {
    let mut latencies: Vec<_> = tallies.iter().flat_map(|tally| tally.latencies.iter().copied()).collect();
    latencies.sort_unstable();
    let problems: Vec<_> = tallies.into_iter().flat_map(|tally| tally.problems).collect();
    let answered = latencies.len();
    let lost = problems.len();
    let at = |share: f64| {
        let index = (answered.saturating_sub(1) as f64 * share) as usize;
        latencies.get(index).copied().map(text::latency).unwrap_or_default()
    };
    println!(
        "{} {noun}, {answered} answered as without chaos, {lost} not; latency p50 {}, p99 {}, slowest {}\n",
        answered + lost,
        at(0.5),
        at(0.99),
        at(1.0)
    );
    match problems.first() {
        None => Ok(()),
        Some(first) => Err(CommandFailure::failed(format!(
            "{lost} {noun} were not answered correctly; the first: {first}"
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_lost_request_fails_the_demo() {
        let good = || ClientResults { latencies: vec![Duration::from_millis(1)], problems: vec![] };
        let bad = ClientResults { latencies: vec![], problems: vec!["lost".into()] };
        assert_eq!(report(vec![good(), good()], "requests"), Ok(()));
        let failure = report(vec![good(), bad], "requests").unwrap_err();
        assert_eq!(failure.message.unwrap(), "1 requests were not answered correctly; the first: lost");
    }
}
