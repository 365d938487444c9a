//! Tests launches of each engine on an emulated device: a launch reads only loaded bytes.
#![allow(missing_docs, clippy::unwrap_used)]

#[allow(dead_code, reason = "`in_place` uses the rest")]
mod engines;
mod tiny;

use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;
use std::sync::Barrier;

use millrace_device::emulated::{EmulatedGpu, EmulatedRegion, SmPage};
use millrace_device::{
    Device as _, DeviceMemory, Error as DeviceError, Event as _, HostRegion, InjectedFault, MemoryExtent,
    Stream as _,
};
use millrace_engine::ort::OrtEngine;
use millrace_engine::rten::RtenEngine;
use millrace_engine::{
    Engine as _, Error, HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue as _, TensorBytes,
};
use millrace_types::slices::{SmShare, UNITS, UnitSet};
use millrace_types::{Bytes, DataType};

use engines::{TestedEngine, test_each_engine};

const PAGE: u64 = 4096;
/// Elements of a weight: the first weight fills a page, and the second starts on the next page.
const ELEMENTS: usize = PAGE as usize / 4;
const WEIGHTS: u64 = 2 * PAGE;

test_each_engine! {
    a_launch_runs_only_after_the_bytes_it_reads_are_loaded,
    a_launch_reads_its_weights_from_device_memory,
    a_launch_fails_once_without_memory_and_always_on_a_lost_device,
    a_broken_model_and_an_unknown_value_are_refused,
    a_launch_that_fails_on_an_input_does_not_affect_the_next,
    a_launch_begins_at_a_value_of_an_earlier_launch,
    branches_read_their_own_weights_from_device_memory,
    each_launch_is_counted_on_the_sms_of_its_stream,
}

struct Bench<E: TestedEngine> {
    engine: E,
    host: HostRegion,
    region: EmulatedRegion,
    queue: E::Queue,
    /// Counters of the GPU's launches.
    sms: SmPage,
}

fn bench<E: TestedEngine>() -> Option<Bench<E>> {
    let memory = DeviceMemory::create("test", Bytes::mib(1)).unwrap();
    let sms = SmPage::create("test").unwrap();
    let gpu = EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap().with_sms(sms.clone());
    let weights = [vec![10.0f32; ELEMENTS], vec![200.0; ELEMENTS]].concat();
    let bytes: Vec<u8> = weights.into_iter().flat_map(f32::to_le_bytes).collect();
    let host = HostRegion::from_bytes("test", &bytes).unwrap();
    let region = gpu.reserve(Bytes(WEIGHTS)).unwrap();
    let engine = E::create(gpu)?;
    let queue = engine.queue(LaunchThreads::Whole).unwrap();
    Some(Bench { engine, host, region, queue, sms })
}

impl<E: TestedEngine> Bench<E> {
    fn gpu(&self) -> &EmulatedGpu {
        self.engine.device()
    }

    /// Maps the whole region to this place in the GPU's memory.
    fn map(&self, offset: u64) {
        let chunk = self.gpu().create(MemoryExtent { offset, bytes: WEIGHTS }).unwrap();
        self.gpu().map(&self.region, vec![(0, chunk)]).unwrap();
    }

    fn copy(&mut self, bytes: std::ops::Range<u64>) -> Result<(), DeviceError> {
        let stream = self.queue.stream();
        stream.copy(&self.region, &self.host, bytes)?;
        stream.record()?.wait().map(drop)
    }

    /// Loads a model in which `sum` is `input + first`, and `total` is `sum + second`.
    fn module(&self) -> E::Module {
        let code = ModelCode {
            graph: tiny::two_adds("weights.data", ELEMENTS as u64),
            weights_name: "weights.data",
            weights: &self.host,
        };
        self.engine.load(&self.region, code).unwrap()
    }

    fn kernel(&self, module: &E::Module, writes: &str, reads: std::ops::Range<u64>) -> E::Kernel {
        let spec = KernelSpec { args: vec!["input".into()], writes: vec![writes.into()], reads: vec![reads] };
        self.engine.kernel(module, &spec).unwrap()
    }

    fn input(&mut self) -> E::Value {
        let contents = TensorBytes::Inline(1.0f32.to_le_bytes().repeat(ELEMENTS).into());
        let tensor = HostTensor { datatype: DataType::Fp32, shape: vec![ELEMENTS], contents };
        self.queue.upload(tensor).unwrap()
    }

    fn launch(&mut self, module: &E::Module, kernel: &E::Kernel) -> Result<f32, Error> {
        let input = self.input();
        let values = self.queue.launch(module, kernel, vec![LaunchArg::Give(input)])?;
        Ok(self.first(&values[0]))
    }

