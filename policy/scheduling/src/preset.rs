//! Scheduling policy of a node: presets, each a bundle of settings that were measured together, and
//! the settings with which an operator replaces parts of a preset. No preset shares GPUs.
//!
//! | preset | dispatch | eviction | transfers | host links |
//! |---|---|---|---|---|
//! | `unified` (the default) | `unified` | `torpor` | in turns | own |
//! | `torpor` | `torpor`, alpha as in the paper | `torpor` | in turns | own |
//! | `lalb-o3` | `lalb-o3`, 25 overtakes | `lru` | in turns | own |
//! | `fifo` | `fifo` | `lru` | in turns | own |

use millrace_types::PolicySpec;
use millrace_types::policy::{
    Batches, DispatchName, EvictionName, GpuSharingName, HostLinksName, PresetName, TransferSharingName,
};

use crate::dispatch::PolicyConfig;
use millrace_memory::eviction::Eviction;
use millrace_transfers::paths::HostLinks;
use millrace_transfers::rates::TransferSharing;

/// All scheduling decisions that an operator can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SchedulingPolicy {
    /// Policy that assigns requests to GPUs.
    pub dispatch: PolicyConfig,
    /// Policy that orders models for eviction from a GPU.
    pub eviction: Eviction,
    /// Whether requests run as one batch, for functions that allow batching.
    pub batching: Batches,
    /// Policy by which transfers between host memory and GPUs share links.
    pub sharing: TransferSharing,
    /// PCIe links that data crosses between host memory and a GPU.
    pub host_links: HostLinks,
    /// Sharing of a GPU among requests.
    pub gpu_sharing: GpuSharingName,
}

impl Default for SchedulingPolicy {
    fn default() -> Self {
        Self::preset(PresetName::default())
    }
}

impl SchedulingPolicy {
    /// Returns a preset.
    #[must_use]
    pub fn preset(name: PresetName) -> Self {
        let eviction = match name {
            PresetName::Unified | PresetName::Torpor => Eviction::Torpor,
            PresetName::LalbO3 | PresetName::Fifo => Eviction::Lru,
        };
        Self {
            dispatch: PolicyConfig::named(name.dispatch()),
            eviction,
            batching: Batches::On,
            sharing: TransferSharing::Fair,
            host_links: HostLinks::Own,
            gpu_sharing: GpuSharingName::Off,
        }
    }

    /// Returns the preset of a dispatch policy, with the settings of that policy. The papers' baselines
    /// have no preset, and get the other settings of `fifo`.
    #[must_use]
    pub fn around(dispatch: PolicyConfig) -> Self {
        let name = match dispatch {
            PolicyConfig::Unified(_) => PresetName::Unified,
            PolicyConfig::Torpor(_) => PresetName::Torpor,
            PolicyConfig::Lalb { .. } => PresetName::LalbO3,
            PolicyConfig::Fifo | PolicyConfig::Lb | PolicyConfig::Bound(_) => PresetName::Fifo,
        };
        Self { dispatch, ..Self::preset(name) }
    }

    /// Returns the policy that an operator set on a node with the base policy `self`. In production
    /// the base is the default preset.
    #[must_use]
    pub fn with(self, spec: &PolicySpec) -> Self {
        let base = spec.preset.map_or(self, Self::preset);
        Self {
            dispatch: base.dispatch.with(spec),
            eviction: spec.eviction.map_or(base.eviction, Eviction::named),
            batching: spec.batching.unwrap_or(base.batching),
            sharing: spec.transfer_sharing.map_or(base.sharing, TransferSharing::named),
            host_links: spec.host_links.map_or(base.host_links, HostLinks::named),
            gpu_sharing: spec.gpu_sharing.unwrap_or(base.gpu_sharing),
        }
    }

    /// Returns the settings in force, each by its name.
    #[must_use]
    pub fn spec(&self) -> PolicySpec {
        PolicySpec {
            preset: None,
            dispatch: self.dispatch.dispatch_name(),
            eviction: Some(match self.eviction {
                Eviction::Lru => EvictionName::Lru,
                Eviction::Replicas => EvictionName::Replicas,
                Eviction::Torpor => EvictionName::Torpor,
            }),
            overtakes_max: self.dispatch.overtakes_max(),
            alpha: self.dispatch.alpha(),
            batching: Some(self.batching),
            slo_window: self.dispatch.slo_window(),
            transfer_sharing: Some(match self.sharing {
                TransferSharing::FaasTube => TransferSharingName::Faastube,
                TransferSharing::Fair => TransferSharingName::Fair,
                TransferSharing::Fifo => TransferSharingName::Fifo,
            }),
            host_links: Some(match self.host_links {
                HostLinks::Own => HostLinksName::Own,
                HostLinks::All => HostLinksName::All,
            }),
            gpu_sharing: Some(self.gpu_sharing),
        }
    }
}

impl PolicyConfig {
    /// Returns a dispatch policy with its own settings. A retired policy's name gives the default.
    #[must_use]
    pub fn named(name: DispatchName) -> Self {
        Self::default().with(&PolicySpec { dispatch: Some(name), ..PolicySpec::NONE })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policy_around_the_dispatch_of_a_preset_is_the_preset() {
        for name in [PresetName::Unified, PresetName::Torpor, PresetName::LalbO3, PresetName::Fifo] {
            let preset = SchedulingPolicy::preset(name);
            assert_eq!(SchedulingPolicy::around(preset.dispatch), preset);
        }
        let plain = PolicyConfig::Lalb { overtakes_max: 0 };
        let around = SchedulingPolicy::around(plain);
        assert_eq!((around.dispatch, around.eviction), (plain, Eviction::Lru));
    }

    #[test]
    fn a_setting_replaces_its_part_of_the_preset() {
        let spec = PolicySpec {
            preset: Some(PresetName::LalbO3),
            overtakes_max: Some(9),
            eviction: Some(EvictionName::Replicas),
            transfer_sharing: Some(TransferSharingName::Faastube),
            ..PolicySpec::NONE
        };
        let expected = SchedulingPolicy {
            dispatch: PolicyConfig::Lalb { overtakes_max: 9 },
            eviction: Eviction::Replicas,
            batching: Batches::On,
            sharing: TransferSharing::FaasTube,
            host_links: HostLinks::Own,
            gpu_sharing: GpuSharingName::Off,
        };
        assert_eq!(SchedulingPolicy::default().with(&spec), expected);
    }

    #[test]
    fn a_preset_that_is_read_back_from_its_settings_is_the_same() {
        for &name in PresetName::ALL {
            let preset = SchedulingPolicy::preset(name);
            assert_eq!(SchedulingPolicy::default().with(&preset.spec()), preset, "{name}");
            assert_eq!(preset.spec().dispatch, Some(name.dispatch()));
        }
    }

    #[test]
    fn a_retired_dispatch_policy_gives_the_default_preset() {
        for retired in [DispatchName::Lb, DispatchName::Random, DispatchName::Simpleswap] {
            let spec = PolicySpec { dispatch: Some(retired), ..PolicySpec::NONE };
            assert_eq!(SchedulingPolicy::default().with(&spec), SchedulingPolicy::default());
        }
    }
}
