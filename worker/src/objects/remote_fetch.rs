//! Remote fetches of objects by their name alone (D04, D09). An object may be here, on its owner
//! node (`id.home`), or on a node that tier 2 of the index names. [`Lookup`] decides which node to
//! ask. A fetched object is stored as a copy if there is capacity. Later requests find the copy
//! here, and other nodes find the copy when the owner node is gone.

use std::fs::File;
use std::io::{self, Write as _};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use millrace_nodes::index::{IndexCapacity, Lookup, LookupAction};
use millrace_proto::worker::FetchMethod;
use millrace_types::{Bytes as Size, DataId, NodeName, Timestamp};
use tokio::task::JoinSet;

use super::directory::{DataHolders, DirectoryUnavailable};
use super::peers::PeerError;
use super::program_input::seal;
use super::{Contents, INLINE_BYTES_MAX, ObjectStore, memory};

/// Lifetime of a copy.
const COPY_FOR: Duration = Duration::from_secs(60);

/// The reason why an object cannot be fetched.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FetchError {
    /// No worker has the object: trying again does not help.
    #[error("data {id} is lost ({why}): compute it again")]
    Lost { id: DataId, why: String },
    /// Some worker may have the object: trying again may help.
    #[error("data {id} is unavailable now ({why}): try again, or compute it again")]
    Unavailable { id: DataId, why: String },
}

/// The reason why the fetch from one worker failed.
enum PullError {
    /// The worker does not have the object.
    Gone,
    /// The worker cannot be reached.
    Unreachable(String),
    /// This worker has no capacity for the object.
    NoRoom(String),
}

impl ObjectStore {
    /// Returns an object by its name, from this worker or another, within `patience`. `by` is the
    /// deadline of the request that needs the object. An object on a GPU stays there.
    pub(crate) async fn fetch(
        &self,
        id: &DataId,
        patience: Duration,
        by: Option<Timestamp>,
    ) -> Result<Contents, FetchError> {
        if let Some(contents) = self.find(id) {
            self.count(FetchMethod::Host, contents.len());
            return Ok(contents);
        }
        let objects = self.clone();
        let sought = id.clone();
        let mut fetch = JoinSet::new();
        // Dropping the set cancels the fetch if the caller gives up.
        fetch.spawn_on(
            async move { tokio::time::timeout(patience, objects.look_elsewhere(&sought, by)).await },
            &self.0.threads,
        );
        let unavailable = |why: &str| FetchError::Unavailable { id: id.clone(), why: why.to_owned() };
        match fetch.join_next().await {
            Some(Ok(Ok(found))) => found,
            Some(Ok(Err(_late))) => Err(unavailable("it did not arrive within the time of the call")),
            Some(Err(_)) | None => Err(unavailable("the worker is shutting down")),
        }
    }

    async fn look_elsewhere(&self, id: &DataId, by: Option<Timestamp>) -> Result<Contents, FetchError> {
        let found = self.ask_around(id, by).await;
        if let Err(error) = &found {
            tracing::warn!(object = %id, %error, "cannot fetch an object");
        }
        found
    }

    async fn ask_around(&self, id: &DataId, by: Option<Timestamp>) -> Result<Contents, FetchError> {
        let (mut lookup, mut step) = Lookup::begin(self.0.order, self.node(), &id.home);
        let mut findings = LookupResults::default();
        loop {
            // Count before the step: the caller may give up during it.
            self.0.asked.lock().unwrap_or_else(PoisonError::into_inner).count(&step);
            step = match &step {
                LookupAction::AskHome(node) | LookupAction::Fetch(node) => {
                    match self.pull_whole(id, node, by).await {
                        Ok(contents) => return Ok(contents),
                        Err(PullError::NoRoom(why)) => {
                            return Err(FetchError::Unavailable { id: id.clone(), why });
                        }
                        Err(PullError::Gone) => lookup.not_held(),
                        Err(PullError::Unreachable(why)) => {
                            findings.unreached = Some(unreached(id, node, &why));
                            lookup.not_held()
                        }
                    }
                }
                LookupAction::AskTier2 => {
                    let answer = self.0.whereabouts.holders(id).await;
                    lookup.held_by(&findings.take(answer))
                }
                LookupAction::Nowhere => return Err(findings.error(id)),
            };
        }
    }

    /// Fetches a whole object from one worker. If the worker does not answer at its known address,
    /// or does not have the object, its address is looked up again: another process may be the
    /// worker now.
    async fn pull_whole(
        &self,
        id: &DataId,
        node: &NodeName,
        by: Option<Timestamp>,
    ) -> Result<Contents, PullError> {
        let known = self.0.whereabouts.known(node);
        let mut refused = None;
        if let Some(address) = &known {
            match self.pull_from(id, address, by).await {
                Err(why @ (PullError::Gone | PullError::Unreachable(_))) => refused = Some(why),
                done => return done,
            }
        }
        let why = match self.0.whereabouts.ask_for(node).await {
            Ok(Some(address)) if known.as_ref() != Some(&address) => {
                return self.pull_from(id, &address, by).await;
            }
            Ok(None) => return Err(PullError::Unreachable("no controller has that worker now".to_owned())),
            // The address has not changed.
            Ok(Some(_)) => String::new(),
            Err(error) => error.to_string(),
        };
        Err(refused.unwrap_or(PullError::Unreachable(why)))
    }

