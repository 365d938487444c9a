//! The scheduling policy of a cluster's nodes: a preset, and settings that replace parts of the
//! preset. The policy is replicated, and operators change the policy while nodes run.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The error for a name that a setting does not accept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {given:?} cannot be set for a cluster: use one of {known}")]
pub struct UnknownName {
    what: &'static str,
    given: String,
    known: String,
}

macro_rules! named {
    ($(#[$about:meta])* $type:ident, $what:literal, $($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)?) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum $type {
            $($(#[$doc])* #[serde(rename = $name)] $variant),+
        }

        impl $type {
            /// All names that can be set.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Returns the name that operators write.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),+
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }

        impl FromStr for $type {
            type Err = UnknownName;

            fn from_str(text: &str) -> Result<Self, UnknownName> {
                let known = || Self::ALL.iter().map(|it| it.name()).collect::<Vec<_>>().join(", ");
                let found = Self::ALL.iter().copied().find(|it| it.name() == text);
                found.ok_or_else(|| UnknownName { what: $what, given: text.to_owned(), known: known() })
            }
        }
    };
}

named! {
    /// A preset: a bundle of settings that were measured together.
    #[derive(Default)]
    PresetName, "preset",
    /// Millrace's own policy and the default: requests are ordered by estimated finish and by the
    /// objectives that can still be met.
    #[default]
    Unified = "unified",
    /// The Torpor paper: required request counts, least interference, replicas and light models
    /// evicted first.
    Torpor = "torpor",
    /// The LALB paper: locality and load balance with out-of-order dispatch.
    LalbO3 = "lalb-o3",
    /// Requests in order of arrival, least recently used models evicted first.
    Fifo = "fifo",
}

impl PresetName {
    /// Returns the dispatch policy of the preset.
    #[must_use]
    pub const fn dispatch(self) -> DispatchName {
        match self {
            Self::Unified => DispatchName::Unified,
            Self::Torpor => DispatchName::Torpor,
            Self::LalbO3 => DispatchName::LalbO3,
            Self::Fifo => DispatchName::Fifo,
        }
    }
}

/// The policy that assigns requests to GPUs. A stored policy may name a retired baseline, which
/// only the simulator still runs; nodes use the default preset instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DispatchName {
    /// The oldest request first, also queued on busy GPUs.
    #[serde(rename = "fifo")]
    Fifo,
    /// Locality and load balance, with requests in order.
    #[serde(rename = "lalb")]
    Lalb,
    /// Locality and load balance; a request may be overtaken a limited number of times.
    #[serde(rename = "lalb-o3")]
    LalbO3,
    /// Requests by required request count, on the GPU with the least interference.
    #[serde(rename = "torpor")]
    Torpor,
    /// Requests by estimated finish and by the objectives that can still be met.
    #[serde(rename = "unified")]
    Unified,
    /// Retired: the oldest request first, on the GPU that has been idle longest.
    #[serde(rename = "lb")]
    Lb,
    /// Retired: like `torpor`, on any GPU.
    #[serde(rename = "random")]
    Random,
    /// Retired: the oldest request first, on any GPU.
    #[serde(rename = "simpleswap")]
    Simpleswap,
}

impl DispatchName {
    /// The dispatch policies that can be set.
    pub const ALL: &[Self] = &[Self::Unified, Self::Torpor, Self::LalbO3, Self::Lalb, Self::Fifo];

    /// Returns the name of the policy.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fifo => "fifo",
            Self::Lalb => "lalb",
            Self::LalbO3 => "lalb-o3",
            Self::Torpor => "torpor",
            Self::Unified => "unified",
            Self::Lb => "lb",
            Self::Random => "random",
            Self::Simpleswap => "simpleswap",
        }
    }

    /// Returns whether the policy is retired, so that servers do not run the policy.
    #[must_use]
    pub const fn is_retired(self) -> bool {
        matches!(self, Self::Lb | Self::Random | Self::Simpleswap)
    }

    /// Returns whether the policy has a required request count for each function.
    const fn scores(self) -> bool {
        matches!(self, Self::Torpor | Self::Unified | Self::Random)
    }
}

impl fmt::Display for DispatchName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for DispatchName {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let known = || Self::ALL.iter().map(|it| it.name()).collect::<Vec<_>>().join(", ");
        let found = Self::ALL.iter().copied().find(|it| it.name() == text);
        found.ok_or_else(|| UnknownName { what: "dispatch policy", given: text.to_owned(), known: known() })
    }
}

