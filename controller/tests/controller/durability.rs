//! Tests that acknowledged writes survive a restart, after a shutdown or a crash.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_controller::Tcp;
use millrace_proto::admin as api;
use proptest::prelude::*;

use crate::stub::Stub;
use crate::support::{Cluster, apply_request, config, list, mlp, record, upload};

#[tokio::test]
async fn a_restart_serves_the_same_functions_without_a_new_upload() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let id = cluster.controller.cluster_id().clone();
    let stored = async |cluster: &Cluster| {
        list(&mut cluster.admin()).await.into_iter().map(record).collect::<Vec<_>>()
    };
    let before = stored(&cluster).await;
    let cluster = cluster.restart().await;
    assert_eq!(*cluster.controller.cluster_id(), id);
    assert_eq!(stored(&cluster).await, before);
    let mut worker = Stub::start(&cluster, "n1").await;
    worker.told(&["f@1"]).await;
}

#[tokio::test]
async fn a_data_directory_or_port_in_use_is_refused_with_the_next_step() {
    let cluster = Cluster::start().await;
    let second = millrace_controller::start(config(cluster.dir.path()), Arc::new(Tcp)).await.unwrap_err();
    assert!(second.to_string().contains("in use by process"), "{second}");
    let other = tempfile::tempdir().unwrap();
    let mut taken = config(other.path());
    taken.client_listen = cluster.controller.client_addr();
    let refused = millrace_controller::start(taken, Arc::new(Tcp)).await.unwrap_err();
    assert!(refused.to_string().contains("port 0"), "{refused}");
}

#[tokio::test]
async fn a_public_address_is_refused_without_the_insecure_option() {
    let dir = tempfile::tempdir().unwrap();
    let mut open = config(dir.path());
    open.client_listen = "0.0.0.0:0".parse().unwrap();
    let refused = millrace_controller::start(open.clone(), Arc::new(Tcp)).await.unwrap_err();
    assert!(refused.to_string().contains("--insecure"), "{refused}");
    open.insecure = true;
    let started = millrace_controller::start(open, Arc::new(Tcp)).await.unwrap();
    started.shutdown(Duration::ZERO).await;
}

/// A write, or the end of the process before a restart.
#[derive(Debug, Clone)]
enum Step {
    Apply { name: u8, seconds: i64 },
    Delete { name: u8 },
    ShutDown,
    Crash,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0u8..3, 1i64..4).prop_map(|(name, seconds)| Step::Apply { name, seconds }),
        2 => (0u8..3).prop_map(|name| Step::Delete { name }),
        1 => Just(Step::ShutDown),
        1 => Just(Step::Crash),
    ]
}

/// The acknowledged writes: each function's generation and resource version.
type Model = BTreeMap<String, (u64, u64)>;

async fn carry_out(cluster: &Cluster, step: &Step, model: &mut Model) {
    let mut admin = cluster.admin();
    match step {
        Step::Apply { name, seconds } => {
            let mut request = apply_request(&format!("f{name}"), &mlp());
            request.spec.as_mut().unwrap().timeout =
                Some(prost_types::Duration { seconds: *seconds, nanos: 0 });
            let function = admin.apply_function(request).await.unwrap().into_inner().function.unwrap();
            model.insert(format!("f{name}"), (function.generation, function.resource_version));
        }
        Step::Delete { name } => {
            let request = api::DeleteFunctionRequest { name: format!("f{name}"), ..Default::default() };
            let deleted = admin.delete_function(request).await;
            assert_eq!(deleted.is_ok(), model.remove(&format!("f{name}")).is_some());
        }
        Step::ShutDown | Step::Crash => {}
    }
}

async fn shown(cluster: &Cluster) -> Model {
    let functions = list(&mut cluster.admin()).await.into_iter();
    functions.map(|it| (it.spec.unwrap().name, (it.generation, it.resource_version))).collect()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn no_acknowledged_write_is_lost_over_shutdowns_and_crashes(steps in prop::collection::vec(step(), 1..12)) {
        let mut model = Model::new();
        let mut process = runtime();
        let mut cluster = process.block_on(async {
            let cluster = Cluster::start().await;
            upload(&mut cluster.admin(), &mlp()).await.unwrap();
            cluster
        });
        for step in &steps {
            process.block_on(carry_out(&cluster, step, &mut model));
            let dir = match step {
                Step::ShutDown => {
                    let Cluster { controller, dir } = cluster;
                    process.block_on(controller.shutdown(Duration::from_secs(5)));
                    dir
                }
                Step::Crash => {
                    // The controller's tasks end at any point, without a notice.
                    let Cluster { controller, dir } = cluster;
                    std::mem::forget(controller);
                    drop(process);
                    process = runtime();
                    dir
                }
                _ => continue,
            };
            cluster = process.block_on(Cluster::start_in(dir, |_| {}, Arc::new(Tcp)));
            prop_assert_eq!(&process.block_on(shown(&cluster)), &model);
        }
        prop_assert_eq!(&process.block_on(shown(&cluster)), &model);
    }
}
