//! A simple machine with predictable states, and helpers for tests of a store.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use millrace_cluster_state::{ControllerId, UnknownRules};
use millrace_types::{ClusterId, Digest};
use openraft::storage::{RaftLogStorage, RaftLogStorageExt};
use openraft::{CommittedLeaderId, EntryPayload, RaftLogReader};
use serde::{Deserialize, Serialize};

use crate::log::{ExpectedLog, LogStore};
use crate::{DataDir, DirectoryOwner, Entry, Error, LogId, RaftStore, StateMachine, open};

/// A machine that stores every command's value with the index of its entry.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RecordingMachine(pub(super) Vec<(u64, u64)>);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Command {
    Add(u64),
    /// A command that only makes its entry large.
    Pad(String),
}

impl StateMachine for RecordingMachine {
    type Command = Command;
    type Outcome = usize;
    type DecodeError = rmp_serde::decode::Error;

    fn check_rules(&self, _: &Command) -> Result<(), UnknownRules> {
        Ok(())
    }

    fn apply(&mut self, index: u64, command: &Command) -> usize {
        let value = match command {
            Command::Add(value) => *value,
            Command::Pad(text) => text.len() as u64,
        };
        self.0.push((index, value));
        self.0.len()
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        out.write_all(&rmp_serde::to_vec_named(self).unwrap())
    }

    fn digest(&self) -> Digest {
        Digest::of(&rmp_serde::to_vec_named(self).unwrap())
    }

    fn read_from(from: &mut dyn Read) -> Result<Self, Self::DecodeError> {
        rmp_serde::from_read(from)
    }
}

impl Command {
    /// Creates a command that makes its entry larger by this many bytes.
    pub(super) fn pad(bytes: usize, letter: u64) -> Self {
        Self::Pad(char::from(b'a' + (letter % 26) as u8).to_string().repeat(bytes))
    }
}

pub(crate) fn position(term: u64, index: u64) -> LogId {
    LogId::new(CommittedLeaderId::new(term, 1), index)
}

pub(crate) fn entry(term: u64, index: u64, commands: Vec<Command>) -> Entry<RecordingMachine> {
    Entry::<RecordingMachine> { log_id: position(term, index), payload: EntryPayload::Normal(commands) }
}

/// Returns the entries `from..to` of term 1, each of which adds its own index.
pub(super) fn entries(from: u64, to: u64) -> Vec<Entry<RecordingMachine>> {
    (from..to).map(|index| entry(1, index, vec![Command::Add(index)])).collect()
}

/// Returns the machine after the [`entries`] `0..to`.
pub(super) fn tally(to: u64) -> RecordingMachine {
    RecordingMachine((0..to).map(|index| (index, index)).collect())
}

pub(super) fn identity() -> DirectoryOwner {
    DirectoryOwner {
        cluster: ClusterId(Arc::from("test-cluster")),
        controller: ControllerId(1),
        directory: "d1".to_owned(),
    }
}

pub(super) fn open_at(path: &Path) -> Result<RaftStore<RecordingMachine>, Error> {
    open(DataDir::open(path)?, &identity())
}

/// Opens only the log, which a test may purge without a snapshot.
pub(super) fn open_log(path: &Path, expect: ExpectedLog) -> Result<LogStore<RecordingMachine>, Error> {
    LogStore::open(path, expect, everything_covered())
}

pub(super) fn everything_covered() -> tokio::sync::watch::Receiver<Option<u64>> {
    tokio::sync::watch::Sender::new(Some(u64::MAX)).subscribe()
}

/// Returns all entries in the log.
pub(super) async fn all(log: &mut LogStore<RecordingMachine>) -> Vec<Entry<RecordingMachine>> {
    log.try_get_log_entries(0..).await.unwrap()
}

pub(super) async fn append(log: &mut LogStore<RecordingMachine>, entries: Vec<Entry<RecordingMachine>>) {
    log.blocking_append(entries).await.unwrap();
}

pub(super) async fn last_index(log: &mut LogStore<RecordingMachine>) -> Option<u64> {
    log.get_log_state().await.unwrap().last_log_id.map(|last| last.index)
}

/// Returns the seed in `MILLRACE_SEED`, or else a random one. Prints the seed, so that a failure
/// can be repeated.
pub(super) fn seed() -> u64 {
    let given = std::env::var("MILLRACE_SEED").ok().map(|seed| seed.parse().unwrap());
    let seed = given.unwrap_or_else(|| RandomState::new().build_hasher().finish());
    eprintln!("MILLRACE_SEED={seed}");
    seed
}
