//! By when what crosses links is wanted (D14): the time of the request that waits for it, less what its run
//! is expected to take.

use std::time::Duration;

use millrace_policy::ids::RequestKey;
use millrace_policy::rates::Objective;
use millrace_types::Timestamp;

use super::Node;
use crate::actors::work::Work;
use crate::request::Asker;

/// The objective of bytes that another worker fetches: how long its run takes is not said.
pub(super) fn of_elsewhere(now: Timestamp, by: Timestamp) -> Objective {
    Objective { slo: by.since(now), infer: Duration::ZERO }
}

impl Node {
    /// The objective of bytes that a request waits for, or the most pressing one of those that run with it.
    /// `None` where no answer is wanted by a certain time.
    pub(super) fn objective(&self, now: Timestamp, reader: RequestKey) -> Option<Objective> {
        let members = self.dispatch.core.members(reader);
        let works = members.iter().filter_map(|key| Some(&self.entries.get(key)?.work));
        let wanted = works.filter_map(|work| Some((self.wanted_by(work)?, work.model)));
        let (by, model) = wanted.min()?;
        let dispatch = self.dispatch.core.dispatch();
        // Before its first run nothing is known of it.
        let infer = dispatch.predicted_run(model, dispatch.rows(reader)).unwrap_or_default();
        Some(Objective { slo: by.since(now), infer })
    }

    /// The objective of bytes without which a request that has run is not answered.
    pub(super) fn answer_objective(&self, now: Timestamp, work: &Work) -> Option<Objective> {
        let by = self.wanted_by(work)?;
        Some(Objective { slo: by.since(now), infer: Duration::ZERO })
    }

    /// The objective of inputs that are put together before a request is in the queue: alone, as far as can
    /// be known.
    pub(super) fn inputs_objective(&self, now: Timestamp, asker: &Asker) -> Option<Objective> {
        let by = self.asked_by(asker)?;
        let model = self.supervisor.model_of(&asker.revision);
        let run = model.and_then(|model| self.dispatch.core.dispatch().predicted_run(model, 1));
        Some(Objective { slo: by.since(now), infer: run.unwrap_or_default() })
    }

    /// The objective of bytes that a program reads, or that are answered: what a program does with them
    /// nobody can say.
    pub(super) fn outside_objective(&self, now: Timestamp, asker: &Asker) -> Option<Objective> {
        Some(Objective { slo: self.asked_by(asker)?.since(now), infer: Duration::ZERO })
    }

    fn asked_by(&self, asker: &Asker) -> Option<Timestamp> {
        let own = asker.objective;
        let objective = own.or_else(|| self.supervisor.deadline_of_revision(&asker.revision))?;
        Some(asker.came + objective)
    }

    fn wanted_by(&self, work: &Work) -> Option<Timestamp> {
        let own = work.invocation.objective;
        let objective = own.or_else(|| self.supervisor.deadline_of(work.function))?;
        Some(work.accepted + objective)
    }
}
