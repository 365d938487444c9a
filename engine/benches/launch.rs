//! Prints the time of a launch of a whole model: through each engine, and by ONNX Runtime called directly.
//! Run with `ORT_DYLIB_PATH` set: `cargo bench -p millrace-engine`. All measurements use one thread and are
//! taken in turns. The bench asserts nothing.
#![allow(missing_docs, clippy::unwrap_used)]

use std::num::NonZeroUsize;
use std::time::Duration;

use bytes::Bytes as Buffer;
use millrace_device::emulated::EmulatedGpu;
use millrace_device::{Device as _, DeviceMemory, HostRegion, MemoryExtent, Stream as _, monotonic_now};
use millrace_engine::ort::OrtEngine;
use millrace_engine::ort::library::{LIBRARY_VARIABLE, environment, library_path};
use millrace_engine::rten::RtenEngine;
use millrace_engine::{
    Engine, HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue as _, TensorBytes,
};
use millrace_model::synth::{self, Encoder};
use millrace_model::{CompiledModel, WEIGHTS_FILE, WeightSource, compile};
use millrace_types::{Bytes, DataType};
use ort::session::Session;
use ort::session::builder::GraphOptimizationLevel;
use ort::value::Tensor;

const ROUNDS: usize = 15;
const PAGE: u64 = 4096;

/// An input of a model.
#[derive(Clone)]
struct Input {
    name: &'static str,
    datatype: DataType,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn main() {
    // Runs only as a bench, because `cargo test --all-targets` also starts this binary.
    if std::env::args().nth(1).as_deref() != Some("--bench") {
        return;
    }
    if library_path().is_err() {
        println!("skipped: {LIBRARY_VARIABLE} does not name a library of ONNX Runtime");
        return;
    }
    let pixels = (0..3 * 224 * 224).flat_map(|at| ((at % 251) as f32 / 251.0).to_le_bytes()).collect();
    let x = Input { name: "x", datatype: DataType::Fp32, shape: vec![1, 3, 224, 224], bytes: pixels };
    let ids = (0..128i64).flat_map(|id| (id * 97 % 30_000).to_le_bytes()).collect();
    let ids = Input { name: "input_ids", datatype: DataType::Int64, shape: vec![1, 128], bytes: ids };
    let bert = synth::bert_like(Encoder { layers: 4, ..Encoder::BASE });
    let pixels = (0..64).flat_map(|at| (at as f32).to_le_bytes()).collect();
    let small = Input { name: "x", datatype: DataType::Fp32, shape: vec![1, 64], bytes: pixels };
    measure("MLP 64-64-64", synth::mlp(), &small, 500);
    measure("ResNet-50-like, 224x224", synth::resnet50_like(), &x, 1);
    measure("BERT-like, 4 layers, 128 tokens", bert, &ids, 1);
}

fn measure(name: &str, model: Vec<u8>, input: &Input, repeats: u32) {
    println!("\n{name}: first ONNX Runtime, then rten");
    let file = Buffer::from(model);
    let compiled = compile(&file).unwrap();
    let mut ort = launches(|gpu| OrtEngine::new(gpu, NonZeroUsize::MIN).unwrap(), &compiled, &file, input);
    let mut rten = launches(|gpu| RtenEngine::new(gpu, NonZeroUsize::MIN), &compiled, &file, input);
    let mut basic = direct(&file, input, GraphOptimizationLevel::Level1, false);
    let mut best = direct(&file, input, GraphOptimizationLevel::All, true);
    let mut ways = [
        Way::new("ONNX Runtime directly, all optimizations, weights packed", &mut best),
        Way::new("ONNX Runtime directly, basic optimizations, weights not packed", &mut basic),
        Way::new("engine over ONNX Runtime", &mut ort),
        Way::new("engine over rten", &mut rten),
    ];
    for round in 0..=ROUNDS {
        for way in &mut ways {
            let began = monotonic_now();
            (0..repeats).for_each(|_| (way.run)());
            // The first round fills caches.
            if round > 0 {
                way.times.push(monotonic_now().since(began) / repeats);
            }
        }
    }
    println!("  median of {ROUNDS}:");
    for Way { name, mut times, .. } in ways {
        times.sort();
        println!("  {:>10.3} ms  {name}", times[ROUNDS / 2].as_secs_f64() * 1e3);
    }
}

/// A way to run a model.
struct Way<'a> {
    name: &'static str,
    run: &'a mut dyn FnMut(),
    times: Vec<Duration>,
}

