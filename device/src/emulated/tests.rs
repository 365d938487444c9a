//! Tests of streams that finish their work late.

use std::os::fd::AsFd as _;

use millrace_types::Bytes;

use super::*;
use crate::memory::DeviceMemory;

const BYTES: u64 = 8192;

struct LateGpu {
    gpu: EmulatedGpu,
    region: EmulatedRegion,
    host: HostRegion,
    stream: EmulatedStream,
    /// Holds up the stream's work until the event is reached.
    gate: EmulatedEvent,
}

fn late_gpu() -> LateGpu {
    let memory = DeviceMemory::create("test", Bytes::mib(2)).unwrap();
    let gpu = EmulatedGpu::new(memory.share().unwrap(), memory.bytes()).unwrap().with_late_work(1);
    let region = gpu.reserve(Bytes(BYTES)).unwrap();
    let chunk = gpu.create(MemoryExtent { offset: 0, bytes: BYTES }).unwrap();
    gpu.map(&region, vec![(0, chunk)]).unwrap();
    let host = HostRegion::from_bytes("test", &[7; BYTES as usize]).unwrap();
    let mut stream = gpu.stream().unwrap();
    let gate = EmulatedEvent::awaited();
    stream.after(&gate).unwrap();
    LateGpu { gpu, region, host, stream, gate }
}

#[test]
fn bytes_of_a_late_copy_are_loaded_after_its_event_and_not_before() {
    let LateGpu { gpu, region, host, mut stream, gate } = late_gpu();
    stream.copy(&region, &host, 0..4096).unwrap();
    let copied = stream.record().unwrap();
    let missing = |bytes| gpu.missing(&region, bytes);
    assert!(matches!(missing(0..4096), Some(MissingBytes::Issued(events)) if events.len() == 1));
    assert!(matches!(missing(0..BYTES), Some(MissingBytes::NotIssued(gap)) if gap == (4096..BYTES)));
    assert!(matches!(region.hold(0..1), Err(Error::NotResident(_))));
    assert!(matches!(gpu.unmap(&region), Err(Error::Busy)), "the copy is still running");
    gate.reach(Ok(()));
    copied.wait().unwrap();
    assert!(missing(0..4096).is_none());
    assert_eq!(region.hold(4095..4096).unwrap().as_slice(), [7]);
    gpu.unmap(&region).unwrap();
}

#[test]
fn another_stream_waits_for_a_late_copy() {
    let LateGpu { gpu, region, host, mut stream, gate } = late_gpu();
    stream.copy(&region, &host, 0..BYTES).unwrap();
    let copied = stream.record().unwrap();
    let to = memfd::create("test", BYTES).unwrap();
    let mut other = gpu.stream().unwrap();
    other.after(&copied).unwrap();
    other.copy_out(CopySource::Region(&region, 0..BYTES), to.as_fd(), 0).unwrap();
    let done = other.record().unwrap();
    gate.reach(Ok(()));
    done.wait().unwrap();
    let mut found = vec![0; BYTES as usize];
    memfd::read_at(&to, &mut found, 0).unwrap();
    assert_eq!(found, [7; BYTES as usize]);
}

#[test]
fn a_late_copy_fails_at_the_next_event_and_its_bytes_are_missing_again() {
    let LateGpu { gpu, region, host, mut stream, gate } = late_gpu();
    gpu.inject(InjectedFault::FailNextCopy).unwrap();
    stream.copy(&region, &host, 0..4096).unwrap();
    let failed = stream.record().unwrap();
    stream.copy(&region, &host, 4096..BYTES).unwrap();
    let next = stream.record().unwrap();
    gate.reach(Ok(()));
    for event in [&failed, &failed.clone()] {
        assert!(matches!(event.wait(), Err(Error::CopyFailed(_))));
    }
    next.wait().unwrap();
    let missing = gpu.missing(&region, 0..BYTES);
    assert!(matches!(missing, Some(MissingBytes::NotIssued(gap)) if gap == (0..4096)));
}
