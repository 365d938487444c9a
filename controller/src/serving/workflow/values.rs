//! The tensors of a run. A tensor has the parts of each row of the producing step, or of the only call.
//! The bytes of each part are in the controller or in an object at a worker.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use millrace_gateway::backend::{AnswerTimes, NamedTensor};
use millrace_proto::worker as wire;
use millrace_proto::worker::tensor_part::Part as WirePart;
use millrace_types::tensor::element_count;
use millrace_types::workflow::empty_shape;
use millrace_types::{DataType, Failure, FunctionName, Reason, TensorSpec};
use millrace_workflow::TensorFacts;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::fleet::AttachedWorker;

/// A tensor of a run.
#[derive(Debug, Clone)]
pub(super) struct RunTensor {
    datatype: String,
    /// The parts by the row of the producing call; row 0 for a single call. A nested workflow may
    /// produce several parts per row.
    parts: BTreeMap<u64, Vec<Part>>,
    /// The time at which the last part was ready, with the latency breakdown until then.
    pub(super) made: ReadyPoint,
    /// The function that produced the tensor; `None` for inputs of the request and empty tensors.
    by: Option<FunctionName>,
}

/// A point in time, with the latency breakdown of the longest path to this point.
#[derive(Debug, Clone, Copy)]
pub(super) struct ReadyPoint {
    pub(super) at: Instant,
    pub(super) split: AnswerTimes,
}

impl ReadyPoint {
    /// Returns the later of two points, because a reader of both tensors waits for the later point.
    pub(super) fn later(self, other: Self) -> Self {
        if other.at > self.at { other } else { self }
    }

    /// Returns the end of a call that began at this point.
    pub(super) fn then(self, spent: &AnswerTimes) -> Self {
        let AnswerTimes { cold, queue, swap, run, token } = self.split;
        let split = AnswerTimes {
            cold: cold + spent.cold,
            queue: queue + spent.queue,
            swap: swap + spent.swap,
            run: run + spent.run,
            token: token + spent.token,
        };
        Self { at: Instant::now(), split }
    }
}

#[derive(Debug, Clone)]
struct Part {
    shape: Vec<i64>,
    contents: Contents,
}

#[derive(Debug, Clone)]
enum Contents {
    Here {
        data: Bytes,
        /// The permit of the byte budget; `None` for bytes that arrived with the request.
        room: Option<Arc<OwnedSemaphorePermit>>,
    },
    /// A range of an object at a worker.
    There { held: RemoteObject, offset: u64, bytes: u64 },
}

/// An object at a worker.
#[derive(Debug, Clone)]
pub(super) struct RemoteObject {
    pub(super) id: wire::DataId,
    pub(super) worker: Arc<AttachedWorker>,
    /// The object's size in bytes.
    bytes: u64,
}

/// A tensor as the input of a call, with the holders of the objects.
#[derive(Debug)]
pub(super) struct StepCallInput {
    pub(super) tensor: wire::InferTensor,
    pub(super) held: Vec<(Arc<AttachedWorker>, millrace_types::Bytes)>,
    /// The function that produced the tensor, if any.
    pub(super) by: Option<FunctionName>,
    /// The tensor's size in bytes, at any location.
    pub(super) bytes: u64,
}

impl RunTensor {
    /// Returns a tensor that arrived with the request.
    pub(super) fn given(tensor: NamedTensor) -> Self {
        let part = Part { shape: tensor.shape, contents: Contents::here(tensor.data) };
        let made = ReadyPoint { at: Instant::now(), split: AnswerTimes::default() };
        Self { datatype: tensor.datatype.to_string(), parts: [(0, vec![part])].into(), made, by: None }
    }

    /// Returns a tensor without elements.
    pub(super) fn empty(spec: &TensorSpec, made: ReadyPoint) -> Self {
        let part = Part { shape: empty_shape(spec), contents: Contents::here(Bytes::new()) };
        Self { datatype: spec.datatype.to_string(), parts: [(0, vec![part])].into(), made, by: None }
    }

