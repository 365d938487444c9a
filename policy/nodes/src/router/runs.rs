//! Measured run times of a model on each type of machine (L21).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::RUN_GUESS;

/// Maximum number of machine types with estimates of their own. Further types use the mean of
/// these.
const MACHINES_MAX: usize = 16;
/// Inverse weight of a run in the moving estimate.
const WEIGHT: u32 = 8;
/// Runs on a type after which its estimate is trusted. Until then the shortest of them counts, and cannot
/// make the type look worse than the others. The first runs may have been cold, and a type that
/// looks slow would get no further requests.
const RUNS_UNTIL_TRUSTED: u32 = 3;

/// Type of a machine: the types of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MachineType(Arc<str>);

impl MachineType {
    /// Creates the type of a machine with GPUs of these types.
    pub fn of<'a>(gpu_types: impl IntoIterator<Item = &'a str>) -> Self {
        let types: BTreeSet<&str> = gpu_types.into_iter().collect();
        Self(types.into_iter().collect::<Vec<_>>().join("+").into())
    }
}

/// Measurements on a type of machine.
#[derive(Debug, Clone, PartialEq, Eq)]
struct MachineRunTime {
    machine: MachineType,
    run: Duration,
    /// Number of runs, up to [`RUNS_UNTIL_TRUSTED`].
    runs: u32,
}

/// Estimates for a model.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MachineRunTimes(Vec<MachineRunTime>);

impl MachineRunTimes {
    /// Returns the expected run time on a machine type: measured there, else on other types;
    /// [`RUN_GUESS`] before the first measurement.
    #[must_use]
    pub fn estimate(&self, machine: &MachineType) -> Duration {
        let here = self.0.iter().find(|it| it.machine == *machine);
        if let Some(here) = here.filter(|here| here.runs >= RUNS_UNTIL_TRUSTED) {
            return here.run;
        }
        let others = || self.0.iter().filter(|it| it.machine != *machine);
        let elsewhere = others().map(|it| it.run).sum::<Duration>().checked_div(others().count() as u32);
        match (here, elsewhere) {
            (Some(here), Some(elsewhere)) => here.run.min(elsewhere),
            (here, elsewhere) => here.map(|here| here.run).or(elsewhere).unwrap_or(RUN_GUESS),
        }
    }

    /// Adds a measured run time.
    pub fn record_run(&mut self, machine: &MachineType, run: Duration) {
        if let Some(here) = self.0.iter_mut().find(|it| it.machine == *machine) {
            if here.runs < RUNS_UNTIL_TRUSTED {
                here.run = here.run.min(run);
                here.runs += 1;
            } else {
                here.run = here.run - here.run / WEIGHT + run / WEIGHT;
            }
        } else if self.0.len() < MACHINES_MAX {
            self.0.push(MachineRunTime { machine: machine.clone(), run, runs: 1 });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn estimate_starts_at_the_shortest_first_run_and_follows_later_runs() {
        let mut runs = MachineRunTimes::default();
        let here = MachineType::of(["V100"]);
        assert_eq!(runs.estimate(&here), RUN_GUESS);
        runs.record_run(&here, ms(100));
        assert_eq!(runs.estimate(&here), ms(100));
        [80, 160].into_iter().for_each(|took| runs.record_run(&here, ms(took)));
        assert_eq!(runs.estimate(&here), ms(80));
        runs.record_run(&here, ms(160));
        assert_eq!(runs.estimate(&here), ms(90));
        for _ in 0..100 {
            runs.record_run(&here, ms(160));
        }
        assert!(runs.estimate(&here) > ms(159));
    }

    #[test]
    fn estimates_are_separate_for_each_machine_type() {
        let mut runs = MachineRunTimes::default();
        let [slow, fast, mixed] = [&["V100", "V100"][..], &["A100"], &["V100", "A100"]]
            .map(|types| MachineType::of(types.iter().copied()));
        assert_eq!(mixed, MachineType::of(["A100", "V100"]), "in either order");
        runs.record_run(&slow, ms(30));
        assert_eq!(runs.estimate(&fast), ms(30), "the best available estimate");
        runs.record_run(&fast, ms(10));
        assert_eq!([&fast, &mixed].map(|it| runs.estimate(it)), [ms(10), ms(20)]);
        assert_eq!(runs.estimate(&slow), ms(10), "a single run is not trusted");
        (0..2).for_each(|_| runs.record_run(&slow, ms(30)));
        assert_eq!(runs.estimate(&slow), ms(30));
    }

    #[test]
    fn a_slow_first_run_does_not_raise_the_estimate() {
        let mut runs = MachineRunTimes::default();
        let [usual, cold] = ["A100", "V100"].map(|gpu_type| MachineType::of([gpu_type]));
        (0..9).for_each(|_| runs.record_run(&usual, ms(10)));
        runs.record_run(&cold, ms(5_000));
        assert_eq!(runs.estimate(&cold), ms(10));
        (0..2).for_each(|_| runs.record_run(&cold, ms(12)));
        assert_eq!(runs.estimate(&cold), ms(12), "the slow first run is forgotten");
    }

    #[test]
    fn machine_types_with_estimates_are_bounded() {
        let mut runs = MachineRunTimes::default();
        for number in 0..100 {
            runs.record_run(&MachineType::of([number.to_string().as_str()]), ms(number));
        }
        assert_eq!(runs.0.len(), MACHINES_MAX);
    }
}
