//! A cluster of processes on this machine: controllers, and workers with their executors.
//!
//! ```text
//!  start: controller 1 ─ready─▶ the others, in turn ─ready─▶ workers ─ready─▶ all of it up
//!  stop:  workers ─ended─▶ controllers
//! ```
//! If the folder already holds a group, its controllers start at their recorded ports.

mod part;
mod plan;
pub(crate) mod provider;
pub(crate) mod record;
mod restart;

use std::net::SocketAddr;
use std::time::Duration;

use futures::future::join_all;
use futures::stream::{FuturesUnordered, StreamExt as _};
use millrace_client::{Address, Admin, Endpoints};
use serde::de::DeserializeOwned;

use crate::cluster::{names, reachable};
use crate::failure::CommandFailure;
use crate::process::{ControllerReady, WorkerReady};
use crate::readiness::{self, ExpectedCluster};
pub(crate) use part::LogPrefix;
use part::{ChildEvent, ChildRole, ChildServer, STOP_MARGIN};
pub(crate) use plan::GroupPlan;
use plan::{controller_addresses, worker_addresses};
use record::{ControllerAddresses, GroupRecord};
pub(crate) use restart::RestartPolicy;

/// The role, pid and addresses of a process, for clients that connect to or kill the process.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
#[serde(tag = "role", rename_all = "lowercase")]
pub(crate) enum ProcessAddress {
    Controller { name: String, id: u64, pid: u32, client: String, internal: String },
    Worker { name: String, pid: u32, address: String },
}

/// A running group. Dropping the group ends all processes at once.
#[derive(Debug)]
pub(crate) struct ProcessGroup {
    plan: GroupPlan,
    controllers: Vec<ChildServer>,
    workers: Vec<ChildServer>,
    record: GroupRecord,
    cluster: String,
}

impl ProcessGroup {
    /// Starts all processes. Returns once each controller reports all voters, and all GPUs as up.
    pub(crate) async fn start(plan: GroupPlan) -> Result<Self, CommandFailure> {
        let record = record::read(&plan.data_dir)?;
        plan.check(&record)?;
        let mut group =
            Self { plan, controllers: Vec::new(), workers: Vec::new(), record, cluster: String::new() };
        // Start recorded controllers together: none of them can lead without the others. Start new
        // controllers in turn: the group accepts one membership change at a time.
        let before = group.record.controllers.len() as u64;
        group.start_controllers(1..=before).await?;
        for id in before + 1..=u64::from(group.plan.controllers.get()) {
            group.start_controllers(id..=id).await?;
        }
        group.start_workers().await?;
        let voters = Some(group.plan.controllers);
        let nodes = Some(group.plan.workers);
        let admins = group.admins()?;
        tokio::select! {
            reached = readiness::reached(&admins, ExpectedCluster { voters, nodes }, readiness::TIMEOUT) => reached?,
            ended = group.an_end() => return Err(ended),
        }
        Ok(group)
    }

    async fn start_controllers(&mut self, ids: std::ops::RangeInclusive<u64>) -> Result<(), CommandFailure> {
        for id in ids {
            let mut part = self.plan.controller(&self.record, id)?;
            part.start()?;
            self.controllers.push(part);
        }
        self.all_ready().await
    }

    async fn start_workers(&mut self) -> Result<(), CommandFailure> {
        for (index, name) in (0u16..).zip(names(self.plan.workers)?) {
            let mut part = self.plan.worker(&self.record, index, name.to_string())?;
            part.start()?;
            self.workers.push(part);
        }
        self.all_ready().await
    }

    fn parts(&mut self) -> impl Iterator<Item = &mut ChildServer> {
        self.controllers.iter_mut().chain(&mut self.workers)
    }