named! {
    /// The order in which models are evicted from a GPU.
    EvictionName, "eviction policy",
    /// The least recently used model first.
    Lru = "lru",
    /// Models with a copy on another GPU of the node first.
    Replicas = "replicas",
    /// Models with a copy on another GPU of the node first, then light models.
    Torpor = "torpor",
}

named! {
    /// The sharing of links among transfers between host memory and GPUs, for each direction
    /// separately.
    TransferSharingName, "transfer sharing",
    /// Each transfer has the rate that meets the deadline of the request that waits for the
    /// transfer.
    Faastube = "faastube",
    /// Transfers take turns.
    Fair = "fair",
    /// Transfers run in order of arrival.
    Fifo = "fifo",
}

named! {
    /// The PCIe links that transfers between host memory and a GPU may use.
    HostLinksName, "choice of host links",
    /// Only the links of the GPU itself.
    Own = "own",
    /// Also idle links of other GPUs, which forward the data over NVLinks.
    All = "all",
}

named! {
    /// The sharing of a GPU among requests.
    #[derive(Default)]
    GpuSharingName, "GPU sharing",
    /// A request has the whole GPU while it runs.
    #[default]
    Off = "off",
    /// Several requests run at once, each on its own part of the GPU's SMs, in turns of a few
    /// milliseconds.
    Slices = "slices",
}

named! {
    /// The rule by which alpha of `torpor` follows the share of functions that meet their
    /// objectives.
    AlphaReading, "reading of alpha",
    /// The rule of the paper's appendix.
    Paper = "paper",
    /// The rule of the paper's artifact.
    Artifact = "artifact",
}

named! {
    /// Whether requests of a function are batched if the function's owner allows batching.
    Batches, "batching",
    /// Requests are batched.
    On = "on",
    /// Each request runs alone.
    Off = "off",
}

named! {
    /// A setting of a [`PolicySpec`].
    Setting, "setting",
    /// The setting [`PolicySpec::preset`].
    Preset = "preset",
    /// The setting [`PolicySpec::dispatch`].
    Dispatch = "dispatch",
    /// The setting [`PolicySpec::eviction`].
    Eviction = "eviction",
    /// The setting [`PolicySpec::overtakes_max`].
    OvertakesMax = "overtakes_max",
    /// The setting [`PolicySpec::alpha`].
    Alpha = "alpha",
    /// The setting [`PolicySpec::batching`].
    Batching = "batching",
    /// The setting [`PolicySpec::slo_window`].
    SloWindow = "slo_window",
    /// The setting [`PolicySpec::transfer_sharing`].
    TransferSharing = "transfer_sharing",
    /// The setting [`PolicySpec::host_links`].
    HostLinks = "host_links",
    /// The setting [`PolicySpec::gpu_sharing`].
    GpuSharing = "gpu_sharing",
}

/// Maximum number of requests in [`PolicySpec::slo_window`].
pub const SLO_WINDOW_MAX: u32 = 4096;

/// A scheduling policy as an operator set it. A field that is `None` has the value of the preset;
/// without a preset, the value of the default preset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicySpec {
    /// The preset, parts of which the other settings replace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<PresetName>,
    /// The policy that assigns requests to GPUs.
    pub dispatch: Option<DispatchName>,
    /// The order in which models are evicted.
    pub eviction: Option<EvictionName>,
    /// Maximum number of times that a waiting request may be overtaken, under `lalb-o3` and
    /// `unified`. Under `unified`, while the oldest request that reached the maximum has a
    /// deadline, one turn in ten is ordered by age; with 0, every turn is.
    pub overtakes_max: Option<u32>,
    /// The rule for alpha, under `torpor`.
    pub alpha: Option<AlphaReading>,
    /// Whether requests are batched.
    pub batching: Option<Batches>,
    /// The number of latest requests that a function's required request count covers, from 1 to
    /// [`SLO_WINDOW_MAX`], under `torpor` and `unified`. `None` covers all requests of the
    /// function.
    pub slo_window: Option<u32>,
    /// The sharing of links among transfers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_sharing: Option<TransferSharingName>,
    /// The links that transfers between host memory and GPUs may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_links: Option<HostLinksName>,
    /// The sharing of a GPU among requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpu_sharing: Option<GpuSharingName>,
}

