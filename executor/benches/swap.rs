//! Measures the contribution of each part of the swap engine (T07-T09, H14): `cargo bench -p
//! millrace-executor --bench swap [-- --link-mb-per-s 1000]`.
//!
//! The measured time is from the first grant to the response of a model that is not on the GPU, over
//! the socket of a real executor process. Commands, grants, windows and events are those of a worker.
//! The steps differ only in options that a worker has: the access to the host copy, the cut of the
//! model, the bytes per grant, and whether the run is sent before or after the copies. Like the
//! fabric, the bench keeps one grant running and one queued. All steps run in turns, in an order that
//! rotates each round, and ratios compare times of the same round. The bench asserts nothing.
//!
//! The device is emulated: a copy is a write to a memfd, and a launch is rten on the CPU, so both
//! compete for the same cores and the same memory. Pageable memory is modelled by the additional copy
//! that a driver makes. The results show the engine's own cost and overlap, not those of a GPU or a
//! PCIe link.
#![allow(missing_docs, unreachable_pub, dead_code, clippy::unwrap_used)]

#[path = "../tests/process/support.rs"]
mod support;

use std::num::{NonZeroU32, NonZeroUsize};
use std::ops::Range;
use std::time::Duration;

use bytes::Bytes as Buffer;
use millrace_device::emulated::EmulatedGpu;
use millrace_device::{DeviceMemory, HostAccess, HostRegion, MemoryExtent, PinState, monotonic_now, probe};
use millrace_model::elbow::{Throughput, elbow};
use millrace_model::synth::{self, Encoder};
use millrace_model::{CompiledModel, GROUP_BYTES, Grouping};
use millrace_proto::executor::Tensor;
use millrace_types::{Bytes, BytesPerSec};

use support::{Executor, Model, tensor, x};

/// Arguments that make this binary an executor.
const EXECUTOR_ARGS: &[&str] = &["executor"];
const ROUNDS: usize = 21;
const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Size of the fabric's grants in bytes: five chunks of 2 MiB.
const BATCH_BYTES: u64 = 10 * MIB;

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("executor") => return millrace_executor::main(),
        // Runs only as a bench, because `cargo test --all-targets` also starts this binary.
        Some(_) if args.iter().any(|arg| arg == "--bench") => {}
        _ => return std::process::ExitCode::SUCCESS,
    }
    let place = args.iter().position(|arg| arg == "--link-mb-per-s");
    let link = place.map(|place| BytesPerSec(args[place + 1].parse::<u64>().unwrap() * 1_000_000));
    match link {
        Some(rate) => println!("grants paced at {} MB/s", rate.0 / 1_000_000),
        None => println!("grants not paced: copies go as fast as this machine's memory"),
    }
    let elbow = curves();
    let ids: Vec<u8> = (0..128i64).flat_map(|id| (id * 97 % 30_000).to_le_bytes()).collect();
    let ids = vec![tensor("input_ids", "INT64", &[1, 128], ids)];
    let bert = synth::bert_like(Encoder { layers: 4, ..Encoder::BASE });
    compare("ResNet-50-like, 224x224", synth::resnet50_like(), &x(&[1, 3, 224, 224]), elbow, link);
    compare("BERT-like, 4 layers, 128 tokens", bert, &ids, elbow, link);
    std::process::ExitCode::SUCCESS
}

/// Order of the run and the copies.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    CopyThenRun,
    RunWhileCopying,
}

/// A way to swap a model in.
struct Step {
    name: String,
    model: Model,
    order: Order,
    /// Byte ranges of the grants, in order.
    grants: Vec<Range<u64>>,
}

/// Measures the rate of copies by their size, both in the device alone and as grants over the socket.
/// Returns the elbow of the second curve, because a group costs a grant (T09).
fn curves() -> u64 {
    let memory = DeviceMemory::create("bench", Bytes::mib(32)).unwrap();
    let gpu = EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap();
    let extent = MemoryExtent { offset: 0, bytes: memory.bytes().get() };
    let rates = probe::copy_rates(&gpu, extent, NonZeroU32::new(5).unwrap()).unwrap();
    let point = |rate: &probe::CopyRate| Throughput { bytes: rate.bytes, bytes_per_s: rate.bytes_per_s };
    print_curve("copies in the device", &rates.iter().map(point).collect::<Vec<_>>());
    let grants = grant_rates();
    print_curve("grants over the socket", &grants)
}

