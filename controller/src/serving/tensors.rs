//! Conversions of tensors and times between the gateway's types and the worker protocol.

use std::time::Duration;

use millrace_gateway::backend::{AnswerTimes, Kind, ModelRevision, NamedTensor};
use millrace_proto::worker as wire;
use millrace_types::{Failure, GpuIndex, Reason, Runtime};

/// Converts a tensor for a worker. The bytes are shared.
pub(super) fn sent(tensor: NamedTensor) -> wire::InferTensor {
    let NamedTensor { name, datatype, shape, data } = tensor;
    wire::InferTensor { name, datatype: datatype.to_string(), shape, data, parts: Vec::new() }
}

/// Converts a tensor of a worker's response.
///
/// # Errors
/// `INTERNAL` for an unknown data type.
pub(super) fn received(wire: wire::InferTensor) -> Result<NamedTensor, Failure> {
    let datatype = wire.datatype.parse().map_err(|error| {
        Failure::new(Reason::Internal, format!("cannot read the worker's answer: {error}")).after_execution()
    })?;
    Ok(NamedTensor { name: wire.name, datatype, shape: wire.shape, data: wire.data })
}

/// Returns the GPU of an answer; `None` for a program, which runs on no GPU.
pub(super) fn gpu_of(model: &ModelRevision, answer: &wire::InvokeResponse) -> Option<GpuIndex> {
    (model.kind == Kind::Function(Runtime::Onnx)).then_some(GpuIndex(answer.gpu))
}

/// Converts a worker's latency breakdown.
pub(super) fn split(wire: &wire::Split) -> AnswerTimes {
    AnswerTimes {
        cold: Duration::from_nanos(wire.cold_ns),
        queue: Duration::from_nanos(wire.queue_ns),
        swap: Duration::from_nanos(wire.swap_ns),
        run: Duration::from_nanos(wire.run_ns),
        token: Duration::from_nanos(wire.token_ns),
    }
}
