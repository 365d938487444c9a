//! Tests the emulated device through its trait: only loaded bytes can be read.
#![allow(missing_docs, clippy::unwrap_used)]

mod tiny;

use std::num::NonZeroUsize;
use std::os::unix::process::ExitStatusExt as _;
use std::process::Command;

use millrace_device::emulated::{EmulatedGpu, EmulatedRegion, EmulatedStream, EmulatedValue, Kernel, Module};
use millrace_device::{
    Device, DeviceMemory, Error, Event as _, HostRegion, HostTensor, InjectedFault, KernelSpec, LaunchArg,
    MemoryExtent, ModelCode, Stream as _, StreamThreads, TensorBytes,
};
use millrace_types::{Bytes, DataType};

const PAGE: u64 = 4096;
/// Elements of a weight: the first weight fills a page, and the second starts on the next page.
const ELEMENTS: usize = PAGE as usize / 4;
const WEIGHTS: u64 = 2 * PAGE;

struct Bench {
    memory: DeviceMemory,
    gpu: EmulatedGpu,
    host: HostRegion,
    region: EmulatedRegion,
    stream: EmulatedStream,
}

fn bench() -> Bench {
    let memory = DeviceMemory::create("test", Bytes::mib(1)).unwrap();
    let gpu = EmulatedGpu::new(memory.share().unwrap(), memory.bytes(), NonZeroUsize::MIN).unwrap();
    let weights = [vec![10.0f32; ELEMENTS], vec![200.0; ELEMENTS]].concat();
    let bytes: Vec<u8> = weights.into_iter().flat_map(f32::to_le_bytes).collect();
    let host = HostRegion::from_bytes("test", &bytes).unwrap();
    let region = gpu.reserve(Bytes(WEIGHTS)).unwrap();
    let stream = gpu.stream(StreamThreads::Whole).unwrap();
    Bench { memory, gpu, host, region, stream }
}

impl Bench {
    fn map(&self, extents: &[(u64, u64, u64)]) -> Result<(), Error> {
        let chunks = extents
            .iter()
            .map(|&(at, offset, bytes)| Ok((at, self.gpu.create(MemoryExtent { offset, bytes })?)))
            .collect::<Result<_, Error>>()?;
        self.gpu.map(&self.region, chunks)
    }

    fn copy(&mut self, bytes: std::ops::Range<u64>) -> Result<(), Error> {
        self.stream.copy(&self.region, &self.host, bytes)?;
        self.stream.record()?.wait().map(drop)
    }

    /// Loads a model in which `sum` is `input + first`, and `total` is `sum + second`.
    fn module(&self) -> Module {
        let code = ModelCode {
            graph: tiny::two_adds("weights.data", ELEMENTS as u64),
            weights_name: "weights.data",
            weights: &self.host,
        };
        self.gpu.load(&self.region, code).unwrap()
    }

    fn kernel(&self, module: &Module, writes: &str, reads: std::ops::Range<u64>) -> Kernel {
        let spec = KernelSpec { args: vec!["input".into()], writes: vec![writes.into()], reads: vec![reads] };
        self.gpu.kernel(module, &spec).unwrap()
    }

    fn input(&mut self) -> EmulatedValue {
        let contents = TensorBytes::Inline(1.0f32.to_le_bytes().repeat(ELEMENTS).into());
        let tensor = HostTensor { datatype: DataType::Fp32, shape: vec![ELEMENTS], contents };
        self.stream.upload(tensor).unwrap()
    }