    /// Returns the first element of a value.
    fn first(&mut self, value: &E::Value) -> f32 {
        let tensor = self.queue.download(value, DataType::Fp32, usize::MAX).unwrap();
        let TensorBytes::Inline(bytes) = tensor.contents else { panic!("inline was asked for") };
        f32::from_le_bytes(*bytes.first_chunk().unwrap())
    }
}

fn a_launch_runs_only_after_the_bytes_it_reads_are_loaded<E: TestedEngine>(mut bench: Bench<E>) {
    let module = bench.module();
    let first = bench.kernel(&module, "sum", 0..PAGE);
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    assert!(
        matches!(bench.launch(&module, &first), Err(Error::Device(DeviceError::NotResident(gap))) if gap == (0..PAGE))
    );
    bench.map(0);
    assert!(
        matches!(bench.launch(&module, &first), Err(Error::Device(DeviceError::NotResident(_)))),
        "mapped is not loaded"
    );
    bench.copy(0..PAGE).unwrap();
    assert_eq!(bench.launch(&module, &first).unwrap(), 11.0);
    assert!(
        matches!(bench.launch(&module, &both), Err(Error::Device(DeviceError::NotResident(gap))) if gap == (PAGE..WEIGHTS))
    );
    bench.copy(PAGE..WEIGHTS).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
    bench.gpu().unmap(&bench.region).unwrap();
    assert!(matches!(bench.launch(&module, &first), Err(Error::Device(DeviceError::NotResident(_)))));
    // The model works at another place in memory without a new load, because the addresses are the same.
    bench.map(64 * PAGE);
    bench.copy(0..WEIGHTS).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
}

fn a_launch_reads_its_weights_from_device_memory<E: TestedEngine>(mut bench: Bench<E>) {
    let module = bench.module();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    bench.map(0);
    bench.copy(0..WEIGHTS).unwrap();
    bench.gpu().inject(InjectedFault::Corrupt(&bench.region)).unwrap();
    assert_ne!(bench.launch(&module, &both).unwrap(), 211.0);
    bench.copy(0..WEIGHTS).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
}

fn a_launch_fails_once_without_memory_and_always_on_a_lost_device<E: TestedEngine>(mut bench: Bench<E>) {
    let module = bench.module();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    bench.map(0);
    bench.copy(0..WEIGHTS).unwrap();
    bench.gpu().inject(InjectedFault::ExhaustNextLaunch).unwrap();
    assert!(matches!(bench.launch(&module, &both), Err(Error::Device(DeviceError::OutOfMemory(_)))));
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
    bench.gpu().inject(InjectedFault::Lose).unwrap();
    let input = HostTensor {
        datatype: DataType::Fp32,
        shape: vec![0],
        contents: TensorBytes::Inline([].as_slice().into()),
    };
    assert!(matches!(bench.queue.upload(input), Err(Error::Device(DeviceError::Lost(_)))));
    let launched = bench.queue.launch(&module, &both, vec![]);
    assert!(matches!(launched, Err(Error::Device(DeviceError::Lost(_)))));
}

fn a_broken_model_and_an_unknown_value_are_refused<E: TestedEngine>(bench: Bench<E>) {
    let code = |graph| ModelCode { graph, weights_name: "weights.data", weights: &bench.host };
    assert!(matches!(bench.engine.load(&bench.region, code(b"not a graph".to_vec())), Err(Error::Code(_))));
    let longer = tiny::two_adds("weights.data", ELEMENTS as u64 * 2);
    assert!(matches!(bench.engine.load(&bench.region, code(longer)), Err(Error::Code(_))));
    let module = bench.module();
    let spec = |writes: &str, end| KernelSpec {
        args: vec![],
        writes: vec![writes.into()],
        reads: std::iter::once(0..end).collect(),
    };
    assert!(
        matches!(bench.engine.kernel(&module, &spec("nothing", 0)), Err(Error::UnknownValue(name)) if name == "nothing")
    );
    assert!(matches!(
        bench.engine.kernel(&module, &spec("sum", WEIGHTS + 1)),
        Err(Error::Device(DeviceError::BadExtent { .. }))
    ));
}