/// A setting that the policy does not use, or a value out of range.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// `overtakes_max` is set without a dispatch policy that uses the setting.
    #[error("overtakes_max applies only to dispatch lalb-o3 and unified: set one of the two as well")]
    Overtakes,
    /// `lalb-o3` without overtakes is the same as `lalb`.
    #[error("lalb-o3 with overtakes_max 0 is lalb: set dispatch lalb")]
    NoOvertakes,
    /// `alpha` is set without a dispatch policy that uses the setting.
    #[error("alpha applies only to dispatch torpor: set dispatch torpor as well")]
    Alpha,
    /// `slo_window` is set without a dispatch policy that uses the setting.
    #[error("slo_window applies only to dispatch torpor and unified: set one of the two as well")]
    SloWindow,
    /// `slo_window` is zero or exceeds [`SLO_WINDOW_MAX`].
    #[error(
        "slo_window is out of range: write 1 to {SLO_WINDOW_MAX} requests, or leave slo_window out to count all requests"
    )]
    SloWindowSize,
}

impl PolicySpec {
    /// The default preset, with no setting replaced.
    pub const NONE: Self = Self {
        preset: None,
        dispatch: None,
        eviction: None,
        overtakes_max: None,
        alpha: None,
        batching: None,
        slo_window: None,
        transfer_sharing: None,
        host_links: None,
        gpu_sharing: None,
    };

    /// Returns the settings that servers carry out: the default preset, if the policy names a retired
    /// dispatch policy.
    #[must_use]
    pub fn carried_out(&self) -> Self {
        if self.dispatch.is_some_and(DispatchName::is_retired) { Self::NONE } else { *self }
    }

    /// Returns the dispatch policy that is set, or else the preset's.
    const fn dispatch_or_preset(&self) -> Option<DispatchName> {
        match (self.dispatch, self.preset) {
            (Some(dispatch), _) => Some(dispatch),
            (None, Some(preset)) => Some(preset.dispatch()),
            (None, None) => None,
        }
    }

    /// Returns the spec with the listed settings replaced by those of `given`.
    #[must_use]
    pub fn with(mut self, given: &Self, settings: &[Setting]) -> Self {
        for setting in settings {
            match setting {
                Setting::Preset => self.preset = given.preset,
                Setting::Dispatch => self.dispatch = given.dispatch,
                Setting::Eviction => self.eviction = given.eviction,
                Setting::OvertakesMax => self.overtakes_max = given.overtakes_max,
                Setting::Alpha => self.alpha = given.alpha,
                Setting::Batching => self.batching = given.batching,
                Setting::SloWindow => self.slo_window = given.slo_window,
                Setting::TransferSharing => self.transfer_sharing = given.transfer_sharing,
                Setting::HostLinks => self.host_links = given.host_links,
                Setting::GpuSharing => self.gpu_sharing = given.gpu_sharing,
            }
        }
        self
    }

    /// Refuses settings that the dispatch policy does not use.
    ///
    /// # Errors
    /// [`PolicyError`], whose message names the setting to add.
    pub fn check(&self) -> Result<(), PolicyError> {
        let dispatch = self.dispatch_or_preset();
        match (dispatch, self.overtakes_max) {
            (_, None) | (Some(DispatchName::Unified), _) => {}
            (Some(DispatchName::LalbO3), Some(0)) => return Err(PolicyError::NoOvertakes),
            (Some(DispatchName::LalbO3), _) => {}
            _ => return Err(PolicyError::Overtakes),
        }
        match (dispatch, self.alpha) {
            (_, None) | (Some(DispatchName::Torpor | DispatchName::Random), _) => {}
            _ => return Err(PolicyError::Alpha),
        }
        match (dispatch, self.slo_window) {
            (_, None) => Ok(()),
            (_, Some(window)) if !(1..=SLO_WINDOW_MAX).contains(&window) => Err(PolicyError::SloWindowSize),
            (Some(dispatch), _) if dispatch.scores() => Ok(()),
            _ => Err(PolicyError::SloWindow),
        }
    }

