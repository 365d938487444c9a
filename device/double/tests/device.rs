//! The CUDA device on the double, from the first call to the last, each test in a process of its own.
#![allow(unsafe_code, reason = "lends memory of the GPU, as an engine does")]
#![allow(clippy::unwrap_used)]

mod support;

use std::ops::Range;
use std::os::fd::{AsFd as _, OwnedFd};

use millrace_device::cuda::{CudaGpu, CudaRegion, CudaRegionPin, CudaStream, GpuBytes};
use millrace_device::{
    CopySource, Device, Error, Event as _, HostAccess, HostRegion, InjectedFault, MemoryExtent, MissingBytes,
    Stream, memfd,
};
use millrace_types::Bytes;

/// Unit of the device's extents.
const BLOCK: u64 = 16 << 20;
/// Most bytes of a copy.
const PIECE: u64 = 4 << 20;
/// Memory of the double.
const MEMORY: &str = "335544320";
/// Blocks that the device takes.
const BLOCKS: u64 = 15;

fn open() -> CudaGpu {
    // The rest of a block is not taken.
    let gpu = CudaGpu::open(Bytes(BLOCKS * BLOCK + 1)).expect("the double is a GPU");
    assert_eq!(gpu.capabilities().memory, Bytes(BLOCKS * BLOCK));
    gpu
}

/// Returns bytes that differ from place to place and by seed.
fn contents(bytes: u64, seed: u64) -> Vec<u8> {
    let mut state = seed;
    // Knuth's multiplier of a linear generator.
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_le_bytes()
    };
    let mut words: Vec<u8> = (0..bytes.div_ceil(8)).flat_map(next).collect();
    words.truncate(bytes as usize);
    words
}

fn host(gpu: &CudaGpu, bytes: &[u8], access: HostAccess) -> HostRegion {
    let file = HostRegion::from_bytes("test", bytes).unwrap().share().unwrap();
    gpu.import_host(file, Bytes(bytes.len() as u64), access).unwrap()
}

/// Maps scattered blocks, the first of them at `first`.
fn map(gpu: &CudaGpu, region: &CudaRegion, first: u64) -> Result<(), Error> {
    let blocks = region.bytes().div_ceil(BLOCK);
    let chunk = |at: u64| {
        let offset = (first + at * 7) % BLOCKS * BLOCK;
        (at * BLOCK, gpu.create(MemoryExtent { offset, bytes: BLOCK }).unwrap())
    };
    gpu.map(region, (0..blocks).map(chunk).collect())
}

fn pieces(bytes: u64) -> impl Iterator<Item = Range<u64>> {
    (0..bytes).step_by(PIECE as usize).map(move |start| start..bytes.min(start + PIECE))
}

fn record(stream: &mut CudaStream) -> Result<millrace_device::cuda::CudaEvent, Error> {
    Stream::<CudaGpu>::record(stream)
}

fn copy(stream: &mut CudaStream, to: &CudaRegion, from: &HostRegion, part: Range<u64>) -> Result<(), Error> {
    Stream::<CudaGpu>::copy(stream, to, from, part)
}

fn pin(stream: &mut CudaStream, region: &CudaRegion, bytes: Range<u64>) -> Result<CudaRegionPin, Error> {
    stream.pin(region, std::slice::from_ref(&bytes))
}

/// Waits for the work that was queued under pins which are gone.
fn settle(stream: &mut CudaStream) {
    record(stream).unwrap().wait().unwrap();
}

/// Copies the region to a file, and returns the file's contents.
fn contents_of(stream: &mut CudaStream, region: &CudaRegion) -> Vec<u8> {
    let file: OwnedFd = memfd::create("test", region.bytes()).unwrap();
    for part in pieces(region.bytes()) {
        let at = part.start;
        Stream::<CudaGpu>::copy_out(stream, CopySource::Region(region, part), file.as_fd(), at).unwrap();
    }
    let mut found = vec![0; region.bytes() as usize];
    memfd::read_at(&file, &mut found, 0).unwrap();
    found
}

/// Waits until the mapping thread has ended, which releases the last values.
fn await_mapping_thread() {
    let name =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("comm")).unwrap_or_default();
    while std::fs::read_dir("/proc/self/task").unwrap().flatten().any(|task| name(task).trim() == "mapping") {
        std::thread::yield_now();
    }
}

