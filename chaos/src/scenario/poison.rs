//! The scenario with a request that kills its executor. Two executors die while they run the
//! request. Then the request has to be quarantined, so that no third executor dies. The
//! function still answers other requests, and all other requests are answered as before.
//!
//! The request is long, and the harness kills the process in which the request runs according
//! to the cluster. The scenario is thus the same with a process per GPU and with a process per
//! model.

use std::time::Duration;

use anyhow::bail;
use bytes::Bytes;
use millrace_client::messages::Gpu;
use millrace_client::{Admin, Endpoints, Error, InferRequest, Inference, Tensor};
use millrace_types::{DataType, Reason};
use rustix::process::Signal;

use super::stage::ScenarioStage;
use crate::cluster::{descendants, signal, until};
use crate::load::{POISON, publish_slow};
use crate::report::PromiseCheck;

/// Number of texts in the long request.
const TEXTS: usize = 4_000;
/// Number of tokens of each text.
const TOKENS: usize = 4;
/// Timeout of the request: longer than two restarts of executors and the runs, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Interval between two questions to the cluster for the process that runs the request: well within
/// one run.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Maximum number of requests that may end before they were seen in two executors.
const UNSEEN_MAX: usize = 5;
/// Number of processes that a poison request may kill before its quarantine.
const KILLS: usize = 2;

pub(super) async fn play(stage: &mut ScenarioStage) -> anyhow::Result<()> {
    let admin = stage.cluster.admin()?;
    let inference = Inference::new(Endpoints::new(stage.cluster.addresses())?);
    publish_slow(stage.cluster.program(), stage.folder.path(), &admin).await?;
    until("the function of the poison request answers", async || {
        inference.infer(request(1)).await.err().map(|error| error.to_string())
    })
    .await?;
    let mut said = Vec::new();
    let mut evidence = Vec::new();
    for _ in 0..stage.rounds {
        stage.fault();
        let (kills, ended) = seen(stage, &admin, &inference).await?;
        let reason = match &ended {
            Ok(()) => "answered".to_owned(),
            Err(error) => error.reason().map_or_else(|| error.to_string(), |reason| reason.to_string()),
        };
        stage.timeline.saw(format!("the poison request ended after {kills} kills: {reason}"));
        if kills != KILLS || ended.as_ref().err().and_then(Error::reason) != Some(Reason::Quarantined) {
            evidence.push(format!("{kills} processes were killed, and the request ended as {reason}"));
        }
        said.push(format!("{reason} after {kills}"));
        stage.resumed().await?;
        until("the function of the poison request answers another one", async || {
            inference.infer(request(1)).await.err().map(|error| error.to_string())
        })
        .await?;
        stage.whole().await?;
        stage.calm().await;
    }
    let detail = format!("{KILLS} executors each, then the quarantine: {}", said.join(", "));
    stage.checks.push(PromiseCheck::of("a poison request is quarantined", detail, evidence));
    Ok(())
}

/// Sends poison requests until one was seen in two executors. A request that ended earlier killed
/// fewer executors, and another one is sent.
async fn seen(
    stage: &ScenarioStage,
    admin: &Admin,
    inference: &Inference,
) -> anyhow::Result<(usize, Result<(), Error>)> {
    for _ in 0..UNSEEN_MAX {
        let (kills, ended) = poisoned(stage, admin, inference).await?;
        if ended.is_err() {
            return Ok((kills, ended));
        }
        stage
            .timeline
            .saw(format!("the poison request was answered after {kills} kills, too early to be seen twice"));
    }
    poisoned(stage, admin, inference).await
}