    /// Waits for the next event of any process. Returns the process's index too.
    async fn event(&mut self) -> (usize, ChildEvent) {
        let parts = self.parts().enumerate();
        let mut events: FuturesUnordered<_> =
            parts.map(|(index, part)| async move { (index, part.event().await) }).collect();
        match events.next().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Waits for the ready line of every started process.
    async fn all_ready(&mut self) -> Result<(), CommandFailure> {
        let mut awaited = self.parts().filter(|part| part.awaits_ready()).count();
        while awaited > 0 {
            match self.event().await {
                (index, ChildEvent::Ready(line)) => {
                    self.ready(index, &line)?;
                    awaited -= 1;
                }
                (index, ChildEvent::Ended { status, .. }) => return Err(self.did_not_start(index, status)),
                (_, ChildEvent::Due) => {}
            }
        }
        Ok(())
    }

    /// Waits for the end of any process, which is a failure while the group starts.
    async fn an_end(&mut self) -> CommandFailure {
        loop {
            if let (index, ChildEvent::Ended { status, .. }) = self.event().await {
                return self.did_not_start(index, status);
            }
        }
    }

    fn did_not_start(&mut self, index: usize, status: std::process::ExitStatus) -> CommandFailure {
        let name = self.part(index).name.clone();
        CommandFailure::failed(format!("{name} {}: see its log lines above", part::end_in_words(status)))
    }

    fn part(&mut self, index: usize) -> &mut ChildServer {
        match index.checked_sub(self.controllers.len()) {
            None => &mut self.controllers[index],
            Some(index) => &mut self.workers[index],
        }
    }

    /// Records the addresses of a process.
    fn ready(&mut self, index: usize, line: &str) -> Result<(), CommandFailure> {
        let part = self.part(index);
        part.entry.clear();
        match part.role {
            ChildRole::Controller { id } => {
                let said: ControllerReady = read(&part.name, line)?;
                let place = ControllerAddresses {
                    id,
                    client: address(&part.name, &said.client)?,
                    internal: address(&part.name, &said.internal)?,
                };
                part.addresses = controller_addresses(place.client, place.internal);
                self.cluster = said.cluster;
                self.record.put_controller(place);
            }
            ChildRole::Worker => {
                let said: WorkerReady = read(&part.name, line)?;
                let listens = address(&part.name, &said.address)?;
                part.addresses = worker_addresses(listens);
                let name = part.name.clone();
                self.record.put_worker(&name, listens);
            }
        }
        record::write(&self.plan.data_dir, &self.record)
    }

    /// Watches the processes: reports each end and the next step, and restarts ended processes if
    /// the plan says so. Returns when no process is left.
    pub(crate) async fn watch(&mut self) -> CommandFailure {
        loop {
            let (index, event) = self.event().await;
            let restart = self.plan.restart;
            let outcome = match event {
                ChildEvent::Ready(line) => {
                    let part = self.part(index);
                    eprintln!("{} is back (pid {})", part.name, part.pid().unwrap_or_default());
                    self.ready(index, &line)
                }
                ChildEvent::Due => self.part(index).start(),
                ChildEvent::Ended { pid, status, lived } => {
                    let again = match restart {
                        RestartPolicy::Never => None,
                        RestartPolicy::WithBackoff => Some(self.part(index).start_later(lived)),
                    };
                    eprintln!("{}", self.obituary(index, pid, status, again));
                    Ok(())
                }
            };
            if let Err(failure) = outcome {
                return failure;
            }
            if restart == RestartPolicy::Never && self.parts().all(|part| part.pid().is_none()) {
                return CommandFailure::failed("every process of the cluster has ended");
            }
        }
    }

    /// Describes the effect of a process's end, and the next step.
    fn obituary(
        &mut self,
        index: usize,
        pid: u32,
        status: std::process::ExitStatus,
        again: Option<Duration>,
    ) -> String {
        let running = |parts: &[ChildServer]| parts.iter().filter(|part| part.pid().is_some()).count();
        let meaning = match self.part(index).role {
            ChildRole::Controller { .. } => meaning(running(&self.controllers), self.controllers.len()),
            ChildRole::Worker => format!(
                "{} of {} workers are left, and they receive its requests",
                running(&self.workers),
                self.workers.len()
            ),
        };
        let part = self.part(index);
        let next = match again {
            Some(wait) => format!("it restarts in {}", humantime::format_duration(wait)),
            None => format!("start it again: {}", part.command_line()),
        };
        format!("{} (pid {pid}) {}: {meaning}\n  {next}", part.name, part::end_in_words(status))
    }

    /// Stops the workers, then the controllers, so that no worker searches for a controller. Kills
    /// the processes that do not stop in time.
    pub(crate) async fn shutdown(mut self) {
        let patience = self.plan.grace + STOP_MARGIN;
        for parts in [&mut self.workers, &mut self.controllers] {
            let stopped = join_all(parts.iter_mut().map(ChildServer::stop));
            if tokio::time::timeout(patience, stopped).await.is_err() {
                tracing::warn!("a process did not stop in time: killing it");
            }
        }
    }

    /// Returns the id of the cluster.
    pub(crate) fn id(&self) -> &str {
        &self.cluster
    }

    /// Returns the client address of each controller.
    pub(crate) fn endpoints(&self) -> Vec<String> {
        self.record.controllers.iter().map(|place| reachable(place.client).to_string()).collect()
    }

    /// Returns the role, pid and addresses of every running process.
    pub(crate) fn whereabouts(&self) -> Vec<ProcessAddress> {
        let controllers = self.controllers.iter().filter_map(|part| {
            let ChildRole::Controller { id } = part.role else { return None };
            let place = self.record.controller(id)?;
            Some(ProcessAddress::Controller {
                name: part.name.clone(),
                id,
                pid: part.pid()?,
                client: place.client.to_string(),
                internal: place.internal.to_string(),
            })
        });
        let workers = self.workers.iter().filter_map(|part| {
            let address = self.record.worker(&part.name)?.to_string();
            Some(ProcessAddress::Worker { name: part.name.clone(), pid: part.pid()?, address })
        });
        controllers.chain(workers).collect()
    }

    /// Returns a client per controller, connected to this controller alone.
    fn admins(&self) -> Result<Vec<Admin>, CommandFailure> {
        let admin = |endpoint: &String| {
            let address: Address =
                endpoint.parse().map_err(|error| CommandFailure::failed(format!("{error}")))?;
            Ok(Admin::new(Endpoints::new(vec![address])?))
        };
        self.endpoints().iter().map(admin).collect()
    }
}

/// Describes the effect of the number of remaining controllers.
fn meaning(running: usize, all: usize) -> String {
    let majority = all / 2 + 1;
    match running >= majority {
        true => format!("{running} of {all} controllers are left, and {majority} suffice for writes"),
        false => format!(
            "{running} of {all} controllers are left: writes need {majority}; deployed functions are still served if a controller is left"
        ),
    }
}

fn read<T: DeserializeOwned>(part: &str, line: &str) -> Result<T, CommandFailure> {
    serde_json::from_str(line).map_err(|error| {
        CommandFailure::failed(format!("{part} printed {line:?} in place of its ready line: {error}"))
    })
}

fn address(part: &str, text: &str) -> Result<SocketAddr, CommandFailure> {
    text.parse().map_err(|error| CommandFailure::failed(format!("{part} listens at {text:?}: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_controller_is_reported_with_the_remaining_ones() {
        assert_eq!(meaning(2, 3), "2 of 3 controllers are left, and 2 suffice for writes");
        assert!(meaning(1, 3).contains("writes need 2"));
    }
}
