//! Requests that a GPU runs as one batch (`scheduling::batching`): the class that decides which requests are
//! batchable, and the inputs of their common run. Most runs serve a single request.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use millrace_proto::executor::{Tensor, tensor::Contents};
use millrace_scheduling::batching::BatchItem;

use crate::messages::work::SharedWork;
use crate::port::Descriptor;
use crate::request::{Attempt, BatchShare};

/// Returns the class and size by which a request is batched. Returns `None` if the request must run alone:
/// it is a request of a trial, or its inputs have no rows, different numbers of rows, or contents that only an
/// executor can hold.
pub(crate) fn item(invocation: &Attempt) -> Option<BatchItem> {
    let rows = rows(invocation).filter(|_| invocation.trial.is_none())?;
    let mut class = DefaultHasher::new();
    let mut inline = 0;
    let mut descriptors = 0;
    for Tensor { name, datatype, shape, contents } in &invocation.inputs {
        (name, datatype, &shape[1..]).hash(&mut class);
        match contents {
            Some(Contents::Inline(bytes)) => inline += u32::try_from(bytes.len()).ok()?,
            // An object may have to be copied to the host, and is then passed as a descriptor.
            Some(Contents::ContentsFd(_) | Contents::Object(_)) => descriptors += 1,
            Some(Contents::KeptBytes(_)) | None => return None,
        }
    }
    invocation.outputs.hash(&mut class);
    Some(BatchItem { rows, class: class.finish(), inline, descriptors })
}

/// Returns the size of the first dimension of a request's inputs, if all inputs have the same.
fn rows(invocation: &Attempt) -> Option<u32> {
    let mut all = invocation.inputs.iter().map(|input| input.shape.first().copied());
    let first = all.next()??;
    all.all(|rows| rows == Some(first)).then_some(())?;
    u32::try_from(first).ok().filter(|&rows| rows > 0)
}

/// Concatenates the inputs and descriptors of all requests of a run, in the order of the requests.
pub(crate) fn inputs(works: &[SharedWork]) -> (Vec<Tensor>, Vec<Descriptor>) {
    let mut descriptors: Vec<Descriptor> = Vec::new();
    let mut inputs = Vec::new();
    for invocation in works.iter().map(|work| &work.invocation) {
        // `contents_fd` counts descriptors within one message. The batcher bounds their number.
        let before = u32::try_from(descriptors.len()).unwrap_or(u32::MAX);
        inputs.extend(invocation.inputs.iter().cloned().map(|mut input| {
            if let Some(Contents::ContentsFd(place)) = &mut input.contents {
                *place += before;
            }
            input
        }));
        descriptors.extend(invocation.descriptors.iter().cloned());
    }
    (inputs, descriptors)
}

/// Returns each request's share of the rows of a run's outputs, in the order of the requests. The share of
/// a single request is `None`: all rows belong to it.
pub(crate) fn shares(works: &[SharedWork]) -> Vec<Option<BatchShare>> {
    if works.len() < 2 {
        return vec![None; works.len()];
    }
    let rows: Vec<u32> = works.iter().map(|work| rows(&work.invocation).unwrap_or(0)).collect();
    let of = rows.iter().sum();
    let mut first = 0;
    let share = |rows: u32| {
        let share = BatchShare { first, rows, of };
        first += rows;
        Some(share)
    };
    rows.into_iter().map(share).collect()
}
