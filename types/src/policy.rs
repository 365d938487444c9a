//! How a cluster's nodes schedule: a preset, and settings that replace parts of the preset. The setting is
//! replicated, and operators change it while nodes run.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name that stands for nothing here.
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
            /// Every one there is.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Its name.
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
    /// A bundle of settings that were measured together.
    #[derive(Default)]
    PresetName, "preset",
    /// Millrace's own policy, and the default: requests go by estimated finish and by the objectives that can
    /// still be met.
    #[default]
    Unified = "unified",
    /// The Torpor paper: required request counts, least interference, replicas and light models evicted first.
    Torpor = "torpor",
    /// The LALB paper: locality and load balance with out-of-order dispatch.
    LalbO3 = "lalb-o3",
    /// Requests in order of arrival, least recently used models evicted first.
    Fifo = "fifo",
}

impl PresetName {
    /// The dispatch policy of the preset.
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

/// Which request goes to which GPU. A stored policy may name a retired baseline, which only the simulator
/// still runs: nodes use the default preset in its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum DispatchName {
    /// The oldest first, handed ahead to busy GPUs.
    #[serde(rename = "fifo")]
    Fifo,
    /// Locality and load balance, in order.
    #[serde(rename = "lalb")]
    Lalb,
    /// Locality and load balance; a request may be overtaken a number of times.
    #[serde(rename = "lalb-o3")]
    LalbO3,
    /// By required request counts, onto the GPU with least interference.
    #[serde(rename = "torpor")]
    Torpor,
    /// By estimated finish and by the objectives that can still be met.
    #[serde(rename = "unified")]
    Unified,
    /// Retired: the oldest first, to the GPU that has been idle longest.
    #[serde(rename = "lb")]
    Lb,
    /// Retired: as `torpor`, onto any GPU.
    #[serde(rename = "random")]
    Random,
    /// Retired: the oldest first, onto any GPU.
    #[serde(rename = "simpleswap")]
    Simpleswap,
}

impl DispatchName {
    /// The policies that can be set.
    pub const ALL: &[Self] = &[Self::Unified, Self::Torpor, Self::LalbO3, Self::Lalb, Self::Fifo];

    /// The name of the policy.
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

    /// Whether servers no longer run the policy.
    #[must_use]
    pub const fn is_retired(self) -> bool {
        matches!(self, Self::Lb | Self::Random | Self::Simpleswap)
    }

    /// Whether the policy has a required request count for each function.
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
    /// Which models make room first on a GPU.
    EvictionName, "eviction policy",
    /// The least recently used.
    Lru = "lru",
    /// Replicas.
    Replicas = "replicas",
    /// Replicas, then light models.
    Torpor = "torpor",
}

named! {
    /// How transfers between host memory and GPUs share their links, each direction by itself.
    TransferSharingName, "transfer sharing",
    /// Each transfer at the rate that meets the deadline of the request that waits for it.
    Faastube = "faastube",
    /// In turns.
    Fair = "fair",
    /// In order of arrival.
    Fifo = "fifo",
}

named! {
    /// The PCIe links that data crosses between host memory and a GPU.
    HostLinksName, "choice of host links",
    /// The links of the GPU itself.
    Own = "own",
    /// Idle links of other GPUs too; these GPUs forward over NVLinks.
    All = "all",
}

named! {
    /// How `torpor`'s alpha follows the share of functions that comply.
    AlphaReading, "reading of alpha",
    /// As its paper's appendix says.
    Paper = "paper",
    /// As its artifact does.
    Artifact = "artifact",
}

named! {
    /// Whether functions' requests run as one where their owners allow it.
    Batches, "batching",
    /// They do.
    On = "on",
    /// Each runs alone.
    Off = "off",
}

named! {
    /// A setting of a [`PolicySpec`].
    Setting, "setting",
    /// [`PolicySpec::preset`].
    Preset = "preset",
    /// [`PolicySpec::dispatch`].
    Dispatch = "dispatch",
    /// [`PolicySpec::eviction`].
    Eviction = "eviction",
    /// [`PolicySpec::overtakes_max`].
    OvertakesMax = "overtakes_max",
    /// [`PolicySpec::alpha`].
    Alpha = "alpha",
    /// [`PolicySpec::batching`].
    Batching = "batching",
    /// [`PolicySpec::slo_window`].
    SloWindow = "slo_window",
    /// [`PolicySpec::transfer_sharing`].
    TransferSharing = "transfer_sharing",
    /// [`PolicySpec::host_links`].
    HostLinks = "host_links",
}

/// The most requests that [`PolicySpec::slo_window`] looks back on.
pub const SLO_WINDOW_MAX: u32 = 4096;

/// How nodes schedule, as an operator set it. `None` is the value of the preset; without a preset, of the
/// default one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicySpec {
    /// The bundle whose parts the other settings replace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<PresetName>,
    /// Which request goes to which GPU.
    pub dispatch: Option<DispatchName>,
    /// Which models make room first.
    pub eviction: Option<EvictionName>,
    /// Times a waiting request may be overtaken, under `lalb-o3` and `unified`. Under `unified`, while the
    /// oldest that was overtaken so often has a deadline, one turn in ten goes by age; with 0 all do.
    pub overtakes_max: Option<u32>,
    /// How alpha is read, under `torpor`.
    pub alpha: Option<AlphaReading>,
    /// Whether requests run as one.
    pub batching: Option<Batches>,
    /// The requests that a function's required request count is of, under `torpor` and `unified`: the last
    /// so many, from 1 to [`SLO_WINDOW_MAX`]. `None`: all there ever were.
    pub slo_window: Option<u32>,
    /// How transfers share links.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub transfer_sharing: Option<TransferSharingName>,
    /// The links that data crosses between host memory and GPUs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_links: Option<HostLinksName>,
}

/// A setting that nothing would read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Of another dispatch policy.
    #[error("overtakes_max is read under dispatch lalb-o3 and unified alone: set one of them with it")]
    Overtakes,
    /// What `lalb` is.
    #[error("lalb-o3 with overtakes_max 0 is lalb: set dispatch lalb")]
    NoOvertakes,
    /// Of another dispatch policy.
    #[error("alpha is read under dispatch torpor alone: set that with it")]
    Alpha,
    /// Of another dispatch policy.
    #[error("slo_window is read under dispatch torpor and unified alone: set one of them with it")]
    SloWindow,
    /// More than is remembered, or nothing.
    #[error("slo_window is from 1 to {SLO_WINDOW_MAX} requests; without it all count that there ever were")]
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
    };

    /// The dispatch policy: the one that is set, else that of the preset.
    const fn dispatch_or_preset(&self) -> Option<DispatchName> {
        match (self.dispatch, self.preset) {
            (Some(dispatch), _) => Some(dispatch),
            (None, Some(preset)) => Some(preset.dispatch()),
            (None, None) => None,
        }
    }

    /// The same with these settings as they are given.
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
            }
        }
        self
    }

    /// Refuses what would be read by nothing.
    ///
    /// # Errors
    /// [`PolicyError`] says what to set with it.
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

    /// What is said, by name, as an operator types it.
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
    fn names_are_read_as_they_are_shown() {
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
    fn a_setting_is_refused_where_nothing_reads_it() {
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
    fn what_is_set_is_told_by_name() {
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