    /// Returns a tensor of a worker's answer.
    ///
    /// # Errors
    /// `BYTE_BUDGET_EXCEEDED` if the answer has the bytes and the budget is exhausted. `INTERNAL` for a
    /// malformed answer.
    pub(super) fn answered(
        tensor: wire::InferTensor,
        worker: &Arc<AttachedWorker>,
        made: ReadyPoint,
        room: &RunByteBudget,
    ) -> Result<Self, Failure> {
        let wire::InferTensor { name, datatype, shape, data, mut parts } = tensor;
        let contents = match (parts.pop().and_then(|part| part.part), parts.is_empty()) {
            (None, true) => room.keep(data)?,
            (Some(WirePart::Data(data)), true) => room.keep(data)?,
            (Some(WirePart::Held(wire::HeldPart { object: Some(object), .. })), true) => {
                let wire::Object { id: Some(id), bytes, .. } = object else {
                    return Err(senseless(&name, worker));
                };
                let held = RemoteObject { id, worker: worker.clone(), bytes };
                Contents::There { held, offset: 0, bytes }
            }
            _ => return Err(senseless(&name, worker)),
        };
        Ok(Self { datatype, parts: [(0, vec![Part { shape, contents }])].into(), made, by: None })
    }

    /// Returns the tensor with the producing function.
    pub(super) fn by(self, function: &FunctionName) -> Self {
        Self { by: Some(function.clone()), ..self }
    }

    /// Stores another tensor as the result of the call for a row.
    pub(super) fn put(&mut self, row: u64, other: Self) {
        self.made = self.made.later(other.made);
        // An empty row may not name the function, so keep the name from any row.
        self.by = self.by.take().or(other.by);
        self.parts.insert(row, other.parts.into_values().flatten().collect());
    }

    /// Returns the tensor as the result of the call for a row.
    pub(super) fn at(self, row: u64) -> Self {
        let parts = self.parts.into_values().flatten().collect();
        Self { parts: [(row, parts)].into(), ..self }
    }

    /// Removes the result of the call for a row.
    pub(super) fn lose(&mut self, row: u64) {
        self.parts.remove(&row);
    }

    fn parts(&self) -> impl Iterator<Item = &Part> {
        self.parts.values().flatten()
    }

    /// Returns the objects of the tensor, each with the row of the producing call.
    pub(super) fn held(&self) -> impl Iterator<Item = (u64, &RemoteObject)> {
        let parts = self.parts.iter().flat_map(|(row, parts)| parts.iter().map(move |part| (*row, part)));
        parts.filter_map(|(row, part)| match &part.contents {
            Contents::There { held, .. } => Some((row, held)),
            Contents::Here { .. } => None,
        })
    }

    /// Returns the parts with elements, or the first part if all are empty, because empty parts may
    /// have different shapes.
    fn filled(&self) -> impl Iterator<Item = &Part> {
        let some = self.parts().any(|part| !part.is_empty());
        self.parts().filter(move |part| !some || !part.is_empty()).take(if some { usize::MAX } else { 1 })
    }

    /// Returns the tensor's shape, with the parts joined by rows.
    fn shape(&self) -> Result<Vec<i64>, Failure> {
        let mut shapes = self.filled().map(|part| &part.shape);
        let Some(first) = shapes.next() else { return Ok(vec![0]) };
        let mut joined = first.clone();
        for shape in shapes {
            let same = joined.len() == shape.len() && joined.get(1..) == shape.get(1..) && !joined.is_empty();
            if !same {
                let message = format!("cannot join rows of shapes {first:?} and {shape:?}");
                return Err(Failure::new(Reason::InvalidOutput, message));
            }
            // A worker wrote these numbers, so the sum may overflow.
            joined[0] = joined[0].checked_add(shape[0]).ok_or_else(|| too_many_rows(first, shape))?;
        }
        Ok(joined)
    }

