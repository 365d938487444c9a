//! The nodes that an autoscaler starts and stops. A provider of machines implements
//! [`NodeProvider`]; [`LocalProcesses`] provides processes on this machine.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use futures::stream::{FuturesUnordered, StreamExt as _};
use millrace_types::NodeName;

use super::part::{ChildEvent, ChildRole, ChildServer, LogPrefix, STOP_MARGIN, end_in_words};
use super::plan::worker_addresses;
use crate::failure::CommandFailure;
use crate::process::loopback;

/// Starts and stops nodes. A provider need not wait for a node to join: the cluster's state shows
/// the node.
pub(crate) trait NodeProvider {
    /// Starts a node of this name, for the controllers at these internal addresses.
    fn start(&mut self, name: &NodeName, controllers: &[String]) -> Result<(), CommandFailure>;

    /// Stops a drained node, and returns once the node has ended.
    async fn stop(&mut self, name: &NodeName);

    /// Returns the names of the provider's nodes that have not ended.
    fn running(&self) -> Vec<NodeName>;
}

/// Worker processes on this machine, at free ports. Dropping the value ends the processes at once.
#[derive(Debug)]
pub(crate) struct LocalProcesses {
    /// The folder in which each worker has a folder of its name.
    pub(crate) data_dir: PathBuf,
    /// The options of every worker.
    pub(crate) options: Vec<String>,
    /// The time that running requests may take at the end.
    pub(crate) grace: Duration,
    pub(crate) log: LogPrefix,
    parts: BTreeMap<NodeName, ChildServer>,
}

impl LocalProcesses {
    pub(crate) fn new(data_dir: PathBuf, options: Vec<String>, grace: Duration, log: LogPrefix) -> Self {
        Self { data_dir, options, grace, log, parts: BTreeMap::new() }
    }

    /// Waits for a process that ends by itself, removes the process, and describes the end.
    pub(crate) async fn an_end(&mut self) -> String {
        loop {
            let parts = self.parts.iter_mut();
            let mut events: FuturesUnordered<_> =
                parts.map(|(name, part)| async move { (name.clone(), part.event().await) }).collect();
            let Some((name, event)) = events.next().await else { return std::future::pending().await };
            drop(events);
            if let ChildEvent::Ended { pid, status, .. } = event {
                self.parts.remove(&name);
                return format!("{name} (pid {pid}) {}", end_in_words(status));
            }
        }
    }
}

impl NodeProvider for LocalProcesses {
    fn start(&mut self, name: &NodeName, controllers: &[String]) -> Result<(), CommandFailure> {
        let folder = self.data_dir.join(name.as_str()).display().to_string();
        let words = ["worker", "--name", name.as_str(), "--controllers", &controllers.join(",")];
        let mut words: Vec<_> = words.into_iter().map(str::to_owned).collect();
        words.extend(["--data-dir".to_owned(), folder]);
        words.extend(self.options.iter().cloned());
        let addresses = worker_addresses(loopback(0));
        let mut part = ChildServer::new(name.to_string(), ChildRole::Worker, words, addresses, self.log)?;
        part.start()?;
        self.parts.insert(name.clone(), part);
        Ok(())
    }

    async fn stop(&mut self, name: &NodeName) {
        let Some(mut part) = self.parts.remove(name) else { return };
        if tokio::time::timeout(self.grace + STOP_MARGIN, part.stop()).await.is_err() {
            tracing::warn!(node = %name, "a worker did not stop in time: killing it");
        }
    }

    fn running(&self) -> Vec<NodeName> {
        self.parts.keys().cloned().collect()
    }
}
