//! What a GPU has to show: the checks that `gpu-check` runs.
//!
//! A check measures the driver that the CUDA device builds on, through the same code as the device.
//! Each value has an expectation that was written down before the first run, and a check fails only if
//! bytes are wrong or a call is refused; a value outside its expectation is a finding.
//!
//! Checks change nothing on the machine: clocks, compute mode and MIG stay as they are, no memory is
//! managed, and no fault is provoked.

mod bench;
mod copies;
mod device;
mod environment;
mod finding;
mod mapping;
mod memory;
mod shares;
mod sharing;
mod swap;
mod waits;

use std::time::Duration;

pub use finding::{CheckError, Expectation, Findings, Value, Verdict};

/// A check of a GPU.
#[derive(Debug, Clone, Copy)]
pub struct Check {
    /// Number of the check, by which the options name it.
    pub number: u8,
    /// Name in a few words.
    pub name: &'static str,
    /// What the result decides.
    pub decides: &'static str,
    /// Longest time that the check may take.
    pub limit: Duration,
    run: fn(&mut Findings) -> Result<(), CheckError>,
}

impl Check {
    /// Runs the check in this process.
    ///
    /// # Errors
    /// [`CheckError`] if the driver refuses a call, or bytes are wrong.
    pub fn run(&self) -> Result<Findings, CheckError> {
        let mut findings = Findings::default();
        (self.run)(&mut findings)?;
        Ok(findings)
    }
}

/// Returns all checks, in the order in which they run.
#[must_use]
pub fn checks() -> &'static [Check] {
    const fn check(
        number: u8,
        name: &'static str,
        seconds: u64,
        decides: &'static str,
        run: fn(&mut Findings) -> Result<(), CheckError>,
    ) -> Check {
        Check { number, name, decides, limit: Duration::from_secs(seconds), run }
    }
    const CHECKS: &[Check] = &[
        check(1, "environment", 20, "which checks run", environment::attributes),
        check(2, "context", 30, "the density of processes (T14)", environment::context),
        check(3, "physical memory", 60, "the size of a handle, the time of a start (T12)", memory::create),
        check(4, "mapping", 60, "whether memory is unmapped at once or later", mapping::costs),
        check(5, "mapping beside work", 60, "the thread that unmaps (T08)", mapping::beside_work),
        check(6, "stable addresses", 90, "whether models keep their addresses (T08, L01)", mapping::remap),
        check(7, "address hints", 60, "whether user processes can move", sharing::hints),
        check(8, "export and import", 60, "who owns the pool (D06, F17)", sharing::export),
        check(9, "ceilings", 60, "the base of all ratios", copies::ceilings),
        check(10, "registered memory", 120, "the host tier (T07)", copies::registration),
        check(11, "size of a copy", 60, "the size of a group and the depth (T09)", copies::elbow),
        check(12, "copies of pageable memory", 60, "the ring (D17, T07)", copies::pageable),
        check(13, "copies beside kernels", 60, "copies while a model runs (T08)", copies::beside_kernels),
        check(14, "waits", 30, "how the host waits, hops (D05)", waits::modes),
        check(15, "waits on the GPU", 30, "where launches wait (T08)", waits::chains),
        check(16, "swap ladder", 120, "the goal of a swap (T08, T09)", swap::ladder),
        check(18, "hash of chunks", 30, "eviction of processes (T10, T11)", swap::hash),
        check(19, "shares of SMs", 60, "F06 in one process", shares::widths),
        check(24, "one copy of the weights", 60, "F17, D06", sharing::shared_weights),
        check(25, "a killed process", 60, "the time of a restart", sharing::killed),
        check(27, "the CUDA device", 120, "whether executors can use it", device::swaps),
    ];
    CHECKS
}

/// Runs the part of a check that another process plays, over standard input and output. `gpu-check`
/// calls this when a check has started it with the name of a role.
///
/// # Errors
/// [`CheckError`], also for an unknown role.
pub fn play(role: &str) -> Result<(), CheckError> {
    sharing::play(role)
}
