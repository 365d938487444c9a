//! Checks 9 to 13: copies between host and GPU.
#![allow(unsafe_code, reason = "queues copies of buffers that stay until the copies are awaited")]

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};

use crate::clock::monotonic_now;
use crate::cuda::driver::{PinnedBuffer, RawEvent, RawStream, Registration};
use crate::error::DriverError;
use crate::memfd;

use super::bench::{Bench, GpuBuffer, between, host_time};
use super::finding::{CheckError, Findings, millis, rate};

const MIB: usize = 1 << 20;

/// Check 9: the rates of pinned copies, which all other rates are compared with.
pub(super) fn ceilings(found: &mut Findings) -> Result<(), CheckError> {
    const BYTES: usize = 512 * MIB;
    let bench = Bench::new()?;
    let host = PinnedBuffer::new(BYTES)?;
    let other = PinnedBuffer::new(BYTES)?;
    let gpu = GpuBuffer::new(&bench, BYTES as u64)?;
    let second = GpuBuffer::new(&bench, BYTES as u64)?;
    let up = bench.copy_stream()?;
    let down = bench.copy_stream()?;
    let bytes = BYTES as u64;
    // SAFETY: all buffers stay until the end, and each measurement waits.
    let to_gpu = bench.gpu_time(&up, 5, || unsafe { up.copy_to_gpu(gpu.base(), host.as_slice()) })?;
    found.expect("host to GPU", rate(bytes, to_gpu), "GB/s", 53.0..=57.0);
    let to_host =
        // SAFETY: as above.
        bench.gpu_time(&down, 5, || unsafe { down.copy_to_host(other.as_ptr(), second.base(), bytes) })?;
    found.expect("GPU to host", rate(bytes, to_host), "GB/s", 53.0..=57.0);
    let ((), both) = host_time(|| {
        for _ in 0..4 {
            // SAFETY: as above.
            unsafe {
                up.copy_to_gpu(gpu.base(), host.as_slice())?;
                down.copy_to_host(other.as_ptr(), second.base(), bytes)?;
            }
        }
        up.synchronize()?;
        down.synchronize()
    })?;
    found.expect("both directions together", rate(8 * bytes, both), "GB/s", 90.0..=114.0);
    let within =
        // SAFETY: as above.
        bench.gpu_time(&up, 5, || unsafe { up.copy_on_gpu(second.base(), gpu.base(), bytes) })?;
    found.expect("within the GPU, bytes copied", rate(bytes, within) / 1e3, "TB/s", 1.2..=2.2);
    Ok(())
}

/// Host memory of a memfd, mapped into this process.
#[derive(Debug)]
struct Mapped {
    base: *mut u8,
    bytes: usize,
    _file: OwnedFd,
}

impl Mapped {
    /// Maps a memfd that is full of bytes and sealed as a slab is, for reading, shared or private.
    fn new(bytes: usize, flags: MapFlags, huge: bool) -> Result<Self, CheckError> {
        let file = if huge {
            let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
            let file = rustix::fs::memfd_create("gpu-check", flags)?;
            rustix::fs::ftruncate(&file, bytes as u64)?;
            file
        } else {
            memfd::create("gpu-check", bytes as u64)?
        };
        // SAFETY: a new mapping at an address of the kernel's choice.
        let writer = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, file.as_fd(), 0)?
        };
        // SAFETY: the mapping is new and writable.
        unsafe {
            writer.cast::<u8>().write_bytes(0x5A, bytes);
            rustix::mm::munmap(writer, bytes)?;
        }
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::FUTURE_WRITE)?;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), bytes, ProtFlags::READ, flags, file.as_fd(), 0)?
        };
        Ok(Self { base: base.cast(), bytes, _file: file })
    }

    fn as_slice(&self) -> &[u8] {
        // SAFETY: mapped for reading, and nobody writes to the file any more.
        unsafe { std::slice::from_raw_parts(self.base, self.bytes) }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) } {
            eprintln!("gpu-check: munmap: {error}");
        }
    }
}

