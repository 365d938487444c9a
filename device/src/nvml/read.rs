//! Reads a [`Machine`] from NVML. Decides nothing: `discover.rs` does.
//!
//! A question that a GPU does not support gives `None`. Another error gives `None` too, and a line in
//! [`GpuRecord::unanswered`]. Only a GPU without a name, a UUID, a memory size or a PCI address, and a
//! lost GPU, are left out; the record lists them as unreadable.

use std::path::Path;
use std::sync::Arc;

use nvml_wrapper::Device;
use nvml_wrapper::cuda_driver_version_major as cuda_major;
use nvml_wrapper::cuda_driver_version_minor as cuda_minor;
use nvml_wrapper::enum_wrappers::device::{P2pCapabilitiesIndex, P2pStatus as NvmlP2pStatus, TopologyLevel};
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON;

use super::error::Error;
use super::raw;
use super::record::{
    CPUS_MAX, GpuRecord, Machine, MigInstance, NvLink, P2pStatus, PcieAncestor, PeerRecord, RecordFormat,
    UnreadableGpu, check_driver,
};

/// Number of NVLinks that a GPU can have (`NVML_NVLINK_MAX_LINKS`).
const NVLINKS_MAX: u32 = 18;
/// Bits of a word in NVML's sets of CPUs and of NUMA nodes, which are C `unsigned long`.
const WORD_BITS: u32 = std::ffi::c_ulong::BITS;
/// Number of NUMA nodes that NVML is asked about.
const NUMA_NODES_MAX: u32 = 1024;
/// `NVML_AFFINITY_SCOPE_NODE`.
const SCOPE_NODE: u32 = 0;

/// The open library of the NVIDIA driver. A clone is a handle of the same library.
#[derive(Debug, Clone)]
pub struct Nvml {
    pub(super) library: Arc<nvml_wrapper::Nvml>,
}

/// Reads the GPUs of this machine.
///
/// # Errors
/// As [`Nvml::open`] and [`Nvml::machine`].
pub fn machine() -> Result<Machine, Error> {
    Nvml::open()?.machine()
}

impl Nvml {
    /// Opens `libnvidia-ml.so.1`, and checks the version of the driver.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::DriverNotLoaded`], [`Error::DriverTooOld`], [`Error::Nvml`].
    pub fn open() -> Result<Self, Error> {
        let library = nvml_wrapper::Nvml::init().map_err(|error| match error {
            NvmlError::LibloadingError(_) | NvmlError::LibraryNotFound => Error::NoDriver,
            NvmlError::DriverNotLoaded => Error::DriverNotLoaded,
            error => refused("start")(error),
        })?;
        let driver = library.sys_driver_version().map_err(refused("report the driver's version"))?;
        check_driver(&driver)?;
        Ok(Self { library: Arc::new(library) })
    }

    /// Reads the GPUs of this machine.
    ///
    /// # Errors
    /// [`Error::NoGpu`], [`Error::Nvml`].
    pub fn machine(&self) -> Result<Machine, Error> {
        let driver = self.library.sys_driver_version().map_err(refused("report the driver's version"))?;
        let cuda = self.library.sys_cuda_driver_version().ok();
        let count = self.library.device_count().map_err(refused("count the GPUs"))?;
        if count == 0 {
            return Err(Error::NoGpu);
        }
        let mut machine = Machine {
            format: RecordFormat::V1,
            driver,
            cuda: cuda.map(|version| format!("{}.{}", cuda_major(version), cuda_minor(version))),
            gpus: Vec::new(),
            unreadable: Vec::new(),
        };
        let mut devices = Vec::new();
        for index in 0..count {
            match self.library.device_by_index(index) {
                Ok(device) => devices.push((index, device)),
                Err(error) => {
                    machine.unreadable.push(UnreadableGpu { index, reason: error.to_string() });
                }
            }
        }
        for (index, device) in &devices {
            match gpu_record(*index, device, &devices) {
                Ok(gpu) => machine.gpus.push(gpu),
                Err(error) => {
                    machine.unreadable.push(UnreadableGpu { index: *index, reason: error.to_string() });
                }
            }
        }
        Ok(machine)
    }
}

