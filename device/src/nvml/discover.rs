//! Turns the answers of NVML into a topology. Pure: no driver, no clock, no file.
//!
//! Rules, each with its source:
//!
//! | part | rule |
//! |---|---|
//! | order | by PCI address, because NVML's own order may change between restarts |
//! | PCIe link | [`PCIE_GB_PER_S`] by generation, scaled by the lanes; a measured rate should replace it |
//! | uplink | GPUs below a single PCIe switch share one, and so do the MIG instances of a GPU |
//! | NVLink pair | the sum of the active links that end at the other GPU's PCI address |
//! | NVSwitch | every pair of the same fabric, at the sum of a GPU's links to switches |
//! | reads refused | no NVLink, if either GPU may not read the other's memory |
//! | MIG | each instance is a GPU, without NVLink |
//!
//! [`Topology`] gives each GPU its own type and memory, so a machine with different GPUs needs no
//! special case. Two things cannot be expressed. All pairs behind an NVSwitch have a link of their
//! own, so two copies from the same GPU do not slow each other. Several levels of PCIe switches
//! (`PcieAncestor::Multiple`) count as no sharing.

use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};
use serde::Serialize;

use super::error::Error;
use super::record::{
    CpuList, Fabric, FabricState, GpuRecord, Machine, NvLink, P2pStatus, PcieAncestor, PeerRecord, RemoteKind,
};

/// Name of every discovered topology.
const NAME: &str = "discovered";

/// Rate of a PCIe link with 16 lanes in GB/s by generation, from generation 1: the rate that large
/// copies reach, which is below the rate of the standard.
const PCIE_GB_PER_S: [u64; 6] = [3, 6, 12, 25, 50, 100];
/// Generation of a GPU that does not report one, as in some virtual machines: a low guess delays a
/// transfer less than a grant at a rate that the link cannot reach.
const PCIE_GEN_UNKNOWN: u32 = 3;
/// Number of lanes to which [`PCIE_GB_PER_S`] applies.
const PCIE_LANES: u32 = 16;
/// Largest number of lanes that the PCIe standard knows.
const PCIE_LANES_MAX: u32 = 32;

/// The usable GPUs of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Discovery {
    /// GPUs and links, with the type and the memory of each GPU.
    pub topology: Topology,
    /// Facts that the topology has no field for, in the order of [`Topology::gpus`].
    pub gpus: Vec<DiscoveredGpu>,
    /// GPUs of the machine that no program can use.
    pub excluded: Vec<ExcludedGpu>,
}

/// Facts about a usable GPU: a whole GPU, or a MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DiscoveredGpu {
    /// UUID for `CUDA_VISIBLE_DEVICES`.
    pub uuid: String,
    /// UUID of the whole GPU, which [`HealthEvent`](super::HealthEvent) names. Differs from `uuid`
    /// for a MIG instance.
    pub device_uuid: String,
    /// NUMA node of the nearest host memory.
    pub numa_node: Option<u32>,
    /// Nearest CPUs. Empty if the driver does not report them: then all CPUs are equally near.
    pub cpus: CpuList,
}

/// A GPU that no program can use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ExcludedGpu {
    /// UUID, or NVML's index if the GPU did not report a UUID.
    pub gpu: String,
    /// Reason, as the end of a sentence that starts with the GPU's name.
    pub reason: String,
}

/// A GPU that a program can use, and the whole GPU's record.
struct UsableGpu<'a> {
    /// Position of the record in PCI order.
    device: usize,
    record: &'a GpuRecord,
    uuid: &'a str,
    gpu_type: String,
    memory: Bytes,
}

/// Builds the topology from the answers of NVML.
///
/// # Errors
/// [`Error::DriverTooOld`]; [`Error::NoGpu`]; [`Error::NoUsableGpu`] if every GPU is excluded.
pub fn discover(machine: &Machine) -> Result<Discovery, Error> {
    machine.check_driver()?;
    let mut records: Vec<&GpuRecord> = machine.gpus.iter().collect();
    records.sort_by_cached_key(|gpu| (pci_address(&gpu.pci_bus_id), gpu.index));
    let excluded = excluded_gpus(machine, &records);
    let usable: Vec<UsableGpu<'_>> =
        records.iter().enumerate().flat_map(|(device, record)| usable_gpus(device, record)).collect();
    if usable.is_empty() {
        return Err(match excluded.into_iter().next() {
            Some(ExcludedGpu { gpu, reason }) => Error::NoUsableGpu { gpu, reason },
            None => Error::NoGpu,
        });
    }
    let mut links = Vec::new();
    let host_paths = add_host_paths(&records, &usable, &mut links);
    add_nvlinks(&usable, &mut links);
    let gpus = usable.iter().zip(host_paths).zip(0..).map(|((gpu, host_path), index)| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: gpu.gpu_type.clone(),
        memory: gpu.memory,
        host_path,
    });
    let topology = Topology { name: NAME.to_owned(), gpus: gpus.collect(), links };
    let gpus = usable.iter().map(|gpu| DiscoveredGpu {
        uuid: gpu.uuid.to_owned(),
        device_uuid: gpu.record.uuid.clone(),
        numa_node: gpu.record.numa_node,
        cpus: gpu.record.cpus.clone().unwrap_or_default(),
    });
    Ok(Discovery { topology, gpus: gpus.collect(), excluded })
}

