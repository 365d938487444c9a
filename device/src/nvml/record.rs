//! The answers of NVML about a machine, as plain data. A record in JSON lets tests and other machines
//! discover the topology of a machine that is not there.
//!
//! A field is `None` if the GPU or the driver does not answer the question. This module makes no
//! decision: `discover.rs` does.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::error::{DRIVER_MIN, Error};

/// Number of CPUs that a [`CpuList`] can name: a limit for records that claim more.
pub const CPUS_MAX: u32 = 4096;

/// Version of the record's format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum RecordFormat {
    /// The format of November 2026.
    #[serde(rename = "millrace-nvml-1")]
    V1,
}

/// The answers of NVML about a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// Version of this record's format.
    pub format: RecordFormat,
    /// Version of the driver, for example `580.95.05`.
    pub driver: String,
    /// Newest CUDA version that the driver supports, for example `13.0`.
    pub cuda: Option<String>,
    /// The GPUs that answered.
    pub gpus: Vec<GpuRecord>,
    /// The GPUs that NVML counts but that could not be opened or identified.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unreadable: Vec<UnreadableGpu>,
}

impl Machine {
    /// Checks that the driver is new enough.
    ///
    /// # Errors
    /// [`Error::DriverTooOld`], also if the version does not begin with a number.
    pub fn check_driver(&self) -> Result<(), Error> {
        check_driver(&self.driver)
    }
}

/// Checks the version of a driver, for example `580.95.05`.
pub(super) fn check_driver(version: &str) -> Result<(), Error> {
    let major = version.split('.').next().and_then(|major| major.trim().parse::<u32>().ok());
    match major {
        Some(major) if major >= DRIVER_MIN => Ok(()),
        _ => Err(Error::DriverTooOld { found: version.to_owned() }),
    }
}

/// A GPU that NVML counts but that could not be opened or identified.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UnreadableGpu {
    /// NVML's index of the GPU.
    pub index: u32,
    /// Answer of NVML.
    pub reason: String,
}

/// The answers of NVML about a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuRecord {
    /// NVML's index. The index can change when the machine restarts; the UUID cannot.
    pub index: u32,
    /// UUID, for example `GPU-4039dfe4-0c97-4b1e-683e-eb7d42699053`.
    pub uuid: String,
    /// Product name, for example `NVIDIA H100 80GB HBM3`.
    pub name: String,
    /// Size of the memory in bytes, including the part that the driver reserves.
    pub memory_bytes: u64,
    /// PCI address, for example `00000000:1B:00.0`.
    pub pci_bus_id: String,
    /// NUMA node of the host memory that is nearest to the GPU.
    pub numa_node: Option<u32>,
    /// CPUs that are nearest to the GPU.
    pub cpus: Option<CpuList>,
    /// Compute capability, for example `9.0`.
    pub compute_capability: Option<String>,
    /// Highest PCIe generation that the GPU and its slot share. The current generation is no use:
    /// it drops while the GPU is idle.
    pub pcie_gen_max: Option<u32>,
    /// Highest number of PCIe lanes that the GPU and its slot share.
    pub pcie_width_max: Option<u32>,
    /// Whether the GPU is divided by MIG; `None` if the GPU has no MIG.
    pub mig_enabled: Option<bool>,
    /// The instances of a GPU that is divided by MIG.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mig_instances: Vec<MigInstance>,
    /// The NVLinks, active or not.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nvlinks: Vec<NvLink>,
    /// The relation to each other GPU.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub peers: Vec<PeerRecord>,
    /// State of the NVLink fabric.
    pub fabric: Option<Fabric>,
    /// Questions that NVML answered with an error other than "not supported", and the errors.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unanswered: Vec<String>,
}

/// A part of a GPU that MIG made, which a program uses as a GPU of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MigInstance {
    /// UUID, for example `MIG-41b36ac1-05b8-52c6-9d1a-cca63a1e6e4b`.
    pub uuid: String,
    /// Name, for example `NVIDIA A100-SXM4-40GB MIG 3g.20gb`.
    pub name: String,
    /// Size of the instance's memory in bytes.
    pub memory_bytes: u64,
}

/// An NVLink of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NvLink {
    /// Number of the link on this GPU.
    pub link: u32,
    /// Whether the link is trained and carries data.
    pub active: bool,
    /// NVML's number of the NVLink version (`nvmlNvlinkVersion_t`): 1 is NVLink 1.0, 2 is 2.0, 3 is
    /// 2.2, 4 is 3.0, 5 is 3.1, 6 is 4.0 and 7 is 5.0.
    pub version: Option<u32>,
    /// Kind of the device at the other end.
    pub remote: Option<RemoteKind>,
    /// PCI address of the device at the other end.
    pub remote_pci_bus_id: Option<String>,
    /// Rate in each direction, in MB/s.
    pub speed_mb_per_s: Option<u32>,
}

