//! Collects a request's inputs: bytes from the request itself, objects of this worker, and objects
//! of other workers. A whole object of this worker is used in place. Everything else is copied in
//! pieces, between which other tasks get the thread.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use millrace_proto::convert;
use millrace_proto::worker::tensor_part::Part;
use millrace_proto::worker::{FetchMethod, Fetched, HeldPart, InferTensor, TensorPart};
use millrace_types::{DataId, Failure, Reason, RevisionKey, Timestamp};

use super::peers::PeerError;
use super::store::{ObjectStore, PIECE};
use super::{Contents, INLINE_BYTES_MAX, InputTensor, memory};
use crate::object_handle::{ObjectHandle, ObjectRange as KeptPart, TransferReader, TransferRequester};
use crate::signature::InputReader;

/// The inputs of a request, with the fetches of inputs that were objects.
#[derive(Debug)]
pub(crate) struct GatheredInputs {
    pub(crate) inputs: Vec<InputTensor>,
    pub(crate) fetched: Vec<Fetched>,
    /// Objects that are still on GPUs, with their names.
    pub(crate) kept: Vec<(DataId, Arc<ObjectHandle>)>,
    /// The request that needs the inputs.
    pub(crate) asker: Arc<TransferRequester>,
    /// Duration of the collection.
    pub(crate) took: Duration,
}

/// The reason why a request's inputs could not be collected.
#[derive(Debug)]
pub(crate) enum GatherError {
    /// No worker has these objects.
    Lost(Vec<DataId>),
    /// Another error.
    Failed(Failure),
}

impl From<Failure> for GatherError {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

/// The objects of a request that could not be found.
struct MissingObjects {
    ids: Vec<DataId>,
    /// Addresses of workers that do not answer.
    unreachable: BTreeSet<String>,
}

/// Returns the size of a tensor's contents, in bytes, as its sender states it.
pub(crate) fn size_of(tensor: &InferTensor) -> usize {
    let part = |part: &TensorPart| match &part.part {
        Some(Part::Data(data)) => data.len() as u64,
        Some(Part::Held(held)) => held.bytes,
        None => 0,
    };
    let parts = tensor.parts.iter().map(part).fold(0, u64::saturating_add);
    usize::try_from(parts.saturating_add(tensor.data.len() as u64)).unwrap_or(usize::MAX)
}

/// A part of a tensor, found here or to be fetched.
enum TensorPiece {
    Here { id: Option<DataId>, contents: Contents, offset: u64, bytes: u64 },
    There { id: DataId, address: String, offset: u64, bytes: u64 },
}

impl ObjectStore {
    /// Returns the context of a request for transfers. `objective` counts from `came`, the
    /// request's arrival; `None`: now.
    pub(crate) fn asker(
        &self,
        revision: RevisionKey,
        objective: Option<Duration>,
        came: Option<Timestamp>,
    ) -> Arc<TransferRequester> {
        let came = came.unwrap_or_else(|| self.0.clock.now());
        Arc::new(TransferRequester { revision, came, objective })
    }

    /// Finds or fetches all inputs of a request, which has passed the check of its declared sizes.
    /// The error names every object that is lost, so that all of them are computed again at once.
    pub(crate) async fn gather(
        &self,
        tensors: Vec<InferTensor>,
        reader: InputReader,
        asker: Arc<TransferRequester>,
    ) -> Result<GatheredInputs, GatherError> {
        let clock = &self.0.clock;
        let started = clock.now();
        let mut inputs = Vec::with_capacity(tensors.len());
        let mut fetches = Vec::new();
        let mut kept = Vec::new();
        let mut losses = MissingObjects { ids: self.missing(&tensors)?, unreachable: BTreeSet::new() };
        if !losses.ids.is_empty() {
            return Err(GatherError::Lost(losses.ids));
        }
        for tensor in tensors {
            let total = size_of(&tensor);
            let InferTensor { name, datatype, shape, data, parts } = tensor;
            let contents = if parts.is_empty() {
                Contents::Inline(data)
            } else {
                let began = clock.now();
                let (contents, method) =
                    self.assemble(parts, total, reader, &asker, &mut losses, &mut kept).await?;
                if let Some(method) = method.filter(|_| losses.ids.is_empty()) {
                    self.count(method, total as u64);
                    fetches.push(fetched(name.clone(), method, total as u64, clock.now().since(began)));
                }
                contents
            };
            let contents = match reader {
                InputReader::Gpu => contents,
                // The memory that a process maps may be shared with others, so the memory is
                // sealed.
                InputReader::Process => {
                    let bytes = contents.len();
                    contents.given(0, bytes).map_err(no_memory)?.contents(bytes)
                }
            };
            inputs.push(InputTensor { name, datatype, shape, contents });
        }
        if !losses.ids.is_empty() {
            return Err(GatherError::Lost(losses.ids));
        }
        Ok(GatheredInputs { inputs, fetched: fetches, kept, asker, took: clock.now().since(started) })
    }

