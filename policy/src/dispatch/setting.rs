//! What an operator sets while a node runs, as a policy.

use millrace_types::policy::{AlphaReading, DispatchName, PolicySpec};

use super::config::{
    AlphaRule, Choice, Counts, OVERTAKES_MAX, Order, PolicyConfig, TORPOR, TorporConfig, UNIFIED,
    UnifiedConfig,
};

impl PolicyConfig {
    /// What an operator set, of a node that was started with this. One that binds early stays as it is:
    /// what waits there may have no other place.
    #[must_use]
    pub fn with(self, spec: &PolicySpec) -> Self {
        let Some(name) = spec.dispatch.filter(|_| !self.binds_early()) else { return self };
        let counts = spec.slo_window.map_or(Counts::Cumulative, Counts::Last);
        let torpor = |choice, order| {
            let alpha = match spec.alpha {
                None | Some(AlphaReading::Paper) => AlphaRule::Paper,
                Some(AlphaReading::Artifact) => AlphaRule::Artifact,
            };
            Self::Torpor(TorporConfig { choice, order, alpha, counts, ..TORPOR })
        };
        match name {
            DispatchName::Fifo => Self::Fifo,
            DispatchName::Lb => Self::Lb,
            DispatchName::Lalb => Self::Lalb { overtakes_max: 0 },
            DispatchName::LalbO3 => Self::Lalb { overtakes_max: spec.overtakes_max.unwrap_or(OVERTAKES_MAX) },
            DispatchName::Torpor => torpor(Choice::Interference, Order::Required),
            DispatchName::Random => torpor(Choice::Random, Order::Required),
            DispatchName::Simpleswap => torpor(Choice::Random, Order::Arrival),
            DispatchName::Unified => {
                let overtakes_max = spec.overtakes_max.unwrap_or(UNIFIED.overtakes_max);
                let free_overtakes_max = UNIFIED.free_overtakes_max.min(overtakes_max);
                // None may be overtaken then: all go by age.
                let aged_every = if overtakes_max == 0 { 1 } else { UNIFIED.aged_every };
                let limits =
                    UnifiedConfig { overtakes_max, aged_every, free_overtakes_max, counts, ..UNIFIED };
                Self::Unified(limits)
            }
        }
    }

    /// Times a waiting request may be overtaken, where that is bounded by number.
    #[must_use]
    pub const fn overtakes_max(self) -> Option<u32> {
        match self {
            Self::Lalb { overtakes_max } | Self::Unified(UnifiedConfig { overtakes_max, .. }) => {
                Some(overtakes_max)
            }
            Self::Fifo | Self::Lb | Self::Torpor(_) | Self::Bound(_) => None,
        }
    }

    /// The last requests that required request counts are of, where not all are and there are such.
    #[must_use]
    pub fn slo_window(self) -> Option<u32> {
        let counts = match self {
            Self::Torpor(TorporConfig { order: Order::Required, counts, .. }) => counts,
            Self::Unified(UnifiedConfig { counts, .. }) => counts,
            _ => return None,
        };
        match counts {
            Counts::Cumulative => None,
            Counts::Last(last) => Some(last),
        }
    }

    /// How alpha is read, where there is one.
    #[must_use]
    pub fn alpha(self) -> Option<AlphaReading> {
        let Self::Torpor(TorporConfig { order: Order::Required, alpha, .. }) = self else { return None };
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
    fn what_an_operator_sets_is_what_its_name_stands_for() {
        for &name in DispatchName::ALL {
            let set = PolicyConfig::Fifo.with(&PolicySpec { dispatch: Some(name), ..PolicySpec::NONE });
            assert_eq!(Ok(set), name.name().parse(), "{name}");
        }
        let spec = |dispatch, overtakes_max| PolicySpec {
            dispatch: Some(dispatch),
            overtakes_max,
            ..PolicySpec::NONE
        };
        let lalb = PolicyConfig::Lb.with(&spec(DispatchName::LalbO3, Some(3)));
        assert_eq!((lalb, lalb.overtakes_max()), (PolicyConfig::Lalb { overtakes_max: 3 }, Some(3)));
        let PolicyConfig::Unified(unified) = PolicyConfig::Lb.with(&spec(DispatchName::Unified, Some(3)))
        else {
            panic!("it is unified");
        };
        assert_eq!((unified.overtakes_max, unified.free_overtakes_max), (3, 3));
        assert_eq!(unified.aged_every, UNIFIED.aged_every);
        let by_age = PolicyConfig::Lb.with(&spec(DispatchName::Unified, Some(0)));
        assert!(matches!(by_age, PolicyConfig::Unified(it) if (it.overtakes_max, it.aged_every) == (0, 1)));
        let artifact = PolicySpec { alpha: Some(AlphaReading::Artifact), ..spec(DispatchName::Torpor, None) };
        assert_eq!(PolicyConfig::Lb.with(&artifact).alpha(), Some(AlphaReading::Artifact));
        for dispatch in [DispatchName::Torpor, DispatchName::Random, DispatchName::Unified] {
            let windowed = PolicySpec { slo_window: Some(100), ..spec(dispatch, None) };
            assert_eq!(PolicyConfig::Lb.with(&windowed).slo_window(), Some(100), "{dispatch}");
            assert_eq!(PolicyConfig::Lb.with(&spec(dispatch, None)).slo_window(), None);
        }
        assert_eq!(PolicyConfig::Lb.with(&PolicySpec::NONE), PolicyConfig::Lb);
        let native: PolicyConfig = "native".parse().unwrap();
        assert_eq!(native.with(&artifact), native, "it binds early");
    }
}