pub(super) fn refused(request: &'static str) -> impl FnOnce(NvmlError) -> Error {
    move |error| Error::Nvml { request, reason: error.to_string() }
}

/// Returns whether a GPU is gone: no other question to the GPU will be answered.
pub(super) fn is_lost(error: &NvmlError) -> bool {
    matches!(error, NvmlError::GpuLost | NvmlError::ResetRequired)
}

/// Asks a GPU questions that it may leave open, and collects the errors.
#[derive(Debug, Default)]
struct OpenQuestions {
    unanswered: Vec<String>,
}

impl OpenQuestions {
    /// Returns the answer, or `None` if the GPU does not know. Fails only if the GPU is lost.
    fn ask<T>(&mut self, question: &str, answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
        match answer {
            Ok(answer) => Ok(Some(answer)),
            Err(error) if is_lost(&error) => Err(error),
            Err(NvmlError::NotSupported) => Ok(None),
            Err(error) => {
                self.unanswered.push(format!("{question}: {error}"));
                Ok(None)
            }
        }
    }
}

fn gpu_record(index: u32, device: &Device<'_>, all: &[(u32, Device<'_>)]) -> Result<GpuRecord, NvmlError> {
    let mut open = OpenQuestions::default();
    let pci_bus_id = device.pci_info()?.bus_id;
    let capability = open.ask("compute capability", device.cuda_compute_capability())?;
    let mig_mode = open.ask("MIG mode", device.mig_mode())?;
    let cpus = open.ask("CPU affinity", device.cpu_affinity((CPUS_MAX / WORD_BITS) as usize))?;
    let mut peers = Vec::new();
    for (other, _) in all.iter().filter(|(other, _)| *other != index) {
        peers.push(peer_record(device, *other, &mut open)?);
    }
    Ok(GpuRecord {
        index,
        uuid: device.uuid()?,
        name: device.name()?,
        memory_bytes: device.memory_info()?.total,
        numa_node: numa_node(device, &pci_bus_id, &mut open)?,
        pci_bus_id,
        cpus: cpus.map(|words| set_bits(&words).collect()),
        compute_capability: capability.map(|version| format!("{}.{}", version.major, version.minor)),
        pcie_gen_max: open.ask("PCIe generation", device.max_pcie_link_gen())?,
        pcie_width_max: open.ask("PCIe width", device.max_pcie_link_width())?,
        mig_instances: match &mig_mode {
            Some(mode) if mode.current == 1 => mig_instances(device, &mut open)?,
            _ => Vec::new(),
        },
        mig_enabled: mig_mode.map(|mode| mode.current == 1),
        nvlinks: nvlinks(device, &mut open)?,
        peers,
        fabric: open.ask("fabric", raw::fabric(device))?,
        unanswered: open.unanswered,
    })
}

/// Returns the numbers of the bits that are set, from bit 0 of the first word.
fn set_bits(words: &[std::ffi::c_ulong]) -> impl Iterator<Item = u32> {
    (0..).zip(words).flat_map(|(word, bits)| {
        (0..WORD_BITS).filter(move |bit| (bits >> bit) & 1 == 1).map(move |bit| word * WORD_BITS + bit)
    })
}

