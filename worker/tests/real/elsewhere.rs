//! Tests of fetches by name of data on another worker (D02, D04, D09).

use std::collections::BTreeMap;
use std::path::Path;

use millrace_proto::{convert, worker as wire};
use millrace_types::{DataId, Epoch, Failure, NodeName, Reason};
use millrace_worker::start::{LookupOrder, RunningWorker, WorkerConfig, start};

use crate::controller::Controller;
use crate::metrics::scraped;
use crate::programs::{ask, asking, desire, large};
use crate::support::{client, config, launcher, script, within};

/// A worker that serves the script, with its controller.
struct Node {
    worker: RunningWorker,
    controller: Controller,
}

/// Starts the workers `w1`, `w2`, … of one cluster.
async fn cluster(dir: &Path, workers: usize) -> Vec<Node> {
    cluster_of(dir, &vec![LookupOrder::default(); workers]).await
}

/// Starts workers of one cluster, each with its own lookup order.
async fn cluster_of(dir: &Path, orders: &[LookupOrder]) -> Vec<Node> {
    let mut nodes: Vec<Node> = Vec::new();
    for (number, &lookup) in (1..).zip(orders) {
        let name = format!("w{number}");
        let controller = Controller::start("test-cluster", 1).await;
        let base = config(&dir.join(&name), &[controller.addr], 1);
        let node = NodeName::new(&name).unwrap();
        let programs = Some(launcher());
        let worker = start(WorkerConfig { node, programs, lookup, ..base }).await.unwrap();
        controller.lead(1);
        for other in &nodes {
            other.controller.meet(&controller);
            controller.meet(&other.controller);
        }
        nodes.push(Node { worker, controller });
    }
    for Node { controller, .. } in &nodes {
        desire(controller, "f", &script(), 1, true);
        controller.ready("f").await;
    }
    nodes
}

impl Node {
    async fn call(&self, what: &str, x: &[u8]) -> Result<bytes::Bytes, Failure> {
        let mut answer = ask(&mut client(&self.worker), asking(1, what, x)).await?;
        Ok(answer.outputs.remove(0).data)
    }

    /// Stores data through a program, and returns its name as text.
    async fn name(&self, data: &[u8]) -> String {
        String::from_utf8(self.call("name", data).await.unwrap().to_vec()).unwrap()
    }

    async fn find(&self, name: &str) -> Result<bytes::Bytes, Failure> {
        self.call("find", name.as_bytes()).await
    }