    /// Returns the facts that the core needs. `condition` says whether the core needs the tensor's
    /// truth value.
    pub(super) fn facts(&self, condition: bool) -> TensorFacts {
        let of = |part: &Part| {
            let rows = part.shape.first().copied().unwrap_or(1);
            let holds = match &part.contents {
                Contents::Here { data, .. } if condition => is_nonzero(&self.datatype, data),
                Contents::Here { .. } | Contents::There { .. } => None,
            };
            TensorFacts { rows: u64::try_from(rows).unwrap_or(0), is_empty: part.is_empty(), holds }
        };
        self.filled().map(of).reduce(TensorFacts::join).unwrap_or(TensorFacts::EMPTY)
    }

    /// Returns the tensor, or a single row, as an input.
    pub(super) fn sent(&self, name: &str, row: Option<u64>) -> Result<StepCallInput, Failure> {
        match row {
            None => self.all(name),
            Some(row) => self.row(name, row),
        }
    }

    fn all(&self, name: &str) -> Result<StepCallInput, Failure> {
        let shape = self.shape()?;
        let bytes = self.filled().map(Part::bytes).fold(0, u64::saturating_add);
        let mut held = Vec::new();
        let mut parts: Vec<_> = self.filled().map(|part| part.sent(&mut held)).collect();
        // A tensor whose bytes are all here is sent without parts.
        let data = match parts.as_mut_slice() {
            [wire::TensorPart { part: Some(WirePart::Data(data)) }] => {
                let data = std::mem::take(data);
                parts.clear();
                data
            }
            _ => Bytes::new(),
        };
        let name = name.to_owned();
        let datatype = self.datatype.clone();
        let by = self.by.clone();
        Ok(StepCallInput {
            tensor: wire::InferTensor { name, datatype, shape, data, parts },
            held,
            by,
            bytes,
        })
    }

    fn row(&self, name: &str, row: u64) -> Result<StepCallInput, Failure> {
        self.row_value(name, row)?.all(name)
    }

    /// Returns one row of the tensor. The row shares the parts' objects and bytes.
    pub(super) fn row_value(&self, name: &str, row: u64) -> Result<Self, Failure> {
        let parts = [(0, vec![self.part_of(name, row)?])].into();
        Ok(Self { datatype: self.datatype.clone(), parts, made: self.made, by: self.by.clone() })
    }

    fn part_of(&self, name: &str, row: u64) -> Result<Part, Failure> {
        let mut before: u64 = 0;
        for part in self.filled() {
            let rows = part.shape.first().and_then(|rows| u64::try_from(*rows).ok()).unwrap_or(0);
            let end = before.saturating_add(rows);
            if row < end {
                return Ok(part.rows(row - before, rows));
            }
            before = end;
        }
        let message = format!("input {name:?} has no row {row}");
        Err(Failure::new(Reason::Internal, message))
    }

    /// Returns the complete tensor with the bytes.
    ///
    /// # Errors
    /// `INVALID_OUTPUT` if the parts do not join; `INTERNAL` if a part is at a worker.
    pub(super) fn whole(self, name: &str) -> Result<wire::InferTensor, Failure> {
        let StepCallInput { tensor, .. } = self.all(name)?;
        if tensor.parts.is_empty() {
            return Ok(tensor);
        }
        let mut data = BytesMut::new();
        for part in tensor.parts {
            match part.part {
                Some(WirePart::Data(bytes)) => data.extend_from_slice(&bytes),
                Some(WirePart::Held(_)) | None => {
                    let message = format!("output {name:?} is still at a worker");
                    return Err(Failure::new(Reason::Internal, message).after_execution());
                }
            }
        }
        Ok(wire::InferTensor { data: data.freeze(), parts: Vec::new(), ..tensor })
    }
}

/// The byte budget that the answered tensors of all runs share.
#[derive(Debug, Clone)]
pub(super) struct RunByteBudget {
    kib: Arc<Semaphore>,
    size: millrace_types::Bytes,
}

