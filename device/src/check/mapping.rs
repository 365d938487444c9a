//! Checks 4 to 6: mapping, mapping beside work, and stable addresses.
#![allow(unsafe_code, reason = "maps and unmaps memory under queued work, which the check awaits")]

use std::time::Duration;

use crate::clock::monotonic_now;
use crate::cuda::driver::{AddressRange, MemoryHandle};

use super::bench::{BLOCK, Bench, GpuBuffer, host_time};
use super::finding::{CheckError, Findings, median, micros, millis};

/// Check 4: the time of map, set access and unmap, and whether two mappings of a handle agree.
pub(super) fn costs(found: &mut Findings) -> Result<(), CheckError> {
    const COUNT: u64 = 256;
    let bench = Bench::new()?;
    let handles: Vec<_> =
        (0..COUNT).map(|_| MemoryHandle::create(bench.gpu(), BLOCK)).collect::<Result<_, _>>()?;
    let mut range = AddressRange::reserve(COUNT * BLOCK, 0)?;
    let mut times = [vec![], vec![], vec![], vec![], vec![]];
    for _ in 0..5 {
        let ((), map) = host_time(|| map_all(&mut range, &handles))?;
        let ((), open_each) =
            host_time(|| (0..COUNT).try_for_each(|at| range.open(at * BLOCK, BLOCK, bench.gpu())))?;
        // SAFETY: no work uses the range.
        let ((), unmap_each) =
            host_time(|| (0..COUNT).try_for_each(|at| unsafe { range.unmap(at * BLOCK, BLOCK) }))?;
        map_all(&mut range, &handles)?;
        let ((), open_all) = host_time(|| range.open(0, COUNT * BLOCK, bench.gpu()))?;
        // SAFETY: no work uses the range.
        let ((), unmap_all) = host_time(|| unsafe { range.unmap(0, COUNT * BLOCK) })?;
        for (list, time) in times.iter_mut().zip([map, open_each, unmap_each, open_all, unmap_all]) {
            list.push(micros(time) / COUNT as f64);
        }
    }
    let [map, open_each, unmap_each, open_all, unmap_all] = times.map(median);
    found.expect("map a block", map, "µs", 2.0..=8.0);
    found.expect("set access to a block, a call each", open_each, "µs", 30.0..=60.0);
    found.value("set access to a block, one call for 256", open_all, "µs");
    found.expect("unmap a block, a call each", unmap_each, "µs", 20.0..=40.0);
    found.value("unmap a block, one call for 256", unmap_all, "µs");
    let per_model = (map + open_all) * 50.0;
    found.value("map a model of 100 MiB", per_model, "µs");
    by_size(&bench, found)?;
    aliases(&bench, found)
}

/// The time to map and to unmap 512 MiB, by the size of the handles.
fn by_size(bench: &Bench, found: &mut Findings) -> Result<(), CheckError> {
    const ALL: u64 = 512 << 20;
    for mib in [2_u64, 4, 8, 16, 32, 64] {
        let bytes = mib << 20;
        let handles: Vec<_> =
            (0..ALL / bytes).map(|_| MemoryHandle::create(bench.gpu(), bytes)).collect::<Result<_, _>>()?;
        let mut range = AddressRange::reserve(ALL, 0)?;
        let mut times = [vec![], vec![]];
        for _ in 0..5 {
            let ((), map) = host_time(|| {
                for (at, handle) in handles.iter().enumerate() {
                    range.map(at as u64 * bytes, handle)?;
                }
                range.open(0, ALL, bench.gpu())
            })?;
            // SAFETY: no work uses the range.
            let ((), unmap) = host_time(|| unsafe { range.unmap_all() })?;
            times[0].push(millis(map));
            times[1].push(millis(unmap));
        }
        let [map, unmap] = times.map(median);
        found.value(format!("map 512 MiB in handles of {mib} MiB"), map, "ms");
        found.value(format!("unmap 512 MiB in handles of {mib} MiB"), unmap, "ms");
    }
    Ok(())
}

fn map_all(range: &mut AddressRange, handles: &[MemoryHandle]) -> Result<(), CheckError> {
    for (at, handle) in handles.iter().enumerate() {
        range.map(at as u64 * BLOCK, handle)?;
    }
    Ok(())
}

/// Writes through one mapping of a handle and reads through another, 200 times.
fn aliases(bench: &Bench, found: &mut Findings) -> Result<(), CheckError> {
    let handles = [MemoryHandle::create(bench.gpu(), BLOCK)?];
    let one = GpuBuffer::of(&bench.context, &handles)?;
    let other = GpuBuffer::of(&bench.context, &handles)?;
    let mut wrong = 0;
    for seed in 0..200 {
        bench.write(&one, seed)?;
        wrong += bench.differing(other.base(), other.bytes(), seed)?;
        // Both in one stream, ordered by the stream alone.
        // SAFETY: the buffers wait for the context before they go.
        unsafe { bench.kernels.pattern(&bench.stream, other.base(), BLOCK, !seed)? };
        wrong += bench.differing(one.base(), BLOCK, !seed)?;
    }
    found.expect("words that differ between two mappings", wrong as f64, "", 0.0..=0.0);
    if wrong > 0 {
        return Err(CheckError::Wrong(format!("{wrong} words differ between two mappings of a handle")));
    }
    Ok(())
}