impl<'a> Way<'a> {
    fn new(name: &'static str, run: &'a mut dyn FnMut()) -> Self {
        Self { name, run, times: Vec::new() }
    }
}

/// Returns a function that runs the model on an engine, from the upload of the input to the download of the
/// outputs.
fn launches<E: Engine<Device = EmulatedGpu>>(
    create: fn(EmulatedGpu) -> E,
    compiled: &CompiledModel,
    file: &Buffer,
    input: &Input,
) -> impl FnMut() + use<E> {
    let mut bytes = vec![0; compiled.summary.weights_bytes as usize];
    for weight in &compiled.weights {
        let source = match &weight.source {
            WeightSource::File(range) => &file[range.clone()],
            WeightSource::Owned(bytes) => bytes,
        };
        bytes[weight.offset as usize..][..source.len()].copy_from_slice(source);
    }
    let host = HostRegion::from_bytes("bench", &bytes).unwrap();
    let mapped = host.bytes().get().next_multiple_of(PAGE);
    let memory = DeviceMemory::create("bench", Bytes(mapped)).unwrap();
    let engine = create(EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap());
    let region = engine.device().reserve(host.bytes()).unwrap();
    let code = ModelCode { graph: compiled.graph.clone(), weights_name: WEIGHTS_FILE, weights: &host };
    let module = engine.load(&region, code).unwrap();
    let spec = KernelSpec {
        args: compiled.summary.inputs.iter().map(|spec| spec.name.clone()).collect(),
        writes: compiled.summary.outputs.iter().map(|spec| spec.name.clone()).collect(),
        reads: compiled.launches.iter().flat_map(|launch| launch.reads.clone()).collect(),
    };
    let kernel = engine.kernel(&module, &spec).unwrap();
    let began = monotonic_now();
    let cut = compiled.launches.iter().map(|launch| {
        let args = launch.args.clone();
        let writes = launch.writes.clone();
        engine.kernel(&module, &KernelSpec { args, writes, reads: launch.reads.clone() }).unwrap()
    });
    let count = cut.collect::<Vec<_>>().len();
    println!("  {:>10.3} ms  {count} launches prepared", monotonic_now().since(began).as_secs_f64() * 1e3);
    let chunk = engine.device().create(MemoryExtent { offset: 0, bytes: mapped }).unwrap();
    engine.device().map(&region, vec![(0, chunk)]).unwrap();
    let mut queue = engine.queue(LaunchThreads::One).unwrap();
    let copy_max = engine.device().capabilities().copy_max.get();
    for start in (0..host.bytes().get()).step_by(copy_max as usize) {
        let end = (start + copy_max).min(host.bytes().get());
        queue.stream().copy(&region, &host, start..end).unwrap();
    }
    let Input { datatype, shape, bytes, .. } = input.clone();
    let bytes = Buffer::from(bytes);
    let outputs: Vec<DataType> = compiled.summary.outputs.iter().map(|spec| spec.datatype).collect();
    move || {
        let contents = TensorBytes::Inline(bytes.clone());
        let value = queue.upload(HostTensor { datatype, shape: shape.clone(), contents }).unwrap();
        let values = queue.launch(&module, &kernel, vec![LaunchArg::Give(value)]).unwrap();
        for (value, &datatype) in values.iter().zip(&outputs) {
            queue.download(value, datatype, usize::MAX).unwrap();
        }
    }
}

/// Returns a function that runs the model in a session of its own.
fn direct(
    file: &Buffer,
    input: &Input,
    optimizations: GraphOptimizationLevel,
    prepacking: bool,
) -> impl FnMut() + use<> {
    let environment = environment(NonZeroUsize::MIN).unwrap();
    let mut session = Session::builder(&environment)
        .unwrap()
        .with_optimization_level(optimizations)
        .unwrap()
        .with_prepacking(prepacking)
        .unwrap()
        .commit_from_memory(file)
        .unwrap();
    let Input { name, datatype, shape, bytes } = input.clone();
    move || {
        let outputs = match datatype {
            DataType::Fp32 => {
                let elements = bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap()));
                let tensor = Tensor::from_array((shape.clone(), elements.collect::<Vec<_>>())).unwrap();
                session.run(ort::inputs![name => tensor]).unwrap()
            }
            _ => {
                let elements = bytes.chunks(8).map(|eight| i64::from_le_bytes(eight.try_into().unwrap()));
                let tensor = Tensor::from_array((shape.clone(), elements.collect::<Vec<_>>())).unwrap();
                session.run(ort::inputs![name => tensor]).unwrap()
            }
        };
        assert!(outputs.len() > 0);
    }
}
