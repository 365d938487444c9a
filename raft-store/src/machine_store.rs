//! openraft's state machine storage: the machine in memory, published to readers after every batch,
//! and its snapshots on disk.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use openraft::storage::RaftStateMachine;
use openraft::{EntryPayload, OptionalSend, RaftSnapshotBuilder, Snapshot};
use tokio::sync::watch;

use crate::config::{Entry, TypeConfig};
use crate::digests::{Digests, RecentDigests};
use crate::error::{Error, RaftOperation};
use crate::fs::Fs;
use crate::machine::StateMachine;
use crate::raft_ids::{LogId, SnapshotMeta, StorageError, StoredMembership};
use crate::snapshot::SnapshotFile;
use crate::snapshot::directory::{self, SnapshotDir, SnapshotReceiver, StoredSnapshot};
use crate::snapshot::format::SnapshotLayout;

/// The state after a log entry. Immutable: a reader may keep it for any time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AppliedState<M> {
    pub state: M,
    /// The last entry that the state includes.
    pub last: Option<LogId>,
    /// The membership at that entry.
    pub membership: StoredMembership,
}

/// A reader of the replicated state. Cheap to clone.
#[derive(Debug, Clone)]
pub struct StateReader<M> {
    applied: watch::Receiver<Arc<AppliedState<M>>>,
    digests: watch::Receiver<RecentDigests>,
}

impl<M> StateReader<M> {
    /// Returns the latest state. A batch of commands is visible completely or not at all.
    #[must_use]
    pub fn latest(&self) -> Arc<AppliedState<M>> {
        Arc::clone(&self.applied.borrow())
    }

    /// Returns a receiver of the states that follow. States in quick succession are merged into the
    /// latest.
    #[must_use]
    pub fn watch(&self) -> watch::Receiver<Arc<AppliedState<M>>> {
        self.applied.clone()
    }

    /// Returns a receiver of the newest digests of the state.
    #[must_use]
    pub fn digests(&self) -> watch::Receiver<RecentDigests> {
        self.digests.clone()
    }
}

/// openraft's state machine storage, for a single data directory.
pub struct StateMachineStore<M> {
    applied: AppliedState<M>,
    published: watch::Sender<Arc<AppliedState<M>>>,
    snapshots: SnapshotPublisher,
    digests: Digests<M>,
}

/// The snapshot directory, and the channel that publishes the last covered entry.
#[derive(Clone)]
struct SnapshotPublisher {
    shelf: Arc<SnapshotDir>,
    covered: watch::Sender<Option<u64>>,
}

impl SnapshotPublisher {
    /// Publishes that a snapshot with this metadata is durable.
    fn cover(&self, meta: &SnapshotMeta) {
        let index = meta.last_log_id.map(|last| last.index);
        self.covered.send_modify(|covered| *covered = index.max(*covered));
    }

    fn newest<M: StateMachine>(&self) -> Result<Option<Snapshot<TypeConfig<M>>>, Error> {
        let newest = self.shelf.newest()?;
        Ok(newest.map(|(meta, file)| Snapshot { meta, snapshot: Box::new(file) }))
    }
}

impl<M: StateMachine> StateMachineStore<M> {
    /// Opens the snapshots in `dir` and reads the newest. Blocks.
    pub(crate) fn open(fs: Arc<dyn Fs>, dir: PathBuf) -> Result<Self, Error> {
        let (shelf, found) = SnapshotDir::open(fs, dir)?;
        let applied = match found {
            None => AppliedState::default(),
            Some(StoredSnapshot { checked, file }) => AppliedState {
                state: read_state(&file, &checked)?,
                last: checked.meta.last_log_id,
                membership: checked.meta.last_membership,
            },
        };
        let covered = watch::Sender::new(applied.last.map(|last| last.index));
        let published = watch::Sender::new(Arc::new(applied.clone()));
        let snapshots = SnapshotPublisher { shelf: Arc::new(shelf), covered };
        Ok(Self { applied, published, snapshots, digests: Digests::new() })
    }

