//! Tests discovery over recorded answers of NVML. `BLESS=1 cargo test -p millrace-device --test nvml`
//! rewrites the expected topologies in `topology/recorded/`.
#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::num::NonZeroU32;
use std::path::PathBuf;

use millrace_device::nvml::{
    self, CpuList, Discovery, Error, Fabric, FabricState, GpuRecord, Machine, MigInstance, NvLink, P2pStatus,
    PcieAncestor, PeerRecord, RecordFormat, RemoteKind, UnreadableGpu, discover,
};
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu};
use millrace_types::{BytesPerSec, GpuIndex};
use proptest::prelude::*;

const RECORDS: [&str; 6] = ["h100", "h200", "h100x8-nvswitch", "v100x4-nvlink", "a10x4", "a100x3-mig"];

fn path(file: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "topology", "recorded", file].iter().collect()
}

fn record(name: &str) -> Machine {
    let text = std::fs::read_to_string(path(&format!("{name}.json"))).unwrap();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}.json: {error}"))
}

fn discovered(name: &str) -> Discovery {
    discover(&record(name)).unwrap()
}

/// Returns the NVLinks as pairs of GPUs with the rate in MB/s.
fn nvlinks(topology: &Topology) -> Vec<(u32, u32, u64)> {
    let pair = |kind, rate: BytesPerSec| match kind {
        LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) } => Some((a, b, rate.0 / 1_000_000)),
        LinkKind::Pcie | LinkKind::PcieUplink => None,
    };
    topology.links.iter().filter_map(|link| pair(link.kind, link.rate)).collect()
}

/// Returns the names and rates in MB/s of the links that a GPU's copies to and from the host cross.
fn host_path(topology: &Topology, gpu: usize) -> Vec<(String, u64)> {
    let link = |&id: &millrace_types::topology::LinkId| {
        (topology.link_name(id), topology.links[id.0 as usize].rate.0 / 1_000_000)
    };
    topology.gpus[gpu].host_path.iter().map(link).collect()
}

fn link(name: &str, mb_per_s: u64) -> (String, u64) {
    (name.to_owned(), mb_per_s)
}

#[test]
fn recorded_machines_have_the_expected_topologies() {
    for name in RECORDS {
        let expected = path(&format!("{name}.topology.json"));
        let found = serde_json::to_string_pretty(&discovered(name)).unwrap() + "\n";
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&expected, &found).unwrap();
        }
        let text = std::fs::read_to_string(&expected).unwrap();
        assert!(found == text, "{} differs: run with BLESS=1\n{found}", expected.display());
    }
}

#[test]
fn every_record_is_in_the_test_and_is_written_as_it_is_read() {
    let files = std::fs::read_dir(path("")).unwrap().map(|file| file.unwrap().file_name());
    let files = files.map(|file| file.into_string().unwrap());
    let records = files.filter(|file| file.ends_with(".json") && !file.ends_with(".topology.json"));
    let named = RECORDS.iter().map(|name| format!("{name}.json"));
    assert_eq!(records.collect::<BTreeSet<_>>(), named.collect());
    for name in RECORDS {
        let text = std::fs::read_to_string(path(&format!("{name}.json"))).unwrap();
        assert_eq!(serde_json::to_string_pretty(&record(name)).unwrap() + "\n", text, "{name}");
    }
}

#[test]
fn a_gpu_alone_has_a_pcie_link_and_no_other() {
    let found = discovered("h200");
    assert_eq!(host_path(&found.topology, 0), [link("pcie 0", 50_000)]);
    assert_eq!(found.topology.links.len(), 1);
    assert_eq!(found.topology.gpus[0].gpu_type, "h200");
}

#[test]
fn every_pair_behind_nvswitch_has_the_rate_of_a_gpus_links() {
    let found = discovered("h100x8-nvswitch");
    let links = nvlinks(&found.topology);
    assert_eq!(links.len(), 8 * 7 / 2);
    assert!(links.iter().all(|(_, _, rate)| *rate == 18 * 26_562), "{links:?}");
}

