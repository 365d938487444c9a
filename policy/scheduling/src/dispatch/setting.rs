//! The dispatch policy that an operator sets while a node runs.

use millrace_types::policy::{AlphaReading, DispatchName, PolicySpec};

use super::config::{
    AlphaRule, OVERTAKES_MAX, PolicyConfig, ScoreWindow, TORPOR, TorporConfig, TorporGpuChoice, TorporOrder,
    UNIFIED, UnifiedConfig,
};

impl PolicyConfig {
    /// Returns the dispatch policy that an operator set. Without a name in `spec`, the other settings change
    /// `self`.
    #[must_use]
    pub fn with(self, spec: &PolicySpec) -> Self {
        let base = match spec.dispatch {
            None => self,
            Some(DispatchName::Fifo) => Self::Fifo,
            Some(DispatchName::Lalb) => Self::Lalb { overtakes_max: 0 },
            Some(DispatchName::LalbO3) => Self::Lalb { overtakes_max: OVERTAKES_MAX },
            Some(DispatchName::Torpor) => Self::Torpor(TORPOR),
            Some(DispatchName::Unified) => Self::Unified(UNIFIED),
            Some(DispatchName::Lb | DispatchName::Random | DispatchName::Simpleswap) => Self::default(),
        };
        let window = spec.slo_window.map(ScoreWindow::Last);
        match base {
            Self::Lalb { overtakes_max } => {
                Self::Lalb { overtakes_max: spec.overtakes_max.unwrap_or(overtakes_max) }
            }
            Self::Torpor(config) => {
                let alpha = match spec.alpha {
                    None => config.alpha,
                    Some(AlphaReading::Paper) => AlphaRule::Paper,
                    Some(AlphaReading::Artifact) => AlphaRule::Artifact,
                };
                Self::Torpor(TorporConfig { alpha, counts: window.unwrap_or(config.counts), ..config })
            }
            Self::Unified(config) => {
                let overtakes_max = spec.overtakes_max.unwrap_or(config.overtakes_max);
                Self::Unified(UnifiedConfig {
                    overtakes_max,
                    free_overtakes_max: config.free_overtakes_max.min(overtakes_max),
                    // Without overtaking, all requests go by age.
                    aged_every: if overtakes_max == 0 { 1 } else { config.aged_every },
                    counts: window.unwrap_or(config.counts),
                })
            }
            Self::Fifo | Self::Lb | Self::Bound(_) => base,
        }
    }

    /// The name under which an operator sets the policy. `None`: only the simulator has it.
    #[must_use]
    pub const fn dispatch_name(self) -> Option<DispatchName> {
        match self {
            Self::Fifo => Some(DispatchName::Fifo),
            Self::Lalb { overtakes_max: 0 } => Some(DispatchName::Lalb),
            Self::Lalb { .. } => Some(DispatchName::LalbO3),
            Self::Torpor(TorporConfig {
                order: TorporOrder::Required,
                choice: TorporGpuChoice::Interference,
                ..
            }) => Some(DispatchName::Torpor),
            Self::Unified(_) => Some(DispatchName::Unified),
            Self::Torpor(_) | Self::Lb | Self::Bound(_) => None,
        }
    }

    /// Returns how often a waiting request may be overtaken, if the policy bounds that number.
    #[must_use]
    pub const fn overtakes_max(self) -> Option<u32> {
        match self {
            Self::Lalb { overtakes_max } | Self::Unified(UnifiedConfig { overtakes_max, .. }) => {
                Some(overtakes_max)
            }
            Self::Fifo | Self::Lb | Self::Torpor(_) | Self::Bound(_) => None,
        }
    }

    /// Returns the number of recent requests over which required request counts are computed.
    /// `None`: all requests count, or the policy has no such counts.
    #[must_use]
    pub fn slo_window(self) -> Option<u32> {
        let counts = match self {
            Self::Torpor(TorporConfig { order: TorporOrder::Required, counts, .. }) => counts,
            Self::Unified(UnifiedConfig { counts, .. }) => counts,
            _ => return None,
        };
        match counts {
            ScoreWindow::Cumulative => None,
            ScoreWindow::Last(last) => Some(last),
        }
    }

    /// Returns the rule for alpha, if required request counts order the queue.
    #[must_use]
    pub fn alpha(self) -> Option<AlphaReading> {
        let Self::Torpor(TorporConfig { order: TorporOrder::Required, alpha, .. }) = self else {
            return None;
        };
        Some(match alpha {
            AlphaRule::Paper => AlphaReading::Paper,
            AlphaRule::Artifact => AlphaReading::Artifact,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_dispatch_name_sets_the_policy_that_displays_it() {
        for &name in DispatchName::ALL {
            let set = PolicyConfig::Fifo.with(&PolicySpec { dispatch: Some(name), ..PolicySpec::NONE });
            assert_eq!(Ok(set), name.name().parse(), "{name}");
            assert_eq!(set.dispatch_name(), Some(name));
        }
    }

    #[test]
    fn settings_change_the_policies_that_use_them() {
        let spec = |dispatch, overtakes_max| PolicySpec { dispatch, overtakes_max, ..PolicySpec::NONE };
        let lalb = PolicyConfig::Fifo.with(&spec(Some(DispatchName::LalbO3), Some(3)));
        assert_eq!(lalb, PolicyConfig::Lalb { overtakes_max: 3 });
        assert_eq!(lalb.with(&spec(None, Some(4))), PolicyConfig::Lalb { overtakes_max: 4 });
        assert_eq!(lalb.with(&PolicySpec::NONE), lalb);
        let unified = PolicyConfig::default().with(&spec(None, Some(3)));
        let limits = UnifiedConfig { overtakes_max: 3, free_overtakes_max: 3, ..UNIFIED };
        assert_eq!(unified, PolicyConfig::Unified(limits));
        let by_age = PolicyConfig::default().with(&spec(None, Some(0)));
        assert!(matches!(by_age, PolicyConfig::Unified(it) if (it.overtakes_max, it.aged_every) == (0, 1)));
        let torpor = PolicyConfig::Torpor(TORPOR);
        let artifact = PolicySpec { alpha: Some(AlphaReading::Artifact), ..PolicySpec::NONE };
        assert_eq!(torpor.with(&artifact).alpha(), Some(AlphaReading::Artifact));
        for policy in [torpor, PolicyConfig::default()] {
            let windowed = PolicySpec { slo_window: Some(100), ..PolicySpec::NONE };
            assert_eq!(policy.with(&windowed).slo_window(), Some(100), "{policy}");
            assert_eq!(policy.slo_window(), None);
        }
    }
}