/// Uses each call of the device. Copies out five times the bytes of the region.
fn each_call() {
    let gpu = open();
    let mut stream = gpu.stream().unwrap();
    let bytes = 2 * BLOCK + 12_345;
    let ends = [0, 1000, 1003, PIECE + 77, 2 * PIECE, 3 * PIECE, BLOCK - 5, BLOCK + 5, 5 * PIECE, 6 * PIECE];
    let ends = ends.into_iter().chain([7 * PIECE, 8 * PIECE, bytes]).collect::<Vec<_>>();
    let region = gpu.reserve(Bytes(bytes)).unwrap();
    let expected = contents(bytes, 1);
    let registered = host(&gpu, &expected, HostAccess::Direct);
    let buffered = host(&gpu, &contents(bytes, 2), HostAccess::Buffered);
    let file = HostRegion::from_bytes("test", &contents(bytes, 3)).unwrap();

    assert!(matches!(copy(&mut stream, &region, &registered, 0..1), Err(Error::NotMapped(_))));
    map(&gpu, &region, 3).unwrap();
    assert!(matches!(map(&gpu, &region, 3), Err(Error::Busy)));
    assert!(matches!(gpu.missing(&region, 5..9), Some(MissingBytes::NotIssued(gap)) if gap == (5..9)));
    assert!(matches!(pin(&mut stream, &region, 0..1), Err(Error::NotResident(_))));
    for part in ends.windows(2) {
        copy(&mut stream, &region, &registered, part[0]..part[1]).unwrap();
    }
    // A launch may be queued: the stream waits for the copies.
    drop(pin(&mut stream, &region, 0..bytes).unwrap());
    let event = record(&mut stream).unwrap();
    let mut other = gpu.stream().unwrap();
    Stream::<CudaGpu>::after(&mut other, &event).unwrap();
    record(&mut other).unwrap().wait().unwrap();
    assert!(gpu.missing(&region, 0..bytes).is_none());
    let pinned = pin(&mut other, &region, 0..bytes).unwrap();
    assert!(matches!(gpu.unmap(&region), Err(Error::Busy)));
    assert!(contents_of(&mut stream, &region) == expected);
    drop(pinned);
    settle(&mut other);

    for part in ends.windows(2) {
        copy(&mut stream, &region, &buffered, part[0]..part[1]).unwrap();
    }
    record(&mut stream).unwrap().wait().unwrap();
    assert!(contents_of(&mut stream, &region) == buffered.as_slice());
    for part in ends.windows(2) {
        let part = part[0]..part[1];
        Stream::<CudaGpu>::copy_from_file(&mut stream, &region, file.as_fd(), part).unwrap();
    }
    record(&mut stream).unwrap().wait().unwrap();
    assert!(contents_of(&mut stream, &region) == file.as_slice());

    // Bytes that an engine lends are borrowed until their copy has ended.
    let lent = gpu.reserve(Bytes(BLOCK)).unwrap();
    gpu.map(&lent, vec![(0, gpu.create(MemoryExtent { offset: 0, bytes: BLOCK }).unwrap())]).unwrap();
    for part in pieces(BLOCK) {
        copy(&mut stream, &lent, &registered, part).unwrap();
    }
    record(&mut stream).unwrap().wait().unwrap();
    assert!(gpu.missing(&lent, 0..BLOCK).is_none());
    let pinned = pin(&mut other, &lent, 0..BLOCK).unwrap();
    // SAFETY: the pin keeps the memory mapped, and the copies that write there have ended.
    let bytes = unsafe { GpuBytes::new(lent.address(), BLOCK) };
    Stream::<CudaGpu>::fill(&mut stream, &region, bytes).unwrap();
    assert!(matches!(gpu.unmap(&lent), Err(Error::Busy)));
    drop(pinned);
    settle(&mut other);
    assert!(gpu.missing(&region, 0..BLOCK).is_none());
    gpu.unmap(&lent).unwrap();
    assert!(contents_of(&mut stream, &region)[..BLOCK as usize] == expected[..BLOCK as usize]);
    gpu.inject(InjectedFault::Corrupt(&region)).unwrap();
    let corrupted = contents_of(&mut stream, &region);
    assert!(corrupted[..4096].iter().zip(&expected).all(|(found, byte)| *found == byte ^ 0x55));
    assert!(corrupted[4096..BLOCK as usize] == expected[4096..BLOCK as usize]);
    gpu.unmap(&region).unwrap();
}

/// Swaps models of two sizes a hundred times, and unmaps once while a copy is queued.
fn swaps() {
    let gpu = open();
    let mut stream = gpu.stream().unwrap();
    let models: Vec<_> =
        [(700_003, HostAccess::Direct), (BLOCK + 5, HostAccess::Buffered), (9 << 20, HostAccess::Direct)]
            .into_iter()
            .map(|(bytes, access)| {
                (gpu.reserve(Bytes(bytes)).unwrap(), host(&gpu, &contents(bytes, bytes), access))
            })
            .collect();
    let mut busy = 0;
    for swap in 0..100 {
        let (region, model) = &models[if swap % 10 == 9 { 1 } else { swap % 2 * 2 }];
        map(&gpu, region, swap as u64).unwrap();
        for part in pieces(region.bytes()) {
            copy(&mut stream, region, model, part).unwrap();
        }
        match gpu.unmap(region) {
            Err(Error::Busy) => busy += 1,
            Err(error) => panic!("{error}"),
            // The copies had ended.
            Ok(()) => continue,
        }
        record(&mut stream).unwrap().wait().unwrap();
        drop(pin(&mut stream, region, 0..region.bytes()).unwrap());
        settle(&mut stream);
        assert!(contents_of(&mut stream, region) == model.as_slice(), "swap {swap}");
        gpu.unmap(region).unwrap();
    }
    // A stream that is dropped with its work queued waits.
    let (region, model) = &models[1];
    map(&gpu, region, 0).unwrap();
    for part in pieces(region.bytes()) {
        copy(&mut stream, region, model, part).unwrap();
    }
    drop(stream);
    gpu.unmap(region).unwrap();
    assert!(busy > 0, "no swap was unmapped while a copy was queued");
}