fn excluded_gpus(machine: &Machine, records: &[&GpuRecord]) -> Vec<ExcludedGpu> {
    let unreadable = machine.unreadable.iter().map(|gpu| ExcludedGpu {
        gpu: format!("GPU {}", gpu.index),
        reason: format!("does not answer: {}", gpu.reason),
    });
    let undivided = records.iter().filter(|gpu| is_divided(gpu) && gpu.mig_instances.is_empty());
    let undivided = undivided.map(|gpu| ExcludedGpu {
        gpu: gpu.uuid.clone(),
        reason: "has MIG turned on and no instance".to_owned(),
    });
    unreadable.chain(undivided).collect()
}

fn is_divided(gpu: &GpuRecord) -> bool {
    gpu.mig_enabled == Some(true)
}

fn usable_gpus<'a>(device: usize, record: &'a GpuRecord) -> Vec<UsableGpu<'a>> {
    let usable = |uuid: &'a str, name: &str, memory| UsableGpu {
        device,
        record,
        uuid,
        gpu_type: gpu_type(name),
        memory: Bytes(memory),
    };
    if !is_divided(record) {
        return vec![usable(&record.uuid, &record.name, record.memory_bytes)];
    }
    let instances = record.mig_instances.iter();
    instances.map(|instance| usable(&instance.uuid, &instance.name, instance.memory_bytes)).collect()
}

/// Adds the links to the host, and returns the links that each GPU's copies cross. They are numbered
/// as those of a preset: own links, then shared ones.
fn add_host_paths(
    records: &[&GpuRecord],
    usable: &[UsableGpu<'_>],
    links: &mut Vec<TopologyLink>,
) -> Vec<Vec<LinkId>> {
    let mut paths: Vec<Vec<LinkId>> =
        usable.iter().map(|gpu| vec![add_link(links, LinkKind::Pcie, pcie_rate(gpu.record))]).collect();
    let mut share = |devices: &[usize], rate| {
        let uplink = add_link(links, LinkKind::PcieUplink, rate);
        for (path, gpu) in paths.iter_mut().zip(usable) {
            if devices.contains(&gpu.device) {
                path.push(uplink);
            }
        }
    };
    let instances = |device: usize| usable.iter().filter(|gpu| gpu.device == device).count();
    // The instances of a GPU divide a single PCIe link. Each gets a link of its own as well, because
    // a worker starts an issuer of copies for the first link of each GPU.
    for (device, record) in records.iter().enumerate() {
        if instances(device) > 1 {
            share(&[device], pcie_rate(record));
        }
    }
    for mut devices in switch_groups(records) {
        devices.retain(|&device| instances(device) > 0);
        let rate = devices.iter().map(|&device| pcie_rate(records[device])).max();
        if let Some(rate) = rate.filter(|_| devices.len() > 1) {
            share(&devices, rate);
        }
    }
    paths
}

fn add_link(links: &mut Vec<TopologyLink>, kind: LinkKind, rate: BytesPerSec) -> LinkId {
    let id = LinkId(links.len() as u32);
    links.push(TopologyLink { kind, rate });
    id
}

/// Returns the positions of the GPUs below each PCIe switch, in order of the first.
fn switch_groups(records: &[&GpuRecord]) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (device, record) in records.iter().enumerate() {
        let shares_a_switch = |group: &Vec<usize>| {
            group.iter().any(|&other| {
                matches!(
                    ancestor(record, records[other]),
                    Some(PcieAncestor::Internal | PcieAncestor::Single)
                )
            })
        };
        // A GPU joins all groups that it shares a switch with, so that they become one group.
        let (joined, others): (Vec<_>, Vec<_>) = groups.into_iter().partition(shares_a_switch);
        let mut group: Vec<usize> = joined.into_iter().flatten().collect();
        group.push(device);
        groups = others;
        groups.push(group);
    }
    groups.iter_mut().for_each(|group| group.sort_unstable());
    groups.sort_unstable();
    groups
}

