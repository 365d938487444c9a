//! Tests tensors of each engine in regions of an emulated device: filled within the device, read in place, and
//! copied out.
#![allow(missing_docs, clippy::unwrap_used)]

mod engines;
#[allow(dead_code, reason = "`launches` uses the rest")]
mod tiny;

use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};

use millrace_device::emulated::{EmulatedGpu, EmulatedRegion};
use millrace_device::{
    CopySource, Device as _, DeviceMemory, Error as DeviceError, HostRegion, InjectedFault, MemoryExtent,
    MissingBytes, Stream as _,
};
use millrace_engine::ort::OrtEngine;
use millrace_engine::rten::RtenEngine;
use millrace_engine::{
    Error, HostTensor, KernelSpec, LaunchArg, LaunchThreads, ModelCode, Queue as _, TensorBytes, TensorPart,
};
use millrace_types::{Bytes, DataType};
use proptest::prelude::*;

use engines::{TestedEngine, test_each_engine};

test_each_engine! {
    a_launch_reads_a_view_in_place,
    bytes_of_a_view_can_be_neither_unmapped_nor_written,
    every_datatype_reads_its_filled_bytes_and_only_some_in_place,
    mismatched_shapes_types_and_ranges_are_refused,
    host_and_region_parts_are_gathered_into_one_tensor,
    unsealed_files_can_be_copied_from_and_to,
}

const PAGE: u64 = 4096;
const BYTES: u64 = 2 * PAGE;

struct Bench<E: TestedEngine> {
    engine: E,
    /// A mapped region without loaded bytes.
    region: EmulatedRegion,
    queue: E::Queue,
}

fn bench<E: TestedEngine>() -> Option<Bench<E>> {
    let memory = DeviceMemory::create("test", Bytes::mib(1)).unwrap();
    let gpu = EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap();
    let region = gpu.reserve(Bytes(BYTES)).unwrap();
    // The two chunks are not adjacent, so that a copy must write to two places.
    let chunk = |offset| gpu.create(MemoryExtent { offset, bytes: PAGE }).unwrap();
    gpu.map(&region, vec![(0, chunk(4 * PAGE)), (PAGE, chunk(PAGE))]).unwrap();
    let engine = E::create(gpu)?;
    let queue = engine.queue(LaunchThreads::Whole).unwrap();
    Some(Bench { engine, region, queue })
}

impl<E: TestedEngine> Bench<E> {
    fn gpu(&self) -> &EmulatedGpu {
        self.engine.device()
    }

    /// Fills the region from its start with a part of a value.
    fn fill_with(&mut self, value: &E::Value, datatype: DataType, part: Range<u64>) -> Result<(), Error> {
        let lent = self.engine.lend(value, datatype, part)?;
        Ok(self.queue.stream().fill(&self.region, lent)?)
    }

    fn value(&mut self, datatype: DataType, shape: &[usize], bytes: &[u8]) -> E::Value {
        let contents = TensorBytes::Inline(bytes.to_vec().into());
        self.queue.upload(HostTensor { datatype, shape: shape.to_vec(), contents }).unwrap()
    }

    /// Fills the region from its start, and thereby loads these bytes.
    fn fill(&mut self, bytes: &[u8]) {
        let value = self.value(DataType::Uint8, &[bytes.len()], bytes);
        self.fill_with(&value, DataType::Uint8, 0..bytes.len() as u64).unwrap();
    }

    fn view(&mut self, datatype: DataType, shape: &[usize], bytes: Range<u64>) -> Result<E::Value, Error> {
        self.queue.view_region(datatype, shape.to_vec(), &self.region, bytes)
    }

    fn download(&mut self, value: &E::Value, datatype: DataType) -> Vec<u8> {
        let TensorBytes::Inline(bytes) = self.queue.download(value, datatype, usize::MAX).unwrap().contents
        else {
            panic!("inline was asked for")
        };
        bytes.to_vec()
    }
}

fn bytes(count: u64) -> Vec<u8> {
    (0..count).map(|at| (at * 31 % 251) as u8).collect()
}