/// The record describes the machine of the preset `v100x4-pcie-switch`, with NVML's rates (T22).
#[test]
fn nvlink_pairs_and_pcie_switches_equal_the_preset() {
    let found = discovered("v100x4-nvlink");
    let one = 25_781;
    let two = 2 * one;
    assert_eq!(
        nvlinks(&found.topology),
        [(0, 1, one), (0, 2, one), (0, 3, two), (1, 2, two), (1, 3, one), (2, 3, two)]
    );
    for (gpu, uplink) in [(0, "uplink 0,1"), (1, "uplink 0,1"), (2, "uplink 2,3"), (3, "uplink 2,3")] {
        let own = link(&format!("pcie {gpu}"), 12_000);
        assert_eq!(host_path(&found.topology, gpu), [own, link(uplink, 12_000)]);
    }
}

#[test]
fn gpus_are_numbered_by_pci_address_and_a_link_of_eight_lanes_has_half_the_rate() {
    let found = discovered("a10x4");
    let uuids: Vec<&str> = found.gpus.iter().map(|gpu| &gpu.uuid[4..12]).collect();
    assert_eq!(uuids, ["00000a10", "00000a11", "00000a12", "00000a13"]);
    assert_eq!(host_path(&found.topology, 2), [link("pcie 2", 25_000)]);
    assert_eq!(host_path(&found.topology, 3), [link("pcie 3", 12_500)]);
    assert_eq!(nvlinks(&found.topology), []);
}

#[test]
fn mig_instances_are_gpus_that_share_a_pcie_link_and_have_no_nvlink() {
    let found = discovered("a100x3-mig");
    let types: Vec<&str> = found.topology.gpus.iter().map(|gpu| gpu.gpu_type.as_str()).collect();
    assert_eq!(types, ["a100-3g.20gb", "a100-2g.10gb", "a100-1g.5gb", "a100"]);
    for gpu in 0..3 {
        assert!(found.gpus[gpu].uuid.starts_with("MIG-"));
        assert!(found.gpus[gpu].device_uuid.starts_with("GPU-"));
        let own = link(&format!("pcie {gpu}"), 25_000);
        let shared = [link("uplink 0,1,2", 25_000), link("uplink 0,1,2,3", 25_000)];
        assert_eq!(host_path(&found.topology, gpu), [vec![own], shared.to_vec()].concat());
    }
    assert_eq!(nvlinks(&found.topology), []);
    let excluded: Vec<&str> = found.excluded.iter().map(|gpu| gpu.reason.as_str()).collect();
    assert_eq!(excluded, ["has MIG turned on and no instance"]);
}

/// The fabric manager may fail although all links are active, as on a B300 in NVIDIA's forum.
#[test]
fn links_of_a_fabric_that_did_not_come_up_are_not_offered() {
    let check = |state: FabricState, status: u32| {
        let mut machine = record("h100x8-nvswitch");
        let fabric = machine.gpus[3].fabric.as_mut().unwrap();
        fabric.state = state;
        fabric.status = status;
        let links = nvlinks(&discover(&machine).unwrap().topology);
        assert_eq!(links.len(), 7 * 6 / 2, "{state:?} {status}");
        assert!(links.iter().all(|&(a, b, _)| a != 3 && b != 3), "{state:?} {status}: {links:?}");
    };
    check(FabricState::Completed, 999);
    check(FabricState::InProgress, 0);
    check(FabricState::NotStarted, 0);
}

#[test]
fn gpus_of_different_cliques_have_no_nvlink() {
    let mut machine = record("h100x8-nvswitch");
    machine.gpus[4..].iter_mut().for_each(|gpu| gpu.fabric.as_mut().unwrap().clique = 1);
    let links = nvlinks(&discover(&machine).unwrap().topology);
    assert_eq!(links.len(), 2 * (4 * 3 / 2));
    assert!(links.iter().all(|(a, b, _)| a / 4 == b / 4), "{links:?}");
}

