//! The checks of a file beyond its grammar, made before anything is started.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use super::{
    AwaitCondition, ClockJumpSpec, CodedScenario, CutSpec, DiskStallSpec, FaultSpec, FaultStream,
    FaultTarget, Invariant, RoundStep, ScenarioSpec, SynthKind,
};
use crate::load::{LoadMix, RESERVED};

/// Maximum number of workers that this machine runs.
const WORKERS_MAX: u32 = 8;
/// Maximum number of GPUs of a worker.
const GPUS_MAX: u32 = 8;
/// Maximum number of functions.
const FUNCTIONS_MAX: u32 = 1_000;
/// Maximum number of rows of a request.
const ROWS_MAX: u32 = 4_096;
/// Maximum number of values in a state: 1 MiB of FP32.
const WIDTH_MAX: u32 = 262_144;
/// Minimum interval between two faults of a stream.
const EVERY_MIN: Duration = Duration::from_millis(100);

impl ScenarioSpec {
    pub(super) fn check(&self) -> anyhow::Result<()> {
        is_a_name(&self.name)?;
        self.check_cluster()?;
        self.check_functions()?;
        self.check_sequences()?;
        self.check_body()?;
        for (number, step) in (1..).zip(&self.round) {
            self.check_step(step).with_context(|| format!("step {number} of the round"))?;
        }
        for (number, stream) in (1..).zip(&self.storm) {
            self.check_stream(stream).with_context(|| format!("stream {number} of the storm"))?;
        }
        self.check_invariants()
    }

    fn check_cluster(&self) -> anyhow::Result<()> {
        let shape = &self.cluster;
        ensure!([1, 3, 5].contains(&shape.controllers), "a cluster has 1, 3 or 5 controllers");
        ensure!((1..=WORKERS_MAX).contains(&shape.workers), "a cluster has 1 to {WORKERS_MAX} workers");
        ensure!((1..=GPUS_MAX).contains(&shape.gpus), "a worker has 1 to {GPUS_MAX} GPUs");
        Ok(())
    }

    fn check_functions(&self) -> anyhow::Result<()> {
        ensure!(!self.functions.is_empty(), "functions: at least one function is required");
        let mut names = BTreeSet::new();
        for function in &self.functions {
            let name = &function.name;
            is_a_name(name)?;
            ensure!(names.insert(name), "functions: {name} is defined twice");
            let reserved = RESERVED.iter().find(|&&own| name.starts_with(own));
            ensure!(
                reserved.is_none(),
                "functions: names that begin with {reserved:?} are the harness's own"
            );
            let replicas = function.replicas.get();
            let workers = self.cluster.workers;
            ensure!(replicas <= workers, "functions: {name} asks for {replicas} of {workers} workers");
        }
        let count: u32 = self.functions.iter().map(|it| it.count.get()).sum();
        ensure!(count <= FUNCTIONS_MAX, "functions: {count} are more than {FUNCTIONS_MAX}");
        for workflow in &self.workflows {
            let name = &workflow.name;
            is_a_name(name)?;
            ensure!(names.insert(name), "workflows: {name} is defined twice");
            ensure!(!workflow.steps.is_empty(), "workflows: {name} has no steps");
            ensure!(workflow.rows.get() <= ROWS_MAX, "workflows: {name} takes more than {ROWS_MAX} rows");
            for step in &workflow.steps {
                let single = self.functions.iter().any(|it| it.name == *step && it.count.get() == 1);
                ensure!(single, "workflows: {name} runs {step}, which is not a single function");
            }
        }
        let billed = self.invariants.contains(&Invariant::Billed);
        ensure!(
            self.workflows.is_empty() || !billed,
            "billed counts requests of functions alone: leave out billed or the workflows"
        );
        Ok(())
    }

