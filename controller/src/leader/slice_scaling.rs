//! The number of slices of each function whose number of slices follows the load (`slices.max`).
//!
//! The load is the device time of the function's slices, as workers report it, divided by the time of a run in the
//! function's profile. Without a profile, and while a new one is measured, the number stays as it is. Between two
//! runs a slice waits for the next request to be sent; the profile tells this time too.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{FunctionRecord, State};
use millrace_slices::profiling::MeasuredCurve;
use millrace_slices::scaling::{Capacity, CapacityTable, Observed, SliceBounds, SliceScaler, SliceSpeed};
use millrace_slices::units::Grid;
use millrace_types::profile::GpuProfile;
use millrace_types::{AskedSlices, FunctionKey, Permille, Timestamp};

use crate::fleet::Workers;

/// The interval between looks at the load.
pub(super) const SCALE_EVERY: Duration = Duration::from_secs(1);

/// The scalers of all functions whose number of slices follows the load.
#[derive(Debug, Default)]
pub(super) struct SliceScalers(BTreeMap<FunctionKey, ScaledFunction>);

#[derive(Debug)]
struct ScaledFunction {
    scaler: SliceScaler,
    /// `None` while the model has no profile.
    capacity: Option<CapacityTable>,
    count: u32,
}

/// The slices of a function by the last reports.
#[derive(Debug, Default, Clone, Copy)]
struct SliceLoad {
    slices: u32,
    reported: u32,
    busy_ns: u64,
    used_permille: u32,
}

impl SliceScalers {
    /// Looks at the loads. Returns whether a function should have another number of slices than before.
    pub(super) fn look(&mut self, now: Timestamp, state: &State, workers: &Workers) -> bool {
        let scaled = state.functions().filter(|function| function.enabled);
        let scaled: Vec<_> = scaled.filter_map(|it| Some((it, scaled_slices(it)?))).collect();
        let known = std::mem::take(&mut self.0);
        if scaled.is_empty() {
            return !known.is_empty();
        }
        let loads = loads(state, workers);
        let mut known = known;
        let mut changed = false;
        for (function, (asked, max)) in scaled {
            let key = &function.key;
            let load = loads.get(key).copied().unwrap_or_default();
            let bounds = SliceBounds { min: asked.min, max };
            let had = known.remove(key);
            let before = had.as_ref().map(|had| had.count);
            let (mut scaler, table) = match had {
                Some(had) => (had.scaler, had.capacity),
                None => (SliceScaler::new(now, load.slices.max(asked.min)), None),
            };
            let Some(speed) = run_speed(state, function, asked) else {
                let count = before.unwrap_or(load.slices).clamp(bounds.min, bounds.max);
                changed |= before != Some(count);
                self.0.insert(key.clone(), ScaledFunction { scaler, capacity: None, count });
                continue;
            };
            let capacity = capacity(function, asked, speed);
            let table = table.filter(|table| table.of() == capacity && table.slices_max() == max);
            let mut table = table.unwrap_or_else(|| CapacityTable::new(capacity, max));
            let run_ns = speed.run.as_nanos().max(1);
            let used = f64::from(load.used_permille) / 1000.0 / f64::from(load.reported.max(1));
            let seen = Observed {
                answered: u64::try_from(u128::from(load.busy_ns) / run_ns).unwrap_or(u64::MAX),
                used: (load.reported > 0).then_some(used / speed.utilisation),
                slices: load.slices,
            };
            let count = scaler.look(now, seen, asked.terms.limit(), &mut table, bounds);
            if before != Some(count) {
                tracing::info!(
                    function = %key,
                    slices = count,
                    before = before.unwrap_or(load.slices),
                    expected = scaler.expected(),
                    missed = scaler.missed(),
                    "the number of slices follows the load (requests a second)"
                );
                changed = true;
            }
            self.0.insert(key.clone(), ScaledFunction { scaler, capacity: Some(table), count });
        }
        changed || !known.is_empty()
    }

