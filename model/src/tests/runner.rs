//! Runs compiled models in rten as an executor does: weights in one region, launch by launch.

use std::collections::HashMap;

use bytes::Bytes;
use rten::{Model, ModelOptions, Value, ValueOrView};

use crate::{Compiled, Source, WEIGHTS_FILE};

/// A model's values by name.
pub(super) type Values = Vec<(String, Value)>;

/// Loads an ONNX file as it is.
pub(super) fn load_original(onnx: &[u8]) -> Model {
    ModelOptions::with_all_ops().enable_optimization(false).load(onnx.to_vec()).unwrap()
}

/// The region of a compiled file's weights.
pub(super) fn region(compiled: &Compiled, onnx: &[u8]) -> Vec<u8> {
    let mut region = vec![0; compiled.summary.weights_bytes as usize];
    for weight in &compiled.weights {
        let bytes = match &weight.source {
            Source::File(range) => &onnx[range.clone()],
            Source::Owned(bytes) => bytes,
        };
        region[weight.offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    region
}

/// Loads the graph over a region filled with its weights.
pub(super) fn load_compiled(compiled: &Compiled, onnx: &Bytes) -> Model {
    let region = region(compiled, onnx);
    let mut options = ModelOptions::with_all_ops();
    options.external_data_static(WEIGHTS_FILE, region.leak());
    options.enable_optimization(false).load(compiled.graph.clone()).unwrap()
}

/// Runs a model as far as `wanted`.
pub(super) fn run(model: &Model, given: &[(&str, &Value)], wanted: &[String]) -> Values {
    let inputs = given.iter().map(|(name, value)| (model.node_id(name).unwrap(), ValueOrView::from(*value)));
    let ids: Vec<_> = wanted.iter().map(|name| model.node_id(name).unwrap()).collect();
    let values = model.run(inputs.collect(), &ids, None).unwrap();
    wanted.iter().cloned().zip(values).collect()
}

/// Runs a model launch by launch, each seeing only the values it names.
pub(super) fn run_in_launches(model: &Model, compiled: &Compiled, given: &[(&str, &Value)]) -> Values {
    let mut known: HashMap<String, Value> =
        given.iter().map(|(name, value)| ((*name).to_owned(), (*value).clone())).collect();
    for launch in &compiled.launches {
        let args: Vec<(&str, &Value)> = launch.args.iter().map(|arg| (arg.as_str(), &known[arg])).collect();
        let made = run(model, &args, &launch.writes);
        known.extend(made);
    }
    let outputs = compiled.summary.outputs.iter();
    outputs.map(|output| (output.name.clone(), known.remove(&output.name).unwrap())).collect()
}
