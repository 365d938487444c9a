//! The resources that a process uses on this machine, from /proc.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::time::Duration;

use anyhow::Context as _;

/// The unit of `st_blocks`, in bytes.
const BLOCK: u64 = 512;

/// The resources of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Resident bytes of private memory: heap and stacks.
    pub private: u64,
    /// Resident bytes of mapped shared memory.
    pub shared: u64,
    /// Number of open file descriptors.
    pub fds: u64,
}

impl ProcessUsage {
    /// Returns the present resources of a process.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let ended = || format!("process {pid} ended");
        let status = fs::read_to_string(format!("/proc/{pid}/status")).with_context(ended)?;
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).with_context(ended)?.count() as u64;
        Ok(Self { private: field(&status, "RssAnon:")?, shared: field(&status, "RssShmem:")?, fds })
    }
}

/// Returns the processor time that all threads of a process have used since its start.
///
/// # Errors
/// If the process has ended.
pub(crate) fn processor_time(pid: u32) -> anyhow::Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    let stat = stat.with_context(|| format!("process {pid} ended"))?;
    // The second field, the name, may contain spaces; utime and stime are the 14th and 15th fields.
    let (_, after_name) = stat.rsplit_once(") ").context("/proc has no name of a process")?;
    let ticks = after_name.split(' ').skip(11).take(2).map(str::parse::<u64>);
    let ticks: u64 = ticks.sum::<Result<_, _>>().context("/proc has no processor times")?;
    Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// The memory of a process, file pages and shared memory included.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ResidentMemory {
    /// Resident bytes.
    pub resident: u64,
    /// Maximum resident bytes since the start of the process, or since [`reset_peak`].
    pub peak: u64,
}

impl ResidentMemory {
    /// Returns the present memory of a process.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn of(pid: u32) -> anyhow::Result<Self> {
        let status = fs::read_to_string(format!("/proc/{pid}/status"));
        let status = status.with_context(|| format!("process {pid} ended"))?;
        Ok(Self { resident: field(&status, "VmRSS:")?, peak: field(&status, "VmHWM:")? })
    }
}

/// Resets the peak memory of a process to its present memory.
pub(crate) fn reset_peak(pid: u32) -> anyhow::Result<()> {
    fs::write(format!("/proc/{pid}/clear_refs"), "5")
        .with_context(|| format!("cannot reset the peak memory of process {pid}"))
}

/// Returns the soft limit of descriptors of a process.
pub(crate) fn descriptors_max(pid: u32) -> Option<u64> {
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// Returns a size in /proc/PID/status, in bytes.
fn field(status: &str, name: &str) -> anyhow::Result<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Ok(kib.with_context(|| format!("/proc shows no {name}"))? * 1024)
}

/// Returns the shared memory that some processes hold through descriptors, by name: the number of
/// files and their bytes. Each file counts once.
pub(crate) fn shared_memory(pids: &[u32]) -> BTreeMap<String, (u64, u64)> {
    let mut files = BTreeMap::new();
    for pid in pids {
        // A process may end meanwhile, and a descriptor may be closed: neither holds memory then.
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let Ok(target) = fs::read_link(entry.path()) else { continue };
            let Ok(file) = fs::metadata(entry.path()) else { continue };
            if let Some(name) = target.to_string_lossy().strip_prefix("/memfd:") {
                let name = name.trim_end_matches(" (deleted)").to_owned();
                files.insert(file.ino(), (name, file.blocks() * BLOCK));
            }
        }
    }
    let mut names: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (name, bytes) in files.into_values() {
        let (count, total) = names.entry(name).or_default();
        *count += 1;
        *total += bytes;
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_descriptors_of_this_process_are_read() {
        let usage = ProcessUsage::of(std::process::id()).unwrap();
        assert!(usage.private > 0 && usage.fds >= 3, "{usage:?}");
        let memory = ResidentMemory::of(std::process::id()).unwrap();
        assert!(descriptors_max(std::process::id()).is_some_and(|most| most > 3));
        assert!(memory.resident > 0 && memory.peak >= memory.resident, "{memory:?}");
        assert!(field("RssAnon:\t   12 kB\n", "RssShmem:").is_err());
        assert_eq!(field("RssAnon:\t   12 kB\n", "RssAnon:").unwrap(), 12 * 1024);
    }
}
