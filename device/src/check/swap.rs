//! Checks 16 and 18: bringing a model to the GPU, and hashing it there.
#![allow(unsafe_code, reason = "queues work on memory that stays until the work is awaited")]

use std::time::Duration;

use crate::clock::monotonic_now;
use crate::cuda::driver::{AddressRange, MemoryHandle, PinnedBuffer, RawEvent};

use super::bench::{BLOCK, Bench, GpuBuffer, host_time};
use super::finding::{CheckError, Findings, millis, rate};

const MIB: u64 = 1 << 20;

/// Check 16: a model of each size comes to the GPU, in five ways: from the first call until a kernel
/// may read the last byte. All ways but the last copy to memory that is mapped already.
pub(super) fn ladder(found: &mut Findings) -> Result<(), CheckError> {
    let bench = Bench::new()?;
    let ceiling = bench.ceiling_to_gpu()?;
    let copies = bench.copy_stream()?;
    for mib in [100, 400, 1300, 4000] {
        let bytes = mib * MIB;
        let blocks = bytes / BLOCK;
        let handles: Vec<_> =
            (0..blocks).map(|_| MemoryHandle::create(bench.gpu(), BLOCK)).collect::<Result<_, _>>()?;
        let arena = GpuBuffer::of(&bench.context, &handles)?;
        let host = PinnedBuffer::new(bytes as usize)?;
        let pageable = vec![0x11_u8; bytes as usize];
        let piece = |at: u64| &host.as_slice()[(at * BLOCK) as usize..((at + 1) * BLOCK) as usize];
        let ((), by_driver) = best(|| {
            // SAFETY: the buffers stay until the stream is awaited.
            unsafe { copies.copy_to_gpu(arena.base(), &pageable)? };
            copies.synchronize()
        })?;
        let ((), at_once) = best(|| {
            // SAFETY: as above.
            unsafe { copies.copy_to_gpu(arena.base(), host.as_slice())? };
            copies.synchronize()
        })?;
        let ((), waited) = best(|| {
            for at in 0..blocks {
                // SAFETY: as above.
                unsafe { copies.copy_to_gpu(arena.base() + at * BLOCK, piece(at))? };
                copies.record()?.wait()?;
            }
            Ok(())
        })?;
        let ahead = || {
            let mut issued = std::collections::VecDeque::<RawEvent>::new();
            for at in 0..blocks {
                if issued.len() == 2
                    && let Some(oldest) = issued.pop_front()
                {
                    oldest.wait()?;
                }
                // SAFETY: as above.
                unsafe { copies.copy_to_gpu(arena.base() + at * BLOCK, piece(at))? };
                issued.push_back(copies.record()?);
            }
            copies.synchronize()
        };
        let ((), two_ahead) = best(ahead)?;
        // The whole way: another thread maps the region while copies to the arena run.
        let mut region = AddressRange::reserve(bytes, 0)?;
        let ((), mapped) = best(|| {
            std::thread::scope(|scope| {
                let mapper = scope.spawn(|| {
                    bench.context.enter()?;
                    for (at, handle) in handles.iter().enumerate() {
                        region.map(at as u64 * BLOCK, handle)?;
                        region.open(at as u64 * BLOCK, BLOCK, bench.gpu())?;
                    }
                    Ok(())
                });
                ahead()?;
                mapper.join().expect("the mapping thread does not panic")
            })?;
            // SAFETY: no work uses the region.
            unsafe { region.unmap_all() }
        })?;
        let mut region = AddressRange::reserve(bytes, 0)?;
        let mut unmaps = Vec::new();
        let ((), mapped_only) = best(|| {
            // SAFETY: no work uses the region.
            let ((), time) = host_time(|| unsafe { region.unmap_all() })?;
            unmaps.push(millis(time));
            std::thread::scope(|scope| {
                let mapper = scope.spawn(|| {
                    bench.context.enter()?;
                    for (at, handle) in handles.iter().enumerate() {
                        region.map(at as u64 * BLOCK, handle)?;
                    }
                    region.open(0, bytes, bench.gpu())
                });
                ahead()?;
                mapper.join().expect("the mapping thread does not panic")
            })
        })?;
        found.value(format!("{mib} MiB, unmap"), super::finding::median(unmaps), "ms");
        for (way, time, expected) in [
            ("pageable, by the driver", by_driver, None),
            ("pinned, in one copy", at_once, None),
            ("pinned, each block awaited", waited, Some(0.5..=0.9)),
            ("pinned, two blocks ahead", two_ahead, (mib >= 400).then_some(0.95..=1.02)),
            ("two blocks ahead, mapped beside, unmapped after", mapped, (mib >= 400).then_some(0.85..=1.02)),
            ("two blocks ahead, unmapped before, mapped beside", mapped_only, None),
        ] {
            found.of_ceiling(format!("{mib} MiB, {way}"), rate(bytes, time), "GB/s", ceiling, expected);
        }
        found.value(format!("{mib} MiB, two blocks ahead"), millis(two_ahead), "ms");
    }
    Ok(())
}