    async fn pull_from(
        &self,
        id: &DataId,
        address: &str,
        by: Option<Timestamp>,
    ) -> Result<Contents, PullError> {
        let wanted = (by, &*self.0.clock);
        let mut landing = CopySink::new(self.clone());
        let mut sink = |chunk: &[u8]| landing.take(chunk);
        self.0.peers.fetch(id, address, 0, None, wanted, &mut sink).await.map_err(|error| match error {
            PeerError::Gone => PullError::Gone,
            PeerError::Unreachable(why) | PeerError::Refused(why) => PullError::Unreachable(why),
            PeerError::Sink(error) => PullError::NoRoom(error.to_string()),
        })?;
        let contents = landing.done().map_err(|error| PullError::NoRoom(error.to_string()))?;
        self.count(FetchMethod::InterNode, contents.len());
        self.keep_copy(id, &contents).await;
        Ok(contents)
    }

    /// Stores a fetched object as a copy, and reports the copy to the cluster.
    async fn keep_copy(&self, id: &DataId, contents: &Contents) {
        let Some(place) = self.0.feed.reserve().await else { return };
        let until = self.0.clock.now() + COPY_FOR;
        // Report while the index is locked: otherwise the drop of the copy could be reported first.
        let mut index = self.index();
        if index.put_copy(id, contents.clone(), until) {
            place.stored(id.clone(), Size(contents.len()));
        }
    }
}

/// The results of a lookup that has not found the object.
#[derive(Debug, Default)]
struct LookupResults {
    /// Whether tier 2 knows that no node holds the object.
    lost: bool,
    /// The error of the last query to tier 2.
    no_answer: Option<DirectoryUnavailable>,
    /// The last worker that could not be reached and may have the object.
    unreached: Option<String>,
}

impl LookupResults {
    /// Returns the nodes that hold the object according to tier 2. The owner node may have an
    /// object that tier 2 calls lost: a node that the controllers believe dead may still be
    /// reachable from others.
    fn take(&mut self, answer: Result<DataHolders, DirectoryUnavailable>) -> Vec<NodeName> {
        match answer {
            Ok(DataHolders { nodes, lost }) => {
                self.lost |= lost;
                self.no_answer = None;
                nodes
            }
            Err(why) => {
                self.no_answer = Some(why);
                Vec::new()
            }
        }
    }

    /// Returns the error of a lookup that found the object nowhere.
    fn error(self, id: &DataId) -> FetchError {
        let lost = |why: &str| FetchError::Lost { id: id.clone(), why: why.to_owned() };
        let unavailable = |why: String| FetchError::Unavailable { id: id.clone(), why };
        match self {
            Self { lost: true, .. } => lost("it was lost with the last worker that held it"),
            Self { no_answer: Some(error), unreached, .. } => {
                let home = unreached.unwrap_or_else(|| "its owner node no longer holds it".to_owned());
                unavailable(format!("{home}, and {error}"))
            }
            Self { unreached: Some(why), .. } => unavailable(why),
            Self { .. } => lost("no worker holds it: it was released, or never stored"),
        }
    }
}

fn unreached(id: &DataId, node: &NodeName, why: &str) -> String {
    let whom = if *node == id.home { "its owner node" } else { "worker" };
    format!("{whom} {node} cannot be reached: {why}")
}

/// The destination of an arriving object. Capacity is reserved piece by piece. The capacity is
/// released at the end, when the object is a copy in the index or has failed.
struct CopySink {
    objects: ObjectStore,
    small: BytesMut,
    file: Option<File>,
    room: IndexCapacity,
}

impl CopySink {
    fn new(objects: ObjectStore) -> Self {
        Self { objects, small: BytesMut::new(), file: None, room: IndexCapacity::default() }
    }

    fn take(&mut self, chunk: &[u8]) -> io::Result<()> {
        let first = self.room == IndexCapacity::default();
        let opens = self.file.is_none() && self.small.len() + chunk.len() > INLINE_BYTES_MAX;
        let more = IndexCapacity {
            bytes: Size(chunk.len() as u64),
            files: u64::from(opens),
            objects: u64::from(first),
        };
        if !self.objects.index().set_aside(more) {
            return Err(io::Error::other("this worker's object memory is full: raise --object-memory"));
        }
        self.room = self.room.plus(more);
        if opens {
            let mut file = memory("millrace-copy")?;
            file.write_all(&std::mem::take(&mut self.small))?;
            self.file = Some(file);
        }
        match &mut self.file {
            Some(file) => file.write_all(chunk),
            None => {
                self.small.extend_from_slice(chunk);
                Ok(())
            }
        }
    }

    /// Returns the object. Processes that read it map the same memory, so the memory is sealed.
    fn done(mut self) -> io::Result<Contents> {
        let Some(file) = self.file.take() else {
            return Ok(Contents::Inline(Bytes::from(std::mem::take(&mut self.small))));
        };
        seal(&file)?;
        Ok(Contents::Memory { fd: Arc::new(file.into()), bytes: self.room.bytes.get() })
    }
}

impl Drop for CopySink {
    fn drop(&mut self) {
        self.objects.index().give_back(self.room);
    }
}