    /// Returns the settings with a value, by the names that operators type.
    #[must_use]
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let settings = [
            (Setting::Preset, self.preset.map(|it| it.to_string())),
            (Setting::Dispatch, self.dispatch.map(|it| it.to_string())),
            (Setting::Eviction, self.eviction.map(|it| it.to_string())),
            (Setting::OvertakesMax, self.overtakes_max.map(|it| it.to_string())),
            (Setting::Alpha, self.alpha.map(|it| it.to_string())),
            (Setting::Batching, self.batching.map(|it| it.to_string())),
            (Setting::SloWindow, self.slo_window.map(|it| it.to_string())),
            (Setting::TransferSharing, self.transfer_sharing.map(|it| it.to_string())),
            (Setting::HostLinks, self.host_links.map(|it| it.to_string())),
            (Setting::GpuSharing, self.gpu_sharing.map(|it| it.to_string())),
        ];
        settings.into_iter().filter_map(|(setting, value)| Some((setting.name(), value?))).collect()
    }
}

impl fmt::Display for PolicySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<_> =
            self.settings().iter().map(|(name, value)| format!("{name} {value}")).collect();
        if settings.is_empty() { f.pad("the default preset") } else { f.pad(&settings.join(", ")) }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn displayed_names_parse_to_the_same_values() {
        for &name in DispatchName::ALL {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        for &name in EvictionName::ALL {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        for &name in PresetName::ALL {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        let refused = "random".parse::<DispatchName>().unwrap_err().to_string();
        assert_eq!(
            refused,
            "dispatch policy \"random\" cannot be set for a cluster: use one of unified, torpor, lalb-o3, lalb, fifo"
        );
    }

    #[test]
    fn settings_that_the_dispatch_policy_does_not_use_are_refused() {
        let dispatch = |dispatch| PolicySpec { dispatch: Some(dispatch), ..PolicySpec::NONE };
        let preset = |preset| PolicySpec { preset: Some(preset), ..PolicySpec::NONE };
        let overtakes = |spec, max| PolicySpec { overtakes_max: Some(max), ..spec };
        let window = |spec, window| PolicySpec { slo_window: Some(window), ..spec };
        let alpha = |spec| PolicySpec { alpha: Some(AlphaReading::Artifact), ..spec };
        for (spec, expected) in [
            (PolicySpec::NONE, Ok(())),
            (dispatch(DispatchName::Lb), Ok(())),
            (overtakes(dispatch(DispatchName::LalbO3), 3), Ok(())),
            (overtakes(dispatch(DispatchName::Unified), 0), Ok(())),
            (overtakes(dispatch(DispatchName::LalbO3), 0), Err(PolicyError::NoOvertakes)),
            (overtakes(dispatch(DispatchName::Fifo), 3), Err(PolicyError::Overtakes)),
            (overtakes(PolicySpec::NONE, 3), Err(PolicyError::Overtakes)),
            (alpha(dispatch(DispatchName::Torpor)), Ok(())),
            (alpha(dispatch(DispatchName::Unified)), Err(PolicyError::Alpha)),
            (window(dispatch(DispatchName::Unified), SLO_WINDOW_MAX), Ok(())),
            (window(dispatch(DispatchName::Torpor), SLO_WINDOW_MAX + 1), Err(PolicyError::SloWindowSize)),
            (window(dispatch(DispatchName::Random), 0), Err(PolicyError::SloWindowSize)),
            (window(dispatch(DispatchName::LalbO3), 100), Err(PolicyError::SloWindow)),
            (overtakes(preset(PresetName::LalbO3), 3), Ok(())),
            (overtakes(preset(PresetName::Fifo), 3), Err(PolicyError::Overtakes)),
            (alpha(preset(PresetName::Torpor)), Ok(())),
            (
                alpha(PolicySpec { dispatch: Some(DispatchName::Fifo), ..preset(PresetName::Torpor) }),
                Err(PolicyError::Alpha),
            ),
        ] {
            assert_eq!(spec.check(), expected, "{spec}");
        }
    }

    #[test]
    fn display_lists_the_settings_by_name() {
        let spec = PolicySpec {
            dispatch: Some(DispatchName::LalbO3),
            overtakes_max: Some(7),
            batching: Some(Batches::Off),
            ..PolicySpec::NONE
        };
        assert_eq!(spec.to_string(), "dispatch lalb-o3, overtakes_max 7, batching off");
        assert_eq!(PolicySpec::NONE.to_string(), "the default preset");
    }
}