/// Check 10: registering memory that another process made, and copies from it.
pub(super) fn registration(found: &mut Findings) -> Result<(), CheckError> {
    const BYTES: usize = 1024 * MIB;
    let bench = Bench::new()?;
    let ceiling = bench.ceiling_to_gpu()?;
    let gpu = GpuBuffer::new(&bench, BYTES as u64)?;
    let kinds = [
        ("a shared mapping", MapFlags::SHARED, false),
        ("a private mapping", MapFlags::PRIVATE, false),
        ("a shared mapping of huge pages", MapFlags::SHARED, true),
    ];
    for (name, flags, huge) in kinds {
        let memory = match Mapped::new(BYTES, flags, huge) {
            Ok(memory) => memory,
            Err(error) => {
                found.note(format!("{name}: not tried: {error}"));
                continue;
            }
        };
        // Read once, so that the time to register holds no page faults.
        std::hint::black_box(
            memory.as_slice().iter().step_by(4096).map(|byte| u64::from(*byte)).sum::<u64>(),
        );
        let before = available();
        // SAFETY: the mapping stays until the registration is dropped, which is below.
        let registered = host_time(|| unsafe { Registration::new(memory.base, BYTES, false) });
        let (registered, time) = match registered {
            Ok(done) => done,
            Err(error) => {
                found.note(format!("{name}: refused: {error}"));
                continue;
            }
        };
        let taken = before.saturating_sub(available()) as f64 / MIB as f64;
        found.expect(format!("register 1 GiB of {name}"), millis(time), "ms", 5.0..=250.0);
        if huge || flags.contains(MapFlags::SHARED) {
            found.expect(format!("memory that {name} takes more"), taken, "MiB", 0.0..=64.0);
        } else {
            found.expect(format!("memory that {name} takes more"), taken, "MiB", 900.0..=1200.0);
        }
        // SAFETY: memory and buffer stay until the copies are awaited.
        let time = bench.gpu_time(&bench.stream, 5, || unsafe {
            bench.stream.copy_to_gpu(gpu.base(), memory.as_slice())
        })?;
        let copied = rate(BYTES as u64, time);
        found.of_ceiling(format!("copies of {name}"), copied, "GB/s", ceiling, Some(0.95..=1.05));
        let ((), time) = host_time(|| {
            drop(registered);
            Ok::<_, CheckError>(())
        })?;
        found.value(format!("unregister 1 GiB of {name}"), millis(time), "ms");
    }
    Ok(())
}

/// Returns the memory of the machine that is available, in bytes.
fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|rest| rest.split_whitespace().next()).and_then(|word| word.parse::<u64>().ok());
    kib.unwrap_or(0) << 10
}

/// Copies `host` in pieces, with at most `depth` pieces issued and not awaited, and returns the time.
fn in_pieces(
    stream: &RawStream,
    to: u64,
    host: &[u8],
    piece: usize,
    depth: usize,
) -> Result<Duration, DriverError> {
    let began = monotonic_now();
    let mut issued = std::collections::VecDeque::<RawEvent>::new();
    for (at, part) in host.chunks(piece).enumerate() {
        if issued.len() == depth
            && let Some(oldest) = issued.pop_front()
        {
            oldest.wait()?;
        }
        // SAFETY: the caller keeps both buffers, and this function awaits all copies.
        unsafe { stream.copy_to_gpu(to + (at * piece) as u64, part)? };
        issued.push_back(stream.record()?);
    }
    stream.synchronize()?;
    Ok(monotonic_now().since(began))
}

/// Check 11: the rate by the size of a copy, and by the number of copies that are issued ahead.
pub(super) fn elbow(found: &mut Findings) -> Result<(), CheckError> {
    const BYTES: usize = 256 * MIB;
    let bench = Bench::new()?;
    let ceiling = bench.ceiling_to_gpu()?;
    let host = PinnedBuffer::new(BYTES)?;
    let gpu = GpuBuffer::new(&bench, BYTES as u64)?;
    let stream = bench.copy_stream()?;
    for kib in [64_usize, 256, 1024, 2048, 4096, 16384] {
        let queued = bench.gpu_time(&stream, 5, || {
            host.as_slice().chunks(kib << 10).enumerate().try_for_each(|(at, part)| {
                // SAFETY: both buffers stay until the copies are awaited.
                unsafe { stream.copy_to_gpu(gpu.base() + (at * (kib << 10)) as u64, part) }
            })
        })?;
        let queued = rate(BYTES as u64, queued);
        found.of_ceiling(format!("{kib} KiB, all queued, no events"), queued, "GB/s", ceiling, None);
        for depth in [1, 2, 4] {
            let mut times = Vec::new();
            for _ in 0..5 {
                times.push(in_pieces(&stream, gpu.base(), host.as_slice(), kib << 10, depth)?);
            }
            times.sort_unstable();
            let measured = rate(BYTES as u64, times[2]);
            let expected = match (kib, depth) {
                (2048, 1) => Some(0.70..=0.80),
                (2048, 2) => Some(0.95..=1.02),
                _ => None,
            };
            found.of_ceiling(format!("{kib} KiB, depth {depth}"), measured, "GB/s", ceiling, expected);
        }
    }
    Ok(())
}

