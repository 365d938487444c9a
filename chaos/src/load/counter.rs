//! Counters: functions that count the requests of each sequence.

use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use bytes::Bytes;
use millrace_client::{Admin, ApplyOptions, Endpoints, Error, InferRequest, Inference, Tensor};
use millrace_types::sequences::{SequenceSpec, StatePair};
use millrace_types::{DataType, InSequence, SequenceId};

use super::{keys, synth};
use crate::clock;
use crate::timeline::seconds;

/// Maximum number of sequences of a counter at a time.
const SEQUENCES_MAX: u32 = 64;
/// Time for which a counter keeps an idle sequence.
const IDLE: Duration = Duration::from_secs(20);
/// Maximum wait for the end of idle sequences, for which the cluster looks once in a while.
const ROOM_PATIENCE: Duration = Duration::from_secs(60);
const ROOM_EVERY: Duration = Duration::from_millis(500);
/// Maximum time of a try.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);

/// A function that counts the requests of each sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CounterFunction {
    pub name: String,
    /// Number of values in the counter's state. Large state stays on the GPU of the last run.
    pub width: NonZeroU32,
}

impl CounterFunction {
    /// Publishes the counter. Does not wait until the counter is ready.
    pub(super) async fn publish(&self, program: &Path, root: &Path, admin: &Admin) -> anyhow::Result<()> {
        let path = root.join(format!("{}.onnx", self.name));
        let words = ["counter", "--width", &self.width.to_string()];
        let digest = synth::synthesize(&words, program, &path, admin).await?;
        let mut spec = keys::spec(&self.name, 0);
        let state = vec![StatePair { input: "h_in".to_owned(), output: "h_out".to_owned() }];
        spec.sequences = Some(SequenceSpec { state, idle: IDLE, max: SEQUENCES_MAX });
        admin.apply(&spec, digest, ApplyOptions::default()).await?;
        Ok(())
    }

    /// Waits until the maximum number of sequences can start at the same time, which proves that no
    /// old sequence is left.
    ///
    /// # Errors
    /// If the sequences do not start in time.
    pub(crate) async fn has_room(&self, endpoints: Endpoints) -> anyhow::Result<()> {
        let inference = Inference::new(endpoints);
        let deadline = clock::now() + ROOM_PATIENCE;
        loop {
            let begun = clock::now();
            let missing = match self.all_begin(&inference).await {
                // A slower start proves nothing: the first sequences may have ended for being idle.
                Ok(()) if begun.elapsed() < IDLE / 2 => return Ok(()),
                Ok(()) => {
                    format!("starting all takes {}, too long to prove anything", seconds(begun.elapsed()))
                }
                Err(error) => error.to_string(),
            };
            if clock::now() >= deadline {
                bail!("{SEQUENCES_MAX} sequences of {} do not start: {missing}", self.name);
            }
            tokio::time::sleep(ROOM_EVERY).await;
        }
    }

    async fn all_begin(&self, inference: &Inference) -> Result<(), Error> {
        for number in 0..SEQUENCES_MAX {
            let id = SequenceId::Name(format!("room-{number}"));
            inference.infer(self.request(1.0, InSequence { id, start: true, end: false })).await?;
        }
        Ok(())
    }

    /// Returns a request. The first number counts, and the other numbers identify the sequence.
    pub(super) fn request(&self, key: f32, sequence: InSequence) -> InferRequest {
        let width = self.width.get();
        let number = |at: u32| if at == 0 { 1.0 } else { key };
        let data = Bytes::from((0..width).flat_map(|at| number(at).to_le_bytes()).collect::<Vec<u8>>());
        let input = Tensor::new("x", DataType::Fp32, vec![1, width.into()], data);
        let mut request = InferRequest::new(&*self.name, vec![input.expect("the shape has these bytes")]);
        request.sequence = Some(sequence);
        request.timeout = TRY_TIMEOUT;
        request
    }
}