/// Returns the NUMA node of the nearest host memory. `nvmlDeviceGetNumaNodeId` answers another
/// question: the node that a coherent GPU's own memory forms.
fn numa_node(
    device: &Device<'_>,
    pci_bus_id: &str,
    open: &mut OpenQuestions,
) -> Result<Option<u32>, NvmlError> {
    // The kernel writes -1 on a machine without NUMA.
    let path = Path::new("/sys/bus/pci/devices").join(sysfs_address(pci_bus_id)).join("numa_node");
    let by_kernel = std::fs::read_to_string(path).ok().and_then(|node| node.trim().parse().ok());
    if by_kernel.is_some() {
        return Ok(by_kernel);
    }
    let nodes = device.memory_affinity((NUMA_NODES_MAX / WORD_BITS) as usize, SCOPE_NODE);
    let nodes: Vec<u32> =
        open.ask("memory affinity", nodes)?.map(|words| set_bits(&words).collect()).unwrap_or_default();
    // A GPU that is equally near to several nodes has no nearest node.
    Ok(if let [node] = nodes[..] { Some(node) } else { None })
}

/// Returns the name of a PCI device's folder in sysfs. The kernel writes at least four digits for the
/// domain, and NVML writes eight.
fn sysfs_address(pci_bus_id: &str) -> String {
    let address = pci_bus_id.to_ascii_lowercase();
    match address.split_once(':') {
        Some((domain, rest)) => format!("{:0>4}:{rest}", domain.trim_start_matches('0')),
        None => address,
    }
}

fn mig_instances(device: &Device<'_>, open: &mut OpenQuestions) -> Result<Vec<MigInstance>, NvmlError> {
    let count = open.ask("MIG instances", device.mig_device_count())?.unwrap_or(0);
    let mut instances = Vec::new();
    for index in 0..count {
        // The count is the highest possible one, and the numbers in use need not be consecutive.
        let instance = match device.mig_device_by_index(index) {
            Err(NvmlError::NotFound | NvmlError::InvalidArg) => continue,
            answer => open.ask("MIG instance", answer)?,
        };
        let Some(instance) = instance else { continue };
        let answers = instance.uuid().and_then(|uuid| {
            let name = instance.name()?;
            Ok(MigInstance { uuid, name, memory_bytes: instance.memory_info()?.total })
        });
        instances.extend(open.ask("MIG instance's name and memory", answers)?);
    }
    Ok(instances)
}

fn nvlinks(device: &Device<'_>, open: &mut OpenQuestions) -> Result<Vec<NvLink>, NvmlError> {
    let mut links = Vec::new();
    for number in 0..NVLINKS_MAX {
        let link = device.link_wrapper_for(number);
        // A GPU with fewer links answers "invalid argument" for the others.
        let active = match link.is_active() {
            Err(NvmlError::InvalidArg) => None,
            answer => open.ask("NVLink state", answer)?,
        };
        let Some(active) = active else { continue };
        let mut record = NvLink {
            link: number,
            active,
            version: None,
            remote: None,
            remote_pci_bus_id: None,
            speed_mb_per_s: None,
        };
        if active {
            record.version = open.ask("NVLink version", link.version())?;
            record.remote = open.ask("NVLink remote kind", raw::remote_kind(device, number))?;
            let remote = open.ask("NVLink remote address", link.remote_pci_info())?;
            record.remote_pci_bus_id = remote.map(|pci| pci.bus_id);
        }
        links.push(record);
    }
    if links.iter().any(|link| link.active) {
        let speed = field_value(device, NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON);
        let speed = open.ask("NVLink speed", speed)?.and_then(|speed| u32::try_from(speed).ok());
        links.iter_mut().filter(|link| link.active).for_each(|link| link.speed_mb_per_s = speed);
    }
    Ok(links)
}

/// Returns the value of a field of `nvmlDeviceGetFieldValues` that is a whole number.
pub(super) fn field_value(device: &Device<'_>, field: u32) -> Result<u64, NvmlError> {
    let answers = device.field_values_for(&[FieldId(field)])?;
    match answers.into_iter().next().ok_or(NvmlError::NoData)??.value? {
        SampleValue::U32(value) => Ok(value.into()),
        SampleValue::U64(value) => Ok(value),
        SampleValue::I64(value) => u64::try_from(value).map_err(|_| NvmlError::NoData),
        SampleValue::F64(_) => Err(NvmlError::NoData),
    }
}