/// Kind of the device at the other end of an NVLink.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemoteKind {
    /// Another GPU.
    Gpu,
    /// An NVSwitch.
    Switch,
    /// A CPU.
    Cpu,
    /// A device that NVML does not identify, as in some virtual machines.
    Unknown,
}

/// The relation of a GPU to another GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PeerRecord {
    /// NVML's index of the other GPU.
    pub gpu: u32,
    /// Lowest common ancestor of both GPUs in the PCIe tree.
    pub ancestor: Option<PcieAncestor>,
    /// Whether this GPU can read the other GPU's memory.
    pub read: Option<P2pStatus>,
}

/// Lowest common ancestor of two GPUs in the PCIe tree (`nvmlGpuTopologyLevel_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PcieAncestor {
    /// A switch on the board that both GPUs share.
    Internal,
    /// A single PCIe switch.
    Single,
    /// Several PCIe switches, below the same host bridge.
    Multiple,
    /// A host bridge.
    HostBridge,
    /// A NUMA node.
    Node,
    /// The connection between the sockets.
    System,
}

/// Whether a GPU can reach another GPU's memory (`nvmlGpuP2PStatus_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum P2pStatus {
    /// The GPU can reach the memory.
    Ok,
    /// The chipset does not support the access.
    ChipsetNotSupported,
    /// A GPU does not support the access.
    GpuNotSupported,
    /// The two GPUs are under different I/O hubs.
    IohTopologyNotSupported,
    /// The administrator turned the access off.
    DisabledByRegkey,
    /// The access is not supported.
    NotSupported,
    /// The driver does not know.
    Unknown,
}

/// State of a GPU's registration with the NVLink fabric (`nvmlGpuFabricInfo_v2_t`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    /// State of the registration.
    pub state: FabricState,
    /// `nvmlReturn_t` of the registration. Any value but 0 means that NVLinks carry no data between
    /// GPUs, although each link is active.
    pub status: u32,
    /// UUID of the cluster, in hexadecimal digits. Zero on a machine that is its own fabric.
    pub cluster: String,
    /// Part of the cluster in which GPUs reach each other.
    pub clique: u32,
}

/// State of a GPU's registration with the NVLink fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FabricState {
    /// The GPU has no fabric.
    NotSupported,
    /// The fabric manager has not started to register the GPU.
    NotStarted,
    /// The registration is in progress.
    InProgress,
    /// The registration has ended; [`Fabric::status`] has the result.
    Completed,
}

/// A set of CPUs in Linux's notation, for example `0-31,64-95`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CpuList(BTreeSet<u32>);

impl CpuList {
    /// Returns the CPUs in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }

    /// Returns whether the list names no CPU.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().filter(|&cpu| cpu < CPUS_MAX).collect())
    }
}

impl fmt::Display for CpuList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut cpus = self.iter().peekable();
        let mut separator = "";
        while let Some(first) = cpus.next() {
            let mut last = first;
            while let Some(next) = cpus.next_if_eq(&(last + 1)) {
                last = next;
            }
            match last {
                last if last == first => write!(f, "{separator}{first}")?,
                last => write!(f, "{separator}{first}-{last}")?,
            }
            separator = ",";
        }
        Ok(())
    }
}

/// The error for a text that is not a list of CPUs; holds the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a list of CPUs below {CPUS_MAX}: write numbers and ranges, such as 0-31,64")]
pub struct ParseCpuListError(pub String);

impl FromStr for CpuList {
    type Err = ParseCpuListError;

    fn from_str(text: &str) -> Result<Self, ParseCpuListError> {
        let refused = || ParseCpuListError(text.to_owned());
        let number =
            |digits: &str| digits.parse().ok().filter(|&cpu: &u32| cpu < CPUS_MAX).ok_or_else(refused);
        let mut cpus = BTreeSet::new();
        for range in text.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            cpus.extend(number(first)?..=number(last)?);
        }
        Ok(Self(cpus))
    }
}

impl Serialize for CpuList {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for CpuList {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lists_are_written_as_linux_writes_them() {
        let check = |cpus: &[u32], text: &str| {
            let list: CpuList = cpus.iter().copied().collect();
            assert_eq!(list.to_string(), text);
            assert_eq!(text.parse(), Ok(list));
        };
        check(&[], "");
        check(&[3], "3");
        check(&[0, 1, 2, 3, 64, 66, 67], "0-3,64,66-67");
        check(&[CPUS_MAX - 1], "4095");
    }

    #[test]
    fn malformed_cpu_lists_are_refused() {
        for text in ["a", "1-", "-1", "0-4294967295", "4096", "1;2", " 1"] {
            assert_eq!(text.parse::<CpuList>(), Err(ParseCpuListError(text.to_owned())));
        }
    }

    #[test]
    fn drivers_before_580_are_refused() {
        let check = |driver: &str, supported: bool| {
            assert_eq!(check_driver(driver).is_ok(), supported, "{driver}");
        };
        check("580.95.05", true);
        check("580", true);
        check("615.1", true);
        check("579.99", false);
        check("550.54.15", false);
        check("", false);
        check("unknown", false);
    }
}
