//! The configuration of a group, and the command line of each process. Pure logic.

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use super::part::{ChildRole, ChildServer, LogPrefix};
use super::record::GroupRecord;
use super::restart::RestartPolicy;
use crate::cluster::{nth, reachable};
use crate::failure::CommandFailure;

/// The configuration of the group to start.
#[derive(Debug, Clone)]
pub(crate) struct GroupPlan {
    /// The data directory. Each process has a folder in it.
    pub(crate) data_dir: PathBuf,
    /// The first controller's address for clients. The other controllers use the next ports, or
    /// free ports if this is port 0.
    pub(crate) client: SocketAddr,
    /// The first controller's internal address, likewise. `None` selects the folder's record, or
    /// `internal_usual`.
    pub(crate) internal: Option<SocketAddr>,
    /// The default of `internal`, for workers and other controllers.
    pub(crate) internal_usual: SocketAddr,
    /// The first worker's listen address, likewise.
    pub(crate) worker: SocketAddr,
    pub(crate) controllers: NonZeroU32,
    pub(crate) workers: NonZeroU32,
    /// The options of every process.
    pub(crate) common: Vec<String>,
    /// The options of every controller.
    pub(crate) control: Vec<String>,
    /// The options of every worker.
    pub(crate) machine: Vec<String>,
    /// The time that running requests may take at the end.
    pub(crate) grace: Duration,
    pub(crate) restart: RestartPolicy,
    pub(crate) log: LogPrefix,
}

impl GroupPlan {
    /// Refuses a plan that does not match the group in the folder.
    pub(super) fn check(&self, record: &GroupRecord) -> Result<(), CommandFailure> {
        let has = record.controllers.len();
        let wanted = self.controllers.get() as usize;
        if has > wanted {
            let message = format!("{} holds a group of {has} controllers", self.data_dir.display());
            return Err(
                CommandFailure::usage(message).hint(format!("start all of them: --controllers {has}"))
            );
        }
        let Some(first) = self.internal.filter(|asked| asked.port() != 0) else { return Ok(()) };
        for (index, place) in (0u16..).zip(&record.controllers) {
            if nth(first, index)? != place.internal {
                let message = format!(
                    "the other controllers know controller {} of {} at {}",
                    place.id,
                    self.data_dir.display(),
                    place.internal
                );
                return Err(CommandFailure::usage(message)
                    .hint("omit --internal-listen: the controller then listens at that address"));
            }
        }
        Ok(())
    }

    /// Returns the controller of this id, not started yet.
    pub(super) fn controller(&self, record: &GroupRecord, id: u64) -> Result<ChildServer, CommandFailure> {
        let index = u16::try_from(id - 1).unwrap_or(u16::MAX);
        let known = record.controller(id);
        // The first controller has the same folder as the controller of a cluster of one.
        let folder = if id == 1 { "controller".to_owned() } else { format!("controller-{id}") };
        let mut words = self.words("controller", &folder);
        words.extend(["--id".to_owned(), id.to_string()]);
        words.extend(self.control.iter().cloned());
        let others: Vec<_> = record.controllers.iter().filter(|place| place.id != id).collect();
        let entry = match (known, others.as_slice()) {
            (None, []) => vec!["--bootstrap".to_owned()],
            // A controller that the record names has lost its data if its folder is empty. Without
            // `--bootstrap` or `--join`, the controller refuses an empty folder.
            (Some(_), _) => Vec::new(),
            (None, others) => {
                let at: Vec<_> = others.iter().map(|place| place.internal.to_string()).collect();
                vec!["--join".to_owned(), at.join(",")]
            }
        };
        let client = match (self.client.port(), known) {
            (0, Some(known)) => known.client,
            _ => nth(self.client, index)?,
        };
        let internal = match known {
            Some(known) => known.internal,
            None => nth(self.internal.unwrap_or(self.internal_usual), index)?,
        };
        let name = format!("controller-{id}");
        let role = ChildRole::Controller { id };
        let mut part = ChildServer::new(name, role, words, controller_addresses(client, internal), self.log)?;
        part.entry = entry;
        Ok(part)
    }

