//! Tests of the names in a request for log lines.

use millrace_proto::admin as api;
use millrace_types::Reason;

use crate::stub::Stub;
use crate::support::{Cluster, reason, until};

#[tokio::test]
async fn logs_name_a_detached_node_as_missing_and_refuse_an_unknown_name() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    let mut list = async |of: &str| {
        let request = api::ListLogsRequest { of: vec![of.to_owned()], ..Default::default() };
        admin.list_logs(request).await.map(|page| page.into_inner().missing)
    };
    let unknown = list("n1").await.unwrap_err();
    assert_eq!(reason(&unknown), Reason::NodeNotFound);
    let worker = Stub::start(&cluster, "n1").await;
    until("its stream", async || list("n1").await.unwrap().is_empty().then_some(())).await;
    worker.kill();
    until("its end", async || (list("n1").await.unwrap() == ["n1: not attached"]).then_some(())).await;
    let _again = Stub::start(&cluster, "n1").await;
    until("its stream", async || list("n1").await.unwrap().is_empty().then_some(())).await;
    assert_eq!(list("controller-1").await.unwrap(), [""; 0]);
}