    fn check_sequences(&self) -> anyhow::Result<()> {
        let others = self.functions.iter().map(|it| &it.name).chain(self.workflows.iter().map(|it| &it.name));
        let mut names: BTreeSet<_> = others.collect();
        for counter in &self.sequences {
            let name = &counter.name;
            is_a_name(name)?;
            ensure!(names.insert(name), "sequences: {name} is defined twice");
            let reserved = RESERVED.iter().find(|&&own| name.starts_with(own));
            ensure!(
                reserved.is_none(),
                "sequences: names that begin with {reserved:?} are the harness's own"
            );
            ensure!(counter.width.get() <= WIDTH_MAX, "sequences: {name} is wider than {WIDTH_MAX}");
        }
        let counted = self.invariants.contains(&Invariant::Counted);
        ensure!(
            self.sequences.is_empty() != counted,
            "counted requires sequences, and sequences require counted"
        );
        Ok(())
    }

    fn check_body(&self) -> anyhow::Result<()> {
        let bodies = [!self.round.is_empty(), !self.storm.is_empty(), self.plays.is_some()];
        ensure!(
            bodies.iter().filter(|&&there| there).count() == 1,
            "a scenario has exactly one of round, storm and plays"
        );
        let rounds = self.rounds.is_some();
        let lasts = self.lasts.is_some();
        match self.is_timed() {
            false => ensure!(rounds && !lasts, "a round or a plays takes rounds and no lasts"),
            true => ensure!(lasts && !rounds, "a storm or hostile clients takes lasts and no rounds"),
        }
        if self.plays == Some(CodedScenario::HostileClients) {
            let attacked = self.functions.first().map(|it| it.model);
            ensure!(
                attacked == Some(SynthKind::Mlp),
                "hostile clients require a first function of model mlp"
            );
        }
        if matches!(
            self.plays,
            Some(
                CodedScenario::Partition
                    | CodedScenario::FullDisk
                    | CodedScenario::ClockJump
                    | CodedScenario::TornStore
                    | CodedScenario::HostileClients
            )
        ) {
            ensure!(self.cluster.controllers >= 3, "this scenario in code requires 3 controllers");
            ensure!(self.load == LoadMix::Everything, "this scenario in code requires load: everything");
        }
        Ok(())
    }

