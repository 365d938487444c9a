//! Topologies as data: parses the files in `topology/` and builds a [`Topology`] from them. This
//! module does not inspect the machine.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex};
use serde::Deserialize;

/// Name of the preset that is used if no preset is named.
pub const DEFAULT_PRESET: &str = "emulated";

/// Name and YAML text of every preset.
pub const PRESETS: &[(&str, &str)] = &[
    ("emulated", include_str!("../topology/emulated.yaml")),
    ("dgx-v100", include_str!("../topology/dgx-v100.yaml")),
    ("dgx-a100", include_str!("../topology/dgx-a100.yaml")),
    ("v100x4-pcie-switch", include_str!("../topology/v100x4-pcie-switch.yaml")),
    ("a10x4", include_str!("../topology/a10x4.yaml")),
    ("h100x8", include_str!("../topology/h100x8.yaml")),
];

/// Reason why a topology could not be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// No preset has this name.
    #[error("topology {0:?} is not known: use one of {known}", known = preset_names().join(", "))]
    Unknown(String),
    /// The text is not a description of a topology.
    #[error("cannot parse the topology: {0}")]
    Yaml(String),
    /// The description contradicts itself.
    #[error("topology {name}: {problem}")]
    Invalid {
        /// Name of the topology.
        name: String,
        /// Rule that the description breaks.
        problem: String,
    },
    /// The request has more GPUs than the topology.
    #[error(
        "topology {name} has {has} GPUs that share links, so it cannot have {asked}: request fewer, or use {DEFAULT_PRESET}"
    )]
    TooManyGpus {
        /// Name of the topology.
        name: String,
        /// Number of GPUs in the topology.
        has: u32,
        /// Requested number of GPUs.
        asked: u32,
    },
}

/// Returns the names of all presets.
#[must_use]
pub fn preset_names() -> Vec<&'static str> {
    PRESETS.iter().map(|(name, _)| *name).collect()
}

/// The GPUs and links of a machine, as described in a file. [`TopologyDescription::build`] numbers them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct TopologyDescription {
    name: String,
    gpus: NonZeroU32,
    gpu_type: String,
    #[serde(deserialize_with = "bytes")]
    memory: Bytes,
    #[serde(rename = "pcieGbPerS", deserialize_with = "rate")]
    pcie: BytesPerSec,
    #[serde(default)]
    switches: Vec<Switch>,
    #[serde(default)]
    nvlink: Vec<NvLinks>,
    #[serde(default, rename = "nvswitchGbPerS", deserialize_with = "some_rate")]
    nvswitch: Option<BytesPerSec>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Switch {
    gpus: Vec<u32>,
    #[serde(rename = "uplinkGbPerS", deserialize_with = "rate")]
    uplink: BytesPerSec,
}

/// Pairs of GPUs that have NVLinks of the same rate.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct NvLinks {
    #[serde(rename = "gbPerS", deserialize_with = "rate")]
    rate: BytesPerSec,
    pairs: Vec<(u32, u32)>,
}

impl TopologyDescription {
    /// Returns the preset of this name.
    ///
    /// # Errors
    /// [`Error::Unknown`] if no preset has this name.
    pub fn preset(name: &str) -> Result<Self, Error> {
        let (_, text) = PRESETS
            .iter()
            .find(|(known, _)| *known == name)
            .ok_or_else(|| Error::Unknown(name.to_owned()))?;
        Self::parse(text)
    }

    /// Parses a description in the format of the files in `topology/`.
    ///
    /// # Errors
    /// [`Error::Yaml`], [`Error::Invalid`].
    pub fn parse(text: &str) -> Result<Self, Error> {
        let description: Self =
            serde_saphyr::from_str(text).map_err(|error| Error::Yaml(error.to_string()))?;
        match description.problem() {
            Some(problem) => Err(Error::Invalid { name: description.name, problem }),
            None => Ok(description),
        }
    }

    /// Changes the number of GPUs: keeps the first `gpus` GPUs and the links among them. The number
    /// can grow only if the GPUs share no links.
    ///
    /// # Errors
    /// [`Error::TooManyGpus`] if the GPUs share links and the topology has fewer of them.
    pub fn with_gpus(mut self, gpus: NonZeroU32) -> Result<Self, Error> {
        let shared = !self.switches.is_empty() || !self.nvlink.is_empty();
        if gpus > self.gpus && shared {
            return Err(Error::TooManyGpus { name: self.name, has: self.gpus.get(), asked: gpus.get() });
        }
        let kept = |gpu: &u32| *gpu < gpus.get();
        for switch in &mut self.switches {
            switch.gpus.retain(kept);
        }
        self.switches.retain(|switch| !switch.gpus.is_empty());
        for links in &mut self.nvlink {
            links.pairs.retain(|(a, b)| kept(a) && kept(b));
        }
        self.gpus = gpus;
        Ok(self)
    }