/// Sends the request, and kills each process that runs it until the request has ended. Returns the
/// number of killed processes, and the result of the request.
async fn poisoned(
    stage: &ScenarioStage,
    admin: &Admin,
    inference: &Inference,
) -> anyhow::Result<(usize, Result<(), Error>)> {
    // A report of the request before would name an executor that the poison request has not reached.
    until("no GPU runs the function of the poison request", async || match admin.nodes().await {
        Ok(nodes) => {
            let pids: Vec<_> = nodes.iter().flat_map(|node| &node.gpus).filter_map(running).collect();
            (!pids.is_empty()).then(|| format!("executors {pids:?} run it"))
        }
        Err(error) => Some(error.to_string()),
    })
    .await?;
    stage.timeline.fault("sent the poison request");
    let mut sent = std::pin::pin!(inference.infer(request(TEXTS)));
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let mut killed = Vec::new();
    loop {
        tokio::select! {
            ended = &mut sent => return Ok((killed.len(), ended.map(drop))),
            _ = looks.tick() => {}
        }
        let Ok(nodes) = admin.nodes().await else { continue };
        let gpus = nodes.iter().flat_map(|node| &node.gpus);
        for pid in gpus.filter_map(running).filter(|pid| !killed.contains(pid)).collect::<Vec<_>>() {
            if !stage.executors_now().contains(&pid) {
                continue;
            }
            stage.timeline.fault(format!("kill -9 of the executor that runs the poison request (pid {pid})"));
            signal(pid, Signal::KILL)?;
            killed.push(pid);
        }
        if killed.len() > KILLS + 2 {
            bail!("the poison request still runs after the deaths of {} executors", killed.len());
        }
    }
}

impl ScenarioStage {
    /// Returns the present executors. A pid that the cluster reported may already belong to another
    /// process.
    fn executors_now(&self) -> Vec<u32> {
        let workers = self.cluster.worker_names();
        workers.iter().filter_map(|name| self.cluster.worker_pid(name).ok()).flat_map(descendants).collect()
    }
}

/// Returns the process that runs the poison request on a GPU. A request does not run before some of
/// its weights have arrived, and the worker does not count a death before that time against the
/// request.
fn running(gpu: &Gpu) -> Option<u32> {
    let is_poison = |revision: &str| revision.contains(&format!("/{POISON}@"));
    if !gpu.running.iter().any(|running| is_poison(&running.function)) {
        return None;
    }
    let own = gpu.models.iter().find(|model| model.functions.iter().any(|it| is_poison(it)))?;
    let pid = if own.executor_pid != 0 { own.executor_pid } else { gpu.executor_pid };
    (pid != 0 && own.loaded_bytes > 0).then_some(pid)
}

fn request(texts: usize) -> InferRequest {
    let tokens: Vec<u8> = [3i64, 999, 12, 200].iter().flat_map(|token| token.to_le_bytes()).collect();
    let shape = vec![i64::try_from(texts).expect("a few thousand"), TOKENS as i64];
    let input = Tensor::new("input_ids", DataType::Int64, shape, Bytes::from(tokens.repeat(texts)));
    let mut request = InferRequest::new(POISON, vec![input.expect("the shape has these bytes")]);
    request.timeout = TIMEOUT;
    request
}

#[cfg(test)]
mod tests {
    use millrace_client::messages::{ResidentModel, RunningRequest};

    use super::*;

    #[test]
    fn the_process_of_the_model_or_else_of_the_gpu_is_found() {
        let gpu = |running: &str, executor_pid, own| gpu(running, executor_pid, own, 1);
        let runs = format!("default/{POISON}@1");
        assert_eq!(running(&gpu(&runs, 0, 8)), Some(8));
        assert_eq!(running(&gpu(&runs, 7, 7)), Some(7));
        assert_eq!(running(&gpu("default/other@1", 7, 7)), None);
        assert_eq!(running(&gpu("", 7, 7)), None);
    }

    #[test]
    fn no_process_runs_the_request_before_some_weights_are_loaded() {
        let runs = format!("default/{POISON}@1");
        assert_eq!(running(&gpu(&runs, 7, 7, 0)), None);
        assert_eq!(running(&Gpu { models: Vec::new(), ..gpu(&runs, 7, 7, 1) }), None);
    }

    fn gpu(running: &str, executor_pid: u32, own: u32, loaded_bytes: u64) -> Gpu {
        let model = ResidentModel {
            functions: vec![format!("default/{POISON}@1")],
            executor_pid: own,
            loaded_bytes,
            ..Default::default()
        };
        let running = RunningRequest { function: running.into(), ..Default::default() };
        Gpu { running: vec![running], executor_pid, models: vec![model], ..Default::default() }
    }
}
