//! Tests launches of rten on an emulated device: a launch reads only loaded bytes.
#![allow(missing_docs, clippy::unwrap_used)]

mod tiny;

use std::num::NonZeroUsize;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use millrace_device::emulated::{EmulatedGpu, EmulatedRegion};
use millrace_device::{
    Device as _, DeviceMemory, Error as DeviceError, Event as _, HostRegion, InjectedFault, MemoryExtent,
    Stream as _,
};
use millrace_engine::rten::{Kernel, Module, RtenEngine, RtenQueue, RtenValue};
use millrace_engine::{
    Engine as _, Error, HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue as _, TensorBytes,
};
use millrace_types::{Bytes, DataType};

const PAGE: u64 = 4096;
/// Elements of a weight: the first weight fills a page, and the second starts on the next page.
const ELEMENTS: usize = PAGE as usize / 4;
const WEIGHTS: u64 = 2 * PAGE;

struct Bench {
    engine: RtenEngine,
    host: HostRegion,
    region: EmulatedRegion,
    queue: RtenQueue,
}

fn bench() -> Bench {
    let memory = DeviceMemory::create("test", Bytes::mib(1)).unwrap();
    let gpu = EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap();
    let weights = [vec![10.0f32; ELEMENTS], vec![200.0; ELEMENTS]].concat();
    let bytes: Vec<u8> = weights.into_iter().flat_map(f32::to_le_bytes).collect();
    let host = HostRegion::from_bytes("test", &bytes).unwrap();
    let region = gpu.reserve(Bytes(WEIGHTS)).unwrap();
    let engine = RtenEngine::new(gpu, NonZeroUsize::MIN);
    let queue = engine.queue(LaunchThreads::Whole).unwrap();
    Bench { engine, host, region, queue }
}

impl Bench {
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
    fn module(&self) -> Module {
        let code = ModelCode {
            graph: tiny::two_adds("weights.data", ELEMENTS as u64),
            weights_name: "weights.data",
            weights: &self.host,
        };
        self.engine.load(&self.region, code).unwrap()
    }

    fn kernel(&self, module: &Module, writes: &str, reads: std::ops::Range<u64>) -> Kernel {
        let spec = KernelSpec { args: vec!["input".into()], writes: vec![writes.into()], reads: vec![reads] };
        self.engine.kernel(module, &spec).unwrap()
    }

    fn input(&mut self) -> RtenValue {
        let contents = TensorBytes::Inline(1.0f32.to_le_bytes().repeat(ELEMENTS).into());
        let tensor = HostTensor { datatype: DataType::Fp32, shape: vec![ELEMENTS], contents };
        self.queue.upload(tensor).unwrap()
    }

    fn launch(&mut self, module: &Module, kernel: &Kernel) -> Result<f32, Error> {
        let input = self.input();
        let values = self.queue.launch(module, kernel, vec![LaunchArg::Give(input)])?;
        let tensor = self.queue.download(&values[0], DataType::Fp32, usize::MAX)?;
        let TensorBytes::Inline(bytes) = tensor.contents else { panic!("inline was asked for") };
        Ok(f32::from_le_bytes(*bytes.first_chunk().unwrap()))
    }
}

#[test]
fn a_launch_runs_only_after_the_bytes_it_reads_are_loaded() {
    let mut bench = bench();
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

#[test]
fn a_launch_reads_its_weights_from_device_memory() {
    let mut bench = bench();
    let module = bench.module();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    bench.map(0);
    bench.copy(0..WEIGHTS).unwrap();
    bench.gpu().inject(InjectedFault::Corrupt(&bench.region)).unwrap();
    assert_ne!(bench.launch(&module, &both).unwrap(), 211.0);
    bench.copy(0..WEIGHTS).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
}

#[test]
fn a_launch_fails_once_without_memory_and_always_on_a_lost_device() {
    let mut bench = bench();
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

#[test]
fn a_broken_model_and_an_unknown_value_are_refused() {
    let bench = bench();
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

#[test]
fn a_launch_that_fails_on_an_input_does_not_affect_the_next() {
    let mut bench = bench();
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

#[test]
fn constants_stored_in_another_form_are_read_from_the_host_copy() {
    let mut bench = bench();
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
    let mut bench = bench();
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
