//! The objectives of transfers (D14): the deadline of the waiting request, and the expected duration of the
//! request's run, which has to fit between the end of the transfer and the deadline.

use std::time::Duration;

use millrace_core::ids::RequestKey;
use millrace_transfers::rates::TransferObjective;
use millrace_types::Timestamp;

use super::actor::NodeActor;
use crate::object_handle::{AnsweredRequest, TransferRequester};

/// Returns the objective of bytes that another worker fetches. The duration of that worker's run is unknown
/// here, and counts as zero.
pub(super) fn of_elsewhere(now: Timestamp, by: Timestamp) -> TransferObjective {
    TransferObjective { slo: by.since(now), infer: Duration::ZERO }
}

impl NodeActor {
    /// Returns the objective of bytes that a request's run waits for. In a batch the earliest deadline
    /// counts. Returns `None` if no request of the batch has a deadline.
    pub(super) fn objective(&self, now: Timestamp, reader: RequestKey) -> Option<TransferObjective> {
        let members = self.dispatch.core.members(reader);
        let works = members.iter().filter_map(|key| Some(&self.entries.get(key)?.work));
        let wanted = works.filter_map(|work| Some((self.wanted_by(&work.answered())?, work.model)));
        let (by, model) = wanted.min()?;
        let dispatch = self.dispatch.core.dispatch();
        // Before the first run of a model its run has no prediction.
        let infer = dispatch.predicted_run(model, dispatch.rows(reader)).unwrap_or_default();
        Some(TransferObjective { slo: by.since(now), infer })
    }

    /// Returns the objective of bytes that belong to the answer of a request that has run.
    pub(super) fn answer_objective(
        &self,
        now: Timestamp,
        request: &AnsweredRequest,
    ) -> Option<TransferObjective> {
        let by = self.wanted_by(request)?;
        Some(TransferObjective { slo: by.since(now), infer: Duration::ZERO })
    }

    /// Returns the objective of inputs that are gathered before their request is enqueued. The prediction
    /// assumes that the request runs alone, because its batch is not known yet.
    pub(super) fn inputs_objective(
        &self,
        now: Timestamp,
        asker: &TransferRequester,
    ) -> Option<TransferObjective> {
        let by = self.asked_by(asker)?;
        let model = self.state.model_of(&asker.revision);
        let run = model.and_then(|model| self.dispatch.core.dispatch().predicted_run(model, 1));
        Some(TransferObjective { slo: by.since(now), infer: run.unwrap_or_default() })
    }

    /// Returns the objective of bytes that a program reads, or that are part of an answer. The duration
    /// of a program's work is unknown, and counts as zero.
    pub(super) fn outside_objective(
        &self,
        now: Timestamp,
        asker: &TransferRequester,
    ) -> Option<TransferObjective> {
        Some(TransferObjective { slo: self.asked_by(asker)?.since(now), infer: Duration::ZERO })
    }

    fn asked_by(&self, asker: &TransferRequester) -> Option<Timestamp> {
        let own = asker.objective;
        let objective = own.or_else(|| self.state.deadline_of_revision(&asker.revision))?;
        Some(asker.came + objective)
    }

    /// Returns the time by which the answer of a request is due.
    pub(super) fn wanted_by(&self, request: &AnsweredRequest) -> Option<Timestamp> {
        let own = request.objective;
        let objective = own.or_else(|| self.state.deadline_of(request.function))?;
        Some(request.accepted + objective)
    }
}
