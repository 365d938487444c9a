//! The failures of a data directory, by the operator's next step.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use openraft::AnyError;

use millrace_cluster_state::UnknownRules;

use crate::frame::RecordFault;
use crate::fs::is_shortage;
use crate::raft_ids::StorageError;

/// The reason why a data directory was refused, or why the store halted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process holds the directory's lock.
    #[error("{} is in use by {holder}: stop that process, or give this controller a data directory of its own", path.display())]
    InUse {
        path: PathBuf,
        /// The process that holds the lock, if known.
        holder: String,
    },

    /// The file or record is intact, but in a format that this build does not know.
    #[error(
        "{what} is of format {found}, but this build knows format {known}: start the build that wrote it, or a newer one"
    )]
    UnknownFormat {
        /// The name of the file or record.
        what: String,
        /// The format of the file or record.
        found: u32,
        /// The format that this build reads and writes.
        known: u32,
    },

    /// The bytes are torn, cut, flipped or foreign. They are never skipped and never repaired.
    #[error(
        "{what} is damaged ({flaw}): keep the data directory for inspection, and start a controller with a new id and an empty directory in its place (docs/operate/controllers.md). Restore a backup only if no majority of the controllers is left (docs/operate/backup.md)"
    )]
    Damaged {
        /// The name of the file or record.
        what: String,
        /// The sign of the damage.
        flaw: String,
    },

    /// A majority of the controllers has another state. This state must not be read, used for
    /// votes, or sent.
    #[error(
        "the state in {} differs from that of a majority after log entry {entry}: keep the directory for inspection, 'millrace cluster remove' its controller, and start one with a new id and an empty directory",
        path.display()
    )]
    Diverged {
        path: PathBuf,
        /// The index of the log entry.
        entry: String,
    },

    /// A part of the directory that the rest requires is missing.
    #[error(
        "{what} is missing although {because}: it was deleted or lost by the disk. Start a controller with a new id and an empty directory in its place (docs/operate/controllers.md). Restore a backup only if no majority of the controllers is left (docs/operate/backup.md)"
    )]
    Missing {
        /// The name of the missing part.
        what: String,
        /// The evidence that the part existed.
        because: String,
    },

    /// The directory belongs to another member or another cluster.
    #[error(
        "{} belongs to {found}, not to {wanted}: check the data directory and the controller's configuration", path.display()
    )]
    OtherIdentity {
        path: PathBuf,
        /// The owner of the directory.
        found: String,
        /// The member that opened the directory.
        wanted: String,
    },

    /// The identity file cannot hold the cluster id.
    #[error("cluster id {0:?} is not valid: use 1 to 128 visible ASCII characters")]
    BadClusterId(String),

    /// The identity file cannot hold the directory's id.
    #[error("directory id {0:?} is not valid: use at most 128 visible ASCII characters")]
    BadDirectoryName(String),

    /// An intact log entry does not decode, because a newer build wrote its command.
    #[error(
        "log entry {index} holds a command that this build does not know ({reason}): start the build that wrote it, or a newer one"
    )]
    UnknownCommand {
        index: u64,
        /// The decoder's message.
        reason: String,
    },

    /// A log entry needs rules that this build does not know.
    #[error("log entry {index} cannot be applied: {source}")]
    UnknownRules {
        index: u64,
        /// The rules, and the build to start instead.
        source: UnknownRules,
    },

    /// An intact snapshot has a state that the machine rejects.
    #[error(
        "{what} is intact, but this build cannot read its state: {reason}; start the build that wrote it, or keep the data directory for inspection and start a controller with a new id and an empty directory in its place (docs/operate/controllers.md)"
    )]
    BadState {
        /// The name of the snapshot.
        what: String,
        /// The machine's message.
        reason: String,
    },

    /// A value cannot be encoded as a record.
    #[error("cannot encode {what}: {reason}")]
    Encode {
        /// The name of the value.
        what: String,
        /// The encoder's message.
        reason: String,
    },

    /// The entry exceeds [`ENTRY_BYTES_MAX`](crate::ENTRY_BYTES_MAX).
    #[error("log entry {index} has {bytes} bytes, more than {max}: propose smaller batches")]
    EntryTooLarge {
        index: u64,
        /// The size of the encoded entry, in bytes.
        bytes: usize,
        /// The maximum size, in bytes.
        max: usize,
    },

    /// An append would leave a hole in the log.
    #[error("log entry {next} does not follow entry {last}: the append would leave a hole")]
    Hole {
        /// The index of the last entry in the log.
        last: u64,
        /// The index of the appended entry.
        next: u64,
    },

    #[error("{doing} {} failed: {source}", path.display())]
    Io {
        /// The operation, as a participle.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        source: io::Error,
    },

    /// sled failed. sled's own message does not name the disk.
    #[error("{doing} failed in the log's store {}: {source}", path.display())]
    Sled {
        /// The operation, as a participle.
        doing: &'static str,
        /// The directory of the store.
        path: PathBuf,
        source: sled::Error,
    },

    /// A received snapshot would use space that the log may need.
    #[error("{} has {available} bytes free, but a snapshot must leave {kept}: free space on that disk", path.display())]
    NoSpace {
        /// The folder of snapshots.
        path: PathBuf,
        /// Free bytes on the disk of the folder.
        available: u64,
        /// Bytes that must stay free.
        kept: u64,
    },

    /// An earlier write or sync failed. The contents of the disk since then are unknown, so the
    /// store neither writes nor acknowledges anything.
    #[error("the store has halted: {0}; check that the disk works and has space, then restart the process")]
    Halted(Arc<str>),
}

