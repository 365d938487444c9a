//! Test of the places of models after their executor was killed (T16).

use millrace_model::synth;
use millrace_proto::worker as wire;
use millrace_types::{Digest, GpuIndex, MemoryTier, ModelCopy};
use millrace_worker::process_port::ExecutorCommand;
use millrace_worker::start::start;

use crate::controller::Controller;
use crate::ledger::Ledger;
use crate::support::{all_up, client, config, kill_9, texts, values, within};

/// Returns an executor that does not start while a file exists.
fn held_back(executor: ExecutorCommand, file: &std::path::Path) -> ExecutorCommand {
    let script = format!("while [ -e '{}' ]; do sleep 0.02; done; exec \"$0\" \"$@\"", file.display());
    let program = executor.program.clone().into_os_string();
    let mut args = vec!["-c".into(), script.into(), program];
    args.extend(executor.args);
    ExecutorCommand { program: "/bin/sh".into(), args, envs: executor.envs }
}

/// Returns three models with equal answers: they differ only in the seed of their weights.
fn models() -> [Vec<u8>; 3] {
    [3_000, 3_001, 3_002].map(|vocabulary| {
        let encoder = synth::Encoder { vocabulary, ..synth::Encoder::TINY };
        synth::bert_like(encoder)
    })
}

fn ask(function: &str, id: u64, count: usize) -> wire::InvokeRequest {
    texts(function, id, [3, 2_999, 12, 200], count)
}

#[tokio::test(flavor = "multi_thread")]
async fn models_with_queued_work_are_on_another_gpu_before_a_killed_executor_is_back() {
    for dispatch in ["lb", "unified"] {
        moves_what_is_asked_for(dispatch).await;
    }
}

async fn moves_what_is_asked_for(dispatch: &str) {
    let dir = tempfile::tempdir().unwrap();
    let hold = dir.path().join("hold");
    let controller = Controller::start("test-cluster", 1).await;
    controller.lead(1);
    let mut config = config(dir.path(), &[controller.addr], 2);
    config.policy.dispatch = dispatch.parse().unwrap();
    config.executor = held_back(config.executor, &hold);
    let worker = start(config).await.unwrap();
    let before = all_up(&controller).await;
    let digests: Vec<Digest> = models().iter().map(|model| controller.publish(model)).collect();
    let names = ["a", "b", "c"];
    controller.desire(&names.into_iter().zip(digests.iter().copied()).collect::<Vec<_>>());
    for name in names {
        controller.ready(name).await;
    }
    // Both GPUs have long runs of the first model; the requests of the others wait for either GPU.
    let send = |request: wire::InvokeRequest| {
        let mut client = client(&worker);
        tokio::spawn(async move { within("an answer", client.invoke(request)).await.unwrap().into_inner() })
    };
    let long: Vec<_> = (0..2).map(|id| send(ask("a", id, 20_000))).collect();
    let busy = |telemetry: &wire::Telemetry| telemetry.gpus.iter().all(|gpu| !gpu.running.is_empty());
    controller.telemetry("both GPUs at work", busy).await;
    let waiting: Vec<_> = (2..8).map(|id| send(ask(names[id as usize % 3], id, 1))).collect();
    controller.telemetry("requests that wait", |telemetry| telemetry.queued == 6).await;

    std::fs::write(&hold, "").unwrap();
    kill_9(before.gpus[0].executor_pid);
    let copy = |digest: &Digest, gpu| ModelCopy { digest: *digest, tier: MemoryTier::Gpu(GpuIndex(gpu)) };
    let moved = |ledger: &Ledger| {
        let models = &ledger.kept.models;
        let has = |gpu| digests.iter().filter(|digest| models.contains_key(&copy(digest, gpu))).count();
        (has(0), has(1)) == (0, 3)
    };
    controller.committed("the models' new places", moved).await;
    let now = controller.latest_telemetry();
    assert_eq!(now.gpus[0].health(), wire::GpuHealth::Restarting, "the killed executor is not back");
    std::fs::remove_file(&hold).unwrap();
    all_up(&controller).await;
    for answer in long.into_iter().chain(waiting) {
        assert!(!values(&answer.await.unwrap()).is_empty());
    }
    worker.shutdown().await;
}