    /// Sets the memory of each GPU.
    #[must_use]
    pub fn with_memory(mut self, memory: Bytes) -> Self {
        self.memory = memory;
        self
    }

    /// Builds the topology. Links are numbered in this order: PCIe links by GPU, uplinks, NVLinks.
    #[must_use]
    pub fn build(&self) -> Topology {
        let mut links = Vec::new();
        let mut add = |kind, rate| {
            links.push(TopologyLink { kind, rate });
            LinkId(links.len() as u32 - 1)
        };
        let mut gpus: Vec<_> = (0..self.gpus.get())
            .map(|index| TopologyGpu {
                index: GpuIndex(index),
                gpu_type: self.gpu_type.clone(),
                memory: self.memory,
                host_path: vec![add(LinkKind::Pcie, self.pcie)],
            })
            .collect();
        for switch in &self.switches {
            let uplink = add(LinkKind::PcieUplink, switch.uplink);
            for &gpu in &switch.gpus {
                gpus[gpu as usize].host_path.push(uplink);
            }
        }
        for (a, b, rate) in self.pairs() {
            add(LinkKind::NvLink { a: GpuIndex(a), b: GpuIndex(b) }, rate);
        }
        Topology { name: self.name.clone(), gpus, links }
    }

    fn pairs(&self) -> Vec<(u32, u32, BytesPerSec)> {
        let direct =
            self.nvlink.iter().flat_map(|links| links.pairs.iter().map(|&(a, b)| (a, b, links.rate)));
        let gpus = self.gpus.get();
        let switched = self
            .nvswitch
            .into_iter()
            .flat_map(move |rate| (0..gpus).flat_map(move |a| (a + 1..gpus).map(move |b| (a, b, rate))));
        direct.chain(switched).collect()
    }

    fn problem(&self) -> Option<String> {
        let count = self.gpus.get();
        if self.memory == Bytes::ZERO {
            return Some("memory is zero".to_owned());
        }
        let mut switched = BTreeSet::new();
        for &gpu in self.switches.iter().flat_map(|switch| &switch.gpus) {
            if gpu >= count {
                return Some(format!("a switch has GPU {gpu}, but there are {count} GPUs, from 0"));
            }
            if !switched.insert(gpu) {
                return Some(format!("GPU {gpu} is under two switches"));
            }
        }
        let mut linked = BTreeSet::new();
        for (a, b, _) in self.pairs() {
            if a >= b || b >= count {
                return Some(format!(
                    "NVLink pair [{a}, {b}]: write two of the {count} GPUs, the lower first"
                ));
            }
            if !linked.insert((a, b)) {
                return Some(format!("NVLink pair [{a}, {b}] is listed twice"));
            }
        }
        None
    }
}

fn bytes<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
    String::deserialize(from)?.parse().map_err(serde::de::Error::custom)
}

fn rate<'de, D: serde::Deserializer<'de>>(from: D) -> Result<BytesPerSec, D::Error> {
    NonZeroU32::deserialize(from).map(|gb| BytesPerSec::gb(gb.get().into()))
}

