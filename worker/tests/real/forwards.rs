//! Test of a model that is also copied over another GPU's link (D05).

use std::time::Duration;

use millrace_types::topology::{LinkKind, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};
use millrace_worker::start::{HostLinks, start};

use crate::controller::Controller;
use crate::peers::{ask, model};
use crate::support::{all_up, client, config, values, within};

/// Size of the model's weights: four batches and a short one.
const WEIGHTS: Bytes = Bytes(45_560_832);
const LOOK_EVERY: Duration = Duration::from_millis(1);

#[tokio::test(flavor = "multi_thread")]
async fn a_model_forwarded_by_a_neighbour_answers_as_one_from_the_host() {
    let mut answers = Vec::new();
    for host_links in [HostLinks::Own, HostLinks::All] {
        let dir = tempfile::tempdir().unwrap();
        let controller = Controller::start("test-cluster", 1).await;
        let mut config = config(dir.path(), &[controller.addr], 2);
        config.policy.host_links = host_links;
        let topology = &mut config.topology;
        topology.links.iter_mut().for_each(|link| link.rate = BytesPerSec(100_000_000));
        let kind = LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(1) };
        topology.links.push(TopologyLink { kind, rate: BytesPerSec(200_000_000) });
        let worker = start(config).await.unwrap();
        all_up(&controller).await;
        let digest = controller.publish(&model());
        controller.desire(&[("bert", digest)]);
        controller.ready("bert").await;

        let answer = ask(&client(&worker), 0, 1).await.unwrap().unwrap();
        let own = answer.gpu as usize;
        let other = 1 - answer.gpu as usize;
        answers.push(values(&answer));
        // The end of the run may be reported before the end of the last copy.
        let carried = within("all of the model", async {
            loop {
                let links = worker.node().snapshot().await.links;
                let carried = [own, other, 2].map(|link| links[link].carried);
                if carried[0] + carried[1] >= WEIGHTS {
                    return carried;
                }
                tokio::time::sleep(LOOK_EVERY).await;
            }
        });
        let [by_own, by_other, between] = carried.await;
        assert_eq!((by_own + by_other, between), (WEIGHTS, by_other), "each byte crosses one path");
        match host_links {
            HostLinks::Own => assert_eq!(by_other, Bytes::ZERO),
            HostLinks::All => assert!(by_other >= Bytes::mib(10), "{by_other}"),
        }
        worker.shutdown().await;
    }
    assert_eq!(answers[0], answers[1], "bit by bit");
}