    fn check_step(&self, step: &RoundStep) -> anyhow::Result<()> {
        match step {
            RoundStep::Fault(fault) => self.check_fault(fault),
            RoundStep::Await(awaited) => self.check_await(*awaited),
            RoundStep::Promise(promise) => {
                ensure!(promise.within.is_exact(), "the within of a promise is a single time");
                self.check_await(promise.r#await)
            }
            RoundStep::Pause(_) | RoundStep::Repair => Ok(()),
        }
    }

    fn check_await(&self, awaited: AwaitCondition) -> anyhow::Result<()> {
        match awaited {
            AwaitCondition::AnotherLeader => {
                ensure!(self.cluster.controllers >= 3, "another leader requires 3 controllers");
            }
            AwaitCondition::Lost => ensure!(
                self.faults().any(
                    |fault| matches!(fault, FaultSpec::Kill(who) | FaultSpec::Unplug(who) | FaultSpec::Cut(CutSpec { who, .. }) if who.is_worker())
                ),
                "lost requires a worker that was killed or cut off before"
            ),
            AwaitCondition::Executors => ensure!(
                self.faults().any(|fault| matches!(fault, FaultSpec::Kill(FaultTarget::Executor))),
                "executors requires an executor that was killed before"
            ),
            AwaitCondition::Service | AwaitCondition::Served | AwaitCondition::Whole => {}
        }
        Ok(())
    }

    fn check_fault(&self, fault: &FaultSpec) -> anyhow::Result<()> {
        let who = match fault {
            FaultSpec::Kill(who)
            | FaultSpec::Stop(who)
            | FaultSpec::Restart(who)
            | FaultSpec::Starve(who)
            | FaultSpec::Unplug(who)
            | FaultSpec::Cut(CutSpec { who, .. })
            | FaultSpec::StallDisk(DiskStallSpec { who, .. })
            | FaultSpec::MoveClock(ClockJumpSpec { who, .. }) => who,
            FaultSpec::Slow(_) | FaultSpec::Device(_) => return Ok(()),
        };
        self.check_who(*who)?;
        let one_controller = who.is_controller() && *who != FaultTarget::EveryController;
        match fault {
            FaultSpec::Restart(_) => ensure!(
                one_controller || who.is_worker(),
                "restart is for a controller or a worker: an executor ends with its worker"
            ),
            FaultSpec::Stop(_) => ensure!(*who != FaultTarget::EveryController, "stop is for one process"),
            FaultSpec::Starve(_) => ensure!(who.is_worker(), "starve is for a worker"),
            FaultSpec::Cut(_) | FaultSpec::Unplug(_) => {
                ensure!(one_controller || who.is_worker(), "cut and unplug are for a controller or a worker");
            }
            FaultSpec::StallDisk(_) | FaultSpec::MoveClock(_) => {
                ensure!(one_controller, "only controllers have disks and clocks that can be broken");
            }
            FaultSpec::Kill(_) | FaultSpec::Slow(_) | FaultSpec::Device(_) => {}
        }
        Ok(())
    }

    fn check_who(&self, who: FaultTarget) -> anyhow::Result<()> {
        let controllers = self.cluster.controllers;
        let workers = self.cluster.workers;
        match who {
            FaultTarget::Follower => ensure!(controllers > 1, "a follower requires more than one controller"),
            FaultTarget::Controller(id) => {
                ensure!((1..=controllers).contains(&id), "there is no controller {id} of {controllers}");
            }
            FaultTarget::Worker(number) => {
                ensure!((1..=workers).contains(&number), "there is no worker {number} of {workers}");
            }
            _ => {}
        }
        Ok(())
    }

    fn check_stream(&self, stream: &FaultStream) -> anyhow::Result<()> {
        self.check_fault(&stream.fault)?;
        ensure!(stream.every.least >= EVERY_MIN, "every is at least {EVERY_MIN:?}");
        match (stream.fault.is_repaired(), stream.r#for) {
            (true, None) => bail!("this fault takes a for: the time until the repair"),
            (false, Some(_)) => bail!("this fault takes no for: it ends by itself"),
            _ => Ok(()),
        }
    }

    fn check_invariants(&self) -> anyhow::Result<()> {
        let has = |invariant| self.invariants.contains(&invariant);
        for (invariant, name) in [
            (Invariant::Answered, "answered"),
            (Invariant::Right, "right"),
            (Invariant::Healthy, "healthy"),
            (Invariant::Gone, "gone"),
        ] {
            ensure!(has(invariant), "invariants: {name} has to hold in every scenario");
        }
        if has(Invariant::Acknowledged) || has(Invariant::Linearizable) {
            ensure!(
                self.load == LoadMix::Everything,
                "invariants: no client writes without load: everything"
            );
        }
        if has(Invariant::Flat) || has(Invariant::Returned) {
            ensure!(self.cluster.workers == 1, "invariants: flat and returned require a single worker");
            let ends_it = |fault: &FaultSpec| matches!(fault, FaultSpec::Kill(who) | FaultSpec::Restart(who) | FaultSpec::Starve(who) if who.is_worker());
            ensure!(
                !self.faults().any(ends_it),
                "invariants: flat and returned require a worker that keeps running"
            );
            ensure!(!self.storm.is_empty(), "invariants: flat and returned require a storm");
            ensure!(self.load == LoadMix::Requests, "invariants: flat and returned require load: requests");
        }
        Ok(())
    }
}

impl FaultSpec {
    /// Whether the fault lasts until its repair.
    fn is_repaired(&self) -> bool {
        !matches!(self, Self::Kill(FaultTarget::Executor) | Self::Restart(_) | Self::Device(_))
    }
}

fn is_a_name(name: &str) -> anyhow::Result<()> {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    ensure!(
        !name.is_empty() && name.len() <= 40 && name.bytes().all(fits),
        "{name:?} is not a name: write 1 to 40 characters of a to z, 0 to 9 and -"
    );
    Ok(())
}
