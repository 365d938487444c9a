//! Long-running operations: drains of nodes, changes of the controller group, and profiles. A drain begins
//! when an operator sets the node to draining, and ends when no function is placed on the node,
//! whichever command removes the last one. A controller that changes the group begins and ends the
//! operation itself. The leader carries out a profile's trials, and ends the operation. The progress of a
//! drain follows from the placements, that of a profile from the recorded trials.

use std::sync::Arc;
use std::time::Duration;

/// Maximum number of running changes of the group, of running profiles, and of ended operations. Each
/// draining node has a drain besides.
pub use millrace_types::limits::OPERATIONS_MAX;
use millrace_types::profile::{PROFILE_POINTS_MAX, PROFILE_WIDTHS};
use millrace_types::{Digest, FunctionKey, NodeName};

use crate::context::CommandContext;
pub use crate::operation_record::{OperationKind, OperationRecord, OperationResult};
use crate::outcome::{CommandRefusal, RUNNING_PROFILES};
use crate::record::SchedulingState;
use crate::state::State;
use crate::time::UnixMillis;

/// Maximum duration of a change of the group, far longer than any change lasts. An older operation
/// was left behind by a controller that no longer runs.
pub const OPERATION_LIFE_MAX: Duration = Duration::from_secs(600);
/// Maximum duration of a profile.
pub const PROFILE_LIFE_MAX: Duration = Duration::from_secs(3600);
/// Time for which an operation is kept after its end.
pub const OPERATION_TTL: Duration = Duration::from_secs(24 * 3600);

impl State {
    #[must_use]
    pub fn operation(&self, id: u64) -> Option<&Arc<OperationRecord>> {
        self.operations.get(&id)
    }

    /// Returns every stored operation, oldest first.
    pub fn operations(&self) -> impl DoubleEndedIterator<Item = &Arc<OperationRecord>> {
        self.operations.values()
    }

    /// Returns the running drain of a node.
    #[must_use]
    pub fn drain_of(&self, name: &NodeName) -> Option<&Arc<OperationRecord>> {
        let drains = |it: &&Arc<OperationRecord>| matches!(&it.kind, OperationKind::DrainNode { node } if node == name);
        self.operations.values().filter(|it| it.is_running()).find(drains)
    }

    /// Returns the number of steps of an operation that are done.
    #[must_use]
    pub fn steps_done(&self, operation: &OperationRecord) -> u64 {
        match (&operation.ended, &operation.kind) {
            (Some((_, OperationResult::Succeeded)), _) => operation.total,
            (Some(_), _) => operation.done,
            (None, OperationKind::DrainNode { node }) => {
                operation.total.saturating_sub(self.placements.on(node).count() as u64)
            }
            (None, OperationKind::ProfileFunction { digest, .. }) => {
                let profiles = self.artifacts.get(digest).map(|artifact| artifact.profiles.iter());
                let own = profiles.into_iter().flatten().filter(|profile| profile.operation == operation.id);
                own.map(|profile| profile.points.len() as u64).sum()
            }
            (None, _) => 0,
        }
    }

    /// Refuses to begin a profile of a model that is not the function's, or has a profile under way, or while
    /// too many profiles are under way.
    pub(crate) fn check_profile(&self, function: &FunctionKey, digest: Digest) -> Result<(), CommandRefusal> {
        let known = self.functions.get(function);
        let known = known.ok_or_else(|| CommandRefusal::FunctionNotFound { key: function.clone() })?;
        let refused = |problem: String| Err(CommandRefusal::InvalidSpec { problem });
        if known.latest().digest != digest {
            return refused(format!("{function} has got another model: try again"));
        }
        let running = self.operations.values().filter(|it| it.is_running());
        let profiles = running.filter_map(|it| match &it.kind {
            OperationKind::ProfileFunction { digest, .. } => Some((it.id, *digest)),
            _ => None,
        });
        let profiles: Vec<_> = profiles.collect();
        if let Some((id, _)) = profiles.iter().find(|(_, of)| *of == digest) {
            return refused(format!(
                "operation {id} is profiling this model: wait for it with 'millrace operation wait {id}', or end it with 'millrace operation cancel {id}'"
            ));
        }
        if profiles.len() >= OPERATIONS_MAX {
            return Err(CommandRefusal::full(RUNNING_PROFILES, OPERATIONS_MAX));
        }
        Ok(())
    }