    /// Returns the worker of this name, not started yet.
    pub(super) fn worker(
        &self,
        record: &GroupRecord,
        index: u16,
        name: String,
    ) -> Result<ChildServer, CommandFailure> {
        let mut words = self.words("worker", &name);
        let controllers: Vec<_> =
            record.controllers.iter().map(|place| reachable(place.internal).to_string()).collect();
        words.extend(["--name".to_owned(), name.clone(), "--controllers".to_owned(), controllers.join(",")]);
        words.extend(self.machine.iter().cloned());
        let listen = match (self.worker.port(), record.worker(&name)) {
            (0, Some(known)) => known,
            _ => nth(self.worker, index)?,
        };
        ChildServer::new(name, ChildRole::Worker, words, worker_addresses(listen), self.log)
    }

    fn words(&self, verb: &str, folder: &str) -> Vec<String> {
        let folder = self.data_dir.join(folder).display().to_string();
        let words = [verb.to_owned(), "--data-dir".to_owned(), folder];
        words.into_iter().chain(self.common.iter().cloned()).collect()
    }
}

/// Returns the command-line words for a controller's addresses.
pub(super) fn controller_addresses(client: SocketAddr, internal: SocketAddr) -> Vec<String> {
    let words =
        ["--listen".to_owned(), client.to_string(), "--internal-listen".to_owned(), internal.to_string()];
    words.into()
}

/// Returns the command-line words for a worker's address.
pub(super) fn worker_addresses(listen: SocketAddr) -> Vec<String> {
    vec!["--listen".to_owned(), listen.to_string()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::loopback;
    use crate::processes::record::ControllerAddresses;

    fn plan() -> GroupPlan {
        let controllers = NonZeroU32::new(3).unwrap();
        let workers = NonZeroU32::new(2).unwrap();
        GroupPlan {
            data_dir: "d".into(),
            client: loopback(8080),
            internal: None,
            internal_usual: loopback(7070),
            worker: loopback(0),
            controllers,
            workers,
            common: vec!["--log".into(), "info".into()],
            control: Vec::new(),
            machine: vec!["--gpus".into(), "1".into()],
            grace: Duration::from_secs(1),
            restart: RestartPolicy::Never,
            log: LogPrefix::Named,
        }
    }

    fn place(id: u64) -> ControllerAddresses {
        let port = 1000 + u16::try_from(id).unwrap();
        ControllerAddresses { id, client: loopback(port), internal: loopback(port + 100) }
    }

    fn record(ids: &[u64]) -> GroupRecord {
        GroupRecord { controllers: ids.iter().copied().map(place).collect(), workers: Vec::new() }
    }

    #[test]
    fn the_first_controller_bootstraps_the_cluster_and_the_others_join() {
        let line = |record: GroupRecord, id| plan().controller(&record, id).unwrap().command_line();
        assert_eq!(
            line(GroupRecord::default(), 1),
            "millrace controller --data-dir d/controller --log info --id 1 --bootstrap --listen 127.0.0.1:8080 --internal-listen 127.0.0.1:7070"
        );
        assert_eq!(
            line(record(&[1]), 3),
            "millrace controller --data-dir d/controller-3 --log info --id 3 --join 127.0.0.1:1101 --listen 127.0.0.1:8082 --internal-listen 127.0.0.1:7072"
        );
    }

    #[test]
    fn a_recorded_group_restarts_at_its_recorded_addresses() {
        let line = plan().controller(&record(&[1, 2, 3]), 2).unwrap().command_line();
        assert!(line.ends_with("--id 2 --listen 127.0.0.1:8081 --internal-listen 127.0.0.1:1102"), "{line}");
        let asked = |port| GroupPlan { internal: Some(loopback(port)), ..plan() };
        assert_eq!(asked(1101).check(&record(&[1, 2])), Ok(()));
        assert_eq!(asked(0).check(&record(&[1, 2])), Ok(()));
        let moved = asked(7070).check(&record(&[1, 2])).unwrap_err();
        assert!(moved.message.unwrap().contains("127.0.0.1:1101"));
        assert!(
            plan().check(&record(&[1, 2, 3, 4, 5])).unwrap_err().hint.unwrap().contains("--controllers 5")
        );
    }

    #[test]
    fn a_worker_is_given_every_controller() {
        let line = plan().worker(&record(&[1, 2, 3]), 1, "worker-2".into()).unwrap().command_line();
        assert_eq!(
            line,
            "millrace worker --data-dir d/worker-2 --log info --name worker-2 --controllers 127.0.0.1:1101,127.0.0.1:1102,127.0.0.1:1103 --gpus 1 --listen 127.0.0.1:0"
        );
    }
}