    /// Returns a reader of the state.
    #[must_use]
    pub fn reader(&self) -> StateReader<M> {
        StateReader { applied: self.published.subscribe(), digests: self.digests.recent() }
    }

    /// Sets the number of entries between two digests.
    #[cfg(any(test, feature = "sim"))]
    pub fn set_digest_every(&mut self, entries: std::num::NonZeroU64) {
        self.digests.set_every(entries.get());
    }

    /// Corrupts the state in memory, for tests of divergence.
    #[cfg(any(test, feature = "sim"))]
    pub fn corrupt(&mut self, corrupt: impl FnOnce(&mut M)) {
        corrupt(&mut self.applied.state);
        self.publish();
    }

    /// Returns a handle that creates files for received snapshots.
    #[must_use]
    pub fn receiver(&self) -> SnapshotReceiver {
        SnapshotReceiver::new(Arc::clone(&self.snapshots.shelf))
    }

    /// Returns a receiver of the last log index that a durable snapshot covers.
    pub(crate) fn covered(&self) -> watch::Receiver<Option<u64>> {
        self.snapshots.covered.subscribe()
    }

    /// Returns the last entry that the state includes.
    pub(crate) fn last(&self) -> Option<LogId> {
        self.applied.last
    }

    fn publish(&self) {
        self.published.send_replace(Arc::new(self.applied.clone()));
    }

    fn apply_entry(&mut self, entry: Entry<M>) -> Result<Vec<M::Outcome>, Error> {
        let AppliedState { state, last, membership } = &mut self.applied;
        let index = entry.log_id.index;
        *last = Some(entry.log_id);
        let outcomes = match entry.payload {
            EntryPayload::Blank => Vec::new(),
            EntryPayload::Normal(commands) => {
                let apply = |command| {
                    state.check_rules(command).map_err(|source| Error::UnknownRules { index, source })?;
                    Ok(state.apply(index, command))
                };
                commands.iter().map(apply).collect::<Result<_, _>>()?
            }
            EntryPayload::Membership(new) => {
                *membership = StoredMembership::new(Some(entry.log_id), new);
                Vec::new()
            }
        };
        self.digests.applied(index, &self.applied.state);
        Ok(outcomes)
    }

    async fn install(&mut self, meta: SnapshotMeta, file: SnapshotFile) -> Result<(), Error> {
        let snapshots = self.snapshots.clone();
        let expected = meta.clone();
        let state: M = retry_on_shortage("installing a snapshot", move || {
            let checked = file.check()?;
            if checked.meta != expected {
                let flaw = format!("it covers {}, and was announced as {expected}", checked.meta);
                return Err(Error::Damaged { what: format!("received {file:?}"), flaw });
            }
            let state = read_state(&file, &checked)?;
            snapshots.shelf.put_received(&checked.meta, &file)?;
            snapshots.cover(&checked.meta);
            Ok(state)
        })
        .await?;
        self.applied = AppliedState { state, last: meta.last_log_id, membership: meta.last_membership };
        self.publish();
        Ok(())
    }
}

fn read_state<M: StateMachine>(file: &SnapshotFile, checked: &SnapshotLayout) -> Result<M, Error> {
    let state = M::read_from(&mut file.state(checked));
    state.map_err(|error| Error::BadState { what: file.what(), reason: error.to_string() })
}

/// Pause before file work is retried after a lack of descriptors or space.
const SHORTAGE_PAUSE: Duration = Duration::from_secs(5);

/// Runs file work outside the async threads, and retries while it fails for lack of descriptors or
/// disk space. Without the retries openraft would halt the node, because it does so on any error of
/// a snapshot.
async fn retry_on_shortage<T: Send + 'static>(
    doing: &'static str,
    work: impl Fn() -> Result<T, Error> + Send + Sync + 'static,
) -> Result<T, Error> {
    let work = Arc::new(work);
    let mut waited = false;
    loop {
        let attempt = Arc::clone(&work);
        match blocking(move || attempt()).await {
            Err(error) if error.is_shortage() => {
                if !waited {
                    tracing::error!(%error, doing, "waiting for descriptors or disk space: close files or free space");
                }
                waited = true;
                tokio::time::sleep(SHORTAGE_PAUSE).await;
            }
            done => {
                if waited && done.is_ok() {
                    tracing::info!(doing, "file work succeeded after a wait");
                }
                return done;
            }
        }
    }
}