fn some_rate<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Option<BytesPerSec>, D::Error> {
    rate(from).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preset(name: &str) -> Topology {
        TopologyDescription::preset(name).unwrap().build()
    }

    /// Returns the number of NVLink pairs with this rate in GB/s.
    fn nvlinks(topology: &Topology, gb: u64) -> usize {
        let at = |link: &&TopologyLink| {
            matches!(link.kind, LinkKind::NvLink { .. }) && link.rate == BytesPerSec::gb(gb)
        };
        topology.links.iter().filter(at).count()
    }

    #[test]
    fn every_preset_has_its_name_and_is_numbered_in_order() {
        for name in preset_names() {
            let topology = preset(name);
            assert_eq!(topology.name, name);
            for (place, gpu) in topology.gpus.iter().enumerate() {
                assert_eq!(gpu.index, GpuIndex(place as u32), "{name}");
                assert_eq!(topology.links[gpu.host_path[0].0 as usize].kind, LinkKind::Pcie, "{name}");
                let own = topology.gpus.iter().filter(|other| other.host_path[0] == gpu.host_path[0]);
                assert_eq!(own.count(), 1, "{name}: a GPU's first link is its own");
            }
        }
        assert!(matches!(TopologyDescription::preset("dgx"), Err(Error::Unknown(_))));
    }

    /// Row H26: of the 28 pairs of a DGX-V100, 8 have two NVLinks, 8 have one and 12 have none.
    #[test]
    fn a_dgx_v100_has_the_pairs_of_the_paper_and_six_nvlinks_a_gpu() {
        let topology = preset("dgx-v100");
        assert_eq!((nvlinks(&topology, 48), nvlinks(&topology, 24)), (8, 8));
        let linked = topology.links.iter().filter(|link| matches!(link.kind, LinkKind::NvLink { .. }));
        assert_eq!(8 * 7 / 2 - linked.count(), 12);
        for gpu in &topology.gpus {
            let ends = |link: &&TopologyLink| matches!(link.kind, LinkKind::NvLink { a, b } if a == gpu.index || b == gpu.index);
            let rate: u64 = topology.links.iter().filter(ends).map(|link| link.rate.0).sum();
            assert_eq!(BytesPerSec(rate), BytesPerSec::gb(6 * 24), "GPU {}", gpu.index);
        }
    }

    /// Row T22: GPUs 0 and 1 share a switch, and GPUs 2 and 3 share another.
    #[test]
    fn only_neighbouring_gpus_share_an_uplink() {
        let topology = preset("v100x4-pcie-switch");
        let uplink = |gpu: usize| topology.gpus[gpu].host_path[1];
        assert_eq!(uplink(0), uplink(1));
        assert_eq!(uplink(2), uplink(3));
        assert_ne!(uplink(0), uplink(2));
        assert_eq!((nvlinks(&topology, 48), nvlinks(&topology, 24)), (3, 3));
    }

    /// Row D30.
    #[test]
    fn a_switched_topology_links_every_pair_and_an_a10_none() {
        assert_eq!(nvlinks(&preset("dgx-a100"), 300), 28);
        assert_eq!(preset("a10x4").links.len(), 4);
    }

    #[test]
    fn fewer_gpus_keep_the_links_among_them() {
        let two = TopologyDescription::preset("v100x4-pcie-switch")
            .unwrap()
            .with_gpus(NonZeroU32::new(2).unwrap())
            .unwrap();
        let topology = two.with_memory(Bytes::gib(1)).build();
        assert_eq!(topology.gpus.len(), 2);
        assert!(topology.gpus.iter().all(|gpu| gpu.memory == Bytes::gib(1)));
        let kinds: Vec<_> = topology.links.iter().map(|link| link.kind).collect();
        let pair = LinkKind::NvLink { a: GpuIndex(0), b: GpuIndex(1) };
        assert_eq!(kinds, [LinkKind::Pcie, LinkKind::Pcie, LinkKind::PcieUplink, pair]);
    }

    #[test]
    fn the_gpu_count_grows_only_without_shared_links() {
        let six = NonZeroU32::new(6).unwrap();
        let emulated = TopologyDescription::preset("emulated").unwrap().with_gpus(six).unwrap().build();
        assert_eq!((emulated.gpus.len(), emulated.links.len()), (6, 6));
        let refused = TopologyDescription::preset("v100x4-pcie-switch").unwrap().with_gpus(six);
        assert!(matches!(refused, Err(Error::TooManyGpus { has: 4, asked: 6, .. })));
    }

    #[test]
    fn descriptions_that_contradict_themselves_are_refused() {
        let base = "name: x\ngpus: 2\ngpuType: y\nmemory: 1GiB\npcieGbPerS: 1\n";
        assert!(TopologyDescription::parse(base).is_ok());
        for (more, says) in [
            ("nvlink: [{gbPerS: 1, pairs: [[0, 2]]}]", "[0, 2]"),
            ("nvlink: [{gbPerS: 1, pairs: [[1, 0]]}]", "lower first"),
            ("nvlink: [{gbPerS: 1, pairs: [[0, 1], [0, 1]]}]", "twice"),
            ("nvswitchGbPerS: 0", "zero"),
            ("switches: [{gpus: [0, 2], uplinkGbPerS: 1}]", "GPU 2"),
            ("switches: [{gpus: [0, 0], uplinkGbPerS: 1}]", "two switches"),
            ("colour: red", "colour"),
        ] {
            let error = TopologyDescription::parse(&format!("{base}{more}\n")).unwrap_err().to_string();
            assert!(error.contains(says), "{more}: {error}");
        }
    }
}