/// Loses the context in a copy: the fault is planned by the test.
fn lost_context() {
    let gpu = open();
    let mut stream = gpu.stream().unwrap();
    let region = gpu.reserve(Bytes(BLOCK)).unwrap();
    let model = host(&gpu, &contents(BLOCK, 1), HostAccess::Direct);
    map(&gpu, &region, 0).unwrap();
    let event = pieces(BLOCK)
        .try_for_each(|part| copy(&mut stream, &region, &model, part))
        .and_then(|()| record(&mut stream));
    let found = event.and_then(|event| event.wait());
    assert!(matches!(found, Err(Error::ContextLost(_))), "{found:?}");
    let later = copy(&mut stream, &region, &model, 0..1);
    assert!(matches!(later, Err(Error::ContextLost(_))), "{later:?}");
}

/// Maps a region after a mapping of the same region has failed: the fault is planned by the test.
fn failed_mapping() {
    let gpu = open();
    let mut stream = gpu.stream().unwrap();
    let region = gpu.reserve(Bytes(2 * BLOCK)).unwrap();
    let model = host(&gpu, &contents(2 * BLOCK, 1), HostAccess::Direct);
    for is_first in [true, false] {
        map(&gpu, &region, 0).unwrap();
        for part in pieces(2 * BLOCK) {
            copy(&mut stream, &region, &model, part).unwrap();
        }
        record(&mut stream).unwrap().wait().unwrap();
        let pinned = pin(&mut stream, &region, 0..1);
        match is_first {
            true => assert!(matches!(pinned, Err(Error::OutOfMemory(_))), "{pinned:?}"),
            false => drop(pinned.unwrap()),
        }
        settle(&mut stream);
        gpu.unmap(&region).unwrap();
    }
}

#[test]
fn scenario() {
    match support::scenario().as_deref() {
        None => return,
        Some("each call") => each_call(),
        Some("swaps") => swaps(),
        Some("lost context") => lost_context(),
        Some("failed mapping") => failed_mapping(),
        Some(name) => panic!("unknown scenario {name}"),
    }
    await_mapping_thread();
}

/// Runs a scenario to its end, and checks that the device released everything. Returns the report.
fn run(name: &str, variables: &[(&str, &str)]) -> Option<serde_json::Value> {
    let memory = [("MILLRACE_DOUBLE_MEMORY", MEMORY)];
    let outcome = support::run(name, &[&memory, variables].concat())?;
    assert!(outcome.status.success(), "{variables:?}: {}\n{}", outcome.status, outcome.errors);
    assert!(!outcome.errors.contains("cuda double:"), "{variables:?}: {}", outcome.errors);
    assert!(!outcome.errors.contains("not registered"), "{variables:?}: {}", outcome.errors);
    let report = outcome.report.expect("a report");
    let left = report["left"].as_object().expect("the values that were left");
    assert!(left.values().all(|count| *count == 0), "{variables:?}: {report:#}");
    Some(report)
}

#[test]
fn each_call_of_the_device_keeps_the_rules_and_leaves_nothing() {
    let Some(report) = run("each call", &[("MILLRACE_DOUBLE_SEED", "6")]) else { return };
    assert_eq!(report["on_gpu"], BLOCK);
    assert_eq!(report["calls"]["cuMemCreate"], BLOCKS, "the pool is taken at the start, and nothing later");
    assert_eq!(report["to_host"], 5 * (2 * BLOCK + 12_345), "unmapping copies nothing to the host");
}

#[test]
fn swaps_keep_all_bytes_whatever_the_delays_are() {
    for seed in ["1", "2", "3", "4", "5"] {
        let Some(report) = run("swaps", &[("MILLRACE_DOUBLE_SEED", seed)]) else { return };
        assert_eq!(report["calls"]["cuMemCreate"], BLOCKS);
    }
}

#[test]
fn a_copy_that_loses_the_context_fails_its_event() {
    run("lost context", &[("MILLRACE_DOUBLE_FAULT", "cuMemcpyHtoDAsync_v2:3:700")]);
}

#[test]
fn a_region_can_be_mapped_again_after_its_mapping_failed() {
    // The pool maps each block once, and the fault is in the second block of the region.
    run("failed mapping", &[("MILLRACE_DOUBLE_FAULT", "cuMemMap:17:2")]);
}
