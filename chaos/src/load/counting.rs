//! Clients of counters, which are functions that keep state. A client sends sequences of requests.
//! Each answer shows how many requests the state has counted, and to which sequence the state
//! belongs.
//!
//! A client follows docs/guide/sequences.md. A request that was not carried out and may be retried is
//! retried. After an error that the sequence has ended, the client restarts the sequence under the
//! same id. If a request may have been carried out, the client leaves the sequence for another id,
//! and the cluster ends the sequence for being idle.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use millrace_client::{Error, InferResponse, Inference};
use millrace_types::{InSequence, Reason, SequenceId};
use rand::Rng as _;

use super::client::{Client, error_name};
use super::counter::CounterFunction;
use crate::history::{SequenceRequest, SequenceRequestResult};

/// Number of sequences that a client has at a time.
const OPEN: u64 = 4;
/// Number of requests of a sequence.
const LENGTH: std::ops::RangeInclusive<u32> = 2..=12;
/// Numbers by which sequences are told apart. With [`LENGTH`], every count times its number is
/// exact in FP32.
const KEYS: u64 = 64;
/// Maximum time of a request with all its tries.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two requests, in milliseconds.
const THINK_MS: std::ops::Range<u64> = 5..30;
/// Pause between two tries, in milliseconds.
const AGAIN_MS: std::ops::Range<u64> = 20..100;

/// A client's progress in a sequence.
struct Sequence {
    id: String,
    key: f32,
    /// Number of answered requests.
    answered: u32,
    length: u32,
}

/// A client of a counter.
pub(super) struct CounterClient {
    pub(super) client: Client,
    pub(super) counter: CounterFunction,
    pub(super) steps: Arc<Mutex<Vec<SequenceRequest>>>,
}

impl CounterClient {
    /// Sends requests until the load stops, and then ends the open sequences.
    pub(super) async fn run(mut self) {
        let inference = Inference::new(self.client.endpoints.clone());
        let mut begun = 0;
        let mut open: Vec<Sequence> = (0..OPEN).map(|_| self.another(&mut begun)).collect();
        while self.client.think(THINK_MS).await {
            let at = self.client.rng.random_range(0..open.len());
            let last = open[at].answered + 1 == open[at].length;
            match self.step(&inference, &open[at], last).await {
                SequenceRequestResult::Counted if !last => open[at].answered += 1,
                // Both results restart the sequence under the same id.
                SequenceRequestResult::Counted | SequenceRequestResult::Over(_) => open[at].answered = 0,
                SequenceRequestResult::Miscounted(_)
                | SequenceRequestResult::Unclear(_)
                | SequenceRequestResult::Refused(_) => {
                    open[at] = self.another(&mut begun);
                }
            }
        }
        for sequence in open.iter().filter(|sequence| sequence.answered > 0) {
            self.step(&inference, sequence, true).await;
        }
    }

    /// Returns a sequence with a new id.
    fn another(&mut self, begun: &mut u64) -> Sequence {
        *begun += 1;
        let number = self.client.number;
        let key = u64::from(number) * KEYS + *begun % KEYS;
        let length = self.client.rng.random_range(LENGTH);
        Sequence { id: format!("{number}-{begun}"), key: key as f32, answered: 0, length }
    }

    /// Makes the next request of a sequence until its end, and records the request.
    async fn step(
        &mut self,
        inference: &Inference,
        sequence: &Sequence,
        last: bool,
    ) -> SequenceRequestResult {
        let place = sequence.answered + 1;
        let id = self.client.endpoints.next_id();
        let begun = self.client.timeline.now();
        let how = loop {
            let in_sequence =
                InSequence { id: SequenceId::Name(sequence.id.clone()), start: place == 1, end: last };
            let mut request = self.counter.request(sequence.key, in_sequence);
            request.id = Some(id.clone());
            let error = match inference.infer(request).await {
                Ok(answer) => break judge(&answer, place, sequence.key),
                Err(error) => error,
            };
            if let Some(ended) = became(&error) {
                break ended;
            }
            if self.client.timeline.now() - begun >= PATIENCE {
                break SequenceRequestResult::Refused(format!("given up, {}", error_name(&error)));
            }
            let pause = self.client.rng.random_range(AGAIN_MS);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        };
        let sequence = format!("{} of {}", sequence.id, self.counter.name);
        let step = SequenceRequest {
            sequence,
            place,
            last,
            begun,
            ended: self.client.timeline.now(),
            how: how.clone(),
        };
        self.steps.lock().unwrap_or_else(PoisonError::into_inner).push(step);
        how
    }
}

