//! The state of the leader's duties: the inputs, and the publication of the results.

use std::sync::Arc;

use millrace_nodes::lease;
use millrace_nodes::placement::MeasuredTraffic;
use millrace_nodes::scaling::ScalingSignal;
use tokio::sync::watch;

use crate::fleet::WorkerFleet;
use crate::leadership::{DesiredStates, LeaderStatus, Leadership, LeaseStates, MissingSlices, Shortages};
use crate::passed::TrafficMatrix;
use crate::raft::Replica;

/// The task of the leader's duties.
#[derive(Debug)]
pub(crate) struct Duties {
    pub(super) replica: Replica,
    pub(super) fleet: WorkerFleet,
    pub(super) limits: lease::LeaseLimits,
    /// The traffic of the runs that this controller drives.
    pub(super) passed: TrafficMatrix,
    /// The traffic of the runs of all controllers, as collected while this controller led.
    pub(super) measured: watch::Sender<MeasuredTraffic>,
    pub(super) leadership: watch::Sender<Leadership>,
    pub(super) desired: watch::Sender<Option<Arc<DesiredStates>>>,
    pub(super) lease_states: watch::Sender<LeaseStates>,
    pub(super) shortages: watch::Sender<Shortages>,
    pub(super) missing_slices: watch::Sender<MissingSlices>,
    pub(super) signal: watch::Sender<Option<ScalingSignal>>,
}

impl Duties {
    pub(crate) fn new(
        replica: Replica,
        fleet: WorkerFleet,
        limits: lease::LeaseLimits,
        passed: TrafficMatrix,
    ) -> Self {
        Self {
            replica,
            fleet,
            limits,
            passed,
            measured: watch::Sender::default(),
            leadership: watch::Sender::default(),
            desired: watch::Sender::default(),
            lease_states: watch::Sender::default(),
            shortages: watch::Sender::default(),
            missing_slices: watch::Sender::default(),
            signal: watch::Sender::default(),
        }
    }

    pub(crate) fn outlook(&self) -> LeaderStatus {
        LeaderStatus {
            leadership: self.leadership.subscribe(),
            desired: self.desired.subscribe(),
            lease_states: self.lease_states.subscribe(),
            shortages: self.shortages.subscribe(),
            missing_slices: self.missing_slices.subscribe(),
            signal: self.signal.subscribe(),
        }
    }
}