#[test]
fn switches_that_a_virtual_machine_hides_are_known_by_the_fabric() {
    let mut machine = record("h100x8-nvswitch");
    for link in machine.gpus.iter_mut().flat_map(|gpu| &mut gpu.nvlinks) {
        link.remote = Some(RemoteKind::Unknown);
        link.remote_pci_bus_id = None;
    }
    assert_eq!(discover(&machine).unwrap().topology, discovered("h100x8-nvswitch").topology);
}

#[test]
fn gpus_that_may_not_read_each_other_have_no_nvlink() {
    let mut machine = record("v100x4-nvlink");
    let peers = &mut machine.gpus[2].peers;
    peers.iter_mut().find(|peer| peer.gpu == 3).unwrap().read = Some(P2pStatus::DisabledByRegkey);
    let links = nvlinks(&discover(&machine).unwrap().topology);
    assert_eq!(links.len(), 5);
    assert!(!links.iter().any(|&(a, b, _)| (a, b) == (2, 3)), "{links:?}");
}

#[test]
fn a_machine_with_different_gpus_has_a_type_and_a_memory_for_each() {
    let mut machine = record("a10x4");
    machine.gpus[0].name = "NVIDIA L40S".to_owned();
    machine.gpus[0].memory_bytes = 48 << 30;
    let found = discover(&machine).unwrap();
    let types: Vec<&str> = found.topology.gpus.iter().map(|gpu| gpu.gpu_type.as_str()).collect();
    assert_eq!(types, ["a10", "a10", "l40s", "a10"]);
    assert_eq!(found.topology.gpus[2].memory.0, 48 << 30);
}

#[test]
fn unusable_machines_are_refused_with_the_reason() {
    let check = |change: fn(&mut Machine), expected: Error, text: &str| {
        let mut machine = record("h200");
        change(&mut machine);
        assert_eq!(discover(&machine), Err(expected.clone()));
        assert_eq!(expected.to_string(), text);
    };
    check(
        |machine| machine.driver = "550.54.15".to_owned(),
        Error::DriverTooOld { found: "550.54.15".to_owned() },
        "the NVIDIA driver 550.54.15 is too old: Millrace needs version 580 or newer",
    );
    check(
        |machine| machine.gpus.clear(),
        Error::NoGpu,
        "no NVIDIA GPU on this machine: the driver finds none",
    );
    check(
        |machine| machine.gpus[0].mig_enabled = Some(true),
        Error::NoUsableGpu {
            gpu: "GPU-00000200-0000-4000-8000-000000000200".to_owned(),
            reason: "has MIG turned on and no instance".to_owned(),
        },
        "no usable NVIDIA GPU on this machine: GPU-00000200-0000-4000-8000-000000000200 has MIG turned on and no instance",
    );
    check(
        |machine| {
            machine.gpus.clear();
            machine.unreadable.push(UnreadableGpu { index: 0, reason: "lost".to_owned() });
        },
        Error::NoUsableGpu { gpu: "GPU 0".to_owned(), reason: "does not answer: lost".to_owned() },
        "no usable NVIDIA GPU on this machine: GPU 0 does not answer: lost",
    );
}

/// On a machine with a driver this test reads the GPUs instead.
#[test]
fn a_machine_without_a_driver_gives_exactly_the_one_error() {
    match nvml::machine() {
        Err(error) => assert_eq!(error, Error::NoDriver),
        Ok(machine) => {
            let found = discover(&machine).unwrap();
            assert_eq!(found.gpus.len(), found.topology.gpus.len());
        }
    }
}

fn any_bus_id() -> impl Strategy<Value = String> {
    prop_oneof![
        8 => (0..6_u8).prop_map(|bus| format!("00000000:{bus:02X}:00.0")),
        1 => (0..6_u8).prop_map(|bus| format!("{bus:02x}:00.0")),
        1 => ".{0,12}",
    ]
}

fn any_nvlink() -> impl Strategy<Value = NvLink> {
    let remote = prop::option::of(prop::sample::select(vec![
        RemoteKind::Gpu,
        RemoteKind::Switch,
        RemoteKind::Cpu,
        RemoteKind::Unknown,
    ]));
    let numbers = (0..18_u32, prop::option::of(0..9_u32), prop::option::of(any::<u32>()));
    (numbers, prop::bool::weighted(0.8), remote, prop::option::of(any_bus_id())).prop_map(
        |((link, version, speed_mb_per_s), active, remote, remote_pci_bus_id)| NvLink {
            link,
            active,
            version,
            remote,
            remote_pci_bus_id,
            speed_mb_per_s,
        },
    )
}

