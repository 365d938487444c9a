//! Prints the costs of the executor and of the emulated device on this machine: `cargo bench -p
//! millrace-executor`. Ratios compare measurements that were taken in turns. The bench asserts
//! nothing.
#![allow(missing_docs, unreachable_pub, dead_code, clippy::unwrap_used)]

#[path = "../tests/process/support.rs"]
mod support;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::time::Duration;

use millrace_device::emulated::{EmulatedGpu, EmulatedRegion};
use millrace_device::{
    Device as _, DeviceMemory, Event as _, HostAccess, HostRegion, MemoryExtent, Stream as _, monotonic_now,
};
use millrace_engine::rten::{Kernel, Module, RtenEngine, RtenQueue, RtenValue};
use millrace_engine::{
    Engine as _, HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue as _, TensorBytes,
};
use millrace_model::WEIGHTS_FILE;
use millrace_model::synth::{self, Encoder};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::{RunFailure, Tensor, Unmap};
use millrace_types::Bytes;

use support::{Executor, Model, tensor, x};

/// Arguments that make this binary an executor.
const EXECUTOR_ARGS: &[&str] = &["executor"];
const ROUNDS: usize = 9;
const MIB: u64 = 1 << 20;

fn main() -> std::process::ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("executor") => return millrace_executor::main(),
        // Runs only as a bench, because `cargo test --all-targets` also starts this binary.
        Some("--bench") => {}
        _ => return std::process::ExitCode::SUCCESS,
    }
    round_trips();
    remapping();
    copying();
    let resnet = Model::new(synth::resnet50_like());
    let bert = Model::new(synth::bert_like(Encoder { layers: 4, ..Encoder::BASE }));
    let ids: Vec<u8> = (0..128i64).flat_map(|id| (id * 97 % 30_000).to_le_bytes()).collect();
    let ids = vec![tensor("input_ids", "INT64", &[1, 128], ids)];
    for (name, model, input) in [
        ("ResNet-50-like, 224x224", &resnet, x(&[1, 3, 224, 224])),
        ("BERT-like, 4 layers, 128 tokens", &bert, ids),
    ] {
        println!(
            "\n{name}: {} of weights, {} launches",
            model.weights.bytes(),
            model.compiled.launches.len()
        );
        segments(model, &input);
        swap(model, &input);
    }
    std::process::ExitCode::SUCCESS
}

fn timed<T>(body: impl FnOnce() -> T) -> (Duration, T) {
    let start = monotonic_now();
    let result = body();
    (monotonic_now().since(start), result)
}

/// Formats the median, followed by the quartiles.
fn spread(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |part: usize| times[times.len() * part / 4];
    format!("{:.2?} ({:.2?} to {:.2?})", at(2), at(1), at(3))
}

fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |part: usize| times[(times.len() * part / 100).min(times.len() - 1)];
    format!("p50 {:.1?}, p90 {:.1?}, p99 {:.1?}", at(50), at(90), at(99))
}

fn round_trips() {
    const TRIPS: usize = 20_000;
    let model = Model::new(synth::mlp());
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    let input = x(&[1, 64]);
    let mut control = Vec::new();
    let mut whole = Vec::new();
    let mut added = Vec::new();
    for _ in 0..TRIPS {
        control.push(
            timed(|| {
                executor.run(1, 9, 1, vec![]);
                assert_eq!(executor.run_failure(1), RunFailure::UnknownProgram);
            })
            .0,
        );
        let (time, answer) = timed(|| {
            executor.run(1, 1, 1, input.clone());
            executor.ran(1).unwrap()
        });
        let own = Duration::from_nanos(answer.done.finished_ns - answer.done.started_ns);
        whole.push(time);
        added.push(time.saturating_sub(own));
    }
    println!("round trip, answered by the control thread: {}", percentiles(control));
    println!("round trip of an MLP run:                   {}", percentiles(whole));
    println!("  of that, not the model itself:            {}", percentiles(added));
}

/// A device in this process, and the host memory to copy to the device.
struct Bench {
    engine: RtenEngine,
    region: EmulatedRegion,
    host: HostRegion,
    queue: RtenQueue,
}

impl Bench {
    fn new(host: HostRegion) -> Self {
        let memory = DeviceMemory::create("bench", Bytes::gib(1)).unwrap();
        let gpu = EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap();
        let region = gpu.reserve(host.bytes()).unwrap();
        let engine = RtenEngine::new(gpu, NonZeroUsize::MIN);
        let queue = engine.queue(LaunchThreads::Whole).unwrap();
        Self { engine, region, host, queue }
    }

    fn gpu(&self) -> &EmulatedGpu {
        self.engine.device()
    }

    fn map(&self, extent: u64) {
        let bytes = self.host.bytes().get().next_multiple_of(4096);
        let chunk = |at: u64| {
            let extent = MemoryExtent { offset: at, bytes: extent.min(bytes - at) };
            (at, self.gpu().create(extent).unwrap())
        };
        self.gpu().map(&self.region, (0..bytes).step_by(extent as usize).map(chunk).collect()).unwrap();
    }