    /// Returns the counts of fetches by method and of lookups by destination.
    async fn counted(&self) -> BTreeMap<String, u64> {
        let metrics = within("the metrics", scraped(self.worker.addr())).await;
        let counts = metrics.lines().filter_map(|line| {
            let (name, count) = line.split_once(' ')?;
            let of = |family: &str| name.strip_prefix(family)?.strip_suffix("\"}");
            let name = of("millrace_objects_fetches_total{method=\"")
                .or_else(|| of("millrace_objects_lookups_total{asked=\""))?;
            Some((name.to_owned(), count.parse::<f64>().unwrap() as u64))
        });
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// Releases data that this worker stored.
    async fn release(&self, name: &str) {
        let ids = vec![convert::data_id_wire(&data_id(name))];
        client(&self.worker).release_objects(wire::ReleaseObjectsRequest { ids }).await.unwrap();
    }

    /// Waits until the cluster knows that this worker holds the data.
    async fn told_of(&self, name: &str) {
        let id = data_id(name);
        self.controller.committed("the copy in tier 2", |ledger| ledger.kept.entries.contains(&id)).await;
    }
}

fn data_id(name: &str) -> DataId {
    let words: Vec<_> = name.split('/').collect();
    let number = |at: usize| words[at].parse().unwrap();
    DataId { home: NodeName::new(words[0]).unwrap(), epoch: Epoch(number(1)), counter: number(2) }
}

fn counts<const N: usize>(counts: [(&str, u64); N]) -> BTreeMap<String, u64> {
    counts.into_iter().map(|(name, count)| (name.to_owned(), count)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_another_worker_is_fetched_by_name_and_then_read_from_the_copy() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = cluster(dir.path(), 2).await;
    let [home, other] = &nodes[..] else { unreachable!() };
    // Small and large data.
    let mut names = Vec::new();
    for data in [b"a".to_vec(), b"abc".to_vec(), large()] {
        let name = home.name(&data).await;
        assert!(name.starts_with("w1/1/"), "{name}");
        assert!(home.find(&name).await.unwrap() == data);
        assert!(other.find(&name).await.unwrap() == data, "{} bytes", data.len());
        names.push((name, data));
    }
    // A local read makes no call. A remote read makes one call to the owner node per object, and
    // one address query.
    assert_eq!(home.counted().await, counts([("host", 3)]));
    let asked = [("inter-node", 3), ("home", 3), ("address", 1)];
    assert_eq!(other.counted().await, counts(asked));
    for (name, data) in &names {
        assert!(other.find(name).await.unwrap() == *data);
    }
    assert_eq!(other.counted().await, counts([("inter-node", 3), ("home", 3), ("address", 1), ("host", 3)]));
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn data_released_by_its_owner_node_is_fetched_from_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = cluster(dir.path(), 3).await;
    let [home, holder, other] = &nodes[..] else { unreachable!() };
    let name = home.name(&large()).await;
    holder.find(&name).await.unwrap();
    holder.told_of(&name).await;
    home.release(&name).await;
    assert!(other.find(&name).await.unwrap() == large());
    let asked = [("inter-node", 1), ("home", 1), ("tier2", 1), ("holder", 1), ("address", 2)];
    assert_eq!(other.counted().await, counts(asked));
    // The owner node does not ask itself.
    assert!(home.find(&name).await.unwrap() == large());
    let asked = home.counted().await;
    assert_eq!((asked.get("home"), asked.get("tier2"), asked.get("holder")), (None, Some(&1), Some(&1)));
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_lookup_order_makes_its_stated_calls_also_with_stale_entries() {
    let dir = tempfile::tempdir().unwrap();
    let by_home = LookupOrder::Home;
    let by_paper = LookupOrder::Paper;
    let nodes = cluster_of(dir.path(), &[by_home, by_home, by_home, by_paper]).await;
    let [home, holder, by_home, by_paper] = &nodes[..] else { unreachable!() };
    // Each node reads twice: first remotely, then from its copy.
    let at_home = home.name(b"at home").await;
    home.told_of(&at_home).await;
    for node in [home, by_home, by_home, by_paper, by_paper] {
        assert_eq!(node.find(&at_home).await.unwrap(), &b"at home"[..]);
    }
    assert_eq!(home.counted().await, counts([("host", 1)]), "local data makes no call");
    let asked = [("host", 1), ("inter-node", 1), ("home", 1), ("address", 1)];
    assert_eq!(by_home.counted().await, counts(asked), "only the owner node was asked");
    let asked = [("host", 1), ("inter-node", 1), ("tier2", 1), ("holder", 1), ("address", 1)];
    assert_eq!(by_paper.counted().await, counts(asked), "tier 2 and the named holder were asked");

    // The owner node releases the data, and tier 2 keeps naming the owner node.
    let moved = home.name(b"moved").await;
    holder.find(&moved).await.unwrap();
    holder.told_of(&moved).await;
    home.told_of(&moved).await;
    home.controller.commit(false);
    home.release(&moved).await;
    for node in [by_home, by_paper] {
        assert_eq!(node.find(&moved).await.unwrap(), &b"moved"[..]);
    }
    // The owner node's address is queried once more, because another worker might have the address
    // by now.
    let asked = [("host", 1), ("inter-node", 2), ("home", 2), ("tier2", 1), ("holder", 1), ("address", 3)];
    assert_eq!(by_home.counted().await, counts(asked), "tier 2 was asked once, and then the holder");
    let asked = [("host", 1), ("inter-node", 2), ("tier2", 3), ("holder", 3), ("address", 3)];
    assert_eq!(
        by_paper.counted().await,
        counts(asked),
        "tier 2 and the named holders were each asked once more"
    );

    // Tier 2 does not know the data yet.
    let young = home.name(b"young").await;
    assert_eq!(by_paper.find(&young).await.unwrap(), &b"young"[..]);
    let asked = [("host", 1), ("inter-node", 3), ("tier2", 4), ("home", 1), ("holder", 3), ("address", 3)];
    assert_eq!(by_paper.counted().await, counts(asked), "the owner node was asked in the end");
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn data_that_tier_2_names_and_no_node_has_is_lost_by_either_order() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = cluster_of(dir.path(), &[LookupOrder::Home, LookupOrder::Home, LookupOrder::Paper]).await;
    let name = nodes[0].name(&large()).await;
    nodes[0].told_of(&name).await;
    nodes[0].controller.commit(false);
    nodes[0].release(&name).await;
    for other in &nodes[1..] {
        let failure = other.find(&name).await.unwrap_err();
        assert!(failure.message.contains("DATA_LOST"), "{}", failure.message);
    }
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn data_is_fetched_from_its_owner_node_while_no_controller_answers() {
    let dir = tempfile::tempdir().unwrap();
    let mut nodes = cluster_of(dir.path(), &[LookupOrder::Home, LookupOrder::Paper]).await;
    let known = nodes[0].name(b"known").await;
    let unknown = nodes[0].name(b"unknown").await;
    // From here on this worker knows the address of the owner node.
    nodes[1].find(&known).await.unwrap();
    let Node { worker, controller } = nodes.remove(1);
    drop(controller);
    let found = ask(&mut client(&worker), asking(1, "find", unknown.as_bytes())).await.unwrap();
    assert_eq!(found.outputs[0].data, &b"unknown"[..]);
    worker.shutdown().await;
    nodes.remove(0).worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn data_is_found_after_another_worker_took_its_owner_nodes_address() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = cluster(dir.path(), 3).await;
    let [home, stranger, other] = &nodes[..] else { unreachable!() };
    let name = home.name(&large()).await;
    let moved_to = home.controller.hello().await.address;
    home.controller.send_to(&stranger.controller.hello().await.address);
    let failure = other.find(&name).await.unwrap_err();
    assert!(failure.message.contains("DATA_LOST"), "with the wrong address: {}", failure.message);
    home.controller.send_to(&moved_to);
    assert!(other.find(&name).await.unwrap() == large(), "the cached address is stale");
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn data_of_a_dead_owner_node_is_read_from_a_copy_or_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let mut nodes = cluster(dir.path(), 3).await;
    let copied = nodes[0].name(&large()).await;
    let alone = nodes[0].name(b"alone").await;
    nodes[1].find(&copied).await.unwrap();
    nodes[1].told_of(&copied).await;
    nodes.remove(0).worker.shutdown().await;
    let [holder, other] = &nodes[..] else { unreachable!() };
    // The copy is read here, and fetched from its holder.
    assert!(holder.find(&copied).await.unwrap() == large());
    assert!(other.find(&copied).await.unwrap() == large());
    let failure = other.find(&alone).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelFailed);
    assert!(failure.message.contains("UNAVAILABLE"), "{}", failure.message);
    assert!(failure.message.contains("its owner node w1 cannot be reached"), "{}", failure.message);
    // The error changes once the cluster knows that the data was lost with its owner node.
    other.controller.ledger().send_modify(|ledger| {
        ledger.lost.insert(data_id(&alone));
    });
    let failure = other.find(&alone).await.unwrap_err();
    assert!(failure.message.contains("DATA_LOST"), "{}", failure.message);
    // Data that never existed gives the same clear error.
    let failure = other.find("w2/1/999999999").await.unwrap_err();
    assert!(failure.message.contains("DATA_LOST"), "{}", failure.message);
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}
