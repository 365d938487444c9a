//! What takes its time: drains of nodes and changes of the controller group. A drain begins with the
//! wish, and ends when nothing is placed on the node, by whichever command that comes about; a change of
//! the group is begun and ended by the controller that makes it. How far a drain is follows from the
//! placements.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use millrace_types::NodeName;
/// Of drains there is one for each node that is drained, beside the changes of the group.
pub use millrace_types::limits::OPERATIONS_MAX;
use serde::{Deserialize, Serialize};

use crate::command::{Caller, UnixMillis};
use crate::invariants::Violation;
use crate::outcome::Refusal;
use crate::record::{ControllerId, Scheduling};
use crate::state::{Context, State};

/// How long a change of the group may run: far longer than its maker takes. One that is older was left
/// behind by a maker that is gone.
pub const OPERATION_LIFE_MAX: Duration = Duration::from_secs(600);
/// How long an operation is kept after its end.
pub const OPERATION_TTL: Duration = Duration::from_secs(24 * 3600);

/// What takes its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    /// What a node has moves elsewhere.
    DrainNode {
        /// Which.
        node: NodeName,
    },
    /// A learner becomes a voter.
    PromoteController {
        /// Which.
        id: ControllerId,
    },
    /// A controller leaves the group.
    RemoveController {
        /// Which.
        id: ControllerId,
    },
}

/// How an operation ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// It did what it was to do.
    Succeeded,
    /// It did not.
    Failed {
        /// Why.
        why: String,
    },
    /// Somebody ended it before its time.
    Cancelled,
}

/// An operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Operation {
    /// The state's version when it began: never given twice.
    pub id: u64,
    /// What it does.
    pub kind: Kind,
    /// Steps there were when it began: functions to move; 0 where there is nothing to count.
    pub total: u64,
    /// Steps that were done at its end, where it was ended before its time.
    #[serde(default)]
    pub done: u64,
    /// When it began.
    pub started_at: UnixMillis,
    /// Who began it.
    pub started_by: Caller,
    /// How and when it ended. `None` while it runs.
    #[serde(default)]
    pub ended: Option<(UnixMillis, End)>,
}

impl Operation {
    /// Whether it goes on.
    #[must_use]
    pub fn runs(&self) -> bool {
        self.ended.is_none()
    }

    /// Whether somebody may end it before its time.
    #[must_use]
    pub fn is_cancellable(&self) -> bool {
        self.runs() && matches!(self.kind, Kind::DrainNode { .. })
    }
}

impl State {
    /// One operation.
    #[must_use]
    pub fn operation(&self, id: u64) -> Option<&Arc<Operation>> {
        self.operations.get(&id)
    }

    /// Every operation that is kept, the oldest first.
    pub fn operations(&self) -> impl DoubleEndedIterator<Item = &Arc<Operation>> {
        self.operations.values()
    }

    /// The drain of a node that is under way.
    #[must_use]
    pub fn drain_of(&self, name: &NodeName) -> Option<&Arc<Operation>> {
        let drains = |it: &&Arc<Operation>| matches!(&it.kind, Kind::DrainNode { node } if node == name);
        self.operations.values().filter(|it| it.runs()).find(drains)
    }

    /// How many steps of an operation are done.
    #[must_use]
    pub fn steps_done(&self, operation: &Operation) -> u64 {
        match (&operation.ended, &operation.kind) {
            (Some((_, End::Succeeded)), _) => operation.total,
            (Some(_), _) => operation.done,
            (None, Kind::DrainNode { node }) => {
                operation.total.saturating_sub(self.placements.on(node).count() as u64)
            }
            (None, _) => 0,
        }
    }

    /// Refuses to begin another change of the group while as many are under way as may be.
    pub(crate) fn check_changes(&self) -> Result<(), Refusal> {
        let changes = self.operations.values().filter(|it| it.runs() && !it.is_cancellable());
        if changes.count() >= OPERATIONS_MAX {
            return Err(Refusal::ChangesUnderWay { limit: OPERATIONS_MAX as u64 });
        }
        Ok(())
    }