    /// Maps extents in the reverse order of memory, so that the kernel cannot merge neighbouring mappings.
    fn map_scattered(&self, extent: u64) {
        let bytes = self.host.bytes().get();
        let chunk = |at: u64| {
            (at, self.gpu().create(MemoryExtent { offset: bytes - extent - at, bytes: extent }).unwrap())
        };
        self.gpu().map(&self.region, (0..bytes).step_by(extent as usize).map(chunk).collect()).unwrap();
    }

    fn copy(&mut self) {
        let bytes = self.host.bytes().get();
        let stream = self.queue.stream();
        for start in (0..bytes).step_by(2 << 20) {
            stream.copy(&self.region, &self.host, start..bytes.min(start + 2 * MIB)).unwrap();
        }
        stream.record().unwrap().wait().unwrap();
    }

    fn unmap(&self) {
        self.gpu().unmap(&self.region).unwrap();
    }
}

fn remapping() {
    let bytes = vec![1; (100 * MIB) as usize];
    let mut bench = Bench::new(HostRegion::from_bytes("bench", &bytes).unwrap());
    let mut one = vec![];
    let mut many = vec![];
    let mut scattered = vec![];
    let mut loaded = vec![];
    for _ in 0..ROUNDS {
        one.push(
            timed(|| {
                bench.map(100 * MIB);
                bench.unmap()
            })
            .0,
        );
        many.push(
            timed(|| {
                bench.map(2 * MIB);
                bench.unmap()
            })
            .0,
        );
        scattered.push(
            timed(|| {
                bench.map_scattered(2 * MIB);
                bench.unmap()
            })
            .0,
        );
        bench.map_scattered(2 * MIB);
        bench.copy();
        loaded.push(timed(|| bench.unmap()).0);
    }
    println!("\nremap of 100 MiB, map and unmap:");
    println!("  one extent:                    {}", spread(one));
    println!("  50 extents of 2 MiB, in order: {}", spread(many));
    println!("  50 extents of 2 MiB, not:      {}", spread(scattered));
    println!("  unmap alone, when loaded:      {}", spread(loaded));

    let model = Model::padded(synth::mlp(), 100 * MIB);
    let mut executor = Executor::with(&model, 1);
    let pair = |executor: &mut Executor, generation| {
        executor.map(&model, 1, generation, 0);
        executor.send(Command::Unmap(Unmap { program: 1, generation }));
        executor.expect_unmapped(1, generation);
    };
    let times = (1..2000).map(|generation| timed(|| pair(&mut executor, generation)).0).collect();
    println!("  over the socket, one extent:   {}", percentiles(times));
}

fn copying() {
    let bytes = vec![1; (100 * MIB) as usize];
    let rate = |times: &[Duration]| {
        let mut times = times.to_vec();
        times.sort();
        let median = times[times.len() / 2];
        format!("{:.2} GB/s ({median:.1?})", 100.0 * MIB as f64 / median.as_secs_f64() / 1e9)
    };
    let mut fresh = vec![];
    let mut again = vec![];
    let mut memcpy = vec![];
    let mut target = vec![0u8; bytes.len()];
    let host = HostRegion::from_bytes("bench", &bytes).unwrap();
    for _ in 0..ROUNDS {
        let mut bench =
            Bench::new(HostRegion::receive(host.share().unwrap(), host.bytes(), HostAccess::Direct).unwrap());
        bench.map(2 * MIB);
        fresh.push(timed(|| bench.copy()).0);
        bench.unmap();
        bench.map(2 * MIB);
        again.push(timed(|| bench.copy()).0);
        memcpy.push(
            timed(|| std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&bytes))).0,
        );
    }
    println!("\ncopy of 100 MiB in pieces of 2 MiB:");
    println!("  into memory never touched:       {}", rate(&fresh));
    println!("  into memory used before:         {}", rate(&again));
    println!("  plain memcpy, both sides mapped: {}", rate(&memcpy));
}

/// A model that is loaded on a device in this process.
struct Loaded {
    bench: Bench,
    module: Module,
    whole: Kernel,
    steps: Vec<(KernelSpec, Kernel)>,
    outputs: Vec<String>,
}

impl Loaded {
    fn new(model: &Model) -> Self {
        let mut bench = Bench::new(
            HostRegion::receive(model.weights.share().unwrap(), model.weights.bytes(), HostAccess::Direct)
                .unwrap(),
        );
        let code = ModelCode {
            graph: model.compiled.graph.clone(),
            weights_name: WEIGHTS_FILE,
            weights: &bench.host,
        };
        let (time, module) = timed(|| bench.engine.load(&bench.region, code).unwrap());
        println!("  loading the graph: {time:.2?}");
        bench.map(2 * MIB);
        bench.copy();
        let summary = &model.compiled.summary;
        let names =
            |specs: &[millrace_types::TensorSpec]| specs.iter().map(|spec| spec.name.clone()).collect();
        let reads: Vec<Range<u64>> = model.all();
        let whole = KernelSpec { args: names(&summary.inputs), writes: names(&summary.outputs), reads };
        let steps = model.compiled.launches.iter().map(|launch| {
            let spec = KernelSpec {
                args: launch.args.clone(),
                writes: launch.writes.clone(),
                reads: launch.reads.clone(),
            };
            let kernel = bench.engine.kernel(&module, &spec).unwrap();
            (spec, kernel)
        });
        let steps = steps.collect();
        let outputs = whole.writes.clone();
        let whole = bench.engine.kernel(&module, &whole).unwrap();
        Self { bench, module, whole, steps, outputs }
    }

