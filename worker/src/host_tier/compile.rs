//! The compilation of an artifact into host memory: the graph in a sealed memfd, the weights in another
//! memfd, in first-use order. The work is heavy and runs on a blocking thread.

use std::sync::Arc;

use millrace_device::{HostRegion, HostRegionBuilder, PinState};
use millrace_model::{CompiledModel, Grouping, WeightSource, program};
use millrace_proto::executor as wire;
use millrace_types::{Bytes, Digest, TensorSpec};

use super::plan::PrepareFailure;
use crate::install::PreparedModel;
use crate::programs::{HostedProgram, ProgramStore};
use crate::signature::{FunctionSignature, InputReader};

/// A model in host memory, or a program on the disk, with its signature.
#[derive(Debug, Clone)]
pub(super) struct HostModel {
    pub artifact: PreparedArtifact,
    pub signature: Arc<FunctionSignature>,
    /// The used host memory; zero for a program.
    pub bytes: Bytes,
}

/// A prepared artifact, ready to be installed on the node.
#[derive(Debug, Clone)]
pub(super) enum PreparedArtifact {
    Model {
        prepared: Arc<PreparedModel>,
        // The weights' pages stay locked only while this region maps them (T07).
        weights: HostRegion,
    },
    Program(Arc<HostedProgram>),
}

impl HostModel {
    /// Returns whether the pages of a model's weights are locked; `None` for a program.
    pub(super) fn pinned(&self) -> Option<&PinState> {
        match &self.artifact {
            PreparedArtifact::Model { weights, .. } => Some(weights.pinned()),
            PreparedArtifact::Program(_) => None,
        }
    }

    pub(super) fn is_program(&self) -> bool {
        matches!(self.artifact, PreparedArtifact::Program(_))
    }
}

/// Prepares an artifact, which is a model or a program.
///
/// # Errors
/// The errors of [`compile`]; [`PrepareFailure::Permanent`] for a program on a worker that runs no programs;
/// [`PrepareFailure::Transient`] if the program's file cannot be written.
pub(super) fn make_ready(
    digest: Digest,
    artifact: Vec<u8>,
    grouping: Grouping,
    programs: Option<&ProgramStore>,
) -> Result<HostModel, PrepareFailure> {
    if !program::is_program(&artifact) {
        return compile(digest, artifact, grouping);
    }
    let refused = "this worker runs no programs: start the worker with --allow processes";
    let programs = programs.ok_or_else(|| PrepareFailure::Permanent(refused.into()))?;
    let unpacked = program::PackedProgram::unpack(&artifact.into());
    let program::PackedProgram { signature: declared, file } =
        unpacked.map_err(|error| PrepareFailure::Permanent(error.to_string()))?;
    let millrace_types::workflow::Signature { inputs, outputs } = declared.clone();
    let program = programs
        .put(digest, declared, &file)
        .map_err(|error| PrepareFailure::Transient(format!("cannot write the program's file: {error}")))?;
    Ok(HostModel {
        artifact: PreparedArtifact::Program(Arc::new(program)),
        signature: Arc::new(FunctionSignature {
            digest,
            inputs,
            outputs,
            reader: InputReader::Process,
            state: None,
        }),
        bytes: Bytes::ZERO,
    })
}

/// Compiles a model into host memory, cut into groups of this size.
///
/// # Errors
/// [`PrepareFailure::Permanent`] if the file is not a model that Millrace can serve, [`PrepareFailure::Transient`] if
/// memory cannot be allocated.
pub(super) fn compile(
    digest: Digest,
    onnx: Vec<u8>,
    grouping: Grouping,
) -> Result<HostModel, PrepareFailure> {
    let onnx = bytes::Bytes::from(onnx);
    let compiled = millrace_model::compile_grouped(&onnx, grouping);
    let compiled = compiled.map_err(|error| PrepareFailure::Permanent(error.to_string()))?;
    let weights = weights(&compiled, &onnx)?;
    let graph_bytes = Bytes(compiled.graph.len() as u64);
    let graph = HostRegion::from_bytes("millrace-graph", &compiled.graph).map_err(no_memory)?;
    let CompiledModel { summary, launches, .. } = compiled;
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
    let signature = FunctionSignature {
        digest,
        inputs: summary.inputs,
        outputs: summary.outputs,
        reader: InputReader::Gpu,
        state: None,
    };
    Ok(HostModel {
        artifact: PreparedArtifact::Model { prepared: Arc::new(prepared), weights },
        signature: Arc::new(signature),
        bytes: graph_bytes + weights_bytes,
    })
}

fn weights(compiled: &CompiledModel, onnx: &[u8]) -> Result<HostRegion, PrepareFailure> {
    let mut region = HostRegionBuilder::new("millrace-weights", Bytes(compiled.summary.weights_bytes))
        .map_err(no_memory)?;
    for weight in &compiled.weights {
        let bytes = match &weight.source {
            WeightSource::File(range) => &onnx[range.clone()],
            WeightSource::Owned(bytes) => bytes,
        };
        region.write_at(weight.offset, bytes).map_err(no_memory)?;
    }
    region.finish().map_err(no_memory)
}

fn no_memory(error: millrace_device::Error) -> PrepareFailure {
    PrepareFailure::Transient(format!("cannot allocate host memory for the model: {error}"))
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