    /// Returns the number of slices that a function should have.
    pub(super) fn count(&self, function: &FunctionKey, asked: &AskedSlices) -> u32 {
        self.0.get(function).map_or(asked.min, |scaled| scaled.count)
    }
}

/// Returns the slices of a function whose number follows the load, and the greatest number.
pub(super) fn scaled_slices(function: &FunctionRecord) -> Option<(AskedSlices, u32)> {
    let asked = function.latest().spec.slices?;
    Some((asked, asked.scaled_max()?))
}

/// The speed of runs on a slice's SMs.
#[derive(Debug, Clone, Copy)]
pub(super) struct RunSpeed {
    /// The time that a run computes.
    run: Duration,
    /// The share of the time that a slice computes while requests wait.
    utilisation: f64,
}

/// Returns the speed of a function's runs on its slices; `None` without a profile. Among several types of GPUs the
/// slowest counts.
pub(super) fn run_speed(state: &State, function: &FunctionRecord, asked: AskedSlices) -> Option<RunSpeed> {
    let profiles = &state.artifact(&function.latest().digest)?.profiles;
    let units = Grid::Blocks16.units(asked.terms.least());
    let of_profile = |profile: &GpuProfile| {
        let run = MeasuredCurve::new(&profile.points).time_on(units)?;
        // The wait between two runs is about the same on every width.
        let whole = profile.points.iter().filter(|point| point.setting.quota() == Permille::ALL);
        let waits = whole.map(|point| point.elapsed.saturating_sub(point.computed) / point.runs.max(1));
        let wait = waits.min().unwrap_or_default();
        let utilisation = run.as_secs_f64() / (run + wait).as_secs_f64().max(1e-9);
        Some(RunSpeed { run, utilisation })
    };
    profiles.iter().filter_map(of_profile).max_by_key(|speed| speed.run)
}

/// Returns the objective of a function, and the speed of its slices.
fn capacity(function: &FunctionRecord, asked: AskedSlices, speed: RunSpeed) -> Capacity {
    let run = speed.run.div_f64(speed.utilisation.clamp(0.01, 1.0));
    let objective = function.latest().spec.slo.map(|slo| (slo.deadline, slo.percentile));
    Capacity { speed: SliceSpeed { run, limit: asked.terms.limit() }, objective }
}

fn loads(state: &State, workers: &Workers) -> BTreeMap<FunctionKey, SliceLoad> {
    let mut owners = BTreeMap::new();
    let mut loads: BTreeMap<FunctionKey, SliceLoad> = BTreeMap::new();
    for placement in state.placements().filter(|placement| !placement.slices.is_empty()) {
        let slices = u32::try_from(placement.slices.len()).unwrap_or(u32::MAX);
        loads.entry(placement.function.clone()).or_default().slices += slices;
        let function: &Arc<millrace_cluster_state::PlacementRecord> = placement;
        owners.extend(function.slices.iter().map(|slice| (slice.id.0, &function.function)));
    }
    let reports = workers.values().filter_map(|worker| worker.telemetry());
    for report in reports {
        for used in report.gpus.iter().flat_map(|gpu| &gpu.slices) {
            let Some(load) = owners.get(&used.id).and_then(|owner| loads.get_mut(*owner)) else { continue };
            load.reported += 1;
            load.busy_ns = load.busy_ns.saturating_add(used.busy_ns);
            load.used_permille += used.used_permille;
        }
    }
    loads
}

#[cfg(test)]
mod tests {
    use millrace_cluster_state::operations::OperationKind;
    use millrace_cluster_state::{
        NodeGpu, NodeSlice, PlacementReason, RulesVersion, SliceRecord, StateCommand,
    };
    use millrace_types::profile::{ProfilePoint, TrialSetting};
    use millrace_types::{Bytes, Epoch, GpuIndex, NodeName, SliceId, Terms};