fn peer<'a>(from: &'a GpuRecord, to: &GpuRecord) -> Option<&'a PeerRecord> {
    from.peers.iter().find(|peer| peer.gpu == to.index)
}

fn ancestor(a: &GpuRecord, b: &GpuRecord) -> Option<PcieAncestor> {
    [peer(a, b), peer(b, a)].into_iter().flatten().find_map(|peer| peer.ancestor)
}

fn pcie_rate(gpu: &GpuRecord) -> BytesPerSec {
    let known = |value: Option<u32>| value.filter(|&value| value > 0);
    let generation = known(gpu.pcie_gen_max).unwrap_or(PCIE_GEN_UNKNOWN) as usize;
    let lanes = known(gpu.pcie_width_max).unwrap_or(PCIE_LANES).min(PCIE_LANES_MAX);
    let full = BytesPerSec::gb(PCIE_GB_PER_S[generation.min(PCIE_GB_PER_S.len()) - 1]);
    BytesPerSec(full.0 * u64::from(lanes) / u64::from(PCIE_LANES))
}

fn add_nvlinks(usable: &[UsableGpu<'_>], links: &mut Vec<TopologyLink>) {
    let indexed = || (0..).map(GpuIndex).zip(usable);
    for (a, from) in indexed() {
        for (b, to) in indexed().skip(a.0 as usize + 1) {
            if let Some(rate) = nvlink_rate(from.record, to.record) {
                add_link(links, LinkKind::NvLink { a, b }, rate);
            }
        }
    }
}

/// Returns the rate of the NVLinks between two GPUs, if a copy can use them.
fn nvlink_rate(a: &GpuRecord, b: &GpuRecord) -> Option<BytesPerSec> {
    if is_divided(a) || is_divided(b) || !can_read(a, b) {
        return None;
    }
    // One end may not know the other end's address, so the end that knows more links counts.
    let direct = direct_rate(a, b).max(direct_rate(b, a));
    let switched = if same_fabric(a, b) { switch_rate(a).min(switch_rate(b)) } else { 0 };
    let rate = if direct > 0 { direct } else { switched };
    (rate > 0).then_some(BytesPerSec(rate))
}

/// Returns whether neither GPU is refused to read the other's memory. A driver that does not answer
/// refuses nothing.
fn can_read(a: &GpuRecord, b: &GpuRecord) -> bool {
    let mut answers = [peer(a, b), peer(b, a)].into_iter().flatten().filter_map(|peer| peer.read);
    answers.all(|status| status == P2pStatus::Ok)
}

fn direct_rate(from: &GpuRecord, to: &GpuRecord) -> u64 {
    let address = pci_address(&to.pci_bus_id);
    let ends_there = |link: &&NvLink| {
        let is_other_kind = matches!(link.remote, Some(RemoteKind::Switch | RemoteKind::Cpu));
        let remote = link.remote_pci_bus_id.as_deref().map(pci_address);
        link.active && !is_other_kind && remote.as_ref() == Some(&address)
    };
    from.nvlinks.iter().filter(ends_there).map(link_rate).sum()
}

/// Returns the rate of a GPU's links to NVSwitches in bytes per second: 0 unless the fabric carries
/// data. Links are active before the fabric is, because the hardware trains them alone.
fn switch_rate(gpu: &GpuRecord) -> u64 {
    let fabric = gpu.fabric.as_ref().filter(|fabric| fabric.state != FabricState::NotSupported);
    if fabric.is_some_and(|fabric| !carries_data(fabric)) {
        return 0;
    }
    let is_switch = |link: &&NvLink| match link.remote {
        Some(RemoteKind::Switch) => true,
        // A GPU of a fabric has all its links at switches, also if a virtual machine hides them.
        Some(RemoteKind::Unknown) | None => fabric.is_some(),
        Some(RemoteKind::Gpu | RemoteKind::Cpu) => false,
    };
    gpu.nvlinks.iter().filter(|link| link.active).filter(is_switch).map(link_rate).sum()
}

fn carries_data(fabric: &Fabric) -> bool {
    fabric.state == FabricState::Completed && fabric.status == 0
}

/// Returns whether two GPUs of this machine are behind the same NVSwitches. GPUs before Hopper do not
/// report a fabric; then a machine has a single one.
fn same_fabric(a: &GpuRecord, b: &GpuRecord) -> bool {
    let place = |gpu: &GpuRecord| {
        let fabric = gpu.fabric.as_ref().filter(|fabric| fabric.state != FabricState::NotSupported);
        fabric.map(|fabric| (fabric.cluster.clone(), fabric.clique))
    };
    match (place(a), place(b)) {
        (Some(a), Some(b)) => a == b,
        _ => true,
    }
}

/// Returns the rate of an NVLink in each direction, in bytes per second. Without an answer, the rate
/// is that of the link's version on the data sheet.
fn link_rate(link: &NvLink) -> u64 {
    let by_version = || match link.version {
        Some(1) => 20_000,
        Some(7..) => 50_000,
        _ => 25_000,
    };
    let mb_per_s = link.speed_mb_per_s.filter(|&speed| speed > 0).unwrap_or_else(by_version);
    u64::from(mb_per_s) * 1_000_000
}

/// Returns the short type of a GPU from the product name: `NVIDIA H100 80GB HBM3` and `NVIDIA H100
/// PCIe` are `h100`. A MIG instance has the profile behind the type: `a100-3g.20gb`. A name of
/// another form, such as `NVIDIA GeForce RTX 4090`, becomes a slug of the whole name.
#[must_use]
pub fn gpu_type(name: &str) -> String {
    if let Some((name, profile)) = name.split_once(" MIG ") {
        return format!("{}-{}", gpu_type(name), slug(profile));
    }
    let mut name = name.trim();
    for brand in ["NVIDIA", "Tesla"] {
        name = name.strip_prefix(brand).unwrap_or(name).trim_start();
    }
    let model = name.split([' ', '-']).next().unwrap_or_default();
    if is_model_number(model) { model.to_ascii_lowercase() } else { slug(name) }
}

/// Returns whether a word has the form of a model number of a data centre GPU: one or two letters, up
/// to three digits, and perhaps a letter, as in `T4`, `A100`, `L40S` and `GB200`.
fn is_model_number(word: &str) -> bool {
    let rest = word.trim_start_matches(|letter: char| letter.is_ascii_alphabetic());
    let suffix = rest.trim_start_matches(|digit: char| digit.is_ascii_digit());
    let letters = word.len() - rest.len();
    let digits = rest.len() - suffix.len();
    (1..=2).contains(&letters)
        && (1..=3).contains(&digits)
        && suffix.len() <= 1
        && suffix.chars().all(|letter| letter.is_ascii_alphabetic())
}

/// Returns the name in lower case, with a hyphen for each run of characters other than letters,
/// digits, `.` and `+`.
fn slug(name: &str) -> String {
    let is_kept = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '+');
    let words = name.split(|letter| !is_kept(letter)).filter(|word| !word.is_empty());
    let slug = words.collect::<Vec<_>>().join("-").to_ascii_lowercase();
    if slug.is_empty() { "gpu".to_owned() } else { slug }
}