fn file(bytes: &[u8]) -> OwnedFd {
    let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    assert_eq!(rustix::io::pwrite(&file, bytes, 0).unwrap(), bytes.len());
    file
}

fn contents(file: &OwnedFd) -> Vec<u8> {
    let mut bytes = vec![0; rustix::fs::fstat(file).unwrap().st_size as usize];
    assert_eq!(rustix::io::pread(file, &mut bytes, 0).unwrap(), bytes.len());
    bytes
}

fn a_launch_reads_a_view_in_place<E: TestedEngine>(mut bench: Bench<E>) {
    let elements = PAGE as usize / 4;
    let weights = [10.0f32, 200.0].map(|weight| weight.to_le_bytes().repeat(elements)).concat();
    let host = HostRegion::from_bytes("test", &weights).unwrap();
    let weights = bench.gpu().reserve(host.bytes()).unwrap();
    let graph = tiny::two_adds("weights.data", elements as u64);
    let code = ModelCode { graph, weights_name: "weights.data", weights: &host };
    let module = bench.engine.load(&weights, code).unwrap();
    let chunk = bench.gpu().create(MemoryExtent { offset: 8 * PAGE, bytes: 2 * PAGE }).unwrap();
    bench.gpu().map(&weights, vec![(0, chunk)]).unwrap();
    bench.queue.stream().copy(&weights, &host, 0..2 * PAGE).unwrap();
    let both = 0..2 * PAGE;
    let spec = KernelSpec { args: vec!["input".into()], writes: vec!["total".into()], reads: vec![both] };
    let kernel = bench.engine.kernel(&module, &spec).unwrap();

    bench.fill(&1.0f32.to_le_bytes().repeat(elements));
    let view = bench.view(DataType::Fp32, &[elements], 0..PAGE).unwrap();
    let first = |bench: &mut Bench<E>, arg: LaunchArg<'_, E::Value>| {
        let total = bench.queue.launch(&module, &kernel, vec![arg]).unwrap();
        f32::from_le_bytes(*bench.download(&total[0], DataType::Fp32).first_chunk().unwrap())
    };
    assert_eq!(first(&mut bench, LaunchArg::Lend(&view)), 211.0);
    bench.gpu().inject(InjectedFault::Corrupt(&bench.region)).unwrap();
    assert_ne!(first(&mut bench, LaunchArg::Lend(&view)), 211.0);
    bench.gpu().inject(InjectedFault::Corrupt(&bench.region)).unwrap();
    assert_eq!(first(&mut bench, LaunchArg::Give(view)), 211.0);
    // A value that is given to a launch is dropped with the launch, so the region is free.
    bench.gpu().unmap(&bench.region).unwrap();
}

fn bytes_of_a_view_can_be_neither_unmapped_nor_written<E: TestedEngine>(mut bench: Bench<E>) {
    assert!(
        matches!(bench.view(DataType::Int8, &[8], 0..8), Err(Error::Device(DeviceError::NotResident(gap))) if gap == (0..8))
    );
    bench.fill(&bytes(PAGE));
    let view = bench.view(DataType::Int32, &[2], 8..16).unwrap();
    let other = bench.value(DataType::Uint8, &[4], &[9; 4]);
    assert!(matches!(bench.gpu().unmap(&bench.region), Err(DeviceError::Busy)));
    let refused = bench.fill_with(&other, DataType::Uint8, 0..4);
    assert!(matches!(refused, Err(Error::Device(DeviceError::Busy))));
    let own = bench.queue.detach(view);
    bench.fill_with(&other, DataType::Uint8, 0..4).unwrap();
    bench.gpu().unmap(&bench.region).unwrap();
    assert_eq!(bench.download(&own, DataType::Int32), bytes(PAGE)[8..16]);
}