/// Measures the rate of grants by their size, with one grant running and one queued.
fn grant_rates() -> Vec<Throughput> {
    const CURVE_ROUNDS: usize = 7;
    let model = Model::padded(synth::mlp(), 32 * MIB);
    let bytes = model.bytes();
    let mut executor = Executor::with(&model, 1);
    let sizes: Vec<u64> = (14..=24).map(|power| 1 << power).collect();
    let mut times = vec![Vec::new(); sizes.len()];
    executor.map(&model, 1, 1, 0);
    for round in 0..=CURVE_ROUNDS {
        for (&size, times) in sizes.iter().zip(&mut times) {
            let began = monotonic_now();
            let mut running = None;
            for start in (0..bytes).step_by(size as usize) {
                let batch = executor.grant(1, 1, std::slice::from_ref(&(start..bytes.min(start + size))));
                if let Some(before) = running.replace(batch) {
                    executor.copied(before).unwrap();
                }
            }
            executor.copied(running.unwrap()).unwrap();
            if round > 0 {
                times.push(monotonic_now().since(began));
            }
        }
    }
    let rate = |time: Duration| (bytes as f64 / time.as_secs_f64()) as u64;
    sizes
        .into_iter()
        .zip(times)
        .map(|(bytes, times)| Throughput { bytes, bytes_per_s: rate(median(&times)) })
        .collect()
}

fn print_curve(name: &str, curve: &[Throughput]) -> u64 {
    let points =
        curve.iter().map(|point| format!("{} KiB {:.2}", point.bytes / KIB, point.bytes_per_s as f64 / 1e9));
    let elbow = elbow(curve).unwrap();
    println!("{name}, GB/s: {}; elbow {} KiB", points.collect::<Vec<_>>().join(", "), elbow / KIB);
    elbow
}

fn compare(name: &str, onnx: Vec<u8>, input: &[Tensor], elbow: u64, link: Option<BytesPerSec>) {
    let steps = steps(&Buffer::from(onnx), elbow);
    let first = &steps[0].model;
    println!("\n{name}: {} of weights, {} tensors", first.weights.bytes(), first.compiled.weights.len());
    match first.weights.pinned() {
        PinState::Locked => println!("host copy: locked"),
        PinState::Pageable { reason } => println!("host copy: shared, not locked: {reason}"),
    }
    let mut executor = Executor::start();
    for (program, step) in (1..).zip(&steps) {
        executor.load(&step.model, program);
    }
    let mut times = vec![Vec::new(); steps.len()];
    let mut waited = vec![Vec::new(); steps.len()];
    let mut resident = Vec::new();
    // The first round is not counted, because it touches the memory for the first time.
    for round in 0..=ROUNDS as u64 {
        for turn in 0..steps.len() {
            let index = (turn + round as usize) % steps.len();
            let program = index as u64 + 1;
            let step = &steps[index];
            executor.map(&step.model, program, round + 1, 0);
            let (time, wait) = swap(&mut executor, step, program, round + 1, input, link);
            if round > 0 {
                times[index].push(time);
                waited[index].push(wait);
            }
            if index == 1 && round > 0 {
                let before = monotonic_now();
                executor.run(1, program, round + 1, input.to_vec());
                executor.ran(1).unwrap();
                resident.push(monotonic_now().since(before));
            }
            executor.unmap(program, round + 1);
        }
    }
    println!("  resident, no swap: {}", spread(&resident));
    println!("  {:<44} {:>34} {:>10} {:>7}", "", "grant to answer", "÷ pinned", "waited");
    for (index, step) in steps.iter().enumerate() {
        println!(
            "  {:<44} {:>34} {} {:>7.1?}",
            step.name,
            spread(&times[index]),
            ratio(&times[index], &times[1]),
            median(&waited[index]),
        );
    }
    println!("  each step by the one before it:");
    for index in 1..4 {
        println!("    {:<42} {}", steps[index].name, ratio(&times[index], &times[index - 1]));
    }
}