/// Returns a PCI address in a single notation, so that addresses compare and sort: lower case, and a
/// domain of eight digits, which sources write with four or eight digits or not at all.
fn pci_address(bus_id: &str) -> String {
    let bus_id = bus_id.trim().to_ascii_lowercase();
    match bus_id.split(':').collect::<Vec<_>>()[..] {
        [bus, device] => format!("00000000:{bus}:{device}"),
        [domain, bus, device] => format!("{domain:0>8}:{bus}:{device}"),
        _ => bus_id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_types_are_model_numbers_or_slugs() {
        for (name, expected) in [
            ("NVIDIA H100 80GB HBM3", "h100"),
            ("NVIDIA H100 PCIe", "h100"),
            ("NVIDIA H200", "h200"),
            ("Tesla V100-SXM2-16GB", "v100"),
            ("NVIDIA A100-SXM4-40GB", "a100"),
            ("NVIDIA A10G", "a10g"),
            ("NVIDIA L40S", "l40s"),
            ("NVIDIA GH200 480GB", "gh200"),
            ("NVIDIA GB200", "gb200"),
            ("Tesla T4", "t4"),
            ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "a100-3g.20gb"),
            ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "h100-1g.10gb+me"),
            ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
            ("NVIDIA RTX A6000", "rtx-a6000"),
            ("NVIDIA TITAN V (rev. 2)", "titan-v-rev.-2"),
            ("NVIDIA", "gpu"),
            ("", "gpu"),
            ("é", "gpu"),
            ("H\u{e9}1", "h-1"),
        ] {
            assert_eq!(gpu_type(name), expected, "{name}");
        }
    }

    #[test]
    fn pci_addresses_of_all_notations_compare_equal() {
        for bus_id in ["00000000:1B:00.0", "0000:1b:00.0", "1b:00.0", " 0000:1B:00.0"] {
            assert_eq!(pci_address(bus_id), "00000000:1b:00.0");
        }
        assert_eq!(pci_address("Nonsense"), "nonsense");
    }
}
