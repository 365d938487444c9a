//! A client of the functions that stay. The client obeys the errors: a request that may be retried
//! is retried, under the same id.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use millrace_client::{InferRequest, InferResponse, Inference};
use rand::Rng as _;

use super::availability::CallAvailability;
use super::client::{Client, error_name};
use super::targets::{ExampleAnswer, Targets};
use crate::history::{RequestRecord, RequestResult};

/// Timeout of a try.
const TRY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time of a request with all its tries.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pause between two requests, in milliseconds.
const THINK_MS: std::ops::Range<u64> = 5..30;
/// Pause between two tries, in milliseconds.
const AGAIN_MS: std::ops::Range<u64> = 20..100;

pub(super) async fn run(
    mut client: Client,
    targets: Targets,
    answers: Arc<CallAvailability>,
    requests: Arc<Mutex<Vec<RequestRecord>>>,
) {
    let inference = Inference::new(client.endpoints.clone());
    while client.think(THINK_MS).await {
        let function = &targets.functions[client.rng.random_range(0..targets.functions.len())];
        let example = &function.examples[client.rng.random_range(0..function.examples.len())];
        let request = ask(&mut client, &inference, function.name.clone(), example).await;
        if request.how == RequestResult::Right {
            answers.worked(request.begun);
        }
        requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
    }
}

/// Makes a request until its end, even if the load stops meanwhile.
async fn ask(
    client: &mut Client,
    inference: &Inference,
    function: String,
    example: &ExampleAnswer,
) -> RequestRecord {
    let id = client.endpoints.next_id();
    let begun = client.timeline.now();
    let mut retried = Vec::new();
    let how = loop {
        let mut request = InferRequest::new(function.clone(), vec![example.input.clone()]);
        request.id = Some(id.clone());
        request.timeout = TRY_TIMEOUT;
        let error = match inference.infer(request).await {
            Ok(answer) => break judge(&answer, &id, example),
            Err(error) => error,
        };
        if !error.retryable() {
            break RequestResult::Refused(error_name(&error));
        }
        if client.timeline.now() - begun >= PATIENCE {
            break RequestResult::GivenUp(error_name(&error));
        }
        retried.push(error_name(&error));
        let pause = client.rng.random_range(AGAIN_MS);
        tokio::time::sleep(Duration::from_millis(pause)).await;
    };
    RequestRecord { id, function, begun, ended: client.timeline.now(), retried, how }
}

fn judge(answer: &InferResponse, id: &str, example: &ExampleAnswer) -> RequestResult {
    if answer.request_id != id {
        return RequestResult::Wrong(format!("the answer is to {}", answer.request_id));
    }
    if answer.outputs != example.outputs {
        return RequestResult::Wrong(format!("the answer's {} outputs differ", answer.outputs.len()));
    }
    RequestResult::Right
}
