//! Tests that both engines run the same compiled models with the same results, as a whole and launch by
//! launch.
#![allow(missing_docs, clippy::unwrap_used)]

#[allow(dead_code, unused_imports, unused_macros, reason = "`in_place` uses the rest")]
mod engines;

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::ops::Range;

use bytes::Bytes as Buffer;
use millrace_device::emulated::{EmulatedGpu, EmulatedRegion};
use millrace_device::{Device as _, DeviceMemory, HostRegion, MemoryExtent, Stream as _};
use millrace_engine::ort::OrtEngine;
use millrace_engine::rten::RtenEngine;
use millrace_engine::{HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue as _, TensorBytes};
use millrace_model::{CompiledModel, Grouping, Launch, WEIGHTS_FILE, WeightSource, compile_grouped, synth};
use millrace_types::slices::{SmPercent, SmShare, UnitSet};
use millrace_types::{Bytes, DataType, Dim, TensorSpec};

use engines::TestedEngine;

const PAGE: u64 = 4096;

/// The outputs of a model, each as FP32 elements and its shape.
type Outputs = Vec<(Vec<usize>, Vec<f32>)>;

/// Returns a tensor of an input's type: small numbers that differ from each other, and a size of 2 for free
/// dimensions.
fn input(spec: &TensorSpec) -> HostTensor {
    let size = |dim: &Dim| match dim {
        Dim::Fixed(size) => *size as usize,
        Dim::Symbol(_) => 2,
    };
    let shape: Vec<usize> = spec.shape.iter().map(size).collect();
    let count: usize = shape.iter().product();
    let numbers = (0..count).map(|at| (at * 37 % 11) as u8);
    let contents: Vec<u8> = match spec.datatype {
        DataType::Fp32 => {
            (0..count).flat_map(|at| ((at * 37 % 1009) as f32 / 505.0 - 1.0).to_le_bytes()).collect()
        }
        DataType::Int64 => numbers.flat_map(|number| i64::from(number % 2).to_le_bytes()).collect(),
        DataType::Int32 => numbers.flat_map(|number| i32::from(number % 2).to_le_bytes()).collect(),
        DataType::Uint8 => numbers.collect(),
        DataType::Bool => numbers.map(|number| number % 2).collect(),
        other => panic!("no synthetic model has an input of type {other}"),
    };
    HostTensor { datatype: spec.datatype, shape, contents: TensorBytes::Inline(contents.into()) }
}

fn weights(compiled: &CompiledModel, file: &Buffer) -> HostRegion {
    let mut bytes = vec![0; compiled.summary.weights_bytes as usize];
    for weight in &compiled.weights {
        let source = match &weight.source {
            WeightSource::File(range) => &file[range.clone()],
            WeightSource::Owned(bytes) => bytes,
        };
        bytes[weight.offset as usize..][..source.len()].copy_from_slice(source);
    }
    HostRegion::from_bytes("test", &bytes).unwrap()
}

/// A compiled model that is loaded on an engine, with its weights on the GPU.
struct Loaded<'a, E: TestedEngine> {
    compiled: &'a CompiledModel,
    engine: E,
    region: EmulatedRegion,
    host: HostRegion,
    module: E::Module,
    /// The model as a single launch.
    whole: Vec<(E::Kernel, KernelSpec)>,
    /// The launches of the model.
    cut: Vec<(E::Kernel, KernelSpec)>,
    queue: E::Queue,
}

impl<'a, E: TestedEngine> Loaded<'a, E> {
    fn new(compiled: &'a CompiledModel, file: &Buffer) -> Option<Self> {
        Self::with(compiled, file, E::create)
    }

