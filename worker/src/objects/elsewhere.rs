//! Objects by name alone, wherever they are (D04, D09): here, at their home, or at whoever holds a copy
//! by tier 2 of the index. [`Lookup`] decides whom to ask; what came is kept as a copy, as long as there
//! is room, so that the next one finds it here and others find it here when its home is gone.

use std::fs::File;
use std::io::{self, Write as _};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use millrace_policy::index::{Answer, Calls, HomeAnswer, Lookup, LookupOrder, Step};
use millrace_proto::worker::FetchMethod;
use millrace_types::{Bytes as Size, DataId, NodeName};
use tokio::task::JoinSet;

use super::given::seal;
use super::peers::PeerError;
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
    /// An object by its name, wherever it is, within this time. One that a GPU has stays there.
    pub(crate) async fn fetch(&self, id: &DataId, patience: Duration) -> Result<Contents, FetchError> {
        if let Some(contents) = self.find(id) {
            self.count(FetchMethod::Host, contents.len());
            return Ok(contents);
        }
        let (objects, sought) = (self.clone(), id.clone());
        let mut fetch = JoinSet::new();
        // Given up when whoever waits for it is.
        fetch.spawn_on(
            async move { tokio::time::timeout(patience, objects.look_elsewhere(&sought)).await },
            &self.0.threads,
        );
        let unavailable = |why: &str| FetchError::Unavailable { id: id.clone(), why: why.to_owned() };
        match fetch.join_next().await {
            Some(Ok(Ok(found))) => found,
            Some(Ok(Err(_late))) => Err(unavailable("it did not come in the time that the call has")),
            Some(Err(_)) | None => Err(unavailable("the worker stops")),
        }
    }

    async fn look_elsewhere(&self, id: &DataId) -> Result<Contents, FetchError> {
        let own = HomeAnswer::UnknownSince(self.0.feed.registration.borrow().current.unwrap_or_default());
        let (mut lookup, mut step) = Lookup::elsewhere(LookupOrder::HomeFirst, self.node(), own, id.clone());
        let found = self.follow(id, &mut lookup, &mut step).await;
        let Calls { home, tier2, holders } = lookup.calls();
        let mut asked = self.0.asked.lock().unwrap_or_else(PoisonError::into_inner);
        (asked.home, asked.tier2) = (asked.home + home, asked.tier2 + tier2);
        asked.holders += holders;
        drop(asked);
        if let Err(error) = &found {
            tracing::warn!(object = %id, %error, "an object is not to be had");
        }
        found
    }

    async fn follow(
        &self,
        id: &DataId,
        lookup: &mut Lookup,
        step: &mut Step,
    ) -> Result<Contents, FetchError> {
        let lost = |why: &str| FetchError::Lost { id: id.clone(), why: why.to_owned() };
        let unavailable = |why: String| FetchError::Unavailable { id: id.clone(), why };
        // Who could not be asked, and may have it.
        let mut doubt = None;
        loop {
            let answer = match &*step {
                Step::AskHome(node) => match self.pull_whole(id, node).await {
                    // It sends what it holds with its answer.
                    Ok(contents) => return Ok(contents),
                    Err(Refused::NoRoom(why)) => return Err(unavailable(why)),
                    Err(Refused::Gone) => Answer::Home(HomeAnswer::UnknownSince(id.epoch)),
                    Err(Refused::Unreachable(why)) => {
                        doubt = Some(unreached(id, node, &why));
                        Answer::HomeUnreachable
                    }
                },
                Step::Fetch(node) => match self.pull_whole(id, node).await {
                    Ok(contents) => return Ok(contents),
                    Err(Refused::NoRoom(why)) => return Err(unavailable(why)),
                    Err(Refused::Gone) => Answer::NotFetched,
                    Err(Refused::Unreachable(why)) => {
                        doubt = Some(unreached(id, node, &why));
                        Answer::NotFetched
                    }
                },
                Step::AskTier2 => match self.0.whereabouts.holders(id).await {
                    Ok(holders) if holders.lost => {
                        return Err(lost("it went with the last worker that held it"));
                    }
                    Ok(holders) => Answer::Tier2(holders.nodes),
                    Err(error) => {
                        let home = doubt.unwrap_or_else(|| "its home does not hold it any more".to_owned());
                        return Err(unavailable(format!("{home}, and {error}")));
                    }
                },
                Step::Here(_) | Step::Lost | Step::Gone { .. } => {
                    return Err(match doubt {
                        Some(why) => unavailable(why),
                        None => lost("no worker holds it: it was let go of, or never stored"),
                    });
                }
            };
            *step = lookup.on(answer);
        }
    }

    /// All of an object from one worker. Where that does not answer where it was last, or has not got it, it
    /// is looked for once more: another worker may be there now.
    async fn pull_whole(&self, id: &DataId, node: &NodeName) -> Result<Contents, Refused> {
        let known = self.0.whereabouts.known(node);
        let mut refused = None;
        if let Some(address) = &known {
            match self.pull_from(id, address).await {
                Err(why @ (Refused::Gone | Refused::Unreachable(_))) => refused = Some(why),
                done => return done,
            }
        }
        let why = match self.0.whereabouts.ask_for(node).await {
            Ok(Some(address)) if known.as_ref() != Some(&address) => {
                return self.pull_from(id, &address).await;
            }
            Ok(None) => return Err(Refused::Unreachable("no controller has that worker now".to_owned())),
            // It is where it was.
            Ok(Some(_)) => String::new(),
            Err(error) => error.to_string(),
        };
        Err(refused.unwrap_or(Refused::Unreachable(why)))
    }

    async fn pull_from(&self, id: &DataId, address: &str) -> Result<Contents, Refused> {
        let mut landing = Landing::new(self.clone());
        let mut sink = |chunk: &[u8]| landing.take(chunk);
        self.0.peers.fetch(id, address, 0, None, &mut sink).await.map_err(|error| match error {
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
        let mut shelf = self.shelf();
        if shelf.put_copy(id.clone(), contents.clone(), until) {
            place.stored(id.clone(), Size(contents.len()));
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
    bytes: u64,
}

impl Landing {
    fn new(objects: Objects) -> Self {
        Self { objects, small: BytesMut::new(), file: None, bytes: 0 }
    }

    fn take(&mut self, chunk: &[u8]) -> io::Result<()> {
        let more = chunk.len() as u64;
        if !self.objects.shelf().set_aside(Size(more)) {
            return Err(io::Error::other("this worker has no room for it: give it more --object-memory"));
        }
        self.bytes += more;
        match &mut self.file {
            Some(file) => file.write_all(chunk),
            None if self.small.len() + chunk.len() <= INLINE_BYTES_MAX => {
                self.small.extend_from_slice(chunk);
                Ok(())
            }
            None => {
                let mut file = memory("millrace-copy")?;
                file.write_all(&self.small)?;
                file.write_all(chunk)?;
                self.file = Some(file);
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
        Ok(Contents::Memory { fd: Arc::new(file.into()), bytes: self.bytes })
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.objects.shelf().give_back(Size(self.bytes));
    }
}