fn any_peer() -> impl Strategy<Value = PeerRecord> {
    let ancestors =
        vec![PcieAncestor::Internal, PcieAncestor::Single, PcieAncestor::Multiple, PcieAncestor::System];
    let reads = vec![P2pStatus::Ok, P2pStatus::Ok, P2pStatus::Ok, P2pStatus::NotSupported];
    let ancestor = prop::option::of(prop::sample::select(ancestors));
    let read = prop::option::of(prop::sample::select(reads));
    (0..9_u32, ancestor, read).prop_map(|(gpu, ancestor, read)| PeerRecord { gpu, ancestor, read })
}

fn any_fabric() -> impl Strategy<Value = Fabric> {
    let states = vec![FabricState::NotSupported, FabricState::InProgress, FabricState::Completed];
    (prop::sample::select(states), 0..2_u32, "[01]", 0..2_u32)
        .prop_map(|(state, status, cluster, clique)| Fabric { state, status, cluster, clique })
}

fn any_gpu() -> impl Strategy<Value = GpuRecord> {
    let instance = ("MIG-[a-z]{12}", ".{0,20}", any::<u64>());
    let instance = instance.prop_map(|(uuid, name, memory_bytes)| MigInstance { uuid, name, memory_bytes });
    let identity = ("GPU-[a-z]{12}", ".{0,20}|NVIDIA [A-Z]{1,3}[0-9]{1,4}.{0,3}", any::<u64>(), any_bus_id());
    let place = (prop::option::of(any::<u32>()), prop::option::of(prop::collection::vec(0..5000_u32, 0..5)));
    let pcie = (prop::option::of(any::<u32>()), prop::option::of(any::<u32>()));
    let mig = (prop::option::of(any::<bool>()), prop::collection::vec(instance, 0..3));
    let links = prop::collection::vec(any_nvlink(), 0..20);
    let peers = prop::collection::vec(any_peer(), 0..10);
    (identity, place, pcie, mig, links, peers, prop::option::of(any_fabric())).prop_map(
        |(identity, place, pcie, mig, nvlinks, peers, fabric)| {
            let (uuid, name, memory_bytes, pci_bus_id) = identity;
            GpuRecord {
                index: 0,
                uuid,
                name,
                memory_bytes,
                pci_bus_id,
                numa_node: place.0,
                cpus: place.1.map(CpuList::from_iter),
                compute_capability: None,
                pcie_gen_max: pcie.0,
                pcie_width_max: pcie.1,
                mig_enabled: mig.0,
                mig_instances: mig.1,
                nvlinks,
                peers,
                fabric,
                unanswered: Vec::new(),
            }
        },
    )
}

fn any_machine() -> impl Strategy<Value = Machine> {
    prop::collection::vec(any_gpu(), 0..9).prop_map(|mut gpus| {
        for (gpu, index) in gpus.iter_mut().zip(0..) {
            gpu.index = index;
        }
        Machine {
            format: RecordFormat::V1,
            driver: "580.1".to_owned(),
            cuda: None,
            gpus,
            unreadable: Vec::new(),
        }
    })
}

/// Returns the UUIDs that the record names: whole GPUs and instances, and GPUs without an instance.
fn named(machine: &Machine) -> (BTreeSet<&str>, BTreeSet<&str>) {
    let (divided, whole): (Vec<_>, Vec<_>) =
        machine.gpus.iter().partition(|gpu: &&GpuRecord| gpu.mig_enabled == Some(true));
    let empty = divided.iter().filter(|gpu| gpu.mig_instances.is_empty()).map(|gpu| gpu.uuid.as_str());
    let instances = divided.iter().flat_map(|gpu| &gpu.mig_instances).map(|instance| instance.uuid.as_str());
    (whole.iter().map(|gpu| gpu.uuid.as_str()).chain(instances).collect(), empty.collect())
}