    /// Begins an operation under the state's version.
    pub(crate) fn begin_operation(&mut self, context: Context<'_>, kind: Kind) {
        let total = match &kind {
            Kind::DrainNode { node } => self.placements.on(node).count() as u64,
            Kind::PromoteController { .. } | Kind::RemoveController { .. } => 0,
        };
        let operation = Operation {
            id: self.version,
            kind,
            total,
            done: 0,
            started_at: context.now,
            started_by: context.caller.clone(),
            ended: None,
        };
        self.operations.insert(operation.id, Arc::new(operation));
    }

    /// Ends an operation that runs. Of too many that have ended, the first to have is forgotten.
    pub(crate) fn end_operation(&mut self, id: u64, at: UnixMillis, end: End) {
        let done = self.operation(id).map_or(0, |it| self.steps_done(it));
        if self.operation(id).is_some_and(|it| it.runs()) {
            self.operations.change(&id, |operation| {
                operation.done = done;
                operation.ended = Some((at, end));
            });
        }
        let ended = || self.operations.values().filter_map(|it| Some((it.ended.as_ref()?.0, it.id)));
        if ended().count() > OPERATIONS_MAX
            && let Some((_, id)) = ended().min()
        {
            self.operations.remove(&id);
        }
    }

    /// Ends the drains that a command brought to their end: what was to leave has left, the node is gone,
    /// or somebody wishes otherwise.
    pub(crate) fn settle_operations(&mut self) {
        let end = |it: &Arc<Operation>| {
            let Kind::DrainNode { node: name } = &it.kind else { return None };
            let node = self.nodes.get(name);
            let draining = node.is_none_or(|node| node.scheduling == Scheduling::Draining);
            let empty = self.placements.on(name).next().is_none();
            let end = match (draining, empty) {
                (false, _) => End::Cancelled,
                (true, true) => End::Succeeded,
                (true, false) => return None,
            };
            Some((it.id, end))
        };
        let ends: Vec<_> = self.operations.values().filter(|it| it.runs()).filter_map(end).collect();
        for (id, end) in ends {
            self.end_operation(id, self.clock, end);
        }
    }

    /// Forgets what ended long ago, and ends what nobody will.
    pub(crate) fn expire_operations(&mut self) {
        let now = self.clock;
        let left = |it: &&Arc<Operation>| {
            let drains = matches!(it.kind, Kind::DrainNode { .. });
            it.runs() && !drains && now.since(it.started_at) >= OPERATION_LIFE_MAX
        };
        let left: Vec<_> = self.operations.values().filter(left).map(|it| it.id).collect();
        for id in left {
            let why = "the controller that made it is gone, and did not say how it ended";
            self.end_operation(id, now, End::Failed { why: why.to_owned() });
        }
        let old =
            |it: &&Arc<Operation>| it.ended.as_ref().is_some_and(|(at, _)| now.since(*at) >= OPERATION_TTL);
        let old: Vec<_> = self.operations.values().filter(old).map(|it| it.id).collect();
        for id in old {
            self.operations.remove(&id);
        }
    }

    pub(crate) fn check_operation_records(&self) -> Result<(), Violation> {
        let mut drained = BTreeSet::new();
        for (&id, operation) in &self.operations {
            let named = || format!("operation {id}");
            if id != operation.id || id == 0 || id > self.version {
                return Err(Violation::Misfiled(named()));
            }
            let ended = operation.ended.as_ref().map_or(operation.started_at, |(at, _)| *at);
            if operation.started_at > ended || ended > self.clock {
                return Err(Violation::Future(named()));
            }
            let Kind::DrainNode { node } = &operation.kind else { continue };
            if operation.runs() && (self.placements.on(node).next().is_none() || !drained.insert(node)) {
                return Err(Violation::Stray(named()));
            }
        }
        Ok(())
    }
}
