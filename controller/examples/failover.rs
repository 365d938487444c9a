//! Measures how long writes stop when the leader of three controllers is killed, repeatedly. All
//! controllers run in this process; killing a controller ends the runtime, and the controller then
//! restarts. A client writes through a controller that stays up: `cargo run --release -p
//! millrace-controller --example failover -- 20`

#![allow(
    clippy::unwrap_used,
    clippy::disallowed_methods,
    reason = "a measurement: it may panic and reads the clock"
)]

mod group;

use std::time::{Duration, Instant};

use millrace_proto::admin as api;
use millrace_proto::admin::admin_client::AdminClient;
use tonic::transport::Channel;

use group::{admin, run, write};

const KILLS: usize = 20;

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
    let mut members = group::three(dir.path()).await;
    let mut took = Vec::new();
    for kill in 0..kills {
        let killed = usize::try_from(leader(&mut admin(&members[0])).await.leader).unwrap() - 1;
        let mut client = admin(&members[(killed + 1 + kill % 2) % 3]);
        while !write(&mut client).await {}
        let (threads, controller) = members[killed].up.take().unwrap();
        std::mem::forget(controller);
        let began = Instant::now();
        threads.end();
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
    group::end(members);
}
