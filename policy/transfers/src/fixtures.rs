//! Machines for tests and benches.

use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};

/// Pairs of GPUs of a DGX-V100 that two NVLinks join, as in the preset `dgx-v100`.
const DOUBLE: [(u32, u32); 8] = [(0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7)];
/// Pairs of GPUs of a DGX-V100 that a single NVLink joins.
const SINGLE: [(u32, u32); 8] = [(0, 1), (0, 2), (1, 3), (2, 6), (3, 7), (4, 5), (4, 6), (5, 7)];

/// Returns a machine with NVLinks in GB/s. Each GPU has a PCIe link of 12 GB/s, and every two GPUs
/// share a switch with an uplink of 12 GB/s. The PCIe links are numbered first, then the uplinks.
pub(crate) fn machine(gpus: u32, nvlinks: &[(u32, u32, u64)]) -> Topology {
    let gpu = |index: u32| TopologyGpu {
        index: GpuIndex(index),
        gpu_type: "test".to_owned(),
        memory: Bytes::gib(16),
        host_path: vec![LinkId(index), LinkId(gpus + index / 2)],
    };
    let link = |kind, gb_per_s| TopologyLink { kind, rate: BytesPerSec::gb(gb_per_s) };
    let mut links = vec![link(LinkKind::Pcie, 12); gpus as usize];
    links.extend(vec![link(LinkKind::PcieUplink, 12); gpus.div_ceil(2) as usize]);
    let join = |&(a, b, rate)| link(LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) }, rate);
    links.extend(nvlinks.iter().map(join));
    Topology { name: "test".to_owned(), gpus: (0..gpus).map(gpu).collect(), links }
}

pub(crate) fn dgx_v100() -> Topology {
    let links = DOUBLE.iter().map(|&(a, b)| (a, b, 48)).chain(SINGLE.iter().map(|&(a, b)| (a, b, 24)));
    machine(8, &links.collect::<Vec<_>>())
}