impl Error {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }

    pub(crate) fn sled(doing: &'static str, path: &Path, source: sled::Error) -> Self {
        match source {
            // sled reports a file that contradicts itself as a bug.
            sled::Error::Corruption { .. } | sled::Error::ReportableBug(_) => Self::Damaged {
                what: format!("the log's store {}", path.display()),
                flaw: format!("{doing} failed: {source}"),
            },
            source => Self::Sled { doing, path: path.to_owned(), source },
        }
    }

    /// Returns whether the operation may succeed after another file is closed or deleted.
    pub(crate) fn is_shortage(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_shortage(source))
    }

    pub(crate) fn flaw(what: impl Into<String>, flaw: RecordFault) -> Self {
        let what = what.into();
        match flaw {
            RecordFault::UnknownFormat { found, known } => Self::UnknownFormat { what, found, known },
            RecordFault::Damaged(flaw) => Self::Damaged { what, flaw },
        }
    }

    /// Converts the error to openraft's type. openraft halts the node on every storage error.
    pub(crate) fn into_storage(self, subject: RaftOperation) -> StorageError {
        let (subject, verb) = match subject {
            RaftOperation::ReadLog => (openraft::ErrorSubject::Logs, openraft::ErrorVerb::Read),
            RaftOperation::WriteLog => (openraft::ErrorSubject::Logs, openraft::ErrorVerb::Write),
            RaftOperation::ReadVote => (openraft::ErrorSubject::Vote, openraft::ErrorVerb::Read),
            RaftOperation::WriteVote => (openraft::ErrorSubject::Vote, openraft::ErrorVerb::Write),
            RaftOperation::Apply => (openraft::ErrorSubject::StateMachine, openraft::ErrorVerb::Write),
            RaftOperation::ReadSnapshot => {
                (openraft::ErrorSubject::Snapshot(None), openraft::ErrorVerb::Read)
            }
            RaftOperation::WriteSnapshot => {
                (openraft::ErrorSubject::Snapshot(None), openraft::ErrorVerb::Write)
            }
        };
        openraft::StorageIOError::new(subject, verb, AnyError::new(&self)).into()
    }
}

/// The operation of openraft that failed.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RaftOperation {
    ReadLog,
    WriteLog,
    ReadVote,
    WriteVote,
    Apply,
    ReadSnapshot,
    WriteSnapshot,
}
