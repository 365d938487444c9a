//! Objects by name alone, wherever they are (D04, D09): here, at their home, or at whoever holds them
//! by tier 2 of the index. [`Lookup`] decides whom to ask; what came is kept as a copy, as long as there
//! is room, so that the next one finds it here and others find it here when its home is gone.

use std::fs::File;
use std::io::{self, Write as _};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use millrace_policy::index::{Limit, Lookup, Step};
use millrace_proto::worker::FetchMethod;
use millrace_types::{Bytes as Size, DataId, NodeName, Timestamp};
use tokio::task::JoinSet;

use super::given::seal;
use super::peers::PeerError;
use super::whereabouts::{Holders, NoAnswer};
use super::{Contents, Objects, memory};
use crate::service::tensors::INLINE_BYTES_MAX;

/// How long a copy is kept.
const COPY_FOR: Duration = Duration::from_secs(60);

/// Why an object is not to be had.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FetchError {
    /// It is nowhere: asking again will not help.
    #[error("data {id} is nowhere any more ({why}): make it again")]
    Lost { id: DataId, why: String },
    /// It may be somewhere: asking again may help.
    #[error("data {id} cannot be had now ({why}): try again, or make it again")]
    Unavailable { id: DataId, why: String },
}

/// Why one worker did not give it.
enum Refused {
    /// It has not got it.
    Gone,
    /// It cannot be asked.
    Unreachable(String),
    /// It cannot be put down here.
    NoRoom(String),
}

impl Objects {
    /// An object by its name, wherever it is, within this time; for a request that is wanted by then. One that
    /// a GPU has stays there.
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
        let (objects, sought) = (self.clone(), id.clone());
        let mut fetch = JoinSet::new();
        // Given up when whoever waits for it is.
        fetch.spawn_on(
            async move { tokio::time::timeout(patience, objects.look_elsewhere(&sought, by)).await },
            &self.0.threads,
        );
        let unavailable = |why: &str| FetchError::Unavailable { id: id.clone(), why: why.to_owned() };
        match fetch.join_next().await {
            Some(Ok(Ok(found))) => found,
            Some(Ok(Err(_late))) => Err(unavailable("it did not come in the time that the call has")),
            Some(Err(_)) | None => Err(unavailable("the worker stops")),
        }
    }

    async fn look_elsewhere(&self, id: &DataId, by: Option<Timestamp>) -> Result<Contents, FetchError> {
        let found = self.ask_around(id, by).await;
        if let Err(error) = &found {
            tracing::warn!(object = %id, %error, "an object is not to be had");
        }
        found
    }

    async fn ask_around(&self, id: &DataId, by: Option<Timestamp>) -> Result<Contents, FetchError> {
        let (mut lookup, mut step) = Lookup::begin(self.0.order, self.node(), &id.home);
        let mut findings = Findings::default();
        loop {
            // Before it is taken: whoever waits may give up meanwhile.
            self.0.asked.lock().unwrap_or_else(PoisonError::into_inner).count(&step);
            step = match &step {
                Step::AskHome(node) | Step::Fetch(node) => match self.pull_whole(id, node, by).await {
                    Ok(contents) => return Ok(contents),
                    Err(Refused::NoRoom(why)) => {
                        return Err(FetchError::Unavailable { id: id.clone(), why });
                    }
                    Err(Refused::Gone) => lookup.not_held(),
                    Err(Refused::Unreachable(why)) => {
                        findings.unreached = Some(unreached(id, node, &why));
                        lookup.not_held()
                    }
                },
                Step::AskTier2 => {
                    let answer = self.0.whereabouts.holders(id).await;
                    lookup.held_by(&findings.take(answer))
                }
                Step::Nowhere => return Err(findings.error(id)),
            };
        }
    }

    /// All of an object from one worker. Where that does not answer where it was last, or has not got it, it
    /// is looked for once more: another worker may be there now.
    async fn pull_whole(
        &self,
        id: &DataId,
        node: &NodeName,
        by: Option<Timestamp>,
    ) -> Result<Contents, Refused> {
        let known = self.0.whereabouts.known(node);
        let mut refused = None;
        if let Some(address) = &known {
            match self.pull_from(id, address, by).await {
                Err(why @ (Refused::Gone | Refused::Unreachable(_))) => refused = Some(why),
                done => return done,
            }
        }
        let why = match self.0.whereabouts.ask_for(node).await {
            Ok(Some(address)) if known.as_ref() != Some(&address) => {
                return self.pull_from(id, &address, by).await;
            }
            Ok(None) => return Err(Refused::Unreachable("no controller has that worker now".to_owned())),
            // It is where it was.
            Ok(Some(_)) => String::new(),
            Err(error) => error.to_string(),
        };
        Err(refused.unwrap_or(Refused::Unreachable(why)))
    }

    async fn pull_from(
        &self,
        id: &DataId,
        address: &str,
        by: Option<Timestamp>,
    ) -> Result<Contents, Refused> {
        let wanted = (by, &*self.0.clock);
        let mut landing = Landing::new(self.clone());
        let mut sink = |chunk: &[u8]| landing.take(chunk);
        self.0.peers.fetch(id, address, 0, None, wanted, &mut sink).await.map_err(|error| match error {
            PeerError::Gone => Refused::Gone,
            PeerError::Unreachable(why) | PeerError::Refused(why) => Refused::Unreachable(why),
            PeerError::Sink(error) => Refused::NoRoom(error.to_string()),
        })?;
        let contents = landing.done().map_err(|error| Refused::NoRoom(error.to_string()))?;
        self.count(FetchMethod::InterNode, contents.len());
        self.keep_copy(id, &contents).await;
        Ok(contents)
    }

    /// Keeps what came, and says so to the cluster.
    async fn keep_copy(&self, id: &DataId, contents: &Contents) {
        let Some(place) = self.0.feed.place().await else { return };
        let until = self.0.clock.now() + COPY_FOR;
        // Said before anybody else can have it go, and say so.
        let mut index = self.index();
        if index.put_copy(id, contents.clone(), until) {
            place.stored(id.clone(), Size(contents.len()));
        }
    }
}