/// Returns the effect of an error on a request and its sequence; `None` if the request may be
/// retried.
fn became(error: &Error) -> Option<SequenceRequestResult> {
    match error.reason() {
        Some(Reason::SequenceNotFound | Reason::DataLost) => {
            Some(SequenceRequestResult::Over(error_name(error)))
        }
        // Two executors died during the request, so this may be a request that kills
        // executors.
        Some(Reason::Quarantined) => Some(SequenceRequestResult::Unclear(error_name(error))),
        _ if error.may_have_executed() => Some(SequenceRequestResult::Unclear(error_name(error))),
        _ if error.retryable() => None,
        _ => Some(SequenceRequestResult::Refused(error_name(error))),
    }
}

/// Returns the counter's output after this many requests of 1. The state is halved and 1 is added
/// with each request; the output is twice the state.
fn count(requests: u32) -> f32 {
    4.0 - 4.0 * 0.5_f32.powi(requests.cast_signed())
}

fn judge(answer: &InferResponse, place: u32, key: f32) -> SequenceRequestResult {
    let [output] = answer.outputs.as_slice() else {
        return SequenceRequestResult::Miscounted(format!("the answer has {} outputs", answer.outputs.len()));
    };
    let values: Vec<f32> = output.data().chunks_exact(4).map(value).collect();
    let expected = count(place);
    match values.split_first() {
        Some((&first, others)) if first == expected => {
            match others.iter().find(|&&it| it != expected * key) {
                None => SequenceRequestResult::Counted,
                Some(other) => SequenceRequestResult::Miscounted(format!(
                    "the answer counts {place}, but {other} is not of its sequence"
                )),
            }
        }
        Some((&first, _)) => {
            let counts = (0..=2 * *LENGTH.end()).find(|&requests| count(requests) == first);
            let said = counts
                .map_or_else(|| format!("the answer is {first}"), |it| format!("the answer counts {it}"));
            SequenceRequestResult::Miscounted(said)
        }
        None => SequenceRequestResult::Miscounted("the answer is empty".to_owned()),
    }
}

fn value(bytes: &[u8]) -> f32 {
    f32::from_le_bytes(bytes.try_into().expect("chunks of four"))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use millrace_client::Tensor;
    use millrace_types::{DataType, Failure};

    use super::*;

    /// Returns the answer of the cluster's counter after requests of 1 and of a key.
    fn answer(requests: u32, key: f32) -> InferResponse {
        let mut counted = 0.0_f32;
        let mut keyed = 0.0_f32;
        for _ in 0..requests {
            counted = counted * 0.5 + 1.0;
            keyed = keyed * 0.5 + key;
        }
        let values = [2.0 * counted, 2.0 * keyed, 2.0 * keyed];
        let data = Bytes::from(values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>());
        let output = Tensor::new("y", DataType::Fp32, vec![1, 3], data).unwrap();
        InferResponse {
            model: "counter".to_owned(),
            version: "1".to_owned(),
            request_id: "r".to_owned(),
            outputs: vec![output],
            split: None,
        }
    }

    #[test]
    fn an_answer_with_a_wrong_count_or_of_another_sequence_is_caught() {
        for key in [1.0, 65.0, 1_023.0] {
            for place in 1..=*LENGTH.end() {
                assert_eq!(
                    judge(&answer(place, key), place, key),
                    SequenceRequestResult::Counted,
                    "{place} of {key}"
                );
            }
        }
        let said = |requests, key| judge(&answer(requests, key), 3, 65.0);
        assert_eq!(
            said(1, 65.0),
            SequenceRequestResult::Miscounted("the answer counts 1".to_owned()),
            "state was lost"
        );
        assert_eq!(
            said(4, 65.0),
            SequenceRequestResult::Miscounted("the answer counts 4".to_owned()),
            "the request was applied twice"
        );
        assert!(matches!(said(3, 66.0), SequenceRequestResult::Miscounted(_)), "another's state");
    }

    #[test]
    fn an_error_tells_whether_a_sequence_has_ended() {
        let refused = |reason| Error::Refused(Failure::new(reason, "no"));
        assert!(matches!(became(&refused(Reason::SequenceNotFound)), Some(SequenceRequestResult::Over(_))));
        assert!(matches!(became(&refused(Reason::DataLost)), Some(SequenceRequestResult::Over(_))));
        assert_eq!(became(&refused(Reason::QueueFull)), None);
        let ran = Error::Refused(Failure::new(Reason::ExecutorLost, "no").after_execution());
        assert!(matches!(became(&ran), Some(SequenceRequestResult::Unclear(_))));
        assert!(matches!(
            became(&refused(Reason::MalformedRequest)),
            Some(SequenceRequestResult::Refused(_))
        ));
    }
}
