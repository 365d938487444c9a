//! A policy core inside an actor. If the node keeps a trace, each step of the core is folded into the
//! trace.

use std::sync::{Arc, Mutex, PoisonError};

use millrace_core::Core;
use millrace_core::trace::{CoreId, CoreTrace};
use millrace_types::Timestamp;

/// The trace that all cores of a node fold their steps into. Tests compare the traces of two runs.
pub type SharedTrace = Arc<Mutex<CoreTrace>>;

/// A core and the actions of its last event.
pub(crate) struct TracedCore<C: Core> {
    pub(crate) core: C,
    id: CoreId,
    trace: Option<SharedTrace>,
    actions: Vec<C::Action>,
}

impl<C: Core> TracedCore<C> {
    pub(crate) fn new(core: C, id: CoreId, trace: Option<SharedTrace>) -> Self {
        Self { core, id, trace, actions: Vec::new() }
    }

    /// Lets the core handle an event and returns its actions. The caller returns the emptied vector with
    /// [`Self::done`], so that the next step reuses its memory.
    pub(crate) fn step(&mut self, now: Timestamp, event: C::Event) -> Vec<C::Action> {
        let mut actions = std::mem::take(&mut self.actions);
        match &self.trace {
            None => self.core.on_event(now, event, &mut actions),
            Some(trace) => {
                let mut trace = trace.lock().unwrap_or_else(PoisonError::into_inner);
                trace.step(self.id, &mut self.core, now, event, &mut actions);
            }
        }
        actions
    }

    pub(crate) fn done(&mut self, mut actions: Vec<C::Action>) {
        actions.clear();
        self.actions = actions;
    }

    pub(crate) fn next_wake(&self) -> Option<Timestamp> {
        self.core.next_wake()
    }
}