/// Runs the work five times, and returns the median time by the host's clock.
fn best(
    mut work: impl FnMut() -> Result<(), crate::error::DriverError>,
) -> Result<((), Duration), CheckError> {
    let mut times = Vec::new();
    for _ in 0..5 {
        let began = monotonic_now();
        work()?;
        times.push(monotonic_now().since(began));
    }
    times.sort_unstable();
    Ok(((), times[2]))
}

/// Check 18: the hash of a model in chunks of a block, compared with the same hash on the host.
pub(super) fn hash(found: &mut Findings) -> Result<(), CheckError> {
    const BLOCKS: u32 = 512;
    let bench = Bench::new()?;
    let buffer = GpuBuffer::new(&bench, u64::from(BLOCKS) * BLOCK)?;
    bench.write(&buffer, 7)?;
    let results = GpuBuffer::new(&bench, u64::from(BLOCKS) * 8)?;
    // SAFETY: both stay until the stream is awaited.
    let hash = || unsafe { bench.kernels.hash(&bench.stream, buffer.base(), BLOCKS, BLOCK, results.base()) };
    let time = bench.gpu_time(&bench.stream, 5, hash)?;
    found.expect("hash", rate(buffer.bytes(), time) / 1e3, "TB/s", 1.0..=3.4);
    let hashes = PinnedBuffer::new(BLOCKS as usize * 8)?;
    // SAFETY: as above.
    unsafe { bench.stream.set(results.base(), 0, results.bytes())? };
    hash()?;
    // SAFETY: as above.
    unsafe { bench.stream.copy_to_host(hashes.as_ptr(), results.base(), u64::from(BLOCKS) * 8)? };
    bench.stream.synchronize()?;
    let words = BLOCK / 8;
    let wrong = (0..u64::from(BLOCKS)).filter(|block| {
        let on_gpu = &hashes.as_slice()[*block as usize * 8..][..8];
        let on_host = (0..words)
            .map(|word| mix(mix(7_u64.wrapping_add(block * words + word)) ^ word.wrapping_mul(GOLDEN)))
            .fold(0, u64::wrapping_add);
        on_gpu != on_host.to_le_bytes()
    });
    let wrong = wrong.count();
    found.expect("chunks whose hash differs from the host's", wrong as f64, "", 0.0..=0.0);
    let (_, time) = host_time(|| {
        let mut copy = vec![0_u8; 64 << 20];
        // SAFETY: the vector stays until the stream is awaited.
        unsafe { bench.stream.copy_to_host(copy.as_mut_ptr(), buffer.base(), 64 << 20)? };
        bench.stream.synchronize()?;
        std::hint::black_box(copy.iter().map(|byte| u64::from(*byte)).sum::<u64>());
        Ok::<_, CheckError>(())
    })?;
    found.value("copying 64 MiB to pageable memory instead", millis(time), "ms");
    if wrong > 0 { Err(CheckError::Wrong(format!("{wrong} hashes are wrong"))) } else { Ok(()) }
}

/// Multiplier of a word's index in a hash.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The mixing function of the kernels (the finaliser of splitmix64).
fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
