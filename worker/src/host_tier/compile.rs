//! From an artifact's bytes to a model in host memory: compiled, its graph in one sealed
//! memfd and its weights in another, in first-use order. Blocking and heavy: runs on a blocking thread.

use std::sync::Arc;

use millrace_device::{HostRegion, HostRegionBuilder, Pinned};
use millrace_model::{Compiled, Grouping, Source};
use millrace_proto::executor as wire;
use millrace_types::{Bytes, Digest, TensorSpec};

use super::plan::Failure;
use crate::install::PreparedModel;

/// A model in host memory, and what its functions take and give.
#[derive(Debug, Clone)]
pub(super) struct HostModel {
    pub prepared: Arc<PreparedModel>,
    pub signature: Arc<Signature>,
    /// Host memory taken.
    pub bytes: Bytes,
    // The weights' pages stay locked for as long as this maps them (T07).
    weights: Arc<HostRegion>,
}

impl HostModel {
    /// Whether its weights' pages are locked.
    pub(super) fn pinned(&self) -> &Pinned {
        self.weights.pinned()
    }
}

/// What a model takes and gives, for checking requests.
#[derive(Debug, PartialEq, Eq)]
pub struct Signature {
    /// Of which model.
    pub digest: Digest,
    /// The inputs.
    pub inputs: Vec<TensorSpec>,
    /// The outputs.
    pub outputs: Vec<TensorSpec>,
}

/// Compiles an artifact into host memory, cut into groups of this size.
///
/// # Errors
/// [`Failure::Permanent`] when the file is no model we can serve, [`Failure::Transient`] when there
/// is no memory.
pub(super) fn compile(digest: Digest, onnx: Vec<u8>, grouping: Grouping) -> Result<HostModel, Failure> {
    let onnx = bytes::Bytes::from(onnx);
    let compiled = millrace_model::compile_grouped(&onnx, grouping);
    let compiled = compiled.map_err(|error| Failure::Permanent(error.to_string()))?;
    let weights = weights(&compiled, &onnx)?;
    let graph_bytes = Bytes(compiled.graph.len() as u64);
    let graph = HostRegion::from_bytes("millrace-graph", &compiled.graph).map_err(no_memory)?;
    let Compiled { summary, launches, .. } = compiled;
    let weights_bytes = Bytes(summary.weights_bytes);
    let prepared = PreparedModel {
        digest,
        name: digest.short(),
        graph: Arc::new(graph.share().map_err(no_memory)?),
        graph_bytes,
        weights: Arc::new(weights.share().map_err(no_memory)?),
        weights_bytes,
        group_bytes: Bytes(grouping.bytes),
        launches: launches.into_iter().map(launch).collect(),
        inputs: summary.inputs.iter().map(spec).collect(),
        outputs: summary.outputs.iter().map(spec).collect(),
    };
    let signature = Signature { digest, inputs: summary.inputs, outputs: summary.outputs };
    Ok(HostModel {
        prepared: Arc::new(prepared),
        signature: Arc::new(signature),
        bytes: graph_bytes + weights_bytes,
        weights: Arc::new(weights),
    })
}

fn weights(compiled: &Compiled, onnx: &[u8]) -> Result<HostRegion, Failure> {
    let mut region = HostRegionBuilder::new("millrace-weights", Bytes(compiled.summary.weights_bytes))
        .map_err(no_memory)?;
    for weight in &compiled.weights {
        let bytes = match &weight.source {
            Source::File(range) => &onnx[range.clone()],
            Source::Owned(bytes) => bytes,
        };
        region.write_at(weight.offset, bytes).map_err(no_memory)?;
    }
    region.finish().map_err(no_memory)
}

fn no_memory(error: millrace_device::Error) -> Failure {
    Failure::Transient(format!("host memory for the model: {error}"))
}

fn launch(launch: millrace_model::Launch) -> wire::Launch {
    let range =
        |range: std::ops::Range<u64>| wire::ByteRange { offset: range.start, bytes: range.end - range.start };
    wire::Launch {
        writes: launch.writes,
        args: launch.args,
        reads: launch.reads.into_iter().map(range).collect(),
    }
}

fn spec(spec: &TensorSpec) -> wire::TensorSpec {
    wire::TensorSpec {
        name: spec.name.clone(),
        datatype: spec.datatype.to_string(),
        shape: spec.wire_shape(),
    }
}