/// Check 12: copies of pageable memory by the driver, and through a ring of pinned buffers.
pub(super) fn pageable(found: &mut Findings) -> Result<(), CheckError> {
    const BYTES: usize = 1024 * MIB;
    let bench = Bench::new()?;
    let ceiling = bench.ceiling_to_gpu()?;
    let memory = Mapped::new(BYTES, MapFlags::SHARED, false)?;
    std::hint::black_box(memory.as_slice().iter().step_by(4096).map(|byte| u64::from(*byte)).sum::<u64>());
    let gpu = GpuBuffer::new(&bench, BYTES as u64)?;
    let mut times = Vec::new();
    for _ in 0..3 {
        let ((), time) = host_time(|| {
            // SAFETY: memory and buffer stay until the stream is awaited.
            unsafe { bench.stream.copy_to_gpu(gpu.base(), memory.as_slice())? };
            bench.stream.synchronize()
        })?;
        times.push(time);
    }
    times.sort_unstable();
    found.of_ceiling("by the driver", rate(BYTES as u64, times[1]), "GB/s", ceiling, Some(0.15..=0.4));
    for copiers in [1_usize, 2, 4, 6, 8] {
        let mut times = Vec::new();
        for _ in 0..3 {
            times.push(through_ring(&bench, &gpu, memory.as_slice(), copiers)?);
        }
        times.sort_unstable();
        let expected = (copiers == 6).then_some(0.9..=1.02);
        let measured = rate(BYTES as u64, times[1]);
        found.of_ceiling(format!("a ring with {copiers} copiers"), measured, "GB/s", ceiling, expected);
    }
    Ok(())
}

/// Copies through pinned buffers of 4 MiB, two for each copier.
fn through_ring(bench: &Bench, gpu: &GpuBuffer, host: &[u8], copiers: usize) -> Result<Duration, CheckError> {
    const PIECE: usize = 4 * MIB;
    let rings: Vec<[PinnedBuffer; 2]> = (0..copiers)
        .map(|_| Ok([PinnedBuffer::new(PIECE)?, PinnedBuffer::new(PIECE)?]))
        .collect::<Result<_, DriverError>>()?;
    let base = gpu.base();
    let began = monotonic_now();
    std::thread::scope(|scope| {
        let threads: Vec<_> = rings
            .into_iter()
            .enumerate()
            .map(|(copier, mut ring)| {
                scope.spawn(move || {
                    let stream = bench.copy_stream()?;
                    let mut used: [Option<RawEvent>; 2] = [None, None];
                    for (turn, at) in (copier..host.len() / PIECE).step_by(copiers).enumerate() {
                        let slot = turn % 2;
                        if let Some(event) = &used[slot] {
                            event.wait()?;
                        }
                        ring[slot].as_mut_slice().copy_from_slice(&host[at * PIECE..(at + 1) * PIECE]);
                        // SAFETY: the ring stays until the stream is awaited, and a buffer is not
                        // filled again before its event.
                        unsafe { stream.copy_to_gpu(base + (at * PIECE) as u64, ring[slot].as_slice())? };
                        used[slot] = Some(stream.record()?);
                    }
                    stream.synchronize()
                })
            })
            .collect();
        threads.into_iter().try_for_each(|thread| thread.join().expect("a copier does not panic"))
    })?;
    Ok(monotonic_now().since(began))
}

/// Check 13: copies and a kernel that reads memory, beside each other.
pub(super) fn beside_kernels(found: &mut Findings) -> Result<(), CheckError> {
    const BYTES: usize = 512 * MIB;
    const ROUNDS: u32 = 24;
    let bench = Bench::new()?;
    let host = PinnedBuffer::new(BYTES)?;
    let gpu = GpuBuffer::new(&bench, BYTES as u64)?;
    let read = GpuBuffer::new(&bench, 2 << 30)?;
    let result = GpuBuffer::new(&bench, 8)?;
    let out = result.base();
    let copies = bench.copy_stream()?;
    // SAFETY: all buffers stay until the work is awaited.
    let touch = || unsafe { bench.kernels.touch(&bench.stream, read.base(), read.bytes(), ROUNDS, out) };
    // SAFETY: as above.
    let copy = || unsafe { copies.copy_to_gpu(gpu.base(), host.as_slice()) };
    let kernel_alone = bench.gpu_time(&bench.stream, 3, touch)?;
    let copy_alone = bench.gpu_time(&copies, 3, copy)?;
    found.value("the kernel reads", rate(read.bytes() * u64::from(ROUNDS), kernel_alone) / 1e3, "TB/s");
    // As many copies as fit twice into the time of the kernel, so that it always has copies beside it.
    let kernel_count = (2.0 * kernel_alone.as_secs_f64() / copy_alone.as_secs_f64()).ceil() as usize;
    let began = copies.record()?;
    for _ in 0..kernel_count {
        copy()?;
    }
    let copied = copies.record()?;
    let kernel_began = bench.stream.record()?;
    touch()?;
    let kernel_ended = bench.stream.record()?;
    let kernel_beside = between(&kernel_began, &kernel_ended)?;
    copied.wait()?;
    found.expect(
        "the kernel beside copies, compared with alone",
        kernel_beside.as_secs_f64() / kernel_alone.as_secs_f64(),
        "x",
        0.98..=1.05,
    );
    drop(began);
    // Copies beside kernels that last longer than the copies.
    for _ in 0..4 {
        touch()?;
    }
    let began = copies.record()?;
    copy()?;
    copy()?;
    let copy_beside = between(&began, &copies.record()?)? / 2;
    bench.stream.synchronize()?;
    found.expect(
        "a copy beside kernels, compared with alone",
        copy_beside.as_secs_f64() / copy_alone.as_secs_f64(),
        "x",
        0.98..=1.05,
    );
    Ok(())
}