    fn launch(&mut self, module: &Module, kernel: &Kernel) -> Result<f32, Error> {
        let input = self.input();
        let values = self.stream.launch(module, kernel, vec![LaunchArg::Give(input)])?;
        let tensor = self.stream.download(&values[0], DataType::Fp32, usize::MAX)?;
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
    assert!(matches!(bench.launch(&module, &first), Err(Error::NotResident(gap)) if gap == (0..PAGE)));
    bench.map(&[(0, 0, WEIGHTS)]).unwrap();
    assert!(matches!(bench.launch(&module, &first), Err(Error::NotResident(_))), "mapped is not loaded");
    bench.copy(0..PAGE).unwrap();
    assert_eq!(bench.launch(&module, &first).unwrap(), 11.0);
    assert!(matches!(bench.launch(&module, &both), Err(Error::NotResident(gap)) if gap == (PAGE..WEIGHTS)));
    bench.copy(PAGE..WEIGHTS).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
    bench.gpu.unmap(&bench.region).unwrap();
    assert!(matches!(bench.launch(&module, &first), Err(Error::NotResident(_))));
    // The model works at another place in memory without a new load, because the addresses are the same.
    bench.map(&[(0, 64 * PAGE, WEIGHTS)]).unwrap();
    bench.copy(0..WEIGHTS).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
}

#[test]
fn a_launch_reads_its_weights_from_device_memory() {
    let mut bench = bench();
    let module = bench.module();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    bench.map(&[(0, 0, WEIGHTS)]).unwrap();
    bench.copy(0..WEIGHTS).unwrap();
    bench.gpu.inject(InjectedFault::Corrupt(&bench.region)).unwrap();
    assert_ne!(bench.launch(&module, &both).unwrap(), 211.0);
    bench.copy(0..WEIGHTS).unwrap();
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
}

#[test]
fn scattered_extents_get_the_bytes_of_their_offsets() {
    let mut bench = bench();
    let module = bench.module();
    bench.map(&[(PAGE, 0, PAGE), (0, 9 * PAGE, PAGE)]).unwrap();
    // The copies cross the boundary and are not whole pages.
    bench.copy(0..PAGE - 8).unwrap();
    bench.copy(PAGE - 8..PAGE + 8).unwrap();
    bench.copy(PAGE + 8..WEIGHTS).unwrap();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
    for (offset, expected) in [(0, 200.0f32), (10 * PAGE - 4, 10.0)] {
        let mut bytes = [0; 4];
        bench.memory.read_at(offset, &mut bytes).unwrap();
        assert_eq!(f32::from_le_bytes(bytes), expected);
    }
}

#[test]
fn invalid_extents_are_refused_and_leave_the_region_unmapped() {
    let mut bench = bench();
    let end = Bytes::mib(1).get();
    for extents in [
        &[(0, 0, 100)][..],
        &[(0, 1, PAGE)],
        &[(0, 0, 0)],
        &[(0, end, PAGE)],
        &[(0, u64::MAX - PAGE + 1, PAGE)],
        &[(1, 0, PAGE)],
        &[(2 * PAGE, 0, PAGE)],
        &[(0, 0, PAGE), (0, PAGE, PAGE)],
        &[(0, 0, 2 * PAGE), (PAGE, 2 * PAGE, PAGE)],
    ] {
        assert!(matches!(bench.map(extents), Err(Error::BadExtent { .. })), "{extents:?}");
    }
    assert!(matches!(bench.copy(0..8), Err(Error::NotMapped(gap)) if gap == (0..8)));
    bench.map(&[(0, 0, PAGE)]).unwrap();
    assert!(matches!(bench.map(&[(PAGE, PAGE, PAGE)]), Err(Error::Busy)), "it is mapped");
    assert!(matches!(bench.copy(0..WEIGHTS), Err(Error::NotMapped(gap)) if gap == (PAGE..WEIGHTS)));
    assert!(matches!(bench.copy(0..WEIGHTS + 1), Err(Error::BadExtent { .. })));
}

#[test]
fn another_device_maps_an_exported_chunk() {
    let mut here = bench();
    here.map(&[(0, 3 * PAGE, WEIGHTS)]).unwrap();
    here.copy(0..WEIGHTS).unwrap();
    let exported =
        here.gpu.export(&here.gpu.create(MemoryExtent { offset: 3 * PAGE, bytes: WEIGHTS }).unwrap());
    let mut there = bench();
    let (file, extent) = exported.unwrap();
    let chunk = there.gpu.import(file, extent).unwrap();
    there.gpu.map(&there.region, vec![(0, chunk)]).unwrap();
    // Both devices see the same memory, so a write of one device is visible to the other.
    let different = HostRegion::from_bytes("test", &[0; WEIGHTS as usize]).unwrap();
    there.stream.copy(&there.region, &different, 0..WEIGHTS).unwrap();
    let mut bytes = [1; 4];
    here.memory.read_at(3 * PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4]);
}

#[test]
fn a_copy_from_another_device_loads_only_the_copied_bytes() {
    let mut there = bench();
    there.map(&[(0, 3 * PAGE, WEIGHTS)]).unwrap();
    there.copy(0..WEIGHTS).unwrap();
    let exported =
        there.gpu.export(&there.gpu.create(MemoryExtent { offset: 3 * PAGE, bytes: WEIGHTS }).unwrap());
    let mut here = bench();
    let (file, extent) = exported.unwrap();
    let peer = here.gpu.import(file, extent).unwrap();
    let module = here.module();
    let both = here.kernel(&module, "total", 0..WEIGHTS);
    here.map(&[(0, PAGE, WEIGHTS)]).unwrap();
    here.stream.copy_from_peer(&here.region, &peer, 0, 0..PAGE).unwrap();
    assert!(matches!(here.launch(&module, &both), Err(Error::NotResident(gap)) if gap == (PAGE..WEIGHTS)));
    here.stream.copy_from_peer(&here.region, &peer, PAGE, PAGE..WEIGHTS).unwrap();
    assert_eq!(here.launch(&module, &both).unwrap(), 211.0);
    let past = here.stream.copy_from_peer(&here.region, &peer, PAGE, 0..WEIGHTS);
    assert!(matches!(past, Err(Error::BadExtent { .. })), "{past:?}");
    here.gpu.inject(InjectedFault::LosePeers).unwrap();
    let lost = here.stream.copy_from_peer(&here.region, &peer, 0, 0..PAGE);
    assert!(matches!(lost, Err(Error::PeerLost(_))), "{lost:?}");
    here.copy(0..WEIGHTS).unwrap();
    assert_eq!(here.launch(&module, &both).unwrap(), 211.0, "the host can be read");
}