fn a_launch_that_fails_on_an_input_does_not_affect_the_next<E: TestedEngine>(mut bench: Bench<E>) {
    let module = bench.module();
    bench.map(0);
    bench.copy(0..WEIGHTS).unwrap();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    let contents = TensorBytes::Inline(vec![0; 4 * 7].into());
    let odd = bench.queue.upload(HostTensor { datatype: DataType::Fp32, shape: vec![7], contents }).unwrap();
    assert!(matches!(bench.queue.launch(&module, &both, vec![LaunchArg::Give(odd)]), Err(Error::Launch(_))));
    assert!(matches!(bench.queue.launch(&module, &both, vec![]), Err(Error::Launch(_))));
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
}

fn a_launch_begins_at_a_value_of_an_earlier_launch<E: TestedEngine>(mut bench: Bench<E>) {
    let module = bench.module();
    bench.map(0);
    bench.copy(0..WEIGHTS).unwrap();
    let first = bench.kernel(&module, "sum", 0..PAGE);
    let reads = PAGE..WEIGHTS;
    let writes = vec!["total".into(), "sum".into()];
    // A launch may take values that it does not read, such as an unused input of the model.
    let args = vec!["input".into(), "sum".into()];
    let second = bench.engine.kernel(&module, &KernelSpec { args, writes, reads: vec![reads] }).unwrap();
    let input = bench.input();
    let sum = bench.queue.launch(&module, &first, vec![LaunchArg::Lend(&input)]).unwrap().remove(0);
    let args = vec![LaunchArg::Give(input), LaunchArg::Lend(&sum)];
    let values = bench.queue.launch(&module, &second, args).unwrap();
    let firsts = values.iter().map(|value| bench.first(value)).collect::<Vec<_>>();
    assert_eq!((firsts, bench.first(&sum)), (vec![211.0, 11.0], 11.0));
}

fn branches_read_their_own_weights_from_device_memory<E: TestedEngine>(mut bench: Bench<E>) {
    let graph = tiny::choose("weights.data", ELEMENTS as u64);
    let code = ModelCode { graph, weights_name: "weights.data", weights: &bench.host };
    let module = bench.engine.load(&bench.region, code).unwrap();
    let args = vec!["doubled".into(), "flag".into()];
    let whole = 0..WEIGHTS;
    let spec = KernelSpec { args, writes: vec!["sum".into()], reads: vec![whole] };
    let kernel = bench.engine.kernel(&module, &spec).unwrap();
    bench.map(0);
    bench.copy(0..WEIGHTS).unwrap();
    let chosen = [1, 0].map(|flag| {
        let contents = TensorBytes::Inline(vec![flag].into());
        let flag = HostTensor { datatype: DataType::Bool, shape: vec![1], contents };
        let flag = bench.queue.upload(flag).unwrap();
        let args = vec![LaunchArg::Give(bench.input()), LaunchArg::Give(flag)];
        let sum = bench.queue.launch(&module, &kernel, args).unwrap();
        bench.first(&sum[0])
    });
    assert_eq!(chosen, [11.0, 201.0]);
}

fn each_launch_is_counted_on_the_sms_of_its_stream<E: TestedEngine>(mut bench: Bench<E>) {
    let module = bench.module();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    bench.map(0);
    bench.copy(0..WEIGHTS).unwrap();
    let busy_units = |sms: &SmPage| sms.figures().busy.map(|busy| !busy.is_zero());
    let upper = SmShare::Block(UnitSet::block(8, 8).unwrap());
    bench.queue.stream().restrict(upper).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
    assert_eq!(busy_units(&bench.sms), std::array::from_fn(|unit| unit >= 8));
    let other = bench.sms.claim(SmShare::Block(UnitSet::block(12, 4).unwrap()));
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0, "a violation does not stop the launch");
    drop(other);
    assert_eq!((bench.sms.figures().launches, bench.sms.figures().violations), (3, 1));
    bench.queue.stream().restrict(SmShare::Block(UnitSet::ALL)).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
    assert_eq!(busy_units(&bench.sms), [true; UNITS as usize]);
    assert!(bench.queue.launch(&module, &both, vec![]).is_err());
    assert_eq!(bench.sms.figures().owners, [0; UNITS as usize], "a failed launch frees its SMs");
}

#[test]
fn two_queues_of_an_engine_with_one_thread_run_at_once() {
    let Bench { engine, .. } = bench::<RtenEngine>().unwrap();
    let queues = [(), ()].map(|()| engine.queue(LaunchThreads::Whole).unwrap());
    let both_inside = Barrier::new(2);
    std::thread::scope(|scope| {
        for queue in queues {
            scope.spawn(|| engine.enter(queue, |_| both_inside.wait()));
        }
    });
}