    /// Loads a model on the engine that `create` returns.
    fn with(
        compiled: &'a CompiledModel,
        file: &Buffer,
        create: impl FnOnce(EmulatedGpu) -> Option<E>,
    ) -> Option<Self> {
        let host = weights(compiled, file);
        let mapped = host.bytes().get().next_multiple_of(PAGE).max(PAGE);
        let memory = DeviceMemory::create("test", Bytes(mapped)).unwrap();
        let engine = create(EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap())?;
        let region = engine.device().reserve(host.bytes()).unwrap();
        let code = ModelCode { graph: compiled.graph.clone(), weights_name: WEIGHTS_FILE, weights: &host };
        // Module and kernels are made while nothing is mapped, so a kernel that reads a weight faults.
        let module = engine.load(&region, code).unwrap();
        let names = |specs: &[TensorSpec]| specs.iter().map(|spec| spec.name.clone()).collect::<Vec<_>>();
        let whole = KernelSpec {
            args: names(&compiled.summary.inputs),
            writes: names(&compiled.summary.outputs),
            reads: compiled.launches.iter().flat_map(|launch| launch.reads.clone()).collect(),
        };
        let launch = |launch: &Launch| KernelSpec {
            args: launch.args.clone(),
            writes: launch.writes.clone(),
            reads: launch.reads.clone(),
        };
        let kernel = |spec: KernelSpec| (engine.kernel(&module, &spec).unwrap(), spec);
        let whole = vec![kernel(whole)];
        let cut = compiled.launches.iter().map(launch).map(kernel).collect();
        let chunk = engine.device().create(MemoryExtent { offset: 0, bytes: mapped }).unwrap();
        engine.device().map(&region, vec![(0, chunk)]).unwrap();
        let queue = engine.queue(LaunchThreads::Whole).unwrap();
        let mut loaded = Self { compiled, engine, region, host: host.clone(), module, whole, cut, queue };
        loaded.copy(&host, 0..host.bytes().get());
        Some(loaded)
    }

    fn copy(&mut self, host: &HostRegion, bytes: Range<u64>) {
        let copy_max = self.engine.device().capabilities().copy_max.get();
        for start in bytes.clone().step_by(copy_max as usize) {
            let end = (start + copy_max).min(bytes.end);
            self.queue.stream().copy(&self.region, host, start..end).unwrap();
        }
    }

    fn run(&mut self, cut: bool) -> Outputs {
        let queue = &mut self.queue;
        let given = self.compiled.summary.inputs.iter();
        let mut known: HashMap<String, E::Value> =
            given.map(|spec| (spec.name.clone(), queue.upload(input(spec)).unwrap())).collect();
        for (kernel, spec) in if cut { &self.cut } else { &self.whole } {
            let args = spec.args.iter().map(|arg| LaunchArg::Lend(&known[arg])).collect();
            let values = queue.launch(&self.module, kernel, args).unwrap();
            known.extend(spec.writes.iter().cloned().zip(values));
        }
        let outputs = self.compiled.summary.outputs.iter();
        let mut output = |spec: &TensorSpec| {
            floats(&queue.download(&known[&spec.name], spec.datatype, usize::MAX).unwrap())
        };
        outputs.map(&mut output).collect()
    }
}

fn floats(tensor: &HostTensor) -> (Vec<usize>, Vec<f32>) {
    let TensorBytes::Inline(bytes) = &tensor.contents else { panic!("inline was asked for") };
    let elements = match tensor.datatype {
        DataType::Fp32 => bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect(),
        DataType::Int64 => {
            bytes.chunks(8).map(|eight| i64::from_le_bytes(eight.try_into().unwrap()) as f32).collect()
        }
        DataType::Int32 => {
            bytes.chunks(4).map(|four| i32::from_le_bytes(four.try_into().unwrap()) as f32).collect()
        }
        _ => bytes.iter().map(|&byte| f32::from(byte)).collect(),
    };
    (tensor.shape.clone(), elements)
}