/// Asks a GPU about another GPU. The other GPU may be the lost one, so a loss is no reason to leave
/// out the GPU that is asked.
fn peer_record(device: &Device<'_>, other: u32, open: &mut OpenQuestions) -> Result<PeerRecord, NvmlError> {
    fn ask<T>(
        question: &str,
        answer: Result<T, NvmlError>,
        open: &mut OpenQuestions,
    ) -> Result<Option<T>, NvmlError> {
        let is_loss = answer.as_ref().err().is_some_and(is_lost);
        open.ask(question, if is_loss { Err(NvmlError::NoData) } else { answer })
    }
    // The wrapper consumes a device for the first question, so each question opens the other GPU.
    let peer = || device.nvml().device_by_index(other);
    let ancestor = peer().and_then(|peer| device.topology_common_ancestor(peer)).map(pcie_ancestor);
    let read = peer().and_then(|peer| device.p2p_status(&peer, P2pCapabilitiesIndex::Read)).map(p2p_status);
    Ok(PeerRecord {
        gpu: other,
        ancestor: ask("common ancestor", ancestor, open)?,
        read: ask("peer read", read, open)?,
    })
}

fn pcie_ancestor(level: TopologyLevel) -> PcieAncestor {
    match level {
        TopologyLevel::Internal => PcieAncestor::Internal,
        TopologyLevel::Single => PcieAncestor::Single,
        TopologyLevel::Multiple => PcieAncestor::Multiple,
        TopologyLevel::HostBridge => PcieAncestor::HostBridge,
        TopologyLevel::Node => PcieAncestor::Node,
        TopologyLevel::System => PcieAncestor::System,
    }
}

fn p2p_status(status: NvmlP2pStatus) -> P2pStatus {
    match status {
        NvmlP2pStatus::Ok => P2pStatus::Ok,
        NvmlP2pStatus::ChipsetNotSupported => P2pStatus::ChipsetNotSupported,
        NvmlP2pStatus::GpuNotSupported => P2pStatus::GpuNotSupported,
        NvmlP2pStatus::IohTopologyNotSupported => P2pStatus::IohTopologyNotSupported,
        NvmlP2pStatus::DisabledByRegkey => P2pStatus::DisabledByRegkey,
        NvmlP2pStatus::NotSupported => P2pStatus::NotSupported,
        NvmlP2pStatus::Unknown => P2pStatus::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_the_set_bits_of_all_words() {
        let bits: Vec<u32> = set_bits(&[0b1001, 0, 1]).collect();
        assert_eq!(bits, [0, 3, 2 * WORD_BITS]);
    }

    #[test]
    fn pci_addresses_are_written_as_the_kernel_writes_them() {
        assert_eq!(sysfs_address("00000000:1B:00.0"), "0000:1b:00.0");
        assert_eq!(sysfs_address("00010000:01:00.0"), "10000:01:00.0");
        assert_eq!(sysfs_address("0008:01:00.0"), "0008:01:00.0");
        assert_eq!(sysfs_address("nonsense"), "nonsense");
    }

    #[test]
    fn a_question_without_an_answer_gives_none_and_a_lost_gpu_an_error() {
        let mut open = OpenQuestions::default();
        assert_eq!(open.ask("size", Ok(3)).unwrap(), Some(3));
        assert_eq!(open.ask::<u32>("speed", Err(NvmlError::NotSupported)).unwrap(), None);
        assert_eq!(open.unanswered, Vec::<String>::new());
        assert_eq!(open.ask::<u32>("speed", Err(NvmlError::NoPermission)).unwrap(), None);
        assert_eq!(open.unanswered.len(), 1, "{:?}", open.unanswered);
        assert!(open.unanswered[0].starts_with("speed: "), "{:?}", open.unanswered);
        assert!(open.ask::<u32>("speed", Err(NvmlError::GpuLost)).is_err());
    }
}
