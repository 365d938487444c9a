//! Runs compiled models in rten as an executor does: with the weights in a single region, and launch
//! by launch.

use std::collections::HashMap;

use bytes::Bytes;
use rten::{Model, ModelOptions, Value, ValueOrView};

use crate::{CompiledModel, WEIGHTS_FILE, WeightSource};

/// The values of a model by name.
pub(super) type Values = Vec<(String, Value)>;

/// Loads an ONNX file without compiling it.
pub(super) fn load_original(onnx: &[u8]) -> Model {
    ModelOptions::with_all_ops().enable_optimization(false).load(onnx.to_vec()).unwrap()
}

/// Returns the region with the weights of a compiled file.
pub(super) fn region(compiled: &CompiledModel, onnx: &[u8]) -> Vec<u8> {
    let mut region = vec![0; compiled.summary.weights_bytes as usize];
    for weight in &compiled.weights {
        let bytes = match &weight.source {
            WeightSource::File(range) => &onnx[range.clone()],
            WeightSource::Owned(bytes) => bytes,
        };
        region[weight.offset as usize..][..bytes.len()].copy_from_slice(bytes);
    }
    region
}

/// Loads the compiled graph over a region with its weights.
pub(super) fn load_compiled(compiled: &CompiledModel, onnx: &Bytes) -> Model {
    let region = region(compiled, onnx);
    let mut options = ModelOptions::with_all_ops();
    options.external_data_static(WEIGHTS_FILE, region.leak());
    options.enable_optimization(false).load(compiled.graph.clone()).unwrap()
}

/// Runs a model until the values `wanted` are computed.
pub(super) fn run(model: &Model, given: &[(&str, &Value)], wanted: &[String]) -> Values {
    let inputs = given.iter().map(|(name, value)| (model.node_id(name).unwrap(), ValueOrView::from(*value)));
    let ids: Vec<_> = wanted.iter().map(|name| model.node_id(name).unwrap()).collect();
    let values = model.run(inputs.collect(), &ids, None).unwrap();
    wanted.iter().cloned().zip(values).collect()
}

/// Runs a model launch by launch. Each launch sees only the values that it names.
pub(super) fn run_in_launches(model: &Model, compiled: &CompiledModel, given: &[(&str, &Value)]) -> Values {
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