#[test]
fn injected_faults_happen_once_and_a_lost_device_stays_lost() {
    let mut bench = bench();
    let module = bench.module();
    bench.gpu.inject(InjectedFault::FailNextMap).unwrap();
    assert!(matches!(bench.map(&[(0, 0, WEIGHTS)]), Err(Error::OutOfMemory(_))));
    bench.map(&[(0, 0, WEIGHTS)]).unwrap();
    bench.gpu.inject(InjectedFault::FailNextCopy).unwrap();
    assert!(matches!(bench.copy(0..WEIGHTS), Err(Error::CopyFailed(_))));
    bench.copy(0..WEIGHTS).unwrap();
    bench.gpu.inject(InjectedFault::Lose).unwrap();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    let input = HostTensor {
        datatype: DataType::Fp32,
        shape: vec![0],
        contents: TensorBytes::Inline([].as_slice().into()),
    };
    assert!(matches!(bench.stream.upload(input), Err(Error::Lost(_))));
    assert!(matches!(bench.stream.launch(&module, &both, vec![]), Err(Error::Lost(_))));
    assert!(matches!(bench.copy(0..WEIGHTS), Err(Error::Lost(_))));
}

#[test]
fn a_broken_model_and_an_unknown_value_are_refused() {
    let bench = bench();
    let code = |graph| ModelCode { graph, weights_name: "weights.data", weights: &bench.host };
    assert!(matches!(bench.gpu.load(&bench.region, code(b"not a graph".to_vec())), Err(Error::Code(_))));
    let longer = tiny::two_adds("weights.data", ELEMENTS as u64 * 2);
    assert!(matches!(bench.gpu.load(&bench.region, code(longer)), Err(Error::Code(_))));
    let module = bench.module();
    let spec = |writes: &str, end| KernelSpec {
        args: vec![],
        writes: vec![writes.into()],
        reads: std::iter::once(0..end).collect(),
    };
    assert!(
        matches!(bench.gpu.kernel(&module, &spec("nothing", 0)), Err(Error::UnknownValue(name)) if name == "nothing")
    );
    assert!(matches!(bench.gpu.kernel(&module, &spec("sum", WEIGHTS + 1)), Err(Error::BadExtent { .. })));
}

#[test]
fn a_launch_that_fails_on_an_input_does_not_affect_the_next() {
    let mut bench = bench();
    let module = bench.module();
    bench.map(&[(0, 0, WEIGHTS)]).unwrap();
    bench.copy(0..WEIGHTS).unwrap();
    let both = bench.kernel(&module, "total", 0..WEIGHTS);
    let contents = TensorBytes::Inline(vec![0; 4 * 7].into());
    let odd = bench.stream.upload(HostTensor { datatype: DataType::Fp32, shape: vec![7], contents }).unwrap();
    assert!(matches!(bench.stream.launch(&module, &both, vec![LaunchArg::Give(odd)]), Err(Error::Launch(_))));
    assert!(matches!(bench.stream.launch(&module, &both, vec![]), Err(Error::Launch(_))));
    assert_eq!(bench.launch(&module, &both).unwrap(), 211.0);
}

#[test]
fn constants_stored_in_another_form_are_read_from_the_host_copy() {
    let mut bench = bench();
    let indices: Vec<u8> = [3i64, -1, 0].into_iter().flat_map(i64::to_le_bytes).collect();
    let host = HostRegion::from_bytes("test", &indices).unwrap();
    let region = bench.gpu.reserve(host.bytes()).unwrap();
    let code =
        ModelCode { graph: tiny::pick("weights.data", 3), weights_name: "weights.data", weights: &host };
    let module = bench.gpu.load(&region, code).unwrap();
    let spec = KernelSpec { args: vec!["input".into()], writes: vec!["picked".into()], reads: vec![] };
    let kernel = bench.gpu.kernel(&module, &spec).unwrap();
    let contents = TensorBytes::Inline([10.0f32, 11.0, 12.0, 13.0].map(f32::to_le_bytes).concat().into());
    let input = HostTensor { datatype: DataType::Fp32, shape: vec![4], contents };
    let input = bench.stream.upload(input).unwrap();
    let picked = bench.stream.launch(&module, &kernel, vec![LaunchArg::Give(input)]).unwrap();
    let picked = bench.stream.download(&picked[0], DataType::Fp32, usize::MAX).unwrap();
    let TensorBytes::Inline(bytes) = picked.contents else { panic!("inline was asked for") };
    assert_eq!(bytes, [13.0f32, 13.0, 10.0].map(f32::to_le_bytes).concat());
}

/// Environment variable that is set in the child process, which this test expects to die.
const CHILD: &str = "MILLRACE_DEVICE_TEST_CHILD";

fn read_more_than_declared() {
    let mut bench = bench();
    let module = bench.module();
    bench.map(&[(0, 0, WEIGHTS)]).unwrap();
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
