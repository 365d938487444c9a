//! Data that a program names and another worker has (D02, D04, D09).

use std::collections::BTreeMap;
use std::path::Path;

use millrace_proto::{convert, worker as wire};
use millrace_types::{DataId, Epoch, Failure, NodeName, Reason};
use millrace_worker::start::{LookupOrder, Worker, WorkerConfig, start};

use crate::controller::Controller;
use crate::metrics::scraped;
use crate::programs::{ask, asking, desire, large};
use crate::support::{client, config, launcher, script, within};

/// A worker that serves the script, and the controller that it obeys.
struct Node {
    worker: Worker,
    controller: Controller,
}

/// Workers of one cluster: `w1`, `w2`, …
async fn cluster(dir: &Path, workers: usize) -> Vec<Node> {
    cluster_of(dir, &vec![LookupOrder::default(); workers]).await
}

/// The same, each with the order in which it asks where data is.
async fn cluster_of(dir: &Path, orders: &[LookupOrder]) -> Vec<Node> {
    let mut nodes: Vec<Node> = Vec::new();
    for (number, &lookup) in (1..).zip(orders) {
        let name = format!("w{number}");
        let controller = Controller::start("test-cluster", 1).await;
        let base = config(&dir.join(&name), &[controller.addr], 1);
        let (node, programs) = (NodeName::new(&name).unwrap(), Some(launcher()));
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

    /// Has a program store data, and gives its name as text.
    async fn name(&self, data: &[u8]) -> String {
        String::from_utf8(self.call("name", data).await.unwrap().to_vec()).unwrap()
    }

    async fn find(&self, name: &str) -> Result<bytes::Bytes, Failure> {
        self.call("find", name.as_bytes()).await
    }

    /// How much of what was counted of objects: by method, and by whom was asked.
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

    /// Lets go of data that it made.
    async fn release(&self, name: &str) {
        let ids = vec![convert::data_id_wire(&data_id(name))];
        client(&self.worker).release_objects(wire::ReleaseObjectsRequest { ids }).await.unwrap();
    }

    /// Waits until the cluster knows that it holds data.
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
async fn data_of_another_worker_is_fetched_by_its_name_and_found_here_the_next_time() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = cluster(dir.path(), 2).await;
    let [home, other] = &nodes[..] else { unreachable!() };
    // Small and large.
    let mut names = Vec::new();
    for data in [b"a".to_vec(), b"abc".to_vec(), large()] {
        let name = home.name(&data).await;
        assert!(name.starts_with("w1/1/"), "{name}");
        assert!(home.find(&name).await.unwrap() == data);
        assert!(other.find(&name).await.unwrap() == data, "{} bytes", data.len());
        names.push((name, data));
    }
    // Here: nobody was asked. There: its home, once each, and once where that is.
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
async fn data_that_its_home_let_go_of_is_found_where_a_copy_is() {
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
    // Its home itself does not ask itself.
    assert!(home.find(&name).await.unwrap() == large());
    let asked = home.counted().await;
    assert_eq!((asked.get("home"), asked.get("tier2"), asked.get("holder")), (None, Some(&1), Some(&1)));
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_order_costs_the_calls_that_it_says_and_stale_entries_yield_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let (by_home, by_paper) = (LookupOrder::Home, LookupOrder::Paper);
    let nodes = cluster_of(dir.path(), &[by_home, by_home, by_home, by_paper]).await;
    let [home, holder, by_home, by_paper] = &nodes[..] else { unreachable!() };
    // Twice each: from where it is, then from here.
    let at_home = home.name(b"at home").await;
    home.told_of(&at_home).await;
    for node in [home, by_home, by_home, by_paper, by_paper] {
        assert_eq!(node.find(&at_home).await.unwrap(), &b"at home"[..]);
    }
    assert_eq!(home.counted().await, counts([("host", 1)]), "nobody is asked for what is here");
    let asked = [("host", 1), ("inter-node", 1), ("home", 1), ("address", 1)];
    assert_eq!(by_home.counted().await, counts(asked), "nobody but its home");
    let asked = [("host", 1), ("inter-node", 1), ("tier2", 1), ("holder", 1), ("address", 1)];
    assert_eq!(by_paper.counted().await, counts(asked), "tier 2, and whom it named");

    // Its home lets go of it, and tier 2 goes on naming it.
    let moved = home.name(b"moved").await;
    holder.find(&moved).await.unwrap();
    holder.told_of(&moved).await;
    home.told_of(&moved).await;
    home.controller.commit(false);
    home.release(&moved).await;
    for node in [by_home, by_paper] {
        assert_eq!(node.find(&moved).await.unwrap(), &b"moved"[..]);
    }
    // Once more where the home is: it might be another worker's address by now.
    let asked = [("host", 1), ("inter-node", 2), ("home", 2), ("tier2", 1), ("holder", 1), ("address", 3)];
    assert_eq!(by_home.counted().await, counts(asked), "tier 2 once, and who has it");
    let asked = [("host", 1), ("inter-node", 2), ("tier2", 3), ("holder", 3), ("address", 3)];
    assert_eq!(by_paper.counted().await, counts(asked), "tier 2 and whom it named, each once more");

    // Tier 2 has not heard of it yet.
    let young = home.name(b"young").await;
    assert_eq!(by_paper.find(&young).await.unwrap(), &b"young"[..]);
    let asked = [("host", 1), ("inter-node", 3), ("tier2", 4), ("home", 1), ("holder", 3), ("address", 3)];
    assert_eq!(by_paper.counted().await, counts(asked), "its home in the end");
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_tier_2_names_and_nobody_has_is_lost_by_either_order() {
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
async fn data_is_had_from_its_home_while_no_controller_answers() {
    let dir = tempfile::tempdir().unwrap();
    let mut nodes = cluster_of(dir.path(), &[LookupOrder::Home, LookupOrder::Paper]).await;
    let (known, unknown) = (nodes[0].name(b"known").await, nodes[0].name(b"unknown").await);
    // Where its home is, it knows from here on.
    nodes[1].find(&known).await.unwrap();
    let Node { worker, controller } = nodes.remove(1);
    drop(controller);
    let found = ask(&mut client(&worker), asking(1, "find", unknown.as_bytes())).await.unwrap();
    assert_eq!(found.outputs[0].data, &b"unknown"[..]);
    worker.shutdown().await;
    nodes.remove(0).worker.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn data_is_found_though_another_worker_is_where_its_home_was() {
    let dir = tempfile::tempdir().unwrap();
    let nodes = cluster(dir.path(), 3).await;
    let [home, stranger, other] = &nodes[..] else { unreachable!() };
    let name = home.name(&large()).await;
    let moved_to = home.controller.hello().await.address;
    home.controller.send_to(&stranger.controller.hello().await.address);
    let failure = other.find(&name).await.unwrap_err();
    assert!(failure.message.contains("DATA_LOST"), "by what it is told: {}", failure.message);
    home.controller.send_to(&moved_to);
    assert!(other.find(&name).await.unwrap() == large(), "what it remembers is out of date");
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn data_whose_home_died_is_had_of_a_copy_or_refused_with_the_reason() {
    let dir = tempfile::tempdir().unwrap();
    let mut nodes = cluster(dir.path(), 3).await;
    let (copied, alone) = (nodes[0].name(&large()).await, nodes[0].name(b"alone").await);
    nodes[1].find(&copied).await.unwrap();
    nodes[1].told_of(&copied).await;
    nodes.remove(0).worker.shutdown().await;
    let [holder, other] = &nodes[..] else { unreachable!() };
    // From here, and from where it is yet.
    assert!(holder.find(&copied).await.unwrap() == large());
    assert!(other.find(&copied).await.unwrap() == large());
    let failure = other.find(&alone).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelFailed);
    assert!(failure.message.contains("UNAVAILABLE"), "{}", failure.message);
    assert!(failure.message.contains("its owner node w1 cannot be reached"), "{}", failure.message);
    // Once the cluster knows that it went with its home.
    other.controller.ledger().send_modify(|ledger| {
        ledger.lost.insert(data_id(&alone));
    });
    let failure = other.find(&alone).await.unwrap_err();
    assert!(failure.message.contains("DATA_LOST"), "{}", failure.message);
    // What never was is no less clear.
    let failure = other.find("w2/1/999999999").await.unwrap_err();
    assert!(failure.message.contains("DATA_LOST"), "{}", failure.message);
    for Node { worker, .. } in nodes {
        worker.shutdown().await;
    }
}