impl RunByteBudget {
    pub(super) fn new(size: millrace_types::Bytes) -> Self {
        let kib = usize::try_from(size.get() >> 10).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Self { kib: Arc::new(Semaphore::new(kib)), size }
    }

    fn keep(&self, data: Bytes) -> Result<Contents, Failure> {
        let kib = u32::try_from(data.len().div_ceil(1024)).unwrap_or(u32::MAX);
        let room = self.kib.clone().try_acquire_many_owned(kib).map_err(|_full| {
            let message = format!(
                "answers of workflow steps fill the controller's budget of {}: give workers more --object-memory, or try again soon",
                self.size
            );
            Failure::new(Reason::ByteBudgetExceeded, message).after_execution()
        })?;
        Ok(Contents::Here { data, room: Some(Arc::new(room)) })
    }
}

fn too_many_rows(first: &[i64], other: &[i64]) -> Failure {
    let message = format!("rows of shapes {first:?} and {other:?} together exceed the range of a shape");
    Failure::new(Reason::InvalidOutput, message)
}

fn senseless(name: &str, worker: &AttachedWorker) -> Failure {
    let message = format!("worker {} returned output {name:?} without data or a location", worker.name);
    Failure::new(Reason::Internal, message).after_execution()
}

impl Contents {
    /// Returns bytes that arrived with the request, outside the budget.
    fn here(data: Bytes) -> Self {
        Self::Here { data, room: None }
    }
}

impl Part {
    fn is_empty(&self) -> bool {
        element_count(&self.shape) == Some(0)
    }

    fn bytes(&self) -> u64 {
        match &self.contents {
            Contents::Here { data, .. } => data.len() as u64,
            Contents::There { bytes, .. } => *bytes,
        }
    }

    /// Returns row `row` of a part with `of` rows.
    fn rows(&self, row: u64, of: u64) -> Self {
        let mut shape = self.shape.clone();
        shape[0] = 1;
        let contents = match &self.contents {
            Contents::Here { data, room } => {
                // The product stays within the slice, and `of` is above `row`, so `of` is not zero.
                let bytes = data.len() / of as usize;
                let first = row as usize * bytes;
                Contents::Here { data: data.slice(first..first + bytes), room: room.clone() }
            }
            Contents::There { held, offset, bytes } => {
                let bytes = bytes / of;
                Contents::There { held: held.clone(), offset: offset + row * bytes, bytes }
            }
        };
        Self { shape, contents }
    }

    /// Converts the part for a call, and adds the object's holder to `whose`.
    fn sent(&self, whose: &mut Vec<(Arc<AttachedWorker>, millrace_types::Bytes)>) -> wire::TensorPart {
        let part = match &self.contents {
            Contents::Here { data, .. } => WirePart::Data(data.clone()),
            Contents::There { held, offset, bytes } => {
                whose.push((held.worker.clone(), millrace_types::Bytes(*bytes)));
                let address = held.worker.hello.address.clone();
                let object = wire::Object { id: Some(held.id.clone()), address, bytes: held.bytes };
                WirePart::Held(wire::HeldPart { object: Some(object), offset: *offset, bytes: *bytes })
            }
        };
        wire::TensorPart { part: Some(part) }
    }
}

/// Whether any element is not zero; `None` for a type without a zero.
fn is_nonzero(datatype: &str, data: &[u8]) -> Option<bool> {
    let datatype: DataType = datatype.parse().ok()?;
    let size = datatype.size()?;
    let floating = matches!(datatype, DataType::Fp16 | DataType::Bf16 | DataType::Fp32 | DataType::Fp64);
    // The sign of a float is the highest bit of the last byte, and minus zero counts as zero.
    let sign = if floating { 0x80 } else { 0 };
    let nonzero = |element: &[u8]| {
        let (last, rest) = element.split_last()?;
        Some(last & !sign != 0 || rest.iter().any(|byte| *byte != 0))
    };
    Some(data.chunks_exact(size).filter_map(nonzero).any(|nonzero| nonzero))
}
