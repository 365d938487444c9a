//! The data that the hosts of a run share with the run.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use millrace_cluster_state::StateCommand;
use millrace_controller::sim::MemberView;
use millrace_types::{Epoch, NodeName};
use tokio::time::sleep;

use crate::history::{
    Acknowledged, Created, Journal, Moments, NodeAnswer, RegisterAnswer, RegisterAsked, Registered, Sent,
    Told,
};
use crate::workers::Process;

/// The membership changes in the middle of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Regrouping {
    /// The controller that joins as a learner.
    pub(crate) joins: u64,
    /// Whether the joining controller becomes a voter.
    pub(crate) promotes: bool,
    /// The controller that is removed at the end, if any.
    pub(crate) removes: Option<u64>,
}

/// Observations of the hosts, and facts known to all hosts.
pub(crate) struct Outside {
    pub(crate) controllers: u64,
    pub(crate) regrouping: Option<Regrouping>,
    /// Whether the joining controller shall start to join.
    pub(crate) joining: Cell<bool>,
    /// The removed controller.
    pub(crate) retired: Cell<Option<u64>>,
    /// The number of acknowledged membership changes.
    pub(crate) regrouped: Cell<usize>,
    pub(crate) moments: Moments,
    pub(crate) creations: Journal<String, Created>,
    pub(crate) registers: Journal<RegisterAsked, RegisterAnswer>,
    pub(crate) nodes: Journal<StateCommand, NodeAnswer>,
    /// The epochs that each node was given.
    pub(crate) epochs: RefCell<BTreeMap<NodeName, BTreeSet<Epoch>>>,
    /// The function that was created after everything was repaired.
    pub(crate) last_word: RefCell<Option<String>>,
    pub(crate) registered: RefCell<BTreeSet<Registered>>,
    pub(crate) told: RefCell<Vec<Told>>,
    pub(crate) sent: RefCell<Sent>,
    pub(crate) acknowledged: RefCell<Vec<Acknowledged>>,
    pub(crate) goodbyes: RefCell<BTreeSet<String>>,
    /// The running processes of workers, by machine.
    pub(crate) processes: RefCell<BTreeMap<u64, Rc<Process>>>,
    /// Machines with a stopped worker.
    pub(super) stalling: RefCell<BTreeSet<u64>>,
    /// Machines with a worker that shall say goodbye.
    pub(super) leaving: RefCell<BTreeSet<u64>>,
    pub(super) entered: RefCell<BTreeSet<u64>>,
    pub(super) watches: RefCell<BTreeMap<u64, MemberView>>,
    pub(super) calm: Cell<bool>,
}

impl Outside {
    pub(super) fn new(controllers: u64, regrouping: Option<Regrouping>) -> Self {
        let moments = Moments::default();
        Self {
            controllers,
            regrouping,
            joining: Cell::default(),
            retired: Cell::default(),
            regrouped: Cell::default(),
            creations: Journal::new(moments.clone()),
            registers: Journal::new(moments.clone()),
            nodes: Journal::new(moments.clone()),
            moments,
            epochs: RefCell::default(),
            last_word: RefCell::default(),
            registered: RefCell::default(),
            told: RefCell::default(),
            sent: RefCell::default(),
            acknowledged: RefCell::default(),
            goodbyes: RefCell::default(),
            processes: RefCell::default(),
            stalling: RefCell::default(),
            leaving: RefCell::default(),
            entered: RefCell::default(),
            watches: RefCell::default(),
            calm: Cell::default(),
        }
    }

    pub(super) fn is_formed(&self) -> bool {
        (1..=self.controllers).all(|id| self.has_entered(id))
    }

    /// Whether a controller has ever been a member.
    pub(crate) fn has_entered(&self, id: u64) -> bool {
        self.entered.borrow().contains(&id)
    }

    /// Returns all controllers, including the controller that may join.
    pub(crate) fn members(&self) -> impl Iterator<Item = u64> + use<> {
        (1..=self.controllers).chain(self.regrouping.map(|change| change.joins))
    }

    /// Whether a machine's worker is stopped.
    pub(crate) fn stalls(&self, machine: u64) -> bool {
        self.stalling.borrow().contains(&machine)
    }

    /// Whether a machine's worker shall say goodbye.
    pub(crate) fn leaves(&self, machine: u64) -> bool {
        self.leaving.borrow().contains(&machine)
    }

    /// Waits until all controllers are members.
    pub(crate) async fn formed(&self) {
        while !self.is_formed() {
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether everything is repaired, so that clients stop.
    pub(crate) fn is_calm(&self) -> bool {
        self.calm.get()
    }

    /// Returns the simulated time since the beginning.
    pub(crate) fn elapsed(&self) -> Duration {
        turmoil::sim_elapsed().unwrap_or_default()
    }
}