/// Checks the rules that policies rely on.
fn check_topology(topology: &Topology) {
    let count = topology.gpus.len();
    let mut next = vec![None; topology.links.len()];
    for (place, gpu) in topology.gpus.iter().enumerate() {
        assert_eq!(gpu.index, GpuIndex(place as u32));
        assert!(!gpu.gpu_type.is_empty());
        let own = gpu.host_path[0];
        assert_eq!(topology.links[own.0 as usize].kind, LinkKind::Pcie);
        assert_eq!(topology.gpus.iter().filter(|other| other.host_path.contains(&own)).count(), 1);
        for pair in gpu.host_path.windows(2) {
            assert_eq!(topology.links[pair[1].0 as usize].kind, LinkKind::PcieUplink);
            let after = next[pair[0].0 as usize].get_or_insert(pair[1]);
            assert_eq!(*after, pair[1], "the host's links form a tree");
        }
    }
    let mut pairs = BTreeSet::new();
    for link in &topology.links {
        assert!(link.rate > BytesPerSec(0));
        if let LinkKind::NvLink { a, b } = link.kind {
            assert!(a < b && (b.0 as usize) < count);
            assert!(pairs.insert((a, b)), "a pair has a single link");
        }
    }
}

proptest! {
    #[test]
    fn discovery_never_panics_and_finds_every_gpu_of_the_record(machine in any_machine()) {
        let (usable, empty) = named(&machine);
        match discover(&machine) {
            Ok(found) => {
                let uuids: BTreeSet<&str> = found.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
                prop_assert_eq!(uuids, usable);
                let excluded: BTreeSet<&str> = found.excluded.iter().map(|gpu| gpu.gpu.as_str()).collect();
                prop_assert_eq!(excluded, empty);
                prop_assert_eq!(found.gpus.len(), found.topology.gpus.len());
                check_topology(&found.topology);
            }
            Err(Error::NoGpu) => prop_assert!(machine.gpus.is_empty()),
            Err(error) => {
                prop_assert!(matches!(error, Error::NoUsableGpu { .. }), "{error}");
                prop_assert!(usable.is_empty() && !empty.is_empty());
            }
        }
    }

    #[test]
    fn discovery_does_not_depend_on_the_order_of_the_record(machine in any_machine()) {
        let mut reversed = machine.clone();
        reversed.gpus.reverse();
        let found = discover(&machine);
        let again = discover(&reversed);
        match (found, again) {
            (Ok(found), Ok(again)) => prop_assert_eq!(found.topology, again.topology),
            (found, again) => prop_assert_eq!(found.is_err(), again.is_err()),
        }
    }

    #[test]
    fn records_are_read_as_they_were_written(machine in any_machine()) {
        let text = serde_json::to_string(&machine).unwrap();
        prop_assert_eq!(serde_json::from_str::<Machine>(&text).unwrap(), machine);
    }
}

#[test]
fn the_first_gpus_keep_only_their_own_links() {
    for name in RECORDS {
        let all = discovered(name).topology;
        let gpus = u32::try_from(all.gpus.len()).unwrap();
        for count in 1..=gpus {
            let part = all.first_gpus(NonZeroU32::new(count).unwrap()).unwrap();
            assert_eq!(part.gpus.len(), count as usize, "{name}");
            for (before, after) in all.gpus.iter().zip(&part.gpus) {
                let links = |topology: &Topology, gpu: &TopologyGpu| {
                    let link = |id: &LinkId| topology.links[id.0 as usize].clone();
                    gpu.host_path.iter().map(link).collect::<Vec<_>>()
                };
                assert_eq!(links(&all, before), links(&part, after), "{name}");
                let peers = |topology: &Topology| {
                    let within = topology.nvlinks_of(before.index).map(|(_, peer)| peer.0);
                    within.filter(|peer| *peer < count).collect::<Vec<_>>()
                };
                assert_eq!(peers(&all), peers(&part), "{name}");
            }
        }
        assert_eq!(all.first_gpus(NonZeroU32::new(gpus + 1).unwrap()), None);
    }
}