#[track_caller]
fn assert_close(one: &Outputs, other: &Outputs, what: &str) {
    assert_eq!(one.len(), other.len(), "{what}");
    for ((one_shape, one), (other_shape, other)) in one.iter().zip(other) {
        assert_eq!(one_shape, other_shape, "{what}");
        for (one, other) in one.iter().zip(other) {
            let apart = (one - other).abs();
            assert!(apart <= 1e-3 * (1.0 + one.abs().max(other.abs())), "{what}: {one} and {other}");
        }
    }
}

#[test]
fn synthetic_models_give_the_same_results_on_both_engines_whole_and_cut() {
    let seeded = synth::Seeded::default();
    let models: [(&str, Vec<u8>); 9] = [
        ("mlp", synth::mlp()),
        ("cnn", synth::tiny_cnn()),
        ("transformer block", synth::transformer_block()),
        ("bert", synth::bert_like(synth::Encoder::TINY)),
        ("residual", seeded.residual("small", synth::ResNetShape::TINY)),
        ("detector", seeded.yolo_det(synth::DarknetShape::TINY)),
        ("reader", seeded.ocr(synth::DarknetShape::TINY)),
        ("counter", synth::counter(64)),
        ("vote", synth::vote()),
    ];
    for (name, model) in models {
        let file = Buffer::from(model);
        let compiled = compile_grouped(&file, Grouping { bytes: 64 << 10, ..Grouping::default() }).unwrap();
        let mut rten = Loaded::<RtenEngine>::new(&compiled, &file).unwrap();
        let expected = rten.run(false);
        assert_close(&rten.run(true), &expected, name);
        let Some(mut ort) = Loaded::<OrtEngine<EmulatedGpu>>::new(&compiled, &file) else { return };
        assert_close(&ort.run(false), &expected, name);
        assert_close(&ort.run(true), &expected, name);
    }
}

#[test]
fn restricted_launches_give_the_same_bytes_as_unrestricted_launches() {
    let threads = NonZeroUsize::new(4).unwrap();
    for model in [synth::mlp(), synth::tiny_cnn(), synth::transformer_block()] {
        let file = Buffer::from(model);
        let compiled = compile_grouped(&file, Grouping::default()).unwrap();
        let create = |gpu| Some(RtenEngine::new(gpu, threads));
        let mut rten = Loaded::<RtenEngine>::with(&compiled, &file, create).unwrap();
        let expected = bits(rten.run(true));
        for on in [
            SmShare::Block(UnitSet::block(4, 1).unwrap()),
            SmShare::Block(UnitSet::block(8, 8).unwrap()),
            SmShare::Cap(SmPercent::new(75).unwrap()),
        ] {
            rten.queue.stream().restrict(on).unwrap();
            assert_eq!(bits(rten.run(true)), expected, "{on:?}");
        }
    }
}

/// Returns the bits of the elements of all outputs.
fn bits(outputs: Outputs) -> Vec<u32> {
    outputs.into_iter().flat_map(|(_, elements)| elements).map(f32::to_bits).collect()
}

#[test]
fn onnx_runtime_reads_every_weight_in_place() {
    let models = [synth::mlp(), synth::tiny_cnn(), synth::transformer_block()];
    for file in models.map(Buffer::from) {
        let compiled = compile_grouped(&file, Grouping::default()).unwrap();
        let Some(mut ort) = Loaded::<OrtEngine<EmulatedGpu>>::new(&compiled, &file) else { return };
        let other = HostRegion::from_bytes("test", &vec![0x3e; ort.host.bytes().get() as usize]).unwrap();
        let host = ort.host.clone();
        let expected = ort.run(false);
        for weight in &compiled.weights {
            let bytes = weight.offset..weight.offset + weight.bytes;
            ort.copy(&other, bytes.clone());
            assert_ne!(ort.run(false), expected, "{} was copied", weight.name);
            assert_ne!(ort.run(true), expected, "{} was copied", weight.name);
            ort.copy(&host, bytes);
        }
        assert_eq!(ort.run(false), expected);
    }
}
