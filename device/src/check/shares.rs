//! Check 19: shares of a GPU's SMs within one process.
#![allow(unsafe_code, reason = "queues work on memory that stays until the work is awaited")]

use std::collections::BTreeSet;
use std::time::Duration;

use crate::cuda::driver::green::{GreenContext, SmSet};
use crate::cuda::driver::{self, PinnedBuffer, RawStream};

use super::bench::{Bench, GpuBuffer, grid, host_time};
use super::finding::{CheckError, Findings, micros, millis};

/// Check 19: the sizes that the driver cuts, whether two shares have an SM in common, the rate by the
/// width of a share, and the costs of many shares.
pub(super) fn widths(found: &mut Findings) -> Result<(), CheckError> {
    if !driver::has_green_contexts() {
        found.note("the driver has no green contexts: 555 or newer has them");
        return Ok(());
    }
    let bench = Bench::new()?;
    let all = SmSet::of(bench.gpu())?;
    let shape = all.shape();
    found.value("SMs", f64::from(shape.sms), "");
    found.value("fewest SMs of a share", f64::from(shape.least), "");
    found.value("step of a share", f64::from(shape.step), "");
    let out = GpuBuffer::new(&bench, 8 << 20)?;
    let whole = rate_of(&bench, &bench.stream, shape.sms, &out)?;
    found.value("rate of all SMs", whole, "GFLOP/s");
    for sms in [8, 16, 32, 64, 96] {
        if sms > shape.sms {
            break;
        }
        let (parts, _) = all.split(sms, 1)?;
        let Some(part) = parts.first() else { continue };
        let (green, time) = host_time(|| GreenContext::new(&bench.context, part))?;
        let stream = green.stream()?;
        let measured = rate_of(&bench, &stream, part.sms(), &out)?;
        let name = format!("{sms} SMs asked, {} given: rate for each SM", part.sms());
        let each = measured / f64::from(part.sms());
        found.of_ceiling(name, each, "GFLOP/s", whole / f64::from(shape.sms), Some(0.97..=1.1));
        found.value(format!("making a share of {sms} SMs"), millis(time), "ms");
    }
    disjoint(&bench, &all, found)?;
    switching(&bench, &all, &out, found)?;
    many(&bench, &all, found)
}

/// Returns the rate of the FMA kernel in GFLOP/s, with blocks for this many SMs.
fn rate_of(bench: &Bench, stream: &RawStream, sms: u32, out: &GpuBuffer) -> Result<f64, CheckError> {
    const ROUNDS: u32 = 4000;
    let grid = grid(sms, 8);
    // SAFETY: the buffer holds a number for each thread, and stays until the work is awaited.
    let time =
        bench.gpu_time(stream, 5, || unsafe { bench.kernels.fma(stream, grid, ROUNDS, out.base()) })?;
    let operations = f64::from(grid.blocks) * f64::from(grid.threads) * f64::from(ROUNDS) * 32.0 * 2.0;
    Ok(operations / time.as_secs_f64() / 1e9)
}

/// Returns the SMs on which the blocks of a stream ran.
fn sms_of(bench: &Bench, stream: &RawStream) -> Result<BTreeSet<u32>, CheckError> {
    bench.context.enter()?;
    let seen = PinnedBuffer::new(4 * 1024)?;
    let grid = driver::kernels::Grid { blocks: 1024, threads: 1024 };
    // SAFETY: the buffer has a word for each block, and the work is awaited below.
    unsafe { bench.kernels.smid(stream, grid, seen.device_address()?, Duration::from_micros(100))? };
    stream.synchronize()?;
    let words = seen.as_slice().chunks_exact(4);
    Ok(words.map(|word| u32::from_le_bytes(word.try_into().expect("4 bytes"))).collect())
}

