//! How long one model's runs take on each kind of machine, by what was seen (L21).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::RUN_GUESS;

/// Kinds of machines that are told apart. What further ones take is estimated by the others.
const MACHINES_MAX: usize = 16;
/// A run counts for one part in this many of the estimate.
const WEIGHT: u32 = 8;
/// The first runs of a kind, of which the shortest counts, and which are not trusted to be worse than the
/// others': one may have been cold, and a kind that looks slow is not asked again.
const TRUSTED: u32 = 3;

/// A machine's kind: the types of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MachineType(Arc<str>);

impl MachineType {
    /// Of a machine with GPUs of these types.
    pub fn of<'a>(gpu_types: impl IntoIterator<Item = &'a str>) -> Self {
        let types: BTreeSet<&str> = gpu_types.into_iter().collect();
        Self(types.into_iter().collect::<Vec<_>>().join("+").into())
    }
}

/// What was seen on one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    machine: MachineType,
    run: Duration,
    /// Runs, up to [`TRUSTED`].
    runs: u32,
}

/// One model's estimates.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runs(Vec<Seen>);

impl Runs {
    /// How long a run takes there: by what was seen there, else by what was seen elsewhere;
    /// [`RUN_GUESS`] before the first.
    #[must_use]
    pub fn estimate(&self, machine: &MachineType) -> Duration {
        let here = self.0.iter().find(|it| it.machine == *machine);
        if let Some(here) = here.filter(|here| here.runs >= TRUSTED) {
            return here.run;
        }
        let others = || self.0.iter().filter(|it| it.machine != *machine);
        let elsewhere = others().map(|it| it.run).sum::<Duration>().checked_div(others().count() as u32);
        match (here, elsewhere) {
            (Some(here), Some(elsewhere)) => here.run.min(elsewhere),
            (here, elsewhere) => here.map(|here| here.run).or(elsewhere).unwrap_or(RUN_GUESS),
        }
    }

    /// A run took so long there.
    pub fn took(&mut self, machine: &MachineType, run: Duration) {
        if let Some(here) = self.0.iter_mut().find(|it| it.machine == *machine) {
            if here.runs < TRUSTED {
                (here.run, here.runs) = (here.run.min(run), here.runs + 1);
            } else {
                here.run = here.run - here.run / WEIGHT + run / WEIGHT;
            }
        } else if self.0.len() < MACHINES_MAX {
            self.0.push(Seen { machine: machine.clone(), run, runs: 1 });
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
    fn an_estimate_begins_with_the_shortest_of_the_first_runs_and_follows_the_later_ones() {
        let (mut runs, here) = (Runs::default(), MachineType::of(["V100"]));
        assert_eq!(runs.estimate(&here), RUN_GUESS);
        runs.took(&here, ms(100));
        assert_eq!(runs.estimate(&here), ms(100));
        [80, 160].into_iter().for_each(|took| runs.took(&here, ms(took)));
        assert_eq!(runs.estimate(&here), ms(80));
        runs.took(&here, ms(160));
        assert_eq!(runs.estimate(&here), ms(90));
        for _ in 0..100 {
            runs.took(&here, ms(160));
        }
        assert!(runs.estimate(&here) > ms(159));
    }

    #[test]
    fn each_kind_of_machine_has_its_own() {
        let mut runs = Runs::default();
        let [slow, fast, mixed] = [&["V100", "V100"][..], &["A100"], &["V100", "A100"]]
            .map(|types| MachineType::of(types.iter().copied()));
        assert_eq!(mixed, MachineType::of(["A100", "V100"]), "whichever comes first");
        runs.took(&slow, ms(30));
        assert_eq!(runs.estimate(&fast), ms(30), "it is the best guess there is");
        runs.took(&fast, ms(10));
        assert_eq!([&fast, &mixed].map(|it| runs.estimate(it)), [ms(10), ms(20)]);
        assert_eq!(runs.estimate(&slow), ms(10), "one run there tells little");
        (0..2).for_each(|_| runs.took(&slow, ms(30)));
        assert_eq!(runs.estimate(&slow), ms(30));
    }

    #[test]
    fn a_first_run_that_was_slow_keeps_nobody_away() {
        let mut runs = Runs::default();
        let [usual, cold] = ["A100", "V100"].map(|gpu_type| MachineType::of([gpu_type]));
        (0..9).for_each(|_| runs.took(&usual, ms(10)));
        runs.took(&cold, ms(5_000));
        assert_eq!(runs.estimate(&cold), ms(10));
        (0..2).for_each(|_| runs.took(&cold, ms(12)));
        assert_eq!(runs.estimate(&cold), ms(12), "nor do the next ones have much of it");
    }

    #[test]
    fn not_more_are_kept_than_are_told_apart() {
        let mut runs = Runs::default();
        for number in 0..100 {
            runs.took(&MachineType::of([number.to_string().as_str()]), ms(number));
        }
        assert_eq!(runs.0.len(), MACHINES_MAX);
    }
}