fn every_datatype_reads_its_filled_bytes_and_only_some_in_place<E: TestedEngine>(_: Bench<E>) {
    let numbers = [1i64, 0, 1, 1].map(i64::to_le_bytes).concat();
    for (datatype, size, start, in_place) in [
        (DataType::Fp32, 4, 0, true),
        (DataType::Int32, 4, 4, true),
        (DataType::Int32, 4, 8 + 3, false),
        (DataType::Int8, 1, 3, true),
        (DataType::Uint8, 1, 0, true),
        (DataType::Bool, 1, 0, false),
        (DataType::Int64, 8, 0, E::INT64_IN_PLACE),
    ] {
        let mut bench = bench::<E>().unwrap();
        bench.fill(&numbers);
        let part = start..start + 2 * size;
        let value = bench.view(datatype, &[2], part.clone()).unwrap();
        assert_eq!(bench.gpu().unmap(&bench.region).is_err(), in_place, "{datatype} at {start}");
        let there = &numbers[part.start as usize..part.end as usize];
        assert_eq!(bench.download(&value, datatype), there, "{datatype} at {start}");
        assert_eq!(bench.queue.shape(&value, datatype).unwrap(), [2]);
    }
}

fn mismatched_shapes_types_and_ranges_are_refused<E: TestedEngine>(mut bench: Bench<E>) {
    bench.fill(&bytes(PAGE));
    assert!(matches!(bench.view(DataType::Fp32, &[3], 0..8), Err(Error::Tensor(_))));
    assert!(matches!(
        bench.view(DataType::Uint8, &[2], BYTES - 1..BYTES + 1),
        Err(Error::Device(DeviceError::BadExtent { .. }))
    ));
    assert!(matches!(bench.view(E::REFUSED, &[1], 0..8), Err(Error::DataType(..))));
    let value = bench.value(DataType::Fp32, &[2], &[0; 8]);
    let refused = bench.fill_with(&value, DataType::Int32, 0..8);
    assert!(matches!(refused, Err(Error::Tensor(_))));
    assert!(matches!(bench.queue.shape(&value, DataType::Int8), Err(Error::Tensor(_))));
    for part in [0..9, 9..9, 8..9] {
        let refused = bench.fill_with(&value, DataType::Fp32, part);
        assert!(matches!(refused, Err(Error::Device(DeviceError::BadExtent { .. }))));
    }
    let to = file(&[]);
    let source = CopySource::Region(&bench.region, PAGE - 1..PAGE + 1);
    let refused = bench.queue.stream().copy_out(source, to.as_fd(), 0);
    assert!(matches!(refused, Err(DeviceError::NotResident(_))));
    assert_eq!(contents(&to), []);
}

fn host_and_region_parts_are_gathered_into_one_tensor<E: TestedEngine>(mut bench: Bench<E>) {
    let all = bytes(PAGE + 8);
    bench.fill(&all);
    let inline = TensorBytes::Inline(vec![1; 4].into());
    let file = TensorBytes::File(file(&[2; 8]));
    let region = bench.region.clone();
    let parts = || {
        vec![
            TensorPart::Host(&inline),
            TensorPart::Region(&region, PAGE - 4..PAGE + 8),
            TensorPart::Host(&file),
        ]
    };
    let value = bench.queue.gather(DataType::Fp32, vec![6], parts()).unwrap();
    let expected = [&[1; 4], &all[PAGE as usize - 4..], &[2; 8]].concat();
    assert_eq!(bench.download(&value, DataType::Fp32), expected);
    let refused = bench.queue.gather(DataType::Fp32, vec![7], parts());
    assert!(matches!(refused, Err(Error::Tensor(_))));
}

