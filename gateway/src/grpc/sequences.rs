//! The order of requests of a sequence on a stream: each request begins when the previous one is
//! answered, so that requests reach their function's worker in the order in which the client sent
//! them. Requests of other sequences, and without a sequence, run concurrently.
//!
//! Bounded: finished sequences are forgotten as soon as the table has as many entries as requests in
//! progress.

use std::collections::BTreeMap;

use millrace_proto::inference::ModelInferRequest;
use millrace_types::SequenceId;
use tokio::sync::oneshot;

use crate::parameters::{ParameterValue, SEQUENCE_ID, sequence_id};

/// Signals the end of a request when the sender is dropped.
type EndSignal = oneshot::Receiver<()>;

/// The last request of each sequence of each model.
#[derive(Debug)]
pub(super) struct StreamSequences {
    last: BTreeMap<(String, SequenceId), EndSignal>,
    under_way_max: usize,
}

/// The position of a request behind another request of the same sequence. Dropping the value lets the next
/// request begin.
#[derive(Debug, Default)]
pub(super) struct Place {
    before: Option<EndSignal>,
    _under_way: Option<oneshot::Sender<()>>,
}

impl StreamSequences {
    /// Creates the table for a stream with at most `under_way_max` requests in progress.
    pub(super) fn new(under_way_max: usize) -> Self {
        Self { last: BTreeMap::new(), under_way_max }
    }

    /// Adds the next request. A request with an invalid sequence is not ordered, because it is
    /// refused when it runs.
    pub(super) fn follow(&mut self, request: &ModelInferRequest) -> Place {
        let id = request.parameters.get(SEQUENCE_ID).map(|given| sequence_id(ParameterValue::from(given)));
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
    /// Waits until the previous request of the sequence has ended.
    pub(super) async fn first(&mut self) {
        if let Some(before) = self.before.take() {
            // No value is ever sent: the error is the signal.
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
    fn a_request_begins_when_the_previous_request_of_its_sequence_ends() {
        let mut sequences = StreamSequences::new(8);
        let mut follow = |model, id| sequences.follow(&request(model, id));
        let mut first = follow("m", ParameterChoice::Int64Param(7));
        // The same number in another integer type.
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
    fn the_next_request_waits_for_the_last_and_ended_sequences_are_forgotten() {
        let mut sequences = StreamSequences::new(2);
        let first = sequences.follow(&request("m", ParameterChoice::Int64Param(1)));
        for id in 2..100 {
            drop(sequences.follow(&request("m", ParameterChoice::Int64Param(id))));
            assert!(sequences.last.len() <= 3);
        }
        let mut second = sequences.follow(&request("m", ParameterChoice::Int64Param(1)));
        let mut waiting = Box::pin(second.first());
        assert!(waiting.as_mut().now_or_never().is_none(), "the previous request has not ended");
        drop(first);
        assert!(waiting.now_or_never().is_some());
    }
}
