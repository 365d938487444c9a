//! Checks 14 and 15: how long it takes until the host knows, and what host waits cost.
#![allow(unsafe_code, reason = "queues work on memory that stays until the work is awaited")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::cuda::driver::context::WaitMode;
use crate::cuda::driver::stream::StreamPriority;
use crate::cuda::driver::{Context, Kernels, PinnedBuffer, RawStream};

use super::bench::{Bench, GpuBuffer, first_gpu, host_time};
use super::finding::{CheckError, Findings, median, micros, millis};

/// Check 14: the time from a launch until the host knows of its end, by the way of waiting.
pub(super) fn modes(found: &mut Findings) -> Result<(), CheckError> {
    const ROUNDS: usize = 500;
    for (mode, name, expected) in [
        (WaitMode::Spin, "spinning", Some(4.0..=8.0)),
        (WaitMode::Yield, "yielding", None),
        (WaitMode::Block, "sleeping", Some(15.0..=40.0)),
    ] {
        // A context keeps the mode with which it was opened, so each mode opens another.
        let context = Context::open(first_gpu()?, mode)?;
        let kernels = Kernels::load(&context)?;
        let stream = RawStream::new(&context, StreamPriority::Normal)?;
        let mut times = Vec::new();
        for round in 0..ROUNDS {
            let ((), time) = host_time(|| {
                kernels.spin(&stream, Duration::ZERO)?;
                stream.synchronize()
            })?;
            if round >= ROUNDS / 10 {
                times.push(micros(time));
            }
        }
        let name = format!("from a launch to the host, {name}");
        match expected {
            Some(expected) => found.expect(name, median(times), "µs", expected),
            None => found.value(name, median(times), "µs"),
        }
    }
    let bench = Bench::new()?;
    let buffer = PinnedBuffer::new(8)?;
    let word = buffer.device_address()?;
    // SAFETY: the buffer is aligned for a word, and only atomic accesses use the word.
    let seen = unsafe { &*buffer.as_ptr().cast::<AtomicU32>() };
    let mut times = Vec::new();
    for round in 1..=ROUNDS as u32 {
        let ((), time) = host_time(|| {
            // SAFETY: the buffer stays until the stream is awaited.
            unsafe { bench.kernels.flag(&bench.stream, word, round)? };
            while seen.load(Ordering::Acquire) != round {
                std::hint::spin_loop();
            }
            Ok::<_, CheckError>(())
        })?;
        times.push(micros(time));
        bench.stream.synchronize()?;
    }
    found.expect("from a launch to a flag in host memory", median(times), "µs", 3.0..=6.0);
    let mut times = Vec::new();
    for round in 1..=ROUNDS as u32 {
        let value = round + 1_000_000;
        // SAFETY: as above.
        unsafe { bench.kernels.await_flag(&bench.stream, word, value, Duration::from_secs(1))? };
        // Long enough for the kernel to run, without a sleep: until its launch has reached the GPU.
        let (_, _) = host_time(|| {
            let began = crate::clock::monotonic_now();
            while crate::clock::monotonic_now().since(began) < Duration::from_micros(30) {
                std::hint::spin_loop();
            }
            Ok::<_, CheckError>(())
        })?;
        let ((), time) = host_time(|| {
            seen.store(value, Ordering::Release);
            bench.stream.synchronize()
        })?;
        times.push(micros(time));
    }
    found.value("from a flag of the host through a kernel to the host", median(times), "µs");
    Ok(())
}

/// Check 15: 64 copies with a kernel after each, ordered by waits of the host or of the GPU.
pub(super) fn chains(found: &mut Findings) -> Result<(), CheckError> {
    const LINKS: usize = 64;
    const BYTES: usize = 2 << 20;
    let bench = Bench::new()?;
    let host = PinnedBuffer::new(LINKS * BYTES)?;
    let gpu = GpuBuffer::new(&bench, (LINKS * BYTES) as u64)?;
    let result = GpuBuffer::new(&bench, 8)?;
    let out = result.base();
    let copies = bench.copy_stream()?;
    let run = |on_gpu: bool| {
        host_time(|| {
            for (link, part) in host.as_slice().chunks(BYTES).enumerate() {
                let at = gpu.base() + (link * BYTES) as u64;
                // SAFETY: all buffers stay until both streams are awaited.
                unsafe { copies.copy_to_gpu(at, part)? };
                let event = copies.record()?;
                if on_gpu {
                    bench.stream.after(&event)?;
                } else {
                    event.wait()?;
                }
                // SAFETY: as above.
                unsafe { bench.kernels.touch(&bench.stream, at, BYTES as u64, 1, out)? };
                if !on_gpu {
                    bench.stream.record()?.wait()?;
                }
            }
            bench.stream.synchronize()?;
            copies.synchronize()
        })
        .map(|((), time)| millis(time))
    };
    let mut by_host = Vec::new();
    let mut by_gpu = Vec::new();
    for _ in 0..9 {
        by_host.push(run(false)?);
        by_gpu.push(run(true)?);
    }
    let by_host = median(by_host);
    let by_gpu = median(by_gpu);
    found.value("64 copies and kernels, the host waits", by_host, "ms");
    found.value("64 copies and kernels, the GPU waits", by_gpu, "ms");
    found.expect("what the waits of the host cost", by_host - by_gpu, "ms", 0.6..=10.0);
    Ok(())
}