fn unsealed_files_can_be_copied_from_and_to<E: TestedEngine>(mut bench: Bench<E>) {
    let all = bytes(BYTES);
    let host = file(&all);
    bench.queue.stream().copy_from_file(&bench.region, host.as_fd(), 0..PAGE).unwrap();
    let missing = bench.gpu().missing(&bench.region, 0..BYTES);
    assert!(matches!(missing, Some(MissingBytes::NotIssued(gap)) if gap == (PAGE..BYTES)));
    bench.queue.stream().copy_from_file(&bench.region, host.as_fd(), PAGE..BYTES).unwrap();
    let to = file(&[]);
    bench.queue.stream().copy_out(CopySource::Region(&bench.region, PAGE..BYTES), to.as_fd(), 10).unwrap();
    bench.queue.stream().copy_out(CopySource::Region(&bench.region, PAGE - 10..PAGE), to.as_fd(), 0).unwrap();
    assert_eq!(contents(&to), all[PAGE as usize - 10..], "each part must be at its offset");
    let short = file(&all[..100]);
    assert!(bench.queue.stream().copy_from_file(&bench.region, short.as_fd(), 0..PAGE).is_err());
    let missing = bench.gpu().missing(&bench.region, 0..BYTES);
    assert!(matches!(missing, Some(MissingBytes::NotIssued(gap)) if gap == (0..PAGE)), "the copy had begun");
    bench.gpu().inject(InjectedFault::FailNextCopy).unwrap();
    let failed = bench.queue.stream().copy_out(CopySource::Region(&bench.region, PAGE..BYTES), to.as_fd(), 0);
    assert!(matches!(failed, Err(DeviceError::CopyFailed(_))));
}

/// Checks that any part of a value of these numbers equals that part of its bytes.
fn check_part<E: TestedEngine>(
    mut bench: Bench<E>,
    numbers: &[i32],
    ends: [prop::sample::Index; 2],
    wide: bool,
) -> Result<(), TestCaseError> {
    let (datatype, bytes) = if wide {
        (
            DataType::Int64,
            numbers.iter().flat_map(|&number| i64::from(number).to_le_bytes()).collect::<Vec<_>>(),
        )
    } else {
        (DataType::Int32, numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    };
    let value = bench.value(datatype, &[numbers.len()], &bytes);
    let ends = ends.map(|end| end.index(bytes.len() + 1));
    let part = ends[0].min(ends[1])..ends[0].max(ends[1]);
    let wanted = part.start as u64..part.end as u64;
    let to = file(&[]);
    let lent = bench.engine.lend(&value, datatype, wanted.clone()).unwrap();
    bench.queue.stream().copy_out(CopySource::Bytes(lent), to.as_fd(), 0).unwrap();
    prop_assert_eq!(contents(&to), &bytes[part.clone()]);
    bench.fill_with(&value, datatype, wanted).unwrap();
    let filled = bench.view(DataType::Uint8, &[part.len()], 0..part.len() as u64).unwrap();
    prop_assert_eq!(bench.download(&filled, DataType::Uint8), &bytes[part]);
    Ok(())
}

proptest! {
    #[test]
    fn any_part_of_a_value_equals_that_part_of_its_bytes(
        numbers in prop::collection::vec(any::<i32>(), 1..40),
        ends in any::<[prop::sample::Index; 2]>(),
        wide in any::<bool>(),
    ) {
        check_part(bench::<RtenEngine>().unwrap(), &numbers, ends, wide)?;
        if let Some(bench) = bench::<OrtEngine<EmulatedGpu>>() {
            check_part(bench, &numbers, ends, wide)?;
        }
    }
}

#[test]
fn every_datatype_of_onnx_runtime_survives_upload_and_download() {
    let Some(mut bench) = bench::<OrtEngine<EmulatedGpu>>() else { return };
    for datatype in DataType::ALL {
        let Some(size) = datatype.size() else { continue };
        let sent = match datatype {
            DataType::Bool => vec![1, 0, 0, 1],
            _ => bytes(4 * size as u64),
        };
        let value = bench.value(datatype, &[2, 2], &sent);
        for inline_max in [0, 64] {
            let back = bench.queue.download(&value, datatype, inline_max).unwrap();
            let contents = match back.contents {
                TensorBytes::Inline(bytes) => bytes.to_vec(),
                TensorBytes::File(file) => contents(&file),
            };
            assert_eq!((back.shape, contents), (vec![2, 2], sent.clone()), "{datatype}");
        }
    }
    let odd = bench.value(DataType::Bool, &[2], &[2, 0]);
    assert_eq!(bench.download(&odd, DataType::Bool), [1, 0], "an operator may rely on 0 and 1");
    let empty = bench.value(DataType::Fp32, &[0, 4], &[]);
    assert_eq!(bench.download(&empty, DataType::Fp32), []);
}
