//! Check 3: physical memory.

use crate::cuda::driver::MemoryHandle;

use super::bench::{Bench, host_time};
use super::finding::{CheckError, Findings, micros};

/// Bytes that are created for each size of a handle.
const ALL: u64 = 8 << 30;

/// Check 3: the time to create and to release handles, by their size.
pub(super) fn create(found: &mut Findings) -> Result<(), CheckError> {
    let bench = Bench::new()?;
    for mib in [2_u64, 16, 64] {
        let bytes = mib << 20;
        let count = ALL / bytes;
        let (handles, time) = host_time(|| {
            (0..count).map(|_| MemoryHandle::create(bench.gpu(), bytes)).collect::<Result<Vec<_>, _>>()
        })?;
        let each = micros(time) / count as f64;
        if mib == 2 {
            found.expect("create a handle of 2 MiB", each, "µs", 20.0..=60.0);
            let seconds = each * (80_u64 << 30) as f64 / bytes as f64 / 1e6;
            found.expect("create 80 GiB in handles of 2 MiB", seconds, "s", 0.5..=4.0);
        } else {
            found.value(format!("create a handle of {mib} MiB"), each, "µs");
        }
        let (_, time) = host_time(|| {
            drop(handles);
            Ok::<_, CheckError>(())
        })?;
        found.value(format!("release a handle of {mib} MiB"), micros(time) / count as f64, "µs");
    }
    Ok(())
}
