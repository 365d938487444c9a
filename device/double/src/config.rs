//! The configuration, from the environment. A malformed variable ends the process, because a test with a
//! variable that has no effect would pass for the wrong reason.

use std::path::PathBuf;
use std::sync::LazyLock;

use crate::faults::PlannedFault;

/// Bytes of a handle's unit, and the alignment of all addresses: those of today's GPUs.
pub(crate) const GRANULARITY: u64 = 2 << 20;
/// Most devices of a machine.
pub(crate) const DEVICES_MAX: usize = 8;

const MEMORY_DEFAULT: u64 = 1 << 30;

#[derive(Debug)]
pub(crate) struct Config {
    /// Memory of each device, in bytes.
    pub(crate) memory: u64,
    /// Indices of the visible devices, in the driver's order.
    pub(crate) visible: Vec<usize>,
    /// Seed of the delays; `None` means no delays.
    pub(crate) seed: Option<u64>,
    /// Whether the process is aborted where a driver would let the program corrupt memory.
    pub(crate) strict: bool,
    pub(crate) faults: Vec<PlannedFault>,
    /// File that the first fault creates.
    pub(crate) fault_once: Option<PathBuf>,
    pub(crate) report: Option<PathBuf>,
}

pub(crate) static CONFIG: LazyLock<Config> = LazyLock::new(|| {
    let devices = variable("MILLRACE_DOUBLE_DEVICES", |text| {
        text.parse().ok().filter(|count| (1..=DEVICES_MAX).contains(count))
    });
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
    let report = std::env::var("MILLRACE_DOUBLE_REPORT").ok();
    Config {
        memory: variable("MILLRACE_DOUBLE_MEMORY", bytes).unwrap_or(MEMORY_DEFAULT),
        visible: visible_devices(devices.unwrap_or(1), visible.as_deref()),
        seed: variable("MILLRACE_DOUBLE_SEED", |text| text.parse().ok()).filter(|&seed| seed != 0),
        strict: variable("MILLRACE_DOUBLE_STRICT", |text| match text {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        })
        .unwrap_or(true),
        faults: variable("MILLRACE_DOUBLE_FAULT", |text| text.split(',').map(PlannedFault::parse).collect())
            .unwrap_or_default(),
        fault_once: std::env::var_os("MILLRACE_DOUBLE_FAULT_ONCE").map(PathBuf::from),
        report: report.map(|path| path.replace("%p", &std::process::id().to_string()).into()),
    }
});

/// Returns the value of a variable, or `None` if the variable is not set or is empty.
fn variable<T>(name: &str, parse: impl FnOnce(&str) -> Option<T>) -> Option<T> {
    let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
    let value = parse(&text);
    if value.is_none() {
        eprintln!("cuda double: {name}: malformed value {text:?}");
        std::process::abort();
    }
    value
}

fn bytes(text: &str) -> Option<u64> {
    let units = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30), ("", 1)];
    let (number, unit) = units.iter().find_map(|&(name, unit)| Some((text.strip_suffix(name)?, unit)))?;
    number.trim().parse::<u64>().ok()?.checked_mul(unit)
}

/// Returns the UUID of a device.
pub(crate) fn uuid(index: usize) -> [u8; 16] {
    let mut uuid = *b"millrace\0\0\0\0\0\0\0\0";
    uuid[15] = index as u8;
    uuid
}

/// Applies `CUDA_VISIBLE_DEVICES`: the devices up to the first entry that names none.
fn visible_devices(count: usize, variable: Option<&str>) -> Vec<usize> {
    let Some(variable) = variable else { return (0..count).collect() };
    let named = |entry: &str| {
        let entry = entry.trim();
        let index = match entry.strip_prefix("GPU-") {
            Some(start) => (0..count).find(|&index| {
                let hex: String = uuid(index).iter().map(|byte| format!("{byte:02x}")).collect();
                !start.is_empty() && hex.starts_with(&start.replace('-', "").to_lowercase())
            }),
            None => entry.parse().ok(),
        };
        index.filter(|&index| index < count)
    };
    variable.split(',').map_while(named).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_units() {
        assert_eq!(bytes("4096"), Some(4096));
        assert_eq!(bytes("64MiB"), Some(64 << 20));
        assert_eq!(bytes("2 GiB"), Some(2 << 30));
        assert_eq!(bytes("2GB"), None);
        assert_eq!(bytes("99999999999GiB"), None);
    }

    #[test]
    fn visible_devices_end_at_the_first_unknown_entry() {
        let second = "GPU-6d696c6c-7261-6365-0000-000000000001";
        assert_eq!(visible_devices(2, None), [0, 1]);
        assert_eq!(visible_devices(2, Some("1,0")), [1, 0]);
        assert_eq!(visible_devices(2, Some(second)), [1]);
        assert_eq!(visible_devices(2, Some("0,7,1")), [0]);
        assert!(visible_devices(2, Some("")).is_empty());
    }
}
