//! Parts of a response: lost objects, the object of an output, and the times of a request.

use std::time::Duration;

use millrace_proto::{convert, worker as wire};
use millrace_types::DataId;

use crate::request::AttemptTimes;

/// Returns the id of the object that an output refers to.
pub(super) fn object_of(output: &wire::InferTensor) -> Option<DataId> {
    match &output.parts.first()?.part {
        Some(wire::tensor_part::Part::Held(held)) => {
            convert::data_id(held.object.as_ref()?.id.as_ref()?).ok()
        }
        _ => None,
    }
}

/// Returns the response to a request that was not run because these objects are lost.
pub(super) fn lost(ids: &[DataId]) -> wire::InvokeResponse {
    let lost = ids.iter().map(convert::data_id_wire).collect();
    wire::InvokeResponse { lost, ..wire::InvokeResponse::default() }
}

pub(super) fn split_wire(split: AttemptTimes) -> wire::Split {
    let nanos = |span: Duration| u64::try_from(span.as_nanos()).unwrap_or(u64::MAX);
    wire::Split {
        queue_ns: nanos(split.queue),
        swap_ns: nanos(split.swap),
        run_ns: nanos(split.run),
        total_ns: nanos(split.total),
        swapped_bytes: split.swapped.get(),
        cold_ns: nanos(split.cold),
        token_ns: nanos(split.token),
    }
}
