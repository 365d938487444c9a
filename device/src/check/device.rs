//! Check 27: the CUDA device itself, used as an executor uses it.

use std::collections::VecDeque;
use std::num::NonZeroU32;
use std::os::fd::AsFd as _;

use millrace_types::Bytes;

use crate::api::{Capabilities, CopySource, Device as _, Event as _, MemoryExtent, MissingBytes, Stream};
use crate::clock::monotonic_now;
use crate::cuda::{CudaEvent, CudaGpu, CudaRegion, CudaStream};
use crate::memory::{HostAccess, HostRegion, HostRegionBuilder};
use crate::{memfd, probe};

use super::bench::{Bench, host_time};
use super::finding::{CheckError, Findings, median, millis, rate};

/// Bytes of a copy.
const PIECE: u64 = 4 << 20;
/// Memory that the check leaves free.
const SPARE: Bytes = Bytes::gib(6);

/// Check 27: takes the pool, and swaps models through the device's interface. All bytes that come back
/// are compared with those that went there.
pub(super) fn swaps(found: &mut Findings) -> Result<(), CheckError> {
    let bench = Bench::new()?;
    let ceiling = bench.ceiling_to_gpu()?;
    let (free, _) = bench.context.memory()?;
    let (gpu, time) = host_time(|| CudaGpu::open(free.saturating_sub(SPARE)))?;
    let memory = gpu.capabilities().memory;
    found.expect("taking the pool", millis(time), "ms", 100.0..=5000.0);
    found.value("memory of the pool", memory.get() as f64 / (1 << 20) as f64, "MiB");
    let extent = MemoryExtent { offset: 0, bytes: 256 << 20 };
    let rounds = NonZeroU32::new(3).expect("not zero");
    for copy in probe::copy_rates(&gpu, extent, rounds)? {
        if copy.bytes >= 256 << 10 {
            let name = format!("the probe's copies of {} KiB", copy.bytes >> 10);
            let expected = (copy.bytes == PIECE).then_some(0.95..=1.02);
            found.of_ceiling(name, copy.bytes_per_s as f64 / 1e9, "GB/s", ceiling, expected);
        }
    }
    let mut stream = gpu.stream()?;
    for mib in [100_u64, 400, 1300] {
        let host = filled(mib << 20)?;
        let (direct, time) = host_time(|| gpu.import_host(host.share()?, host.bytes(), HostAccess::Direct))?;
        found.value(format!("{mib} MiB: importing the host's memory"), millis(time), "ms");
        let buffered = gpu.import_host(host.share()?, host.bytes(), HostAccess::Buffered)?;
        let region = gpu.reserve(host.bytes())?;
        for (name, source, expected) in [
            ("registered", &direct, (mib >= 400).then_some(0.9..=1.02)),
            ("through the ring", &buffered, None),
        ] {
            let mut times = Vec::new();
            let mut unmaps = Vec::new();
            for round in 0..5 {
                let time = swap_in(&gpu, &mut stream, &region, source, round)?;
                times.push(time.as_secs_f64());
                if round == 0 {
                    compare(&mut stream, &region, &host)?;
                }
                let ((), time) = host_time(|| gpu.unmap(&region))?;
                unmaps.push(millis(time));
            }
            let time = std::time::Duration::from_secs_f64(median(times));
            let swapped = rate(mib << 20, time);
            found.of_ceiling(format!("{mib} MiB: swap in, {name}"), swapped, "GB/s", ceiling, expected);
            found.value(format!("{mib} MiB: unmap, {name}"), median(unmaps), "ms");
        }
    }
    files(&gpu, &mut stream, found)
}

/// Returns host memory with bytes that differ from place to place.
fn filled(bytes: u64) -> Result<HostRegion, CheckError> {
    let mut builder = HostRegionBuilder::new("gpu-check", Bytes(bytes))?;
    let mut piece = vec![0_u8; PIECE as usize];
    let mut state = bytes;
    for at in (0..bytes).step_by(PIECE as usize) {
        for word in piece.chunks_exact_mut(8) {
            // Knuth's multiplier of a linear generator.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&state.to_le_bytes());
        }
        builder.write_at(at, &piece[..(bytes - at).min(PIECE) as usize])?;
    }
    Ok(builder.finish()?)
}

