//! Tests of slices: a function computes on the SMs of its slices alone.

use millrace_proto::convert::placed_slices_wire;
use millrace_proto::worker as wire;
use millrace_types::policy::GpuSharingName;
use millrace_types::{GpuIndex, Permille, SliceId, SliceOnGpu, Terms};
use millrace_worker::start::{RunningWorker, WorkerConfig, start};

use crate::controller::Controller;
use crate::sharing::{SLOW, ask, slow, violations};
use crate::support::{all_up, client, config, values};

/// Returns terms of this part of the SMs, in thousandths, at any time.
fn terms(sms: u16) -> Terms {
    let sms = Permille::new(sms).unwrap();
    Terms::new(sms, sms, Permille::ZERO, Permille::ALL).unwrap()
}

/// Desires the slow models. The first has these slices on GPU 0.
fn desire(controller: &Controller, terms: Terms, slices: Option<&[u64]>) {
    let functions = [(SLOW[0], controller.publish(&slow(256))), (SLOW[1], controller.publish(&slow(128)))];
    controller.desire_with(&functions, |state| {
        let slice = |&id: &u64| SliceOnGpu::unmeasured(SliceId(id), GpuIndex(0));
        let on = |slices: &[u64]| slices.iter().map(slice).collect::<Vec<_>>();
        let function = state.functions.iter_mut().find(|function| function.name == SLOW[0]).unwrap();
        function.slices = slices.map(|slices| placed_slices_wire(terms, on(slices)));
    });
}

async fn serving(dir: &std::path::Path) -> (RunningWorker, Controller) {
    let controller = Controller::start("test-cluster", 1).await;
    let shares = |config: &mut WorkerConfig| config.policy.gpu_sharing = GpuSharingName::Slices;
    let mut config = config(dir, &[controller.addr], 1);
    shares(&mut config);
    let worker = start(config).await.unwrap();
    all_up(&controller).await;
    (worker, controller)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_with_a_slice_of_12_percent_computes_on_two_of_16_units() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path()).await;
    desire(&controller, terms(120), Some(&[7]));
    for name in SLOW {
        controller.ready(name).await;
    }
    let client = client(&worker);
    let alone = ask(&client, SLOW[0], 1, 500);
    let units = |telemetry: &wire::Telemetry| {
        let running = telemetry.gpus[0].running.iter().find(|it| it.function.contains(SLOW[0]))?;
        (running.units > 0).then_some(running.units)
    };
    let telemetry = controller.telemetry("the function at work", |it| units(it).is_some()).await;
    assert_eq!(units(&telemetry), Some(2), "all other units are free");
    let alone = values(&alone.await.unwrap());
    let together = [ask(&client, SLOW[0], 2, 1_000), ask(&client, SLOW[1], 3, 1_000)];
    let beside =
        |telemetry: &wire::Telemetry| telemetry.gpus[0].running.len() == 2 && units(telemetry) == Some(2);
    controller.telemetry("both functions at work", beside).await;
    let [sliced, free] = together;
    assert_eq!(values(&sliced.await.unwrap())[..alone.len()], alone[..]);
    free.await.unwrap();
    let used = |telemetry: &wire::Telemetry| {
        let [slice] = telemetry.gpus[0].slices[..] else { return false };
        // Each token's SM time is rounded down to a nanosecond.
        let eighth = slice.busy_ns / 8;
        slice.id == 7 && slice.busy_ns > 0 && (eighth - eighth / 1000..=eighth).contains(&slice.sm_ns)
    };
    controller.telemetry("the use of the slice", used).await;
    assert_eq!(violations(&worker).await, 0);
    worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_for_a_slice_and_survive_each_change_of_slices() {
    let dir = tempfile::tempdir().unwrap();
    let (worker, controller) = serving(dir.path()).await;
    desire(&controller, terms(120), Some(&[]));
    for name in SLOW {
        controller.ready(name).await;
    }
    let client = client(&worker);
    let waits = ask(&client, SLOW[0], 1, 10);
    ask(&client, SLOW[1], 2, 10).await.unwrap();
    assert!(!waits.is_finished(), "there is no slice");
    desire(&controller, terms(120), Some(&[1]));
    waits.await.unwrap();
    let mut asked = Vec::new();
    let changes: [Option<&[u64]>; 6] =
        [Some(&[1, 2]), Some(&[2]), None, Some(&[3, 4, 5]), Some(&[]), Some(&[6])];
    for (change, slices) in (1..).zip(changes) {
        asked.extend((0..4).map(|id| ask(&client, SLOW[0], 10 * change + id, 20)));
        desire(&controller, terms(60 * change as u16), slices);
    }
    for answer in asked {
        assert_eq!(answer.await.unwrap().attempts, 1);
    }
    assert_eq!(violations(&worker).await, 0);
    worker.shutdown().await;
}
