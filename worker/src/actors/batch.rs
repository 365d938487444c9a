//! Requests that a GPU runs as one (`policy::batching`): what decides which may, and the one run made
//! of them. Most runs are of a single request.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use millrace_policy::batching::Item;
use millrace_proto::executor::{Tensor, tensor::Contents};

use crate::actors::work::SharedWork;
use crate::port::Descriptor;
use crate::request::{Invocation, Share};

/// Returns the class and size by which a request is batched; `None` if it runs alone, because its inputs have
/// no rows or different numbers of rows.
pub(crate) fn item(invocation: &Invocation) -> Option<Item> {
    let rows = rows(invocation)?;
    let mut class = DefaultHasher::new();
    let (mut inline, mut descriptors) = (0, 0);
    for Tensor { name, datatype, shape, contents } in &invocation.inputs {
        (name, datatype, &shape[1..]).hash(&mut class);
        match contents {
            Some(Contents::Inline(bytes)) => inline += u32::try_from(bytes.len()).ok()?,
            // An object may have to be brought to the host.
            Some(Contents::ContentsFd(_) | Contents::Object(_)) => descriptors += 1,
            Some(Contents::KeptBytes(_)) | None => return None,
        }
    }
    invocation.outputs.hash(&mut class);
    Some(Item { rows, class: class.finish(), inline, descriptors })
}

/// The size of the first dimension of a request's inputs.
fn rows(invocation: &Invocation) -> Option<u32> {
    let mut all = invocation.inputs.iter().map(|input| input.shape.first().copied());
    let first = all.next()??;
    all.all(|rows| rows == Some(first)).then_some(())?;
    u32::try_from(first).ok().filter(|&rows| rows > 0)
}

/// The inputs of all the requests of a run, one's after the other's, and their descriptors.
pub(crate) fn inputs(works: &[SharedWork]) -> (Vec<Tensor>, Vec<Descriptor>) {
    let mut descriptors: Vec<Descriptor> = Vec::new();
    let mut inputs = Vec::new();
    for invocation in works.iter().map(|work| &work.invocation) {
        // Descriptors are counted within the message. The batcher bounds them.
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

/// Which rows of a run's outputs are whose, in the order of its requests; `None` where there is only
/// one request, whose all of them are.
pub(crate) fn shares(works: &[SharedWork]) -> Vec<Option<Share>> {
    if works.len() < 2 {
        return vec![None; works.len()];
    }
    let rows: Vec<u32> = works.iter().map(|work| rows(&work.invocation).unwrap_or(0)).collect();
    let of = rows.iter().sum();
    let mut first = 0;
    let share = |rows: u32| {
        let share = Share { first, rows, of };
        first += rows;
        Some(share)
    };
    rows.into_iter().map(share).collect()
}
