//! Tests the memory of the emulated device through its trait.
#![allow(missing_docs, clippy::unwrap_used)]

use std::ops::Range;

use millrace_device::emulated::{EmulatedGpu, EmulatedRegion, EmulatedStream};
use millrace_device::{
    Device, DeviceMemory, Error, Event as _, HostRegion, InjectedFault, MemoryExtent, MissingBytes,
    Stream as _,
};
use millrace_types::Bytes;

const PAGE: u64 = 4096;
const BYTES: u64 = 2 * PAGE;

struct Bench {
    memory: DeviceMemory,
    gpu: EmulatedGpu,
    /// The first page is full of 10, the second of 200.
    host: HostRegion,
    region: EmulatedRegion,
    stream: EmulatedStream,
}

fn bench() -> Bench {
    let memory = DeviceMemory::create("test", Bytes::mib(1)).unwrap();
    let gpu = EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap();
    let host = HostRegion::from_bytes("test", &[[10; PAGE as usize], [200; PAGE as usize]].concat()).unwrap();
    let region = gpu.reserve(Bytes(BYTES)).unwrap();
    let stream = gpu.stream().unwrap();
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

    fn copy(&mut self, bytes: Range<u64>) -> Result<(), Error> {
        self.stream.copy(&self.region, &self.host, bytes)?;
        self.stream.record()?.wait().map(drop)
    }

    /// Returns a byte of the region, which must be loaded.
    fn byte(&self, at: u64) -> Result<u8, Error> {
        self.region.hold(at..at + 1).map(|held| held.as_slice()[0])
    }
}

#[test]
fn only_loaded_bytes_can_be_read() {
    let mut bench = bench();
    assert!(matches!(bench.byte(0), Err(Error::NotResident(gap)) if gap == (0..1)));
    bench.map(&[(0, 0, BYTES)]).unwrap();
    assert!(matches!(bench.byte(0), Err(Error::NotResident(_))), "mapped is not loaded");
    bench.copy(0..PAGE).unwrap();
    assert_eq!(bench.byte(PAGE - 1).unwrap(), 10);
    assert!(matches!(
        bench.gpu.missing(&bench.region, 0..BYTES),
        Some(MissingBytes::NotIssued(gap)) if gap == (PAGE..BYTES)
    ));
    bench.gpu.unmap(&bench.region).unwrap();
    assert!(matches!(bench.byte(0), Err(Error::NotResident(_))));
}

#[test]
fn bytes_that_are_held_are_neither_unmapped_nor_written() {
    let mut bench = bench();
    bench.map(&[(0, 0, BYTES)]).unwrap();
    bench.copy(0..BYTES).unwrap();
    let held = bench.region.hold(0..8).unwrap();
    assert!(matches!(bench.gpu.unmap(&bench.region), Err(Error::Busy)));
    assert!(matches!(bench.copy(0..PAGE), Err(Error::Busy)));
    drop(held);
    bench.copy(0..PAGE).unwrap();
    bench.gpu.unmap(&bench.region).unwrap();
}

#[test]
fn scattered_extents_get_the_bytes_of_their_offsets() {
    let mut bench = bench();
    bench.map(&[(PAGE, 0, PAGE), (0, 9 * PAGE, PAGE)]).unwrap();
    // The copies cross the boundary and are not whole pages.
    bench.copy(0..PAGE - 8).unwrap();
    bench.copy(PAGE - 8..PAGE + 8).unwrap();
    bench.copy(PAGE + 8..BYTES).unwrap();
    for (offset, expected) in [(0, 200), (10 * PAGE - 1, 10)] {
        let mut byte = [0];
        bench.memory.read_at(offset, &mut byte).unwrap();
        assert_eq!(byte, [expected]);
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
        &[(Bytes::mib(2).get(), 0, PAGE)],
        &[(0, 0, PAGE), (0, PAGE, PAGE)],
        &[(0, 0, 2 * PAGE), (PAGE, 2 * PAGE, PAGE)],
    ] {
        assert!(matches!(bench.map(extents), Err(Error::BadExtent { .. })), "{extents:?}");
    }
    assert!(matches!(bench.copy(0..8), Err(Error::NotMapped(gap)) if gap == (0..8)));
    bench.map(&[(0, 0, PAGE)]).unwrap();
    assert!(matches!(bench.map(&[(PAGE, PAGE, PAGE)]), Err(Error::Busy)), "it is mapped");
    assert!(matches!(bench.copy(0..BYTES), Err(Error::NotMapped(gap)) if gap == (PAGE..BYTES)));
    assert!(matches!(bench.copy(0..BYTES + 1), Err(Error::BadExtent { .. })));
}