    /// Refuses to begin another change of the group while the maximum number is under way.
    pub(crate) fn check_changes(&self) -> Result<(), CommandRefusal> {
        let changes = self.operations.values().filter(|it| it.is_running() && !it.is_cancellable());
        if changes.count() >= OPERATIONS_MAX {
            return Err(CommandRefusal::ChangesUnderWay { limit: OPERATIONS_MAX as u64 });
        }
        Ok(())
    }

    /// Begins an operation, with the state's version as its id.
    pub(crate) fn begin_operation(&mut self, context: CommandContext<'_>, kind: OperationKind) {
        let total = match &kind {
            OperationKind::DrainNode { node } => self.placements.on(node).count() as u64,
            OperationKind::PromoteController { .. } | OperationKind::RemoveController { .. } => 0,
            OperationKind::ProfileFunction { grid: true, .. } => PROFILE_POINTS_MAX as u64,
            OperationKind::ProfileFunction { .. } => PROFILE_WIDTHS.len() as u64,
        };
        let operation = OperationRecord {
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

    /// Ends a running operation. If too many operations have ended, the operation that ended first is
    /// forgotten.
    pub(crate) fn end_operation(&mut self, id: u64, at: UnixMillis, end: OperationResult) {
        let done = self.operation(id).map_or(0, |it| self.steps_done(it));
        if self.operation(id).is_some_and(|it| it.is_running()) {
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

    /// Ends the drains that a command completed or cancelled, and the profiles of functions that are gone. A
    /// drain is complete if no function is placed on the node, or the node was removed. A drain is
    /// cancelled if the node is no longer set to draining.
    pub(crate) fn settle_operations(&mut self) {
        let end = |it: &Arc<OperationRecord>| {
            if let OperationKind::ProfileFunction { function, .. } = &it.kind {
                let gone = !self.functions.contains_key(function);
                let why = || format!("function {function} was deleted");
                return gone.then(|| (it.id, OperationResult::Failed { why: why() }));
            }
            let OperationKind::DrainNode { node: name } = &it.kind else { return None };
            let node = self.nodes.get(name);
            let draining = node.is_none_or(|node| node.scheduling == SchedulingState::Draining);
            let empty = self.placements.on(name).next().is_none();
            let end = match (draining, empty) {
                (false, _) => OperationResult::Cancelled,
                (true, true) => OperationResult::Succeeded,
                (true, false) => return None,
            };
            Some((it.id, end))
        };
        let ends: Vec<_> = self.operations.values().filter(|it| it.is_running()).filter_map(end).collect();
        for (id, end) in ends {
            self.end_operation(id, self.clock, end);
        }
    }

    /// Forgets operations that ended long ago, and ends changes of the group whose controller no
    /// longer runs.
    pub(crate) fn expire_operations(&mut self) {
        let now = self.clock;
        let left = |it: &Arc<OperationRecord>| {
            let (life, why) = match it.kind {
                OperationKind::DrainNode { .. } => return None,
                OperationKind::ProfileFunction { .. } => {
                    (PROFILE_LIFE_MAX, "other requests left the trials too little of the GPUs for an hour")
                }
                OperationKind::PromoteController { .. } | OperationKind::RemoveController { .. } => {
                    (OPERATION_LIFE_MAX, "the controller that made it is gone, and did not say how it ended")
                }
            };
            (it.is_running() && now.since(it.started_at) >= life).then_some((it.id, why))
        };
        let left: Vec<_> = self.operations.values().filter_map(left).collect();
        for (id, why) in left {
            self.end_operation(id, now, OperationResult::Failed { why: why.to_owned() });
        }
        let old = |it: &&Arc<OperationRecord>| {
            it.ended.as_ref().is_some_and(|(at, _)| now.since(*at) >= OPERATION_TTL)
        };
        let old: Vec<_> = self.operations.values().filter(old).map(|it| it.id).collect();
        for id in old {
            self.operations.remove(&id);
        }
    }
}