    fn upload(&mut self, input: &Tensor) -> RtenValue {
        let Some(millrace_proto::executor::tensor::Contents::Inline(bytes)) = &input.contents else {
            unreachable!()
        };
        let tensor = HostTensor {
            datatype: input.datatype.parse().unwrap(),
            shape: input.shape.iter().map(|&dim| dim as usize).collect(),
            contents: TensorBytes::Inline(bytes.clone()),
        };
        self.bench.queue.upload(tensor).unwrap()
    }

    fn whole(&mut self, input: &RtenValue) -> Duration {
        let Self { bench, module, whole, .. } = self;
        timed(|| bench.queue.launch(module, whole, vec![LaunchArg::Lend(input)]).unwrap()).0
    }

    /// Runs every launch in order, twice. The first run of a launch plans it, and the second run uses
    /// the cached plan.
    fn segmented(&mut self, name: &str, input: RtenValue) -> Vec<[Duration; 2]> {
        let Self { bench, module, steps, .. } = self;
        let mut values = std::collections::HashMap::from([(name.to_owned(), input)]);
        let mut times = Vec::new();
        for (spec, kernel) in steps {
            let mut launch = || {
                let args = spec.args.iter().map(|name| LaunchArg::Lend(&values[name])).collect();
                timed(|| bench.queue.launch(module, kernel, args).unwrap())
            };
            let ((anew, _), (kept, made)) = (launch(), launch());
            times.push([anew, kept]);
            values.extend(spec.writes.iter().cloned().zip(made));
        }
        assert!(self.outputs.iter().all(|output| values.contains_key(output)));
        times
    }
}

fn segments(model: &Model, input: &[Tensor]) {
    let mut loaded = Loaded::new(model);
    let mut whole = vec![];
    let mut cut: [Vec<Duration>; 2] = Default::default();
    let mut least: Vec<[Duration; 2]> = vec![[Duration::MAX; 2]; loaded.steps.len()];
    let value = loaded.upload(&input[0]);
    for _ in 0..ROUNDS {
        whole.push(loaded.whole(&value));
        let again = loaded.upload(&input[0]);
        let times = loaded.segmented(&input[0].name, again);
        for plan in 0..2 {
            cut[plan].push(times.iter().map(|time| time[plan]).sum());
            least.iter_mut().zip(&times).for_each(|(least, time)| least[plan] = least[plan].min(time[plan]));
        }
    }
    let [anew, kept] = cut;
    println!("  whole:                                {}", spread(whole));
    println!("  in launches, each planned anew:       {}", spread(anew));
    println!("  in launches, each with its plan kept: {}", spread(kept));
    let sum = |plan: usize| least.iter().map(|time| time[plan]).sum::<Duration>();
    println!("  the same, each launch's least:        {:.2?} and {:.2?}", sum(0), sum(1));
}

/// Measures the time from the first grant to the response, over the socket: copy then run, and run
/// while copying.
fn swap(model: &Model, input: &[Tensor]) {
    let mut executor = Executor::with(model, 1);
    let mut resident = vec![];
    let mut after = vec![];
    let mut during = vec![];
    let mut waited = vec![];
    let mut generation = 0;
    for _ in 0..ROUNDS {
        generation += 1;
        executor.map(model, 1, generation, 0);
        after.push(
            timed(|| {
                let batch = executor.grant(1, generation, &model.all());
                executor.copied(batch).unwrap();
                executor.run(1, 1, generation, input.to_vec());
                executor.ran(1).unwrap();
            })
            .0,
        );
        resident.push(
            timed(|| {
                executor.run(1, 1, generation, input.to_vec());
                executor.ran(1).unwrap()
            })
            .0,
        );
        executor.unmap(1, generation);
        generation += 1;
        executor.map(model, 1, generation, 0);
        let (time, answer) = timed(|| {
            executor.run(1, 1, generation, input.to_vec());
            let batch = executor.grant(1, generation, &model.all());
            let answer = executor.ran(1).unwrap();
            executor.copied(batch).unwrap();
            answer
        });
        during.push(time);
        waited.push(Duration::from_nanos(answer.done.waited_ns));
        executor.unmap(1, generation);
    }
    println!("  over the socket, resident:           {}", spread(resident));
    println!("  over the socket, copied, then run:   {}", spread(after));
    println!("  over the socket, run while copied:   {}", spread(during));
    println!("    of that, launches waited:          {}", spread(waited));
}