    /// Returns the objects that should be on this worker and are not: no other worker can have such
    /// objects.
    fn missing(&self, tensors: &[InferTensor]) -> Result<Vec<DataId>, Failure> {
        let mut missing = Vec::new();
        for part in tensors.iter().flat_map(|tensor| &tensor.parts) {
            let Some(Part::Held(HeldPart { object: Some(object), .. })) = &part.part else { continue };
            let Some(id) = &object.id else { continue };
            let id = convert::data_id(id)?;
            if self.is_own(&id, &object.address) && self.find(&id).is_none() {
                missing.push(id);
            }
        }
        Ok(missing)
    }

    fn is_own(&self, id: &DataId, address: &str) -> bool {
        id.home == self.0.feed.node || address.is_empty()
    }

    /// Returns the bytes of a request's inputs that are copied here. Whole objects of this worker
    /// and objects on GPUs are not copied.
    pub(crate) fn copied(&self, tensors: &[InferTensor]) -> usize {
        let lies_here = |tensor: &InferTensor| {
            let [TensorPart { part: Some(Part::Held(part)) }] = tensor.parts.as_slice() else { return false };
            let id = part.object.as_ref().and_then(|object| convert::data_id(object.id.as_ref()?).ok());
            match id.and_then(|id| self.find(&id)) {
                Some(Contents::Kept(_)) => true,
                Some(contents) => part.offset == 0 && part.bytes == contents.len(),
                None => false,
            }
        };
        let copied = |tensor: &InferTensor| if lies_here(tensor) { 0 } else { size_of(tensor) };
        tensors.iter().map(copied).fold(0, usize::saturating_add)
    }

    /// Assembles a tensor from its parts. Also returns the fetch method of the farthest part that
    /// was an object. The method for an object on a GPU is `None`: that method is known only once
    /// the GPU of the run is chosen.
    async fn assemble(
        &self,
        parts: Vec<TensorPart>,
        total: usize,
        reader: InputReader,
        asker: &Arc<TransferRequester>,
        losses: &mut MissingObjects,
        kept: &mut Vec<(DataId, Arc<ObjectHandle>)>,
    ) -> Result<(Contents, Option<FetchMethod>), GatherError> {
        let mut pieces = Vec::with_capacity(parts.len());
        let mut method = None;
        for part in parts {
            let piece = match part.part {
                None => continue,
                Some(Part::Data(data)) => {
                    let bytes = data.len() as u64;
                    TensorPiece::Here { id: None, contents: Contents::Inline(data), offset: 0, bytes }
                }
                Some(Part::Held(part)) => {
                    let piece = self.find_part(part)?;
                    method = method.max(Some(match &piece {
                        TensorPiece::Here { .. } => FetchMethod::Host,
                        TensorPiece::There { .. } => FetchMethod::InterNode,
                    }));
                    piece
                }
            };
            pieces.push(piece);
        }
        if let [TensorPiece::Here { id, contents, offset, bytes }] = pieces.as_slice() {
            match (contents, id) {
                (Contents::Kept(part), Some(id)) if reader == InputReader::Gpu => {
                    let object = Arc::clone(&part.object);
                    kept.push((id.clone(), Arc::clone(&object)));
                    let part = KeptPart { object, offset: part.offset + offset, bytes: *bytes };
                    return Ok((Contents::Kept(part), None));
                }
                // A process reads the object in host memory.
                (Contents::Kept(_), _) => {
                    let waits = TransferReader::Inputs(Arc::clone(asker));
                    let Ok((here, at)) = contents.on_host(*offset, *bytes, waits).await else {
                        losses.ids.extend(id.clone());
                        return Ok((Contents::Inline(Bytes::new()), None));
                    };
                    if at == 0 && here.len() == *bytes {
                        return Ok((here, method));
                    }
                    let id = id.clone();
                    pieces = vec![TensorPiece::Here { id, contents: here, offset: at, bytes: *bytes }];
                }
                (contents, _) if *offset == 0 && *bytes == contents.len() => {
                    return Ok((contents.clone(), method));
                }
                _ => {}
            }
        }
        let contents = if total <= INLINE_BYTES_MAX {
            self.small(pieces, total, losses, asker).await
        } else {
            self.large(pieces, losses, asker).await
        };
        Ok((contents?, method))
    }

    fn find_part(&self, HeldPart { object, offset, bytes }: HeldPart) -> Result<TensorPiece, GatherError> {
        let object = object.ok_or_else(|| Failure::malformed("a tensor part names no object"))?;
        let id = object.id.ok_or_else(|| Failure::malformed("an object has no id"))?;
        let id = convert::data_id(&id)?;
        match self.find(&id) {
            Some(contents) if offset.saturating_add(bytes) > contents.len() => {
                let message = format!(
                    "object {id} has {} bytes, and the request is for {bytes} from {offset}",
                    contents.len()
                );
                Err(Failure::malformed(message).into())
            }
            Some(contents) => Ok(TensorPiece::Here { id: Some(id), contents, offset, bytes }),
            None if self.is_own(&id, &object.address) => Err(GatherError::Lost(vec![id])),
            None => Ok(TensorPiece::There { id, address: object.address, offset, bytes }),
        }
    }