/// Runs file work outside the async threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| {
        Err(Error::Halted(format!("file work on a snapshot panicked or was cancelled: {error}").into()))
    })
}

/// Writes the snapshot of a state while later entries are applied.
pub struct SnapshotBuilder<M> {
    applied: Arc<AppliedState<M>>,
    snapshots: SnapshotPublisher,
}

impl<M: StateMachine> RaftSnapshotBuilder<TypeConfig<M>> for SnapshotBuilder<M> {
    async fn build_snapshot(&mut self) -> Result<Snapshot<TypeConfig<M>>, StorageError> {
        let applied = Arc::clone(&self.applied);
        let snapshots = self.snapshots.clone();
        let built = retry_on_shortage("building a snapshot", move || {
            let meta = SnapshotMeta {
                last_log_id: applied.last,
                last_membership: applied.membership.clone(),
                snapshot_id: directory::id(applied.last),
            };
            snapshots.shelf.put(&meta, &|out| applied.state.write_to(out))?;
            snapshots.cover(&meta);
            let newest = snapshots.newest()?;
            newest.ok_or_else(|| Error::Missing {
                what: "the snapshot".to_owned(),
                because: "it was written".to_owned(),
            })
        });
        built.await.map_err(|error| error.into_storage(RaftOperation::WriteSnapshot))
    }
}

impl<M: StateMachine> RaftStateMachine<TypeConfig<M>> for StateMachineStore<M> {
    type SnapshotBuilder = SnapshotBuilder<M>;

    async fn applied_state(&mut self) -> Result<(Option<LogId>, StoredMembership), StorageError> {
        Ok((self.applied.last, self.applied.membership.clone()))
    }

    async fn apply<I>(&mut self, entries: I) -> Result<Vec<Vec<M::Outcome>>, StorageError>
    where
        I: IntoIterator<Item = Entry<M>> + OptionalSend,
        I::IntoIter: OptionalSend,
    {
        let outcomes: Result<_, Error> = entries.into_iter().map(|entry| self.apply_entry(entry)).collect();
        // A partly applied state is not published: openraft halts on the error.
        let outcomes = outcomes.map_err(|error| error.into_storage(RaftOperation::Apply))?;
        self.publish();
        Ok(outcomes)
    }

    async fn get_snapshot_builder(&mut self) -> SnapshotBuilder<M> {
        // The state is captured here, because entries are applied while the snapshot is written.
        SnapshotBuilder { applied: Arc::new(self.applied.clone()), snapshots: self.snapshots.clone() }
    }

    async fn begin_receiving_snapshot(&mut self) -> Result<Box<SnapshotFile>, StorageError> {
        let shelf = Arc::clone(&self.snapshots.shelf);
        let file = retry_on_shortage("receiving a snapshot", move || shelf.receive()).await;
        file.map(Box::new).map_err(|error| error.into_storage(RaftOperation::WriteSnapshot))
    }

    async fn install_snapshot(
        &mut self,
        meta: &SnapshotMeta,
        snapshot: Box<SnapshotFile>,
    ) -> Result<(), StorageError> {
        let installed = self.install(meta.clone(), *snapshot).await;
        installed.map_err(|error| error.into_storage(RaftOperation::WriteSnapshot))
    }

    async fn get_current_snapshot(&mut self) -> Result<Option<Snapshot<TypeConfig<M>>>, StorageError> {
        let snapshots = self.snapshots.clone();
        let newest = retry_on_shortage("opening a snapshot", move || snapshots.newest()).await;
        newest.map_err(|error| error.into_storage(RaftOperation::ReadSnapshot))
    }
}