/// What a lookup has heard that is not where an object is.
#[derive(Debug, Default)]
struct Findings {
    /// Tier 2 knows that nobody holds it any more.
    lost: bool,
    /// Why tier 2 could not be asked the last time.
    no_answer: Option<NoAnswer>,
    /// Who could not be reached the last time, and may have it.
    unreached: Option<String>,
}

impl Findings {
    /// Who holds it by what tier 2 says, if it says anything. One that is lost by it may be at home all the
    /// same: a worker that the controllers took for dead may be reached by others.
    fn take(&mut self, answer: Result<Holders, NoAnswer>) -> Vec<NodeName> {
        match answer {
            Ok(Holders { nodes, lost }) => {
                (self.lost, self.no_answer) = (self.lost || lost, None);
                nodes
            }
            Err(why) => {
                self.no_answer = Some(why);
                Vec::new()
            }
        }
    }

    /// Why an object is not to be had that was found nowhere.
    fn error(self, id: &DataId) -> FetchError {
        let lost = |why: &str| FetchError::Lost { id: id.clone(), why: why.to_owned() };
        let unavailable = |why: String| FetchError::Unavailable { id: id.clone(), why };
        match self {
            Self { lost: true, .. } => lost("it went with the last worker that held it"),
            Self { no_answer: Some(error), unreached, .. } => {
                let home = unreached.unwrap_or_else(|| "its home does not hold it any more".to_owned());
                unavailable(format!("{home}, and {error}"))
            }
            Self { unreached: Some(why), .. } => unavailable(why),
            Self { .. } => lost("no worker holds it: it was let go of, or never stored"),
        }
    }
}

fn unreached(id: &DataId, node: &NodeName, why: &str) -> String {
    let whom = if *node == id.home { "its home" } else { "worker" };
    format!("{whom} {node} cannot be reached: {why}")
}

/// Where an object is put down as it comes: room for it is set aside piece by piece, and given back at
/// the end, when it is a copy like others or nothing.
struct Landing {
    objects: Objects,
    small: BytesMut,
    file: Option<File>,
    room: Limit,
}

impl Landing {
    fn new(objects: Objects) -> Self {
        Self { objects, small: BytesMut::new(), file: None, room: Limit::default() }
    }

    fn take(&mut self, chunk: &[u8]) -> io::Result<()> {
        let first = self.room == Limit::default();
        let opens = self.file.is_none() && self.small.len() + chunk.len() > INLINE_BYTES_MAX;
        let more =
            Limit { bytes: Size(chunk.len() as u64), files: u64::from(opens), objects: u64::from(first) };
        if !self.objects.index().set_aside(more) {
            return Err(io::Error::other("this worker has no room for it: give it more --object-memory"));
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

    /// What came. Processes that get it map the very memory: nobody changes it any more.
    fn done(mut self) -> io::Result<Contents> {
        let Some(file) = self.file.take() else {
            return Ok(Contents::Inline(Bytes::from(std::mem::take(&mut self.small))));
        };
        seal(&file)?;
        Ok(Contents::Memory { fd: Arc::new(file.into()), bytes: self.room.bytes.get() })
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.objects.index().give_back(self.room);
    }
}
