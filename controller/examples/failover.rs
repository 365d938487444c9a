//! How long writes stop when the leader of three controllers is killed, over and over: each is
//! killed with its runtime, in this process, and started again. A client writes through one that
//! stays up. `cargo run --release -p millrace-controller --example failover -- 20`

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a measurement: it may panic and reads the clock"
)]

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millrace_cluster_state::ControllerId;
use millrace_controller::{Controller, ControllerConfig, JoinAs, Start, Tcp};
use millrace_proto::admin as api;
use millrace_proto::admin::admin_client::AdminClient;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

const KILLS: usize = 20;

struct Member {
    config: ControllerConfig,
    up: Option<(Runtime, Controller)>,
}

async fn run(config: &ControllerConfig) -> (Runtime, Controller) {
    loop {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let started = runtime.spawn(millrace_controller::start(config.clone(), Arc::new(Tcp)));
        match started.await.unwrap() {
            Ok(controller) => return (runtime, controller),
            Err(error) => {
                // The one that was killed still holds the directory's lock.
                assert!(error.to_string().contains("in use"), "{error}");
                runtime.shutdown_background();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

async fn start(dir: &Path, id: u64, at: Option<&ControllerConfig>) -> Member {
    let mut config = ControllerConfig::new(dir.join(id.to_string()), id);
    config.id = ControllerId(id);
    config.client_listen.set_port(0);
    config.internal_listen.set_port(0);
    if let Some(at) = at {
        config.start = Start::Join { at: vec![at.internal_listen.to_string()], role: JoinAs::Voter };
    }
    let (runtime, controller) = run(&config).await;
    config.client_listen = controller.client_addr();
    config.internal_listen = controller.internal_addr();
    Member { config, up: Some((runtime, controller)) }
}

fn admin(member: &Member) -> AdminClient<Channel> {
    let address = format!("http://{}", member.config.client_listen);
    AdminClient::new(Channel::from_shared(address).unwrap().tcp_nodelay(true).connect_lazy())
}

/// A write that changes nothing but the log: a function that does not exist is deleted.
async fn write(admin: &mut AdminClient<Channel>) -> bool {
    let request = api::DeleteFunctionRequest { name: "none".into(), ..Default::default() };
    admin.delete_function(request).await.is_err_and(|status| status.code() == tonic::Code::NotFound)
}

async fn leader(admin: &mut AdminClient<Channel>) -> api::ClusterStatus {
    loop {
        let status = admin.get_cluster_status(api::GetClusterStatusRequest {}).await.unwrap().into_inner();
        if status.leader != 0 && status.controllers.iter().all(|it| it.reachable) {
            return status;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::main]
async fn main() {
    let kills = std::env::args().nth(1).map_or(KILLS, |kills| kills.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let first = start(dir.path(), 1, None).await;
    let second = start(dir.path(), 2, Some(&first.config)).await;
    let third = start(dir.path(), 3, Some(&first.config)).await;
    let mut members = [first, second, third];
    let mut took = Vec::new();
    for kill in 0..kills {
        let killed = usize::try_from(leader(&mut admin(&members[0])).await.leader).unwrap() - 1;
        let mut client = admin(&members[(killed + 1 + kill % 2) % 3]);
        while !write(&mut client).await {}
        let (runtime, controller) = members[killed].up.take().unwrap();
        std::mem::forget(controller);
        let began = Instant::now();
        runtime.shutdown_background();
        while !write(&mut client).await {}
        let stopped = began.elapsed();
        let status = client.get_cluster_status(api::GetClusterStatusRequest {}).await.unwrap().into_inner();
        println!(
            "kill {kill}, of controller {}: writes resumed after {stopped:?}, under controller {} in term {}",
            killed + 1,
            status.leader,
            status.term
        );
        took.push(stopped);
        members[killed].up = Some(run(&members[killed].config).await);
    }
    took.sort();
    println!("median {:?}  max {:?}", took[took.len() / 2], took[took.len() - 1]);
    for member in &mut members {
        let (runtime, controller) = member.up.take().unwrap();
        drop(controller);
        runtime.shutdown_background();
    }
}
