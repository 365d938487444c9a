//! Tensors and times between the front door's shapes and those that workers are sent.

use std::time::Duration;

use millrace_gateway::backend::{Split, Tensor};
use millrace_proto::worker as wire;
use millrace_types::{Failure, Reason};

/// A tensor as a worker takes it. Its bytes are shared.
pub(super) fn sent(tensor: Tensor) -> wire::InferTensor {
    let Tensor { name, datatype, shape, data } = tensor;
    wire::InferTensor { name, datatype: datatype.to_string(), shape, data, parts: Vec::new() }
}

/// A tensor that a worker answered.
///
/// # Errors
/// `INTERNAL` for a type that there is not.
pub(super) fn received(wire: wire::InferTensor) -> Result<Tensor, Failure> {
    let datatype = wire.datatype.parse().map_err(|error| {
        Failure::new(Reason::Internal, format!("the worker's answer cannot be read: {error}"))
            .after_execution()
    })?;
    Ok(Tensor { name: wire.name, datatype, shape: wire.shape, data: wire.data })
}

/// Where a worker says the time went.
pub(super) fn split(wire: &wire::Split) -> Split {
    Split {
        cold: Duration::from_nanos(wire.cold_ns),
        queue: Duration::from_nanos(wire.queue_ns),
        swap: Duration::from_nanos(wire.swap_ns),
        run: Duration::from_nanos(wire.run_ns),
    }
}