#[test]
fn an_extent_may_end_behind_the_region_within_its_last_block() {
    let mut bench = bench();
    bench.map(&[(0, 0, Bytes::mib(1).get())]).unwrap();
    bench.copy(0..BYTES).unwrap();
    assert!(matches!(bench.copy(0..BYTES + 1), Err(Error::BadExtent { .. })), "the region is no longer");
}

#[test]
fn another_device_maps_an_exported_chunk() {
    let mut here = bench();
    here.map(&[(0, 3 * PAGE, BYTES)]).unwrap();
    here.copy(0..BYTES).unwrap();
    let chunk = here.gpu.create(MemoryExtent { offset: 3 * PAGE, bytes: BYTES }).unwrap();
    let (file, extent) = here.gpu.export(&chunk).unwrap();
    let mut there = bench();
    let chunk = there.gpu.import(file, extent).unwrap();
    there.gpu.map(&there.region, vec![(0, chunk)]).unwrap();
    // Both devices see the same memory, so a write of one device is visible to the other.
    let different = HostRegion::from_bytes("test", &[0; BYTES as usize]).unwrap();
    there.stream.copy(&there.region, &different, 0..BYTES).unwrap();
    let mut bytes = [1; 4];
    here.memory.read_at(3 * PAGE, &mut bytes).unwrap();
    assert_eq!(bytes, [0; 4]);
}

#[test]
fn a_copy_from_another_device_loads_only_the_copied_bytes() {
    let mut there = bench();
    there.map(&[(0, 3 * PAGE, BYTES)]).unwrap();
    there.copy(0..BYTES).unwrap();
    let chunk = there.gpu.create(MemoryExtent { offset: 3 * PAGE, bytes: BYTES }).unwrap();
    let (file, extent) = there.gpu.export(&chunk).unwrap();
    let mut here = bench();
    let peer = here.gpu.import(file, extent).unwrap();
    here.map(&[(0, PAGE, BYTES)]).unwrap();
    here.stream.copy_from_peer(&here.region, &peer, 0, 0..PAGE).unwrap();
    assert!(matches!(here.byte(PAGE), Err(Error::NotResident(_))));
    here.stream.copy_from_peer(&here.region, &peer, PAGE, PAGE..BYTES).unwrap();
    assert_eq!((here.byte(0).unwrap(), here.byte(PAGE).unwrap()), (10, 200));
    let past = here.stream.copy_from_peer(&here.region, &peer, PAGE, 0..BYTES);
    assert!(matches!(past, Err(Error::BadExtent { .. })), "{past:?}");
    here.gpu.inject(InjectedFault::LosePeers).unwrap();
    let lost = here.stream.copy_from_peer(&here.region, &peer, 0, 0..PAGE);
    assert!(matches!(lost, Err(Error::PeerLost(_))), "{lost:?}");
    here.copy(0..BYTES).unwrap();
    assert_eq!(here.byte(PAGE).unwrap(), 200, "the host can be read");
}

#[test]
fn injected_faults_happen_once_and_a_lost_device_stays_lost() {
    let mut bench = bench();
    bench.gpu.inject(InjectedFault::FailNextMap).unwrap();
    assert!(matches!(bench.map(&[(0, 0, BYTES)]), Err(Error::OutOfMemory(_))));
    bench.map(&[(0, 0, BYTES)]).unwrap();
    bench.gpu.inject(InjectedFault::FailNextCopy).unwrap();
    assert!(matches!(bench.copy(0..BYTES), Err(Error::CopyFailed(_))));
    bench.copy(0..BYTES).unwrap();
    bench.gpu.inject(InjectedFault::Lose).unwrap();
    assert!(matches!(bench.copy(0..BYTES), Err(Error::Lost(_))));
    assert!(matches!(bench.gpu.stream(), Err(Error::Lost(_))));
}
