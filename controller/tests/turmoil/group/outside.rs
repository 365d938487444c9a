//! What the hosts of a run and the run itself have in common.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use millrace_cluster_state::Command;
use millrace_controller::sim::Watch;
use millrace_types::{Epoch, NodeName};
use tokio::time::sleep;

use crate::history::{
    Acknowledged, Created, Journal, Moments, NodeAnswer, RegisterAnswer, RegisterAsked, Registered, Sent,
    Told,
};
use crate::workers::Process;

/// A change of the group in the midst of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Regrouping {
    /// Who joins, as a learner.
    pub(crate) joins: u64,
    /// Whether it becomes a voter.
    pub(crate) promotes: bool,
    /// Who is removed in the end.
    pub(crate) removes: Option<u64>,
}

/// What the hosts and the run have in common: what is seen, and what is known to all.
pub(crate) struct Outside {
    pub(crate) controllers: u64,
    pub(crate) regrouping: Option<Regrouping>,
    /// Whether who joins is to do so; who was removed; how many changes were acknowledged.
    pub(crate) joining: Cell<bool>,
    pub(crate) retired: Cell<Option<u64>>,
    pub(crate) regrouped: Cell<usize>,
    pub(crate) moments: Moments,
    pub(crate) creations: Journal<String, Created>,
    pub(crate) registers: Journal<RegisterAsked, RegisterAnswer>,
    pub(crate) nodes: Journal<Command, NodeAnswer>,
    /// The epochs that each node was given.
    pub(crate) epochs: RefCell<BTreeMap<NodeName, BTreeSet<Epoch>>>,
    /// The function that was created when all was well again.
    pub(crate) last_word: RefCell<Option<String>>,
    pub(crate) registered: RefCell<BTreeSet<Registered>>,
    pub(crate) told: RefCell<Vec<Told>>,
    pub(crate) sent: RefCell<Sent>,
    pub(crate) acknowledged: RefCell<Vec<Acknowledged>>,
    pub(crate) goodbyes: RefCell<BTreeSet<String>>,
    /// The workers' processes that are up, by machine.
    pub(crate) processes: RefCell<BTreeMap<u64, Rc<Process>>>,
    /// Machines whose worker stands still, and those whose worker is to leave.
    pub(super) stalling: RefCell<BTreeSet<u64>>,
    pub(super) leaving: RefCell<BTreeSet<u64>>,
    pub(super) entered: RefCell<BTreeSet<u64>>,
    pub(super) watches: RefCell<BTreeMap<u64, Watch>>,
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

    /// Whether a controller ever was a member.
    pub(crate) fn has_entered(&self, id: u64) -> bool {
        self.entered.borrow().contains(&id)
    }

    /// Every controller that there may be.
    pub(crate) fn members(&self) -> impl Iterator<Item = u64> + use<> {
        (1..=self.controllers).chain(self.regrouping.map(|change| change.joins))
    }

    /// Whether a machine's worker stands still.
    pub(crate) fn stalls(&self, machine: u64) -> bool {
        self.stalling.borrow().contains(&machine)
    }

    /// Whether a machine's worker is to leave.
    pub(crate) fn leaves(&self, machine: u64) -> bool {
        self.leaving.borrow().contains(&machine)
    }

    /// Waits until all controllers are members.
    pub(crate) async fn formed(&self) {
        while !self.is_formed() {
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Whether nothing goes wrong any more, and nothing more is to be asked.
    pub(crate) fn is_calm(&self) -> bool {
        self.calm.get()
    }

    /// Simulated time since the beginning.
    pub(crate) fn elapsed(&self) -> Duration {
        turmoil::sim_elapsed().unwrap_or_default()
    }
}