/// Runs kernels in shares at the same time, and compares the SMs that they saw.
fn disjoint(bench: &Bench, all: &SmSet, found: &mut Findings) -> Result<(), CheckError> {
    let (parts, rest) = all.split(32, 3)?;
    let shares: Vec<_> = parts.iter().chain(rest.as_ref()).collect();
    let contexts: Vec<_> =
        shares.iter().map(|part| GreenContext::new(&bench.context, part)).collect::<Result<_, _>>()?;
    let streams: Vec<_> = contexts.iter().map(GreenContext::stream).collect::<Result<_, _>>()?;
    let seen: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            streams.iter().map(|stream| scope.spawn(move || sms_of(bench, stream))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Result<_, _>>()
    })?;
    let sizes: Vec<String> = shares.iter().map(|part| part.sms().to_string()).collect();
    let ran: Vec<String> = seen.iter().map(|sms: &BTreeSet<u32>| sms.len().to_string()).collect();
    found.note(format!("shares of {} SMs ran on {} SMs", sizes.join(", "), ran.join(", ")));
    let sum: usize = seen.iter().map(BTreeSet::len).sum();
    let distinct = seen.iter().flatten().collect::<BTreeSet<_>>().len();
    found.expect("SMs that two shares used", (sum - distinct) as f64, "", 0.0..=0.0);
    let wider = shares.iter().zip(&seen).filter(|(part, sms)| sms.len() > part.sms() as usize).count();
    found.expect("shares that used more SMs than theirs", wider as f64, "", 0.0..=0.0);
    Ok(())
}

/// The cost of a launch in another share than the one before.
fn switching(bench: &Bench, all: &SmSet, out: &GpuBuffer, found: &mut Findings) -> Result<(), CheckError> {
    const LAUNCHES: u32 = 200;
    let (parts, _) = all.split(32, 2)?;
    let [one, other] = [&parts[0], &parts[1]].map(|part| GreenContext::new(&bench.context, part));
    let one = one?;
    let other = other?;
    let first = one.stream()?;
    let second = other.stream()?;
    let chain = |streams: [&RawStream; 2]| {
        host_time(|| {
            let mut before = streams[0].record()?;
            for launch in 0..LAUNCHES as usize {
                let stream = streams[launch % 2];
                stream.after(&before)?;
                // SAFETY: the buffer stays until the streams are awaited.
                unsafe { bench.kernels.fma(stream, grid(1, 1), 1, out.base())? };
                before = stream.record()?;
            }
            before.wait()
        })
        .map(|((), time)| micros(time) / f64::from(LAUNCHES))
    };
    chain([&first, &second])?;
    let same = chain([&first, &first])?;
    let switched = chain([&first, &second])?;
    found.value("a launch in the same share", same, "µs");
    found.expect("more for a launch in another share", switched - same, "µs", -1.0..=20.0);
    Ok(())
}

/// The costs of a share for each 8 SMs, all open at once.
fn many(bench: &Bench, all: &SmSet, found: &mut Findings) -> Result<(), CheckError> {
    let (parts, _) = all.split(8, 16)?;
    let (before, _) = bench.context.memory()?;
    let (made, time) = host_time(|| {
        let contexts: Vec<_> =
            parts.iter().map(|part| GreenContext::new(&bench.context, part)).collect::<Result<_, _>>()?;
        let streams: Vec<_> = contexts.iter().map(GreenContext::stream).collect::<Result<_, _>>()?;
        for stream in &streams {
            bench.kernels.spin(stream, Duration::ZERO)?;
        }
        Ok::<(Vec<RawStream>, Vec<GreenContext>), CheckError>((streams, contexts))
    })?;
    let (after, _) = bench.context.memory()?;
    // A stream ends after its work.
    made.0.iter().try_for_each(RawStream::synchronize)?;
    let mib = before.saturating_sub(after).get() as f64 / (1 << 20) as f64;
    found.note(format!("{} shares of 8 SMs at once", parts.len()));
    found.expect("memory of all these shares", mib, "MiB", 0.0..=200.0);
    found.expect("time to make them", millis(time), "ms", 0.0..=2000.0);
    made.0.iter().try_for_each(RawStream::synchronize)?;
    drop(made);
    Ok(())
}