    async fn small(
        &self,
        pieces: Vec<TensorPiece>,
        total: usize,
        losses: &mut MissingObjects,
        asker: &Arc<TransferRequester>,
    ) -> Result<Contents, GatherError> {
        let mut data = BytesMut::with_capacity(total);
        for piece in pieces {
            match piece {
                // A small tensor has at most [`INLINE_BYTES_MAX`] bytes.
                TensorPiece::Here { id, contents, offset, bytes } => {
                    let waits = TransferReader::Inputs(Arc::clone(asker));
                    let Ok((contents, offset)) = contents.on_host(offset, bytes, waits).await else {
                        losses.ids.extend(id);
                        continue;
                    };
                    data.extend_from_slice(&contents.read(offset, bytes as usize).map_err(no_memory)?);
                }
                TensorPiece::There { id, address, offset, bytes } => {
                    let mut sink = |chunk: &[u8]| {
                        data.extend_from_slice(chunk);
                        Ok(())
                    };
                    self.pull((id, &address), (offset, bytes), asker, &mut sink, losses).await?;
                }
            }
        }
        Ok(Contents::Inline(data.freeze()))
    }

    async fn large(
        &self,
        pieces: Vec<TensorPiece>,
        losses: &mut MissingObjects,
        asker: &Arc<TransferRequester>,
    ) -> Result<Contents, GatherError> {
        let mut file = memory("millrace-input").map_err(no_memory)?;
        for piece in pieces {
            match piece {
                TensorPiece::Here { id, contents, offset, bytes } => {
                    let waits = TransferReader::Inputs(Arc::clone(asker));
                    let Ok((contents, offset)) = contents.on_host(offset, bytes, waits).await else {
                        losses.ids.extend(id);
                        continue;
                    };
                    copy(&contents, offset, bytes, &mut file).await.map_err(no_memory)?;
                }
                TensorPiece::There { id, address, offset, bytes } => {
                    let mut sink = |chunk: &[u8]| file.write_all(chunk);
                    self.pull((id, &address), (offset, bytes), asker, &mut sink, losses).await?;
                }
            }
        }
        Ok(whole(file)?)
    }

    /// Fetches bytes from another worker, or records in `losses` that the object is lost.
    async fn pull(
        &self,
        (id, address): (DataId, &str),
        (offset, bytes): (u64, u64),
        asker: &TransferRequester,
        sink: &mut (dyn FnMut(&[u8]) -> io::Result<()> + Send),
        losses: &mut MissingObjects,
    ) -> Result<(), GatherError> {
        if losses.unreachable.contains(address) {
            losses.ids.push(id);
            return Ok(());
        }
        let wanted = (asker.wanted_by(), &*self.0.clock);
        let Err(error) = self.0.peers.fetch(&id, address, offset, Some(bytes), wanted, sink).await else {
            return Ok(());
        };
        match error {
            PeerError::Sink(error) => return Err(no_memory(error)),
            PeerError::Refused(message) => {
                return Err(Failure::malformed(message).into());
            }
            PeerError::Gone => {}
            // Further objects of this worker are not requested: each would wait as long.
            PeerError::Unreachable(_) => drop(losses.unreachable.insert(address.to_owned())),
        }
        tracing::warn!(object = %id, address, %error, "cannot fetch an object");
        losses.ids.push(id);
        Ok(())
    }
}

/// Copies bytes to the end of a file, and yields to other tasks between pieces.
async fn copy(contents: &Contents, mut offset: u64, mut left: u64, file: &mut File) -> io::Result<()> {
    while left > 0 {
        let piece = left.min(PIECE as u64);
        file.write_all(&contents.read(offset, piece as usize)?)?;
        offset += piece;
        left -= piece;
        tokio::task::yield_now().await;
    }
    Ok(())
}

fn whole(file: File) -> Result<Contents, Failure> {
    let bytes = file.metadata().map_err(no_memory_failure)?.len();
    Ok(Contents::Memory { fd: Arc::new(file.into()), bytes })
}

fn no_memory(error: io::Error) -> GatherError {
    no_memory_failure(error).into()
}

fn no_memory_failure(error: io::Error) -> Failure {
    Failure::new(Reason::QueueFull, format!("no memory for the inputs ({error}): try again soon"))
}

pub(crate) fn fetched(input: String, method: FetchMethod, bytes: u64, took: Duration) -> Fetched {
    let took_ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    Fetched { input, method: method.into(), bytes, took_ns }
}
