//! Tests of controllers that start together with empty directories, like a service manager starts them.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};

use millrace_controller::{ClusterStart, JoinAs};

use crate::group::{Member, status};

/// Returns internal addresses with free ports. All ports are taken at once, so that all ports differ.
fn free_addresses() -> [SocketAddr; 3] {
    let taken = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").unwrap());
    taken.map(|listener| listener.local_addr().unwrap())
}

async fn start(number: usize, at: &[SocketAddr; 3]) -> Result<Member, millrace_controller::StartError> {
    let others: Vec<_> = at.iter().filter(|&it| *it != at[number - 1]).map(ToString::to_string).collect();
    let start = match number {
        1 => ClusterStart::Found { with: others },
        _ => ClusterStart::Join { at: others, role: JoinAs::Voter },
    };
    Member::try_start(number as u64, start, |config| config.internal_listen = at[number - 1]).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_founding_controllers_form_one_cluster_and_a_lost_directory_begins_no_second() {
    let at = free_addresses();
    let (first, second, third) = tokio::join!(start(1, &at), start(2, &at), start(3, &at));
    let mut first = first.unwrap();
    let second = second.unwrap();
    let third = third.unwrap();
    let cluster = status(&second).await;
    let voters: BTreeSet<u64> = cluster.controllers.iter().filter(|it| it.voter).map(|it| it.id).collect();
    assert_eq!(voters, BTreeSet::from([1, 2, 3]));

    // A restart with the same arguments continues, because the data directory decides.
    first.kill();
    first.restart().await;
    assert_eq!(status(&first).await.cluster_id, cluster.cluster_id);

    first.kill();
    let refused = start(1, &at).await.err().unwrap();
    assert!(refused.to_string().contains("millrace cluster remove 1"), "{refused}");
    assert_eq!(status(&third).await.cluster_id, cluster.cluster_id);
}
