//! Measures the rate of a device's copies by their size. The curve's elbow is the size of a group of
//! weights (T09). The probe issues [`COPIES_AHEAD`] copies before it waits for the first, as the
//! executor does.
//!
//! The caller manages the memory: it passes an extent of the device's memory that is not in use. The
//! results are valid only for the moment of the measurement: other work on the machine, or memory
//! that was never touched before, distorts them. This module makes no decision.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use crate::api::{Device, Event as _, MemoryExtent, Stream as _};
use crate::clock::monotonic_now;
use crate::error::Error;
use crate::memory::{HostAccess, HostRegion};

/// Number of copies that are issued before the first of them is awaited: while the device carries
/// out one, the next is ready.
pub const COPIES_AHEAD: usize = 2;
/// Smallest measured copy in bytes.
const SMALLEST: u64 = 4096;

/// The measured rate of copies of a single size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyRate {
    /// Size of a copy in bytes.
    pub bytes: u64,
    /// Median rate of the rounds, in bytes per second.
    pub bytes_per_s: u64,
}

/// Measures copies from the host to all of `extent`: in copies of 4 KiB, 8 KiB and so on, up to the
/// device's largest copy or the extent's length. Each of the `rounds` rounds measures all sizes in
/// turn. An additional first round is not counted, because it touches the memory for the first time.
/// The results are ordered by size.
///
/// # Errors
/// Returns the errors of the device: a bad extent, exhausted memory, or a lost device.
pub fn copy_rates<D: Device>(
    device: &D,
    extent: MemoryExtent,
    rounds: NonZeroU32,
) -> Result<Vec<CopyRate>, Error> {
    let host = HostRegion::from_bytes("millrace-probe", &vec![0xA5; extent.bytes as usize])?;
    let host = device.import_host(host.share()?, host.bytes(), HostAccess::Direct)?;
    let region = device.reserve(host.bytes())?;
    device.map(&region, vec![(0, device.create(extent)?)])?;
    let mut stream = device.stream()?;
    let most = device.capabilities().copy_max.get().min(extent.bytes);
    let sizes: Vec<u64> = std::iter::successors(Some(SMALLEST), |size| Some(size * 2))
        .take_while(|&size| size <= most)
        .collect();
    let mut nanos = vec![Vec::with_capacity(rounds.get() as usize); sizes.len()];
    for round in 0..=rounds.get() {
        for (&size, nanos) in sizes.iter().zip(&mut nanos) {
            let began = monotonic_now();
            let mut issued = VecDeque::new();
            for start in (0..extent.bytes).step_by(size as usize) {
                stream.copy(&region, &host, start..extent.bytes.min(start + size))?;
                issued.push_back(stream.record()?);
                if issued.len() == COPIES_AHEAD
                    && let Some(oldest) = issued.pop_front()
                {
                    oldest.wait()?;
                }
            }
            issued.iter().try_for_each(|event| event.wait().map(drop))?;
            if round > 0 {
                nanos.push(monotonic_now().since(began).as_nanos().max(1));
            }
        }
    }
    device.unmap(&region)?;
    let rate = |(bytes, mut nanos): (u64, Vec<u128>)| {
        nanos.sort_unstable();
        let median = nanos[nanos.len() / 2];
        let bytes_per_s = u128::from(extent.bytes) * 1_000_000_000 / median;
        CopyRate { bytes, bytes_per_s: u64::try_from(bytes_per_s).unwrap_or(u64::MAX) }
    };
    Ok(sizes.into_iter().zip(nanos).map(rate).collect())
}

#[cfg(test)]
mod tests {
    use millrace_types::Bytes;

    use super::*;
    use crate::emulated::EmulatedGpu;
    use crate::memory::DeviceMemory;

    fn gpu(bytes: Bytes) -> (DeviceMemory, EmulatedGpu) {
        let memory = DeviceMemory::create("probe", bytes).unwrap();
        let gpu = EmulatedGpu::new(memory.share().unwrap(), bytes).unwrap();
        (memory, gpu)
    }

    #[test]
    fn sizes_double_up_to_the_largest_copy_and_the_extent_is_released() {
        let (_memory, gpu) = gpu(Bytes::mib(8));
        let extent = MemoryExtent { offset: 0, bytes: 4 << 20 };
        let rates = copy_rates(&gpu, extent, NonZeroU32::MIN).unwrap();
        let sizes: Vec<u64> = rates.iter().map(|rate| rate.bytes).collect();
        assert_eq!(sizes, (12..=21).map(|power| 1 << power).collect::<Vec<u64>>());
        assert!(rates.iter().all(|rate| rate.bytes_per_s > 0));
        let region = gpu.reserve(Bytes::mib(4)).unwrap();
        gpu.map(&region, vec![(0, gpu.create(extent).unwrap())]).unwrap();
    }

    #[test]
    fn a_probe_writes_only_to_its_extent() {
        let (memory, gpu) = gpu(Bytes::mib(4));
        let extent = MemoryExtent { offset: 1 << 20, bytes: 1 << 20 };
        copy_rates(&gpu, extent, NonZeroU32::MIN).unwrap();
        let mut bytes = vec![0; 4 << 20];
        memory.read_at(0, &mut bytes).unwrap();
        let written = bytes.iter().enumerate().filter(|(_, byte)| **byte != 0).map(|(at, _)| at);
        let written: Vec<usize> = written.collect();
        assert_eq!((written.first(), written.last()), (Some(&(1 << 20)), Some(&((2 << 20) - 1))));
    }

    #[test]
    fn an_extent_past_the_end_is_refused() {
        let (_memory, gpu) = gpu(Bytes::mib(1));
        let extent = MemoryExtent { offset: 0, bytes: 2 << 20 };
        assert!(matches!(copy_rates(&gpu, extent, NonZeroU32::MIN), Err(Error::BadExtent { .. })));
    }
}