/// Returns the four steps of H14, the step of a current worker, and steps with other group sizes.
fn steps(onnx: &Buffer, elbow: u64) -> Vec<Step> {
    let whole = |name: &str, pageable| {
        let mut model = Model::grouped(onnx, Grouping::default());
        model.pageable = pageable;
        let grants = model.all();
        Step { name: name.to_owned(), model, order: Order::CopyThenRun, grants }
    };
    let pipelined = |name: String, grouping, grant_bytes| {
        let model = Model::grouped(onnx, grouping);
        let grants = groups(&model.compiled, grant_bytes);
        let name = format!("{name}: {} launches, {} grants", model.compiled.launches.len(), grants.len());
        Step { name, model, order: Order::RunWhileCopying, grants }
    };
    let grouped = |bytes| Grouping { bytes, launches_max: NonZeroUsize::MAX };
    let mut steps = vec![
        whole("pageable, copied, then run", true),
        whole("pinned, copied, then run", false),
        pipelined("per parameter".to_owned(), Grouping::PER_PARAMETER, 1),
        pipelined(format!("groups at the elbow, {} KiB", elbow / KIB), grouped(elbow), elbow),
        pipelined("a worker's cut, 10 MiB a grant".to_owned(), Grouping::default(), BATCH_BYTES),
    ];
    for bytes in [128 * KIB, 512 * KIB, GROUP_BYTES, 8 * MIB, 32 * MIB] {
        steps.push(pipelined(format!("groups of {} KiB", bytes / KIB), grouped(bytes), bytes));
    }
    // The positions of the weights do not depend on the cut, so all steps can share a host copy.
    let (first, others) = steps.split_first_mut().unwrap();
    for step in others {
        let file = first.model.weights.share().unwrap();
        let bytes = first.model.weights.bytes();
        step.model.weights = HostRegion::receive(file, bytes, HostAccess::Direct).unwrap();
    }
    steps
}

/// Groups whole parameters, in order, until a group has at least `bytes` bytes.
fn groups(compiled: &CompiledModel, bytes: u64) -> Vec<Range<u64>> {
    let mut groups: Vec<Range<u64>> = Vec::new();
    for weight in &compiled.weights {
        let end = weight.offset + weight.bytes;
        match groups.last_mut() {
            Some(group) if group.end - group.start < bytes => group.end = end,
            _ => groups.push(groups.last().map_or(0, |group| group.end)..end),
        }
    }
    groups
}

/// Returns the time from the first grant to the response, and the part of that time that launches waited.
fn swap(
    executor: &mut Executor,
    step: &Step,
    program: u64,
    generation: u64,
    input: &[Tensor],
    link: Option<BytesPerSec>,
) -> (Duration, Duration) {
    let began = monotonic_now();
    if step.order == Order::RunWhileCopying {
        executor.run(1, program, generation, input.to_vec());
    }
    let mut free = began;
    let mut running = None;
    for range in &step.grants {
        if let Some(rate) = link {
            // The bytes are available when the link has finished, not when the link begins.
            free = free.max(monotonic_now()) + rate.time_for(Bytes(range.end - range.start));
        }
        let batch = executor.grant_in(program, generation, std::slice::from_ref(range), free.0, u64::MAX);
        if let Some(before) = running.replace(batch) {
            executor.copied(before).unwrap();
        }
    }
    if step.order == Order::CopyThenRun {
        executor.copied(running.take().unwrap()).unwrap();
        executor.run(1, program, generation, input.to_vec());
    }
    let answer = executor.ran(1).unwrap();
    let time = monotonic_now().since(began);
    if let Some(batch) = running {
        executor.copied(batch).unwrap();
    }
    (time, Duration::from_nanos(answer.done.waited_ns))
}

fn median(times: &[Duration]) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    times[times.len() / 2]
}

/// Formats the median, followed by the quartiles.
fn spread(times: &[Duration]) -> String {
    let mut times = times.to_vec();
    times.sort();
    let at = |part: usize| times[times.len() * part / 4];
    format!("{:.1?} ({:.1?} to {:.1?})", at(2), at(1), at(3))
}

/// Formats the ratio of the times of each round: the median, followed by the quartiles.
fn ratio(times: &[Duration], by: &[Duration]) -> String {
    let mut ratios: Vec<f64> = times.iter().zip(by).map(|(a, b)| a.as_secs_f64() / b.as_secs_f64()).collect();
    ratios.sort_by(f64::total_cmp);
    let at = |part: usize| ratios[ratios.len() * part / 4];
    format!("{:.2} ({:.2} to {:.2})", at(2), at(1), at(3))
}