#[test]
fn a_launch_over_onnx_runtime_also_needs_the_weights_that_it_did_not_declare() {
    let Some(mut bench) = bench::<OrtEngine<EmulatedGpu>>() else { return };
    let module = bench.module();
    bench.map(0);
    bench.copy(0..PAGE).unwrap();
    let liar = bench.kernel(&module, "total", 0..PAGE);
    let refused = bench.launch(&module, &liar);
    assert!(matches!(refused, Err(Error::Device(DeviceError::NotResident(gap))) if gap == (PAGE..WEIGHTS)));
}

#[test]
fn onnx_runtime_computes_in_half_precision() {
    let Some(mut bench) = bench::<OrtEngine<EmulatedGpu>>() else { return };
    let halves = |number: u16| number.to_le_bytes().repeat(PAGE as usize / 2);
    // The FP16 numbers 1, 2 and 3.
    let [one, two, three] = [0x3c00, 0x4000, 0x4200].map(halves);
    let host = HostRegion::from_bytes("test", &two).unwrap();
    let region = bench.gpu().reserve(host.bytes()).unwrap();
    let graph = tiny::half_add("weights.data", PAGE / 2);
    let code = ModelCode { graph, weights_name: "weights.data", weights: &host };
    let module = bench.engine.load(&region, code).unwrap();
    let spec = KernelSpec { args: vec!["input".into()], writes: vec!["sum".into()], reads: vec![] };
    let kernel = bench.engine.kernel(&module, &spec).unwrap();
    let chunk = bench.gpu().create(MemoryExtent { offset: 0, bytes: PAGE }).unwrap();
    bench.gpu().map(&region, vec![(0, chunk)]).unwrap();
    bench.queue.stream().copy(&region, &host, 0..PAGE).unwrap();
    let contents = TensorBytes::Inline(one.into());
    let shape = vec![PAGE as usize / 2];
    let input = bench.queue.upload(HostTensor { datatype: DataType::Fp16, shape, contents }).unwrap();
    let sum = bench.queue.launch(&module, &kernel, vec![LaunchArg::Give(input)]).unwrap();
    let sum = bench.queue.download(&sum[0], DataType::Fp16, usize::MAX).unwrap();
    let TensorBytes::Inline(sum) = sum.contents else { panic!("inline was asked for") };
    assert_eq!(sum, three);
}

#[test]
fn constants_stored_in_another_form_are_read_from_the_host_copy() {
    let mut bench = bench::<RtenEngine>().unwrap();
    let indices: Vec<u8> = [3i64, -1, 0].into_iter().flat_map(i64::to_le_bytes).collect();
    let host = HostRegion::from_bytes("test", &indices).unwrap();
    let region = bench.gpu().reserve(host.bytes()).unwrap();
    let code =
        ModelCode { graph: tiny::pick("weights.data", 3), weights_name: "weights.data", weights: &host };
    let module = bench.engine.load(&region, code).unwrap();
    let spec = KernelSpec { args: vec!["input".into()], writes: vec!["picked".into()], reads: vec![] };
    let kernel = bench.engine.kernel(&module, &spec).unwrap();
    let contents = TensorBytes::Inline([10.0f32, 11.0, 12.0, 13.0].map(f32::to_le_bytes).concat().into());
    let input = HostTensor { datatype: DataType::Fp32, shape: vec![4], contents };
    let input = bench.queue.upload(input).unwrap();
    let picked = bench.queue.launch(&module, &kernel, vec![LaunchArg::Give(input)]).unwrap();
    let picked = bench.queue.download(&picked[0], DataType::Fp32, usize::MAX).unwrap();
    let TensorBytes::Inline(bytes) = picked.contents else { panic!("inline was asked for") };
    assert_eq!(bytes, [13.0f32, 13.0, 10.0].map(f32::to_le_bytes).concat());
}

/// Environment variable that is set in the child process, which this test expects to die.
const CHILD: &str = "MILLRACE_DEVICE_TEST_CHILD";

fn read_more_than_declared() {
    let mut bench = bench::<RtenEngine>().unwrap();
    let module = bench.module();
    bench.map(0);
    bench.copy(0..PAGE).unwrap();
    let liar = bench.kernel(&module, "total", 0..PAGE);
    println!("reading");
    let answer = bench.launch(&module, &liar);
    println!("answered {answer:?}");
}

#[test]
fn a_launch_that_reads_more_than_it_declared_is_stopped() {
    if std::env::var_os(CHILD).is_some() {
        return read_more_than_declared();
    }
    let name = "a_launch_that_reads_more_than_it_declared_is_stopped";
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(said.contains("reading") && !said.contains("answered"), "{said}");
    assert_eq!(child.status.signal(), Some(rustix::process::Signal::SEGV.as_raw()), "{said}");
}
