//! How a cluster's nodes schedule, as far as that can be changed while they run. What is not said stays
//! as each worker was started. The early-binding baselines of `--dispatch` are not among these: who
//! waits for one GPU alone may have to be refused when another function is bound there.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// A name that stands for nothing here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} {given:?} is none that can be set while a cluster runs: use one of {known}")]
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
    /// Which request goes to which GPU.
    DispatchName, "dispatch policy",
    /// The oldest first, handed ahead to busy GPUs.
    Fifo = "fifo",
    /// The oldest first, to the GPU that has been idle longest.
    Lb = "lb",
    /// Locality and load balance, in order.
    Lalb = "lalb",
    /// The same, past older requests so many times at most.
    LalbO3 = "lalb-o3",
    /// By required request counts, onto the GPU with least interference.
    Torpor = "torpor",
    /// As `torpor`, onto any GPU.
    Random = "random",
    /// By estimated finish and by what can still be in time.
    Unified = "unified",
    /// The oldest first, onto any GPU.
    Simpleswap = "simpleswap",
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
    /// What can be set.
    Setting, "setting",
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
}

/// The most requests that [`PolicySpec::slo_window`] looks back on.
pub const SLO_WINDOW_MAX: u32 = 4096;

/// What an operator set. `None` is as each worker was started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicySpec {
    /// Which request goes to which GPU.
    pub dispatch: Option<DispatchName>,
    /// Which models make room first.
    pub eviction: Option<EvictionName>,
    /// Times a waiting request may be overtaken, under `lalb-o3` and `unified`. Under `unified`, while the
    /// oldest that was overtaken so often has a deadline, one turn in ten goes by age; with 0 all do.
    pub overtakes_max: Option<u32>,
    /// How alpha is read, under `torpor` and `random`.
    pub alpha: Option<AlphaReading>,
    /// Whether requests run as one.
    pub batching: Option<Batches>,
    /// The requests that a function's required request count is of, under `torpor`, `random` and
    /// `unified`: the last so many, from 1 to [`SLO_WINDOW_MAX`]. `None`: all there ever were.
    pub slo_window: Option<u32>,
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
    #[error("alpha is read under dispatch torpor and random alone: set one of them with it")]
    Alpha,
    /// Of another dispatch policy.
    #[error("slo_window is read under dispatch torpor, random and unified alone: set one of them with it")]
    SloWindow,
    /// More than is remembered, or nothing.
    #[error("slo_window is from 1 to {SLO_WINDOW_MAX} requests; without it all count that there ever were")]
    SloWindowSize,
}

impl PolicySpec {
    /// Everything as each worker was started.
    pub const NONE: Self = Self {
        dispatch: None,
        eviction: None,
        overtakes_max: None,
        alpha: None,
        batching: None,
        slo_window: None,
    };

    /// The same with these settings as they are given.
    #[must_use]
    pub fn with(mut self, given: &Self, settings: &[Setting]) -> Self {
        for setting in settings {
            match setting {
                Setting::Dispatch => self.dispatch = given.dispatch,
                Setting::Eviction => self.eviction = given.eviction,
                Setting::OvertakesMax => self.overtakes_max = given.overtakes_max,
                Setting::Alpha => self.alpha = given.alpha,
                Setting::Batching => self.batching = given.batching,
                Setting::SloWindow => self.slo_window = given.slo_window,
            }
        }
        self
    }

    /// Refuses what would be read by nothing.
    ///
    /// # Errors
    /// [`PolicyError`] says what to set with it.
    pub fn check(&self) -> Result<(), PolicyError> {
        match (self.dispatch, self.overtakes_max) {
            (_, None) | (Some(DispatchName::Unified), _) => {}
            (Some(DispatchName::LalbO3), Some(0)) => return Err(PolicyError::NoOvertakes),
            (Some(DispatchName::LalbO3), _) => {}
            _ => return Err(PolicyError::Overtakes),
        }
        match (self.dispatch, self.alpha) {
            (_, None) | (Some(DispatchName::Torpor | DispatchName::Random), _) => {}
            _ => return Err(PolicyError::Alpha),
        }
        match (self.dispatch, self.slo_window) {
            (_, None) => Ok(()),
            (_, Some(window)) if !(1..=SLO_WINDOW_MAX).contains(&window) => Err(PolicyError::SloWindowSize),
            (Some(DispatchName::Torpor | DispatchName::Random | DispatchName::Unified), _) => Ok(()),
            _ => Err(PolicyError::SloWindow),
        }
    }

    /// What is said, by name, as an operator types it.
    #[must_use]
    pub fn settings(&self) -> Vec<(&'static str, String)> {
        let settings = [
            (Setting::Dispatch, self.dispatch.map(|it| it.to_string())),
            (Setting::Eviction, self.eviction.map(|it| it.to_string())),
            (Setting::OvertakesMax, self.overtakes_max.map(|it| it.to_string())),
            (Setting::Alpha, self.alpha.map(|it| it.to_string())),
            (Setting::Batching, self.batching.map(|it| it.to_string())),
            (Setting::SloWindow, self.slo_window.map(|it| it.to_string())),
        ];
        settings.into_iter().filter_map(|(setting, value)| Some((setting.name(), value?))).collect()
    }
}

impl fmt::Display for PolicySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings: Vec<_> =
            self.settings().iter().map(|(name, value)| format!("{name} {value}")).collect();
        if settings.is_empty() { f.pad("as started") } else { f.pad(&settings.join(", ")) }
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
        let refused = "native".parse::<DispatchName>().unwrap_err().to_string();
        assert!(refused.contains("\"native\"") && refused.contains("simpleswap"), "{refused}");
    }

    #[test]
    fn a_setting_is_refused_where_nothing_reads_it() {
        let dispatch = |dispatch| PolicySpec { dispatch: Some(dispatch), ..PolicySpec::NONE };
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
        assert_eq!(PolicySpec::NONE.to_string(), "as started");
    }
}