    use super::*;
    use crate::fixtures::{apply, key, state};

    /// Returns a state in which `f` asks for one to four slices and has three.
    fn three_slices() -> State {
        let mut state = state(&["f"]);
        apply(&mut state, StateCommand::SetClusterVersion { version: RulesVersion::NEWEST });
        let node = NodeName::new("n1").unwrap();
        let gpu = NodeGpu { index: GpuIndex(0), gpu_type: "emulated".into(), memory: Bytes::gib(1) };
        apply(
            &mut state,
            StateCommand::RegisterNode {
                name: node.clone(),
                instance: "first".into(),
                address: "127.0.0.1:1".into(),
                gpus: vec![gpu],
                topology: String::new(),
                host_memory: Bytes::gib(1),
                seen: Epoch::default(),
            },
        );
        let reason = PlacementReason::MissingReplica;
        apply(&mut state, StateCommand::Place { function: key("f"), node: node.clone(), reason });
        let share = |thousandths| Permille::new(thousandths).unwrap();
        let terms = Terms::new(share(120), share(120), share(0), share(1000)).unwrap();
        let revision = state.function(&key("f")).unwrap().latest().clone();
        let slices = Some(AskedSlices { terms, min: 1, max: Some(4) });
        let spec = millrace_types::FunctionSpec { slices, ..revision.spec.clone() };
        let digest = revision.digest;
        apply(&mut state, StateCommand::ApplyFunction { spec, digest, expected: None, voters: Vec::new() });
        let slice = |id| NodeSlice {
            function: key("f"),
            slice: SliceRecord { id: SliceId(id), gpu: GpuIndex(0), terms },
        };
        apply(&mut state, StateCommand::SetSlices { node, slices: (1..=3).map(slice).collect() });
        state
    }

    /// Begins a profile of `f`, with runs of 10 ms on these widths.
    fn profile(state: &mut State, widths: &[u8]) {
        let digest = state.function(&key("f")).unwrap().latest().digest;
        let kind = OperationKind::ProfileFunction { function: key("f"), digest, grid: false };
        apply(state, StateCommand::BeginOperation { kind });
        let operation = state.version();
        for &units in widths {
            let time = Duration::from_millis(10);
            let point = ProfilePoint {
                runs: 100,
                p50: time,
                p99: time,
                elapsed: time * 100,
                computed: time * 100,
                ..ProfilePoint::new(TrialSetting::whole_time(units).unwrap())
            };
            apply(state, StateCommand::RecordTrial { operation, gpu_type: "emulated".into(), point });
        }
        let end = millrace_cluster_state::operations::OperationResult::Cancelled;
        apply(state, StateCommand::EndOperation { id: operation, end });
    }

    /// Looks each second for two minutes, and returns the number of slices at the end.
    fn after_two_minutes(scalers: &mut SliceScalers, state: &State, from: Timestamp) -> u32 {
        for second in 1..=120 {
            scalers.look(from + Duration::from_secs(second), state, &Workers::default());
        }
        let asked = state.function(&key("f")).unwrap().latest().spec.slices.unwrap();
        scalers.count(&key("f"), &asked)
    }

    #[test]
    fn slices_stay_while_no_profile_covers_them_and_leave_without_load() {
        let mut state = three_slices();
        let mut scalers = SliceScalers::default();
        let start = Timestamp::ZERO;
        assert_eq!(after_two_minutes(&mut scalers, &state, start), 3, "no profile");
        profile(&mut state, &[16]);
        let later = start + Duration::from_secs(120);
        assert_eq!(after_two_minutes(&mut scalers, &state, later), 3, "narrower widths are being measured");
        profile(&mut state, &[16, 1]);
        let last = later + Duration::from_secs(120);
        assert_eq!(after_two_minutes(&mut scalers, &state, last), 1, "no load");
    }
}
