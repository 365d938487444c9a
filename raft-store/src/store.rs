//! Opens the log and the state machine of a data directory, and checks that both fit together.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::watch;

use crate::data_dir::{DataDir, DirectoryOwner};
use crate::error::Error;
use crate::fs::DiskFs;
use crate::log::{ExpectedLog, LogStore, missing_identity};
use crate::machine::StateMachine;
use crate::machine_store::StateMachineStore;

/// The two halves that `openraft::Raft::new` takes. Both are closed when the Raft node with them is
/// shut down; the directory's lock is released with the log.
pub struct RaftStore<M: StateMachine> {
    pub log: LogStore<M>,
    /// The state machine. Take a [`StateMachineStore::reader`] before openraft takes the state machine.
    pub machine: StateMachineStore<M>,
}

/// Opens a data directory for the member that `identity` names. A new directory becomes that
/// member's. Blocks, because the log and the snapshot are read completely.
///
/// # Errors
/// [`Error::OtherIdentity`] if the directory belongs to another member; [`Error::Damaged`],
/// [`Error::Missing`], [`Error::UnknownFormat`], [`Error::UnknownCommand`] or [`Error::BadState`]
/// if its contents cannot be trusted or read; [`Error::Io`] and [`Error::Sled`].
pub fn open<M: StateMachine>(dir: DataDir, identity: &DirectoryOwner) -> Result<RaftStore<M>, Error> {
    open_with(dir, identity, LogStore::open)
}

/// Like [`open`], with a log that the caller opens.
pub(crate) fn open_with<M: StateMachine>(
    mut dir: DataDir,
    identity: &DirectoryOwner,
    open_log: impl FnOnce(&Path, ExpectedLog, watch::Receiver<Option<u64>>) -> Result<LogStore<M>, Error>,
) -> Result<RaftStore<M>, Error> {
    let expect = match dir.identity() {
        Some(found) if found != identity => {
            return Err(Error::OtherIdentity {
                path: dir.path().to_owned(),
                found: found.to_string(),
                wanted: identity.to_string(),
            });
        }
        Some(_) => ExpectedLog::Log,
        None => ExpectedLog::Nothing,
    };
    let machine = StateMachineStore::open(Arc::new(DiskFs::with_spares()), dir.path().join("snapshots"))?;
    let mut log = open_log(dir.path(), expect, machine.covered())?;
    if expect == ExpectedLog::Nothing && machine.last().is_some() {
        return Err(missing_identity("there is a snapshot"));
    }
    let covered = machine.last().map(|last| last.index);
    let purged = log.purged().map(|last| last.index);
    if purged > covered {
        return Err(Error::Missing {
            what: "a snapshot".to_owned(),
            because: format!("the log begins after entry {}", purged.unwrap_or_default()),
        });
    }
    if expect == ExpectedLog::Nothing {
        // The identity is written last, so that every directory with an identity has a log.
        dir.set_owner(identity)?;
    }
    log.keep_locked(dir);
    Ok(RaftStore { log, machine })
}