/// Check 5: whether map, set access and unmap wait for a kernel or a copy that uses other memory.
pub(super) fn beside_work(found: &mut Findings) -> Result<(), CheckError> {
    const KERNEL: Duration = Duration::from_millis(50);
    let bench = Bench::new()?;
    let handles = [MemoryHandle::create(bench.gpu(), BLOCK)?];
    let elsewhere = GpuBuffer::new(&bench, 256 << 20)?;
    let host = crate::cuda::driver::PinnedBuffer::new(256 << 20)?;
    for (work, is_kernel) in [("a kernel of 50 ms", true), ("a copy elsewhere", false)] {
        let mut times = [vec![], vec![], vec![], vec![], vec![]];
        for _ in 0..5 {
            let mut range = AddressRange::reserve(2 * BLOCK, 0)?;
            let began = bench.stream.record()?;
            if is_kernel {
                bench.kernels.spin(&bench.stream, KERNEL)?;
            } else {
                for _ in 0..8 {
                    // SAFETY: both buffers stay until the stream is awaited below.
                    unsafe { bench.stream.copy_to_gpu(elsewhere.base(), host.as_slice())? };
                }
            }
            let ended = bench.stream.record()?;
            let (handle, create) = host_time(|| MemoryHandle::create(bench.gpu(), BLOCK))?;
            let ((), map) = host_time(|| range.map(0, &handles[0]))?;
            let ((), open) = host_time(|| range.open(0, BLOCK, bench.gpu()))?;
            // SAFETY: no work uses the range.
            let ((), unmap) = host_time(|| unsafe { range.unmap(0, BLOCK) })?;
            let still = !ended.is_done()?;
            ended.wait()?;
            let work = ended.since(&began)?;
            for (list, time) in times.iter_mut().zip([create, map, open, unmap]) {
                list.push(micros(time));
            }
            times[4].push(if still { millis(work) } else { f64::NAN });
            drop(handle);
        }
        let [create, map, open, unmap, running] = times.map(median);
        if running.is_nan() {
            found.note(format!("some calls waited for {work}: it had ended after them"));
        }
        found.value(format!("create beside {work}"), create, "µs");
        found.expect(format!("map beside {work}"), map, "µs", 0.0..=1000.0);
        found.expect(format!("set access beside {work}"), open, "µs", 0.0..=1000.0);
        found.expect(format!("unmap beside {work}"), unmap, "µs", 0.0..=1000.0);
    }
    Ok(())
}

/// Check 6: 1,000 times other physical memory under the same addresses, read by a kernel of a loaded
/// module and by a captured graph.
pub(super) fn remap(found: &mut Findings) -> Result<(), CheckError> {
    const ROUNDS: u64 = 1000;
    const BLOCKS: u64 = 8;
    let bench = Bench::new()?;
    let sets: Vec<Vec<MemoryHandle>> = (0..3)
        .map(|_| (0..BLOCKS).map(|_| MemoryHandle::create(bench.gpu(), BLOCK)).collect())
        .collect::<Result<_, _>>()?;
    for (seed, set) in (0..).zip(&sets) {
        bench.write(&GpuBuffer::of(&bench.context, set)?, seed)?;
    }
    let mut range = AddressRange::reserve(BLOCKS * BLOCK, 0)?;
    let count = crate::cuda::driver::PinnedBuffer::new(8)?;
    let out = count.device_address()?;
    let base = range.base();
    let bytes = range.bytes();
    // A graph over the words of each seed, captured while nothing is mapped.
    let graphs: Vec<_> = (0..3)
        .map(|seed| {
            // SAFETY: the memory is mapped whenever the graph is launched, and awaited.
            bench.stream.capture(|| unsafe { bench.kernels.check(&bench.stream, base, bytes, seed, out) })
        })
        .collect::<Result<_, _>>()?;
    let mut wrong = 0;
    let began = monotonic_now();
    for round in 0..ROUNDS {
        let set = (round % 3) as usize;
        // In another order each time, so that a block is not always at the same place of the range.
        for (at, handle) in sets[set].iter().enumerate() {
            range.map(at as u64 * BLOCK, handle)?;
        }
        range.open(0, bytes, bench.gpu())?;
        wrong += bench.differing(base, bytes, round % 3)?;
        // SAFETY: the memory is mapped until the stream is awaited.
        unsafe { bench.stream.launch_graph(&graphs[set])? };
        bench.stream.synchronize()?;
        // SAFETY: the work has finished.
        unsafe { range.unmap(0, bytes)? };
    }
    let time = monotonic_now().since(began);
    wrong += u64::from_le_bytes(count.as_slice().try_into().expect("the buffer has 8 bytes"));
    found.value("a swap of 16 MiB by mapping, with two kernels", micros(time) / ROUNDS as f64, "µs");
    found.expect("words that differ after 1,000 swaps", wrong as f64, "", 0.0..=0.0);
    if wrong > 0 {
        return Err(CheckError::Wrong(format!("{wrong} words differ after swaps under stable addresses")));
    }
    Ok(())
}
