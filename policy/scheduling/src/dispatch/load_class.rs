//! The degree to which the load of a model disturbs the copies of neighbouring GPUs.

use std::time::Duration;

/// Degree to which a load disturbs the copies of neighbouring GPUs (T22, T23), least first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum LoadClass {
    /// No load is under way.
    #[default]
    Nothing,
    /// The model is copied from another GPU.
    FromPeer,
    /// The model is copied from the host, and the run hides the copy even at half the link's rate.
    Light,
    /// The model is copied from the host, and half the link's rate slows the run a little.
    Medium,
    /// The model is copied from the host, and half the link's rate slows the run much.
    Heavy,
}

/// Limit of light models, in percent: a run that overlaps its load at half the link's rate takes
/// less than this part of a run without a load.
const LIGHT_BELOW: u32 = 110;
/// Least percentage of heavy models. Such a run waits for the link most of the time even if the
/// link is free.
const HEAVY_FROM: u32 = 400;

impl LoadClass {
    /// Returns the class of a model that is copied from the host. The class depends on the slowdown
    /// of a run that overlaps its load at half the link's rate: max(2 · load, run) / run. With the
    /// paper's figures (table 4, at 12 GB/s), DenseNet-201 is light, Inception-v3 and ResNet-152
    /// are medium, and Bert-qa is heavy. A model that never ran counts as heavy.
    pub(super) fn of(load: Duration, run: Option<Duration>) -> Self {
        let Some(run) = run.filter(|run| !run.is_zero()) else { return Self::Heavy };
        let slowed = (load * 2).max(run) * 100;
        match () {
            () if slowed < run * LIGHT_BELOW => Self::Light,
            () if slowed < run * HEAVY_FROM => Self::Medium,
            () => Self::Heavy,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T23, with the paper's run times (table 4, GPU remoting) and weights at 12 GB/s.
    #[test]
    fn load_class_follows_slowdown_at_half_the_link_rate() {
        let class = |megabytes: u64, run_ms| {
            let load = Duration::from_micros(megabytes * 1000 / 12);
            LoadClass::of(load, Some(Duration::from_millis(run_ms)))
        };
        assert_eq!(class(80, 28), LoadClass::Light, "DenseNet-201");
        assert_eq!(class(57, 25), LoadClass::Light, "DenseNet-169");
        assert_eq!(class(108, 14), LoadClass::Medium, "Inception-v3");
        assert_eq!(class(241, 17), LoadClass::Medium, "ResNet-152");
        assert_eq!(class(1340, 43), LoadClass::Heavy, "Bert-qa");
        assert_eq!(LoadClass::of(Duration::ZERO, None), LoadClass::Heavy, "a model that never ran is heavy");
    }
}
