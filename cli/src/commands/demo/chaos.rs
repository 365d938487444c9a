//! The demo's chaos: executors are killed under load, and every request has to be answered, as it
//! was answered without.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use millrace_client::{InferRequest, Inference, Tensor};
use rustix::process::{Pid, Signal, kill_process};
use tokio::task::JoinSet;

use crate::clock;
use crate::commands::demo::example::Picture;
use crate::commands::demo::{input, request};
use crate::failure::Failure;
use crate::output::text;
use crate::session::Session;

/// Requests under way at any time.
const CLIENTS: usize = 8;
/// Executors killed, one after the other.
const KILLS: u32 = 4;
/// Answers between one executor's return and the next kill: the load is steady again.
const STEADY: usize = 500;
/// How long a killed executor may take to come back, and answers to come.
const PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(2);

/// A request and the answer it got while nothing was wrong.
type Known = (InferRequest, Vec<Tensor>);

/// What the clients share.
#[derive(Default)]
struct Load {
    done: AtomicBool,
    answered: AtomicUsize,
}

/// One client's account.
#[derive(Default)]
struct Tally {
    latencies: Vec<Duration>,
    problems: Vec<String>,
}

/// An executor, as the cluster shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Executor {
    gpu: u32,
    pid: u32,
}

pub(super) async fn run(session: &Session, pictures: Vec<Picture>) -> Result<(), Failure> {
    let inference = session.inference();
    let known: Arc<[Known]> = learn(&inference, &pictures).await?.into();
    println!("Chaos: {CLIENTS} clients send without a pause, and {KILLS} executors are killed (kill -9).");
    let load = Arc::new(Load::default());
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(send(inference.clone(), known.clone(), load.clone(), number));
    }
    let killed = kill_executors(session, &load).await;
    load.done.store(true, Ordering::Relaxed);
    let tallies = clients.join_all().await;
    killed?;
    report(tallies)
}

async fn learn(inference: &Inference, pictures: &[Picture]) -> Result<Vec<Known>, Failure> {
    let input = input(inference).await?;
    let mut known = Vec::with_capacity(pictures.len());
    for picture in pictures {
        let request = request(picture, &input)?;
        let answer = inference.infer(request.clone()).await?;
        known.push((request, answer.outputs));
    }
    Ok(known)
}

async fn send(inference: Inference, known: Arc<[Known]>, load: Arc<Load>, number: usize) -> Tally {
    let mut tally = Tally::default();
    let mut turn = number;
    while !load.done.load(Ordering::Relaxed) {
        let (request, expected) = &known[turn % known.len()];
        turn += 1;
        let started = clock::now();
        match inference.infer(request.clone()).await {
            Ok(answer) if answer.outputs == *expected => tally.latencies.push(started.elapsed()),
            Ok(answer) => tally.problems.push(format!("{} was answered wrongly", answer.request_id)),
            Err(error) => tally.problems.push(error.to_string()),
        }
        load.answered.fetch_add(1, Ordering::Relaxed);
    }
    tally
}

async fn kill_executors(session: &Session, load: &Load) -> Result<(), Failure> {
    steady(load).await?;
    for turn in 0..KILLS {
        let executors = executors(session).await?;
        let victim = executors[turn as usize % executors.len()];
        kill(victim)?;
        let started = clock::now();
        let back = returned(session, victim).await?;
        let took = text::latency(started.elapsed());
        println!(
            "  GPU {}: executor {} killed; {} is back in its place after {took}",
            victim.gpu, victim.pid, back.pid
        );
        steady(load).await?;
    }
    Ok(())
}

/// Waits for [`STEADY`] more answers.
async fn steady(load: &Load) -> Result<(), Failure> {
    let goal = load.answered.load(Ordering::Relaxed) + STEADY;
    let deadline = clock::now() + PATIENCE;
    while load.answered.load(Ordering::Relaxed) < goal {
        if clock::now() >= deadline {
            return Err(Failure::timed_out(format!(
                "fewer than {STEADY} answers in {}",
                text::latency(PATIENCE)
            )));
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}

/// Every executor that is up; there is at least one.
async fn executors(session: &Session) -> Result<Vec<Executor>, Failure> {
    let nodes = session.admin.nodes().await?;
    let up: Vec<_> = nodes
        .iter()
        .flat_map(|node| &node.gpus)
        .filter(|gpu| gpu.health == "Up" && gpu.executor_pid > 0)
        .map(|gpu| Executor { gpu: gpu.index, pid: gpu.executor_pid })
        .collect();
    if up.is_empty() { Err(Failure::failed("no executor is up")) } else { Ok(up) }
}

fn kill(executor: Executor) -> Result<(), Failure> {
    let pid = i32::try_from(executor.pid).ok().and_then(Pid::from_raw);
    let pid = pid.ok_or_else(|| Failure::failed(format!("{} is no process", executor.pid)))?;
    kill_process(pid, Signal::KILL)
        .map_err(|error| Failure::failed(format!("cannot kill executor {}: {error}", executor.pid)))
}

/// Waits for another executor in a killed one's place.
async fn returned(session: &Session, killed: Executor) -> Result<Executor, Failure> {
    let deadline = clock::now() + PATIENCE;
    loop {
        let now = executors(session).await.unwrap_or_default();
        if let Some(back) = now.into_iter().find(|it| it.gpu == killed.gpu && it.pid != killed.pid) {
            return Ok(back);
        }
        if clock::now() >= deadline {
            return Err(Failure::timed_out(format!("the executor of GPU {} did not come back", killed.gpu)));
        }
        tokio::time::sleep(PAUSE).await;
    }
}

fn report(tallies: Vec<Tally>) -> Result<(), Failure> {
    let mut latencies: Vec<_> = tallies.iter().flat_map(|tally| tally.latencies.iter().copied()).collect();
    latencies.sort_unstable();
    let problems: Vec<_> = tallies.into_iter().flat_map(|tally| tally.problems).collect();
    let (answered, lost) = (latencies.len(), problems.len());
    let at = |share: f64| {
        let index = (answered.saturating_sub(1) as f64 * share) as usize;
        latencies.get(index).copied().map(text::latency).unwrap_or_default()
    };
    println!(
        "{} requests, {answered} answered as without chaos, {lost} not; latency p50 {}, p99 {}, slowest {}\n",
        answered + lost,
        at(0.5),
        at(0.99),
        at(1.0)
    );
    match problems.first() {
        None => Ok(()),
        Some(first) => {
            Err(Failure::failed(format!("{lost} requests were not answered rightly; the first: {first}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_lost_request_fails_the_demo() {
        let good = || Tally { latencies: vec![Duration::from_millis(1)], problems: vec![] };
        let bad = Tally { latencies: vec![], problems: vec!["lost".into()] };
        assert_eq!(report(vec![good(), good()]), Ok(()));
        let failure = report(vec![good(), bad]).unwrap_err();
        assert_eq!(failure.message.unwrap(), "1 requests were not answered rightly; the first: lost");
    }
}
