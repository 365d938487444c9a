//! A request that kills whoever runs it: its executor dies as it runs, and so does the next. It is
//! quarantined then and costs nobody a third one; the function answers other requests, and everybody
//! else's requests are answered as ever.
//!
//! The request is a long one, and the harness kills the process in which the cluster says that it
//! runs: the same for one process a GPU and for one a model.

use std::time::Duration;

use anyhow::bail;
use bytes::Bytes;
use millrace_client::messages::Gpu;
use millrace_client::{Admin, Endpoints, Error, InferRequest, Inference, Tensor};
use millrace_types::{DataType, Reason};
use rustix::process::Signal;

use super::stage::Stage;
use crate::cluster::{descendants, signal, until};
use crate::load::{POISON, publish_slow};
use crate::report::Check;

/// Texts of the long request and of a short one, each of so many tokens.
const TEXTS: usize = 4_000;
const TOKENS: usize = 4;
/// Longer than two executors take to start again and to run it, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(60);
/// How often the cluster is asked who runs it: well within one run.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often the request may be over before it was seen twice.
const UNSEEN_MAX: usize = 5;
/// Processes that a poison request may kill: then it is quarantined.
const KILLS: usize = 2;

pub(super) async fn play(stage: &mut Stage) -> anyhow::Result<()> {
    let admin = stage.cluster.admin()?;
    let inference = Inference::new(Endpoints::new(stage.cluster.addresses())?);
    publish_slow(stage.cluster.program(), stage.folder.path(), &admin).await?;
    until("the function of the poison request answers", async || {
        inference.infer(request(1)).await.err().map(|error| error.to_string())
    })
    .await?;
    let (mut said, mut evidence) = (Vec::new(), Vec::new());
    for _ in 0..stage.rounds {
        stage.fault();
        let (kills, ended) = seen(stage, &admin, &inference).await?;
        let reason = match &ended {
            Ok(()) => "answered".to_owned(),
            Err(error) => error.reason().map_or_else(|| error.to_string(), |reason| reason.to_string()),
        };
        stage.timeline.saw(format!("the poison request ended after {kills} kills: {reason}"));
        if kills != KILLS || ended.as_ref().err().and_then(Error::reason) != Some(Reason::Quarantined) {
            evidence.push(format!("{kills} processes were killed, and it ended as {reason}"));
        }
        said.push(format!("{reason} after {kills}"));
        stage.resumed().await?;
        until("its function answers another request", async || {
            inference.infer(request(1)).await.err().map(|error| error.to_string())
        })
        .await?;
        stage.whole().await?;
        stage.calm().await;
    }
    let detail = format!("{KILLS} executors each, then its quarantine: {}", said.join(", "));
    stage.checks.push(Check::of("a poison request is quarantined", detail, evidence));
    Ok(())
}

/// A poisoned request that was seen in two executors: one that was over before that killed fewer, and
/// is sent again.
async fn seen(
    stage: &Stage,
    admin: &Admin,
    inference: &Inference,
) -> anyhow::Result<(usize, Result<(), Error>)> {
    for _ in 0..UNSEEN_MAX {
        let (kills, ended) = poisoned(stage, admin, inference).await?;
        if ended.is_err() {
            return Ok((kills, ended));
        }
        stage.timeline.saw(format!("it was answered after {kills} kills: too soon to be seen twice"));
    }
    poisoned(stage, admin, inference).await
}

/// Sends the request, and kills each process that runs it until it has ended. Says how many were
/// killed, and how it ended.
async fn poisoned(
    stage: &Stage,
    admin: &Admin,
    inference: &Inference,
) -> anyhow::Result<(usize, Result<(), Error>)> {
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
            stage.timeline.fault(format!("kill -9 of the executor that runs it (pid {pid})"));
            signal(pid, Signal::KILL)?;
            killed.push(pid);
        }
        if killed.len() > KILLS + 2 {
            bail!("the poison request goes on after {} executors died of it", killed.len());
        }
    }
}

impl Stage {
    /// The executors that are there now: a pid that the cluster told may be another's by now.
    fn executors_now(&self) -> Vec<u32> {
        let workers = self.cluster.worker_names();
        workers.iter().filter_map(|name| self.cluster.worker_pid(name).ok()).flat_map(descendants).collect()
    }
}

/// The process that runs the poison request on a GPU, if one does. A request whose turn it is does
/// not run before some of its weights have arrived: who is killed until then did not die of it, and
/// the worker does not count that death against it.
fn running(gpu: &Gpu) -> Option<u32> {
    let is_poison = |revision: &str| revision.contains(&format!("/{POISON}@"));
    if !is_poison(&gpu.running) {
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
    use millrace_client::messages::ResidentModel;

    use super::*;

    #[test]
    fn the_process_is_the_models_own_or_the_gpus() {
        let gpu = |running: &str, executor_pid, own| gpu(running, executor_pid, own, 1);
        let runs = format!("default/{POISON}@1");
        assert_eq!(running(&gpu(&runs, 0, 8)), Some(8));
        assert_eq!(running(&gpu(&runs, 7, 7)), Some(7));
        assert_eq!(running(&gpu("default/other@1", 7, 7)), None);
        assert_eq!(running(&gpu("", 7, 7)), None);
    }

    #[test]
    fn nobody_runs_it_before_any_of_its_weights_are_there() {
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
        Gpu { running: running.into(), executor_pid, models: vec![model], ..Default::default() }
    }
}