/// Maps scattered blocks and copies everything, as an executor does. Returns the time.
fn swap_in(
    gpu: &CudaGpu,
    stream: &mut CudaStream,
    region: &CudaRegion,
    source: &HostRegion,
    round: u64,
) -> Result<std::time::Duration, CheckError> {
    let bytes = source.bytes().get();
    let Capabilities { memory, granularity: block, .. } = gpu.capabilities();
    let block = block.get();
    let blocks = bytes.div_ceil(block);
    let all = memory.get() / block;
    let began = monotonic_now();
    // Every third block of the memory, from another place in each round.
    let chunks = (0..blocks).map(|at| {
        let offset = (round * 7 + at * 3) % all * block;
        Ok((at * block, gpu.create(MemoryExtent { offset, bytes: block })?))
    });
    gpu.map(region, chunks.collect::<Result<_, crate::Error>>()?)?;
    let mut issued = VecDeque::new();
    for start in (0..bytes).step_by(PIECE as usize) {
        Stream::<CudaGpu>::copy(stream, region, source, start..bytes.min(start + PIECE))?;
        issued.push_back(record(stream)?);
        if issued.len() == probe::COPIES_AHEAD
            && let Some(oldest) = issued.pop_front()
        {
            oldest.wait()?;
        }
    }
    issued.iter().try_for_each(|event| event.wait().map(drop))?;
    // A launch could begin.
    drop(stream.pin(region, std::slice::from_ref(&(0..bytes)))?);
    let time = monotonic_now().since(began);
    // The pin counts until the work that was queued under it has finished.
    record(stream)?.wait()?;
    match gpu.missing(region, 0..bytes) {
        None => Ok(time),
        Some(MissingBytes::NotIssued(gap)) => {
            Err(CheckError::Wrong(format!("bytes {gap:?} are missing after their copies")))
        }
        Some(MissingBytes::Issued(_)) => {
            Err(CheckError::Wrong("a copy is under way after its event".to_owned()))
        }
    }
}

fn record(stream: &mut CudaStream) -> Result<CudaEvent, crate::Error> {
    Stream::<CudaGpu>::record(stream)
}

/// Copies a region to a file, and compares the file with the source.
fn compare(stream: &mut CudaStream, region: &CudaRegion, host: &HostRegion) -> Result<(), CheckError> {
    let bytes = host.bytes().get();
    let file = memfd::create("gpu-check", bytes)?;
    for start in (0..bytes).step_by(PIECE as usize) {
        let end = bytes.min(start + PIECE);
        Stream::<CudaGpu>::copy_out(stream, CopySource::Region(region, start..end), file.as_fd(), start)?;
        record(stream)?.wait()?;
    }
    same(&file, 0, host.as_slice())
}

fn same(file: &std::os::fd::OwnedFd, at: u64, expected: &[u8]) -> Result<(), CheckError> {
    let mut found = vec![0; expected.len()];
    memfd::read_at(file, &mut found, at)?;
    match found.iter().zip(expected).position(|(found, expected)| found != expected) {
        None => Ok(()),
        Some(at) => Err(CheckError::Wrong(format!("byte {at} differs from the host's copy"))),
    }
}

/// Copies that start and end within a block, and copies of files.
fn files(gpu: &CudaGpu, stream: &mut CudaStream, found: &mut Findings) -> Result<(), CheckError> {
    let block = gpu.capabilities().granularity.get();
    let bytes = block + (1 << 20);
    let host = filled(bytes)?;
    let region = gpu.reserve(Bytes(bytes))?;
    let chunk = |offset| gpu.create(MemoryExtent { offset, bytes: block });
    // The second block of the region is before the first in memory.
    gpu.map(&region, vec![(0, chunk(8 * block)?), (block, chunk(0)?)])?;
    let uneven = [0, 1000, 1003, PIECE + 77, 2 * PIECE, 3 * PIECE, block - 5, block + 5, bytes];
    for ends in uneven.windows(2) {
        Stream::<CudaGpu>::copy_from_file(stream, &region, host.as_fd(), ends[0]..ends[1])?;
    }
    record(stream)?.wait()?;
    compare(stream, &region, &host)?;
    gpu.unmap(&region)?;
    found.note("uneven copies of a file came back unchanged");
    Ok(())
}
