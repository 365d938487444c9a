//! What can go wrong with a data directory, by what the operator does about it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use openraft::AnyError;

use millrace_cluster_state::UnknownRules;

use crate::config::StorageError;
use crate::frame::Flaw;
use crate::fs::is_shortage;

/// Why a data directory was refused, or why the store halted.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Another process holds the directory's lock.
    #[error("{} is in use by {holder}: stop it, or give this one a data directory of its own", path.display())]
    InUse {
        /// The data directory.
        path: PathBuf,
        /// The process that holds it, as far as it is known.
        holder: String,
    },

    /// Intact, but written in a format this build does not know.
    #[error(
        "{what} is of format {found} and this build knows format {known}: start the build that wrote it, or a newer one"
    )]
    UnknownFormat {
        /// The file or record.
        what: String,
        /// The format it says it has.
        found: u32,
        /// The format this build reads and writes.
        known: u32,
    },

    /// Torn, cut short or flipped, or not ours at all. Never skipped and never repaired.
    #[error(
        "{what} is damaged ({flaw}): this copy cannot be trusted; keep the data directory for inspection, and bring the node back with an empty one, as a learner with a new id, or from a backup"
    )]
    Damaged {
        /// The file or record.
        what: String,
        /// What gave it away.
        flaw: String,
    },

    /// A majority of the controllers had another state: this one must not be read, voted with or sent.
    #[error(
        "the state in {} differs from that of a majority after log entry {entry}: keep the directory for inspection, 'millrace cluster remove' its controller, and start one with an empty directory and another id",
        path.display()
    )]
    Diverged {
        /// The data directory.
        path: PathBuf,
        /// The entry.
        entry: String,
    },

    /// A part of the directory is gone that the rest cannot do without.
    #[error(
        "{what} is missing although {because}: it was deleted or the disk lost it; put it back from a backup, or bring the node back with an empty directory, as a learner with a new id"
    )]
    Missing {
        /// What is missing.
        what: String,
        /// Why it must have been there.
        because: String,
    },

    /// The directory belongs to another member, or to another cluster.
    #[error(
        "{} belongs to {found}, not to {wanted}: check the data directory and the node's configuration", path.display()
    )]
    OtherIdentity {
        /// The data directory.
        path: PathBuf,
        /// Who it belongs to.
        found: String,
        /// Who asked for it.
        wanted: String,
    },

    /// A cluster id that the identity file cannot hold.
    #[error("cluster id {0:?} is not valid: use 1 to 128 visible ASCII characters")]
    BadClusterId(String),

    /// A name of the directory that the identity file cannot hold.
    #[error("directory name {0:?} is not valid: use at most 128 visible ASCII characters")]
    BadDirectoryName(String),

    /// An intact log entry that does not decode: a command of a newer build.
    #[error(
        "log entry {index} holds a command that this build does not know ({reason}): start the build that wrote it, or a newer one"
    )]
    UnknownCommand {
        /// The entry's index.
        index: u64,
        /// What the decoder said.
        reason: String,
    },

    /// A log entry of rules that this build does not know.
    #[error("log entry {index} cannot be applied: {source}")]
    UnknownRules {
        /// The entry's index.
        index: u64,
        /// The rules, and the build to start instead.
        source: UnknownRules,
    },

    /// An intact snapshot whose state the machine does not take.
    #[error("{what} is intact and holds no state this build can take: {reason}")]
    BadState {
        /// The snapshot.
        what: String,
        /// What the machine said.
        reason: String,
    },

    /// A value that cannot be written as a record.
    #[error("cannot encode {what}: {reason}")]
    Encode {
        /// What was being encoded.
        what: String,
        /// What the encoder said.
        reason: String,
    },

    /// An entry above [`ENTRY_BYTES_MAX`](crate::ENTRY_BYTES_MAX).
    #[error("log entry {index} is {bytes} bytes and the most is {max}: propose smaller batches")]
    EntryTooLarge {
        /// The entry's index.
        index: u64,
        /// Its encoded size.
        bytes: usize,
        /// The limit.
        max: usize,
    },

    /// The log was asked to leave a hole.
    #[error("log entry {next} does not follow entry {last}: the log would have a hole")]
    Hole {
        /// The last entry there is.
        last: u64,
        /// The entry that was to be appended.
        next: u64,
    },

    /// A file operation failed.
    #[error("{doing} {} failed: {source}", path.display())]
    Io {
        /// The operation, as a participle.
        doing: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// sled failed. It does not say itself which of a machine's disks it works on.
    #[error("{doing} failed in the log's store {}: {source}", path.display())]
    Sled {
        /// The operation, as a participle.
        doing: &'static str,
        /// The store's directory.
        path: PathBuf,
        /// sled's error.
        source: sled::Error,
    },

    /// A received snapshot would take the space that the log may come to need.
    #[error("{} has {available} bytes free, and a snapshot must leave {kept}: free space on that disk", path.display())]
    NoSpace {
        /// The folder of snapshots.
        path: PathBuf,
        /// Bytes free on its disk.
        available: u64,
        /// Bytes that must stay free.
        kept: u64,
    },

    /// An earlier write or sync failed. What reached the disk since is unknown, so nothing more
    /// is written and nothing more is acknowledged.
    #[error("the store has halted: {0}; see that the disk works and has space, then start the process again")]
    Halted(Arc<str>),
}

impl Error {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }

    pub(crate) fn sled(doing: &'static str, path: &Path, source: sled::Error) -> Self {
        match source {
            // What it calls a bug is a file that contradicts itself.
            sled::Error::Corruption { .. } | sled::Error::ReportableBug(_) => Self::Damaged {
                what: format!("the log's store {}", path.display()),
                flaw: format!("{doing} failed: {source}"),
            },
            source => Self::Sled { doing, path: path.to_owned(), source },
        }
    }

    /// Whether the same may succeed once another file is closed or deleted.
    pub(crate) fn is_shortage(&self) -> bool {
        matches!(self, Self::Io { source, .. } if is_shortage(source))
    }

    pub(crate) fn flaw(what: impl Into<String>, flaw: Flaw) -> Self {
        let what = what.into();
        match flaw {
            Flaw::UnknownFormat { found, known } => Self::UnknownFormat { what, found, known },
            Flaw::Damaged(flaw) => Self::Damaged { what, flaw },
        }
    }

    /// As openraft wants it. openraft halts the node on every storage error.
    pub(crate) fn into_storage(self, subject: Subject) -> StorageError {
        let (subject, verb) = match subject {
            Subject::ReadLog => (openraft::ErrorSubject::Logs, openraft::ErrorVerb::Read),
            Subject::WriteLog => (openraft::ErrorSubject::Logs, openraft::ErrorVerb::Write),
            Subject::ReadVote => (openraft::ErrorSubject::Vote, openraft::ErrorVerb::Read),
            Subject::WriteVote => (openraft::ErrorSubject::Vote, openraft::ErrorVerb::Write),
            Subject::Apply => (openraft::ErrorSubject::StateMachine, openraft::ErrorVerb::Write),
            Subject::ReadSnapshot => (openraft::ErrorSubject::Snapshot(None), openraft::ErrorVerb::Read),
            Subject::WriteSnapshot => (openraft::ErrorSubject::Snapshot(None), openraft::ErrorVerb::Write),
        };
        openraft::StorageIOError::new(subject, verb, AnyError::new(&self)).into()
    }
}

/// What openraft was doing when an error came.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Subject {
    ReadLog,
    WriteLog,
    ReadVote,
    WriteVote,
    Apply,
    ReadSnapshot,
    WriteSnapshot,
}
