//! Requests of one sequence on one stream: each begins when the one before is answered, so that they come
//! to their function's worker in the order in which their client sent them. Those of other sequences, and
//! of none, run beside them.
//!
//! Bounded: those that have an end are forgotten as soon as there are more than requests under way.

use std::collections::BTreeMap;

use millrace_proto::inference::ModelInferRequest;
use millrace_types::SequenceId;
use tokio::sync::oneshot;

use crate::parameters::{SEQUENCE_ID, Value, sequence_id};

/// Tells whoever waits that a request is over, by being dropped.
type Over = oneshot::Receiver<()>;

/// The last request of each sequence of each model.
#[derive(Debug)]
pub(super) struct Sequences {
    last: BTreeMap<(String, SequenceId), Over>,
    under_way_max: usize,
}

/// A request's place behind another. The next waits until it is dropped.
#[derive(Debug, Default)]
pub(super) struct Place {
    before: Option<Over>,
    _under_way: Option<oneshot::Sender<()>>,
}

impl Sequences {
    /// Of a stream that has so many requests under way at most.
    pub(super) fn new(under_way_max: usize) -> Self {
        Self { last: BTreeMap::new(), under_way_max }
    }

    /// Takes the next request's place. One whose sequence cannot be read is refused when it runs.
    pub(super) fn follow(&mut self, request: &ModelInferRequest) -> Place {
        let id = request.parameters.get(SEQUENCE_ID).map(|given| sequence_id(Value::from(given)));
        let Some(Ok(Some(id))) = id else { return Place::default() };
        if self.last.len() >= self.under_way_max {
            self.last.retain(|_, last| last.try_recv() == Err(oneshot::error::TryRecvError::Empty));
        }
        let (under_way, over) = oneshot::channel();
        let before = self.last.insert((request.model_name.clone(), id), over);
        Place { before, _under_way: Some(under_way) }
    }
}

impl Place {
    /// Waits until the one before is over.
    pub(super) async fn first(&mut self) {
        if let Some(before) = self.before.take() {
            // Nothing is ever sent: an error is its end.
            drop(before.await);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;
    use millrace_proto::inference::InferParameter;
    use millrace_proto::inference::infer_parameter::ParameterChoice;

    use super::*;

    fn request(model: &str, id: ParameterChoice) -> ModelInferRequest {
        let parameter = InferParameter { parameter_choice: Some(id) };
        let parameters = [(SEQUENCE_ID.to_owned(), parameter)].into();
        ModelInferRequest { model_name: model.into(), parameters, ..ModelInferRequest::default() }
    }

    #[test]
    fn a_request_begins_when_the_one_before_of_its_sequence_is_over() {
        let mut sequences = Sequences::new(8);
        let mut follow = |model, id| sequences.follow(&request(model, id));
        let mut first = follow("m", ParameterChoice::Int64Param(7));
        // The same number, however it is written.
        let mut second = follow("m", ParameterChoice::Uint64Param(7));
        let others = [
            follow("n", ParameterChoice::Int64Param(7)),
            follow("m", ParameterChoice::Int64Param(8)),
            follow("m", ParameterChoice::StringParam("7".into())),
            follow("m", ParameterChoice::Int64Param(0)),
            follow("m", ParameterChoice::Int64Param(0)),
            sequences.follow(&ModelInferRequest::default()),
        ];
        assert!(others.into_iter().all(|mut place| place.first().now_or_never().is_some()));
        assert!(first.first().now_or_never().is_some());
        assert!(second.first().now_or_never().is_none());
    }

    #[test]
    fn the_next_waits_for_the_last_and_those_that_are_over_are_forgotten() {
        let mut sequences = Sequences::new(2);
        let first = sequences.follow(&request("m", ParameterChoice::Int64Param(1)));
        for id in 2..100 {
            drop(sequences.follow(&request("m", ParameterChoice::Int64Param(id))));
            assert!(sequences.last.len() <= 3);
        }
        let mut second = sequences.follow(&request("m", ParameterChoice::Int64Param(1)));
        let mut waiting = Box::pin(second.first());
        assert!(waiting.as_mut().now_or_never().is_none(), "it is under way still");
        drop(first);
        assert!(waiting.now_or_never().is_some());
    }
}
