//! The ports of a group's processes, recorded in a file beside their folders. Controllers know each
//! other by their addresses. When all controllers restart, each must listen at its recorded
//! address.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::failure::CommandFailure;

const FILE: &str = "group.json";
const VERSION: u32 = 1;

/// The recorded addresses of all processes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct GroupRecord {
    /// The controllers, by id.
    pub(crate) controllers: Vec<ControllerAddresses>,
    /// The workers, by name.
    pub(crate) workers: Vec<(String, SocketAddr)>,
}

/// The recorded addresses of a controller.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ControllerAddresses {
    pub(crate) id: u64,
    pub(crate) client: SocketAddr,
    pub(crate) internal: SocketAddr,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupFile {
    version: u32,
    controllers: Vec<ControllerAddresses>,
    workers: BTreeMap<String, SocketAddr>,
}

impl GroupRecord {
    pub(crate) fn controller(&self, id: u64) -> Option<&ControllerAddresses> {
        self.controllers.iter().find(|place| place.id == id)
    }

    pub(crate) fn worker(&self, name: &str) -> Option<SocketAddr> {
        self.workers.iter().find(|(it, _)| it == name).map(|&(_, address)| address)
    }

    /// Records the addresses of a controller.
    pub(crate) fn put_controller(&mut self, place: ControllerAddresses) {
        self.controllers.retain(|it| it.id != place.id);
        self.controllers.push(place);
        self.controllers.sort_by_key(|it| it.id);
    }

    /// Records the address of a worker.
    pub(crate) fn put_worker(&mut self, name: &str, address: SocketAddr) {
        self.workers.retain(|(it, _)| it != name);
        self.workers.push((name.to_owned(), address));
        self.workers.sort();
    }
}

fn file(data_dir: &Path) -> PathBuf {
    data_dir.join(FILE)
}

/// Reads the record. Without a file, no process was started yet, and the record is empty.
pub(crate) fn read(data_dir: &Path) -> Result<GroupRecord, CommandFailure> {
    let path = file(data_dir);
    let refused = |why: String| {
        CommandFailure::failed(format!("{}: {why}", path.display()))
            .hint("the file holds the ports at which the controllers know each other: restore the original")
    };
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(GroupRecord::default()),
        Err(error) => return Err(refused(error.to_string())),
    };
    let stored: GroupFile = serde_json::from_slice(&bytes).map_err(|error| refused(error.to_string()))?;
    if stored.version != VERSION {
        return Err(refused(format!(
            "unknown version {}: this build reads version {VERSION}",
            stored.version
        )));
    }
    Ok(GroupRecord { controllers: stored.controllers, workers: stored.workers.into_iter().collect() })
}

/// Replaces the record's file atomically.
pub(crate) fn write(data_dir: &Path, record: &GroupRecord) -> Result<(), CommandFailure> {
    let path = file(data_dir);
    let failed = |error: String| CommandFailure::failed(format!("cannot write {}: {error}", path.display()));
    let stored = GroupFile {
        version: VERSION,
        controllers: record.controllers.clone(),
        workers: record.workers.iter().cloned().collect(),
    };
    let text = serde_json::to_string_pretty(&stored).map_err(|error| failed(error.to_string()))?;
    let replace = || {
        std::fs::create_dir_all(data_dir)?;
        let mut new = tempfile::NamedTempFile::new_in(data_dir)?;
        new.write_all(text.as_bytes())?;
        new.as_file().sync_all()?;
        new.persist(&path).map_err(|error| error.error)?;
        std::io::Result::Ok(())
    };
    replace().map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(id: u64, port: u16) -> ControllerAddresses {
        let at = |port| crate::process::loopback(port);
        ControllerAddresses { id, client: at(port), internal: at(port + 1) }
    }

    #[test]
    fn a_record_round_trips_through_its_file() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(read(folder.path()), Ok(GroupRecord::default()));
        let mut record = GroupRecord::default();
        for place in [place(2, 20), place(1, 10), place(2, 30)] {
            record.put_controller(place);
        }
        record.put_worker("worker-1", crate::process::loopback(5));
        write(folder.path(), &record).unwrap();
        assert_eq!(read(folder.path()).unwrap(), record);
        assert_eq!(record.controllers, [place(1, 10), place(2, 30)]);
        assert_eq!(record.worker("worker-1"), Some(crate::process::loopback(5)));
    }

    #[test]
    fn a_malformed_record_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        for text in ["", "{}", r#"{"version": 2, "controllers": [], "workers": {}}"#] {
            std::fs::write(file(folder.path()), text).unwrap();
            assert!(read(folder.path()).unwrap_err().message.unwrap().contains(FILE), "{text}");
        }
    }
}
