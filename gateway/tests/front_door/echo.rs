//! A backend in memory whose models return their inputs, for each datatype and for several shapes.
//! Some models are slow, fail, return wrong outputs or are not ready.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use millrace_gateway::Caller;
use millrace_gateway::backend::{
    AnswerTimes, Backend, Intent, Kind, ModelAvailability, ModelRequest, ModelResponse, ModelRevision,
    NamedTensor,
};
use millrace_types::sequences::{IDLE_DEFAULT, SEQUENCES_DEFAULT, StatePair};
use millrace_types::{
    DataType, Dim, Failure, FunctionKey, FunctionName, Reason, Revision, Runtime, SequenceSpec, TenantName,
    TensorSpec,
};
use tokio::sync::watch;

/// Latency breakdown that every echo reports.
pub const SPLIT: AnswerTimes = AnswerTimes {
    cold: Duration::ZERO,
    queue: Duration::from_micros(100),
    swap: Duration::from_micros(200),
    run: Duration::from_micros(300),
    token: Duration::ZERO,
};

/// The behaviour of a model.
#[derive(Clone, Copy)]
enum Does {
    /// The model returns its inputs.
    Echo,
    /// The model returns its inputs after the milliseconds in its input.
    Wait,
    /// The model responds only after [`Echo::release`].
    Hold,
    Fail(Reason),
    /// The model returns its inputs, after a wait for its workers.
    Move,
    /// The model returns NaN.
    Nan,
    /// The model returns an undeclared output.
    Lie,
}

struct Entry {
    does: Does,
    revisions: Vec<Arc<ModelRevision>>,
}

/// The backend of the tests.
pub struct Echo {
    entries: Mutex<BTreeMap<FunctionKey, Entry>>,
    released: watch::Sender<bool>,
    running: watch::Sender<usize>,
    cancelled: watch::Sender<usize>,
    calls: AtomicUsize,
    seen: Mutex<Vec<ModelRequest>>,
    ready: watch::Sender<bool>,
    changed: watch::Sender<()>,
    awaited: watch::Sender<usize>,
}

fn key(tenant: &str, name: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::new(tenant).unwrap(), name: FunctionName::new(name).unwrap() }
}

fn spec(name: &str, datatype: DataType, shape: &[&str]) -> TensorSpec {
    let dim = |dim: &&str| dim.parse().map_or_else(|_| Dim::Symbol((*dim).to_owned()), Dim::Fixed);
    TensorSpec { name: name.to_owned(), datatype, shape: shape.iter().map(dim).collect() }
}

impl Echo {
    /// Creates a backend with all models of the tests.
    pub fn new() -> Self {
        let echo = Self {
            entries: Mutex::default(),
            released: watch::Sender::new(false),
            running: watch::Sender::new(0),
            cancelled: watch::Sender::new(0),
            calls: AtomicUsize::new(0),
            seen: Mutex::default(),
            ready: watch::Sender::new(true),
            changed: watch::Sender::new(()),
            awaited: watch::Sender::new(0),
        };
        for datatype in DataType::ALL {
            if datatype != DataType::Bytes {
                let name = format!("echo-{}", datatype.as_str().to_lowercase());
                echo.add("default", &name, Does::Echo, 1, &[("x", datatype, &["N", "M"])]);
            }
        }
        let x = &[("x", DataType::Fp32, ["N", "64"].as_slice())];
        echo.add("default", "mlp", Does::Echo, 1, x);
        echo.add("default", "versioned", Does::Echo, 3, x);
        echo.add("acme", "private", Does::Echo, 1, x);
        let pair = [("a", DataType::Fp32, ["N", "4"].as_slice()), ("b", DataType::Int64, ["N"].as_slice())];
        echo.add("default", "pair", Does::Echo, 1, &pair);
        echo.add("default", "scalar", Does::Echo, 1, &[("x", DataType::Fp32, &[])]);
        echo.add("default", "slow", Does::Wait, 1, &[("ms", DataType::Int64, &["1"])]);
        echo.add("default", "held", Does::Hold, 1, x);
        echo.add("default", "failing", Does::Fail(Reason::ModelFailed), 1, x);
        echo.add("default", "full", Does::Fail(Reason::QueueFull), 1, x);
        echo.add("default", "nan", Does::Nan, 1, x);
        echo.add("default", "liar", Does::Lie, 1, x);
        for (name, availability) in [
            ("preparing", ModelAvailability::Preparing),
            ("unloaded", ModelAvailability::Disabled),
            ("broken", ModelAvailability::Unavailable("its model file is gone".to_owned())),
        ] {
            echo.add("default", name, Does::Echo, 1, x);
            echo.set(&key("default", name), &availability);
        }
        echo
    }

    fn add(
        &self,
        tenant: &str,
        name: &str,
        does: Does,
        revisions: u64,
        inputs: &[(&str, DataType, &[&str])],
    ) {
        let inputs: Vec<_> =
            inputs.iter().map(|(name, datatype, shape)| spec(name, *datatype, shape)).collect();
        let output = |input: &TensorSpec| TensorSpec { name: format!("{}_out", input.name), ..input.clone() };
        let numbers: Vec<_> = (1..=revisions).filter_map(Revision::new).collect();
        let model = |&revision: &Revision| {
            Arc::new(ModelRevision {
                key: key(tenant, name),
                revision,
                revisions: numbers.clone(),
                kind: Kind::Function(Runtime::Onnx),
                inputs: inputs.clone(),
                outputs: inputs.iter().map(output).collect(),
                timeout: Duration::from_secs(60),
                objective: None,
                idempotent: true,
                sequences: None,
                weights: millrace_types::Bytes::mib(1),
                availability: ModelAvailability::Ready,
            })
        };
        let entry = Entry { does, revisions: numbers.iter().map(model).collect() };
        self.entries().insert(key(tenant, name), entry);
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, BTreeMap<FunctionKey, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, function: &FunctionKey, availability: &ModelAvailability) {
        if let Some(entry) = self.entries().get_mut(function) {
            for model in &mut entry.revisions {
                *model = Arc::new(ModelRevision {
                    availability: availability.clone(),
                    ..ModelRevision::clone(model)
                });
            }
        }
        self.changed.send_replace(());
    }

    /// Lets "held" respond.
    pub fn release(&self) {
        self.released.send_replace(true);
    }

    /// Sets the availability of a model of the default tenant.
    pub fn make(&self, name: &str, availability: &ModelAvailability) {
        self.set(&key("default", name), availability);
    }

    /// Adds a model without workers, which finds others as soon as a request waits for it.
    pub fn add_moving(&self, name: &str) {
        self.add("default", name, Does::Move, 1, &[("x", DataType::Fp32, &["N", "64"])]);
        self.make(name, &ModelAvailability::Away("it is placed on w1".to_owned()));
    }

    /// Adds a model like "held" that keeps state between the requests of a sequence.
    pub fn add_keeping(&self, name: &str) {
        self.add("default", name, Does::Hold, 1, &[("x", DataType::Fp32, &["N", "64"])]);
        let state = vec![StatePair { input: "h_in".to_owned(), output: "h_out".to_owned() }];
        let sequences = SequenceSpec { state, idle: IDLE_DEFAULT, max: SEQUENCES_DEFAULT };
        if let Some(entry) = self.entries().get_mut(&key("default", name)) {
            for model in &mut entry.revisions {
                *model = Arc::new(ModelRevision {
                    sequences: Some(sequences.clone()),
                    ..ModelRevision::clone(model)
                });
            }
        }
    }

    /// Waits until models have been awaited `times` times.
    pub async fn waited_for(&self, times: usize) {
        self.awaited.subscribe().wait_for(|awaited| *awaited >= times).await.unwrap();
    }

    /// Sets whether the backend is ready.
    pub fn set_ready(&self, ready: bool) {
        self.ready.send_replace(ready);
    }

    /// Waits until exactly `count` requests run.
    pub async fn running(&self, count: usize) {
        self.running.subscribe().wait_for(|&running| running == count).await.unwrap();
    }

    /// Waits until such a request has begun. Returns the priorities of all begun requests, in the
    /// order in which they began. Models that respond at once are not included.
    pub async fn begun(&self, such: impl Fn(&ModelRequest) -> bool) -> Vec<u64> {
        let has_begun = |_: &usize| self.seen.lock().unwrap().iter().any(&such);
        self.running.subscribe().wait_for(has_begun).await.unwrap();
        self.seen.lock().unwrap().iter().map(|it| it.contents.parameters.priority).collect()
    }

    /// Waits until `count` requests were dropped unanswered.
    pub async fn cancelled(&self, count: usize) {
        self.cancelled.subscribe().wait_for(|&cancelled| cancelled == count).await.unwrap();
    }

    /// Returns the last invocation.
    pub fn last(&self) -> ModelRequest {
        self.seen.lock().unwrap().last().cloned().unwrap()
    }

    /// Returns the number of invocations.
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::Relaxed)
    }

    fn does(&self, function: &FunctionKey) -> Option<Does> {
        self.entries().get(function).map(|entry| entry.does)
    }
}

/// Counts a request as cancelled if the value is dropped before the request ends.
struct Underway<'a> {
    echo: &'a Echo,
    ended: bool,
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        self.echo.running.send_modify(|running| *running -= 1);
        if !self.ended {
            self.echo.cancelled.send_modify(|cancelled| *cancelled += 1);
        }
    }
}

fn completion(outputs: Vec<NamedTensor>) -> ModelResponse {
    ModelResponse { outputs, split: SPLIT, attempts: 1, served_by: Some("worker-1/0 V100".into()) }
}

fn echoed(model: &ModelRevision, invocation: ModelRequest) -> ModelResponse {
    let outputs = invocation
        .contents
        .inputs
        .into_iter()
        .map(|tensor| NamedTensor { name: format!("{}_out", tensor.name), ..tensor });
    let outputs: Vec<_> = outputs.collect();
    let wanted: Vec<String> = match invocation.contents.outputs.as_slice() {
        [] => model.outputs.iter().map(|output| output.name.clone()).collect(),
        named => named.to_vec(),
    };
    let find = |name: &String| outputs.iter().find(|output| output.name == *name).cloned();
    completion(wanted.iter().filter_map(find).collect())
}

#[async_trait]
impl Backend for Echo {
    fn ready(&self) -> bool {
        *self.ready.borrow()
    }

    fn resolve(
        &self,
        function: &FunctionKey,
        revision: Option<Revision>,
    ) -> Result<Arc<ModelRevision>, Failure> {
        let entries = self.entries();
        let entry = entries
            .get(function)
            .ok_or_else(|| Failure::new(Reason::FunctionNotFound, format!("no function {function}")))?;
        let found = match revision {
            None => entry.revisions.last(),
            Some(revision) => entry.revisions.iter().find(|model| model.revision == revision),
        };
        found
            .cloned()
            .ok_or_else(|| Failure::new(Reason::RevisionNotFound, format!("no such revision of {function}")))
    }

    fn index(&self, tenant: &TenantName) -> Vec<Arc<ModelRevision>> {
        let entries = self.entries();
        let own = entries.iter().filter(|(key, _)| key.tenant == *tenant);
        own.flat_map(|(_, entry)| entry.revisions.clone()).collect()
    }

    async fn wait_until_ready(&self, model: &ModelRevision) -> Result<Arc<ModelRevision>, Failure> {
        if let Some(Does::Move) = self.does(&model.key) {
            self.set(&model.key, &ModelAvailability::Preparing);
        }
        let mut changed = self.changed.subscribe();
        self.awaited.send_modify(|awaited| *awaited += 1);
        loop {
            let now = self.resolve(&model.key, Some(model.revision))?;
            if !now.availability.may_become_ready() {
                return Ok(now);
            }
            changed.changed().await.unwrap();
        }
    }

    async fn set_intent(
        &self,
        function: &FunctionKey,
        intent: Intent,
        _caller: &Caller,
    ) -> Result<(), Failure> {
        let availability = match intent {
            Intent::Serve => ModelAvailability::Ready,
            Intent::Refuse => ModelAvailability::Disabled,
        };
        if self.does(function).is_none() {
            return Err(Failure::new(Reason::FunctionNotFound, format!("no function {function}")));
        }
        self.set(function, &availability);
        Ok(())
    }

    async fn invoke(
        &self,
        model: &ModelRevision,
        mut invocation: ModelRequest,
    ) -> Result<ModelResponse, Failure> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let does = self.does(&model.key).ok_or_else(|| Failure::new(Reason::FunctionNotFound, "gone"))?;
        if let Does::Echo = does {
            *self.seen.lock().unwrap() = vec![invocation.clone()];
            return Ok(echoed(model, invocation));
        }
        self.seen.lock().unwrap().push(invocation.clone());
        self.running.send_modify(|running| *running += 1);
        let mut underway = Underway { echo: self, ended: false };
        let result = match does {
            Does::Echo | Does::Move => Ok(echoed(model, invocation)),
            Does::Wait => {
                let ms = invocation.contents.inputs[0].data.as_ref().try_into().map_or(0, u64::from_le_bytes);
                tokio::time::sleep(Duration::from_millis(ms)).await;
                Ok(echoed(model, invocation))
            }
            Does::Hold => {
                self.released.subscribe().wait_for(|&released| released).await.unwrap();
                Ok(echoed(model, invocation))
            }
            Does::Fail(reason) => Err(Failure::new(reason, "it was told to fail").after_execution()),
            Does::Nan => {
                let elements = invocation.contents.inputs[0].data.len() / 4;
                invocation.contents.inputs[0].data = Bytes::from(f32::NAN.to_le_bytes().repeat(elements));
                Ok(echoed(model, invocation))
            }
            Does::Lie => {
                invocation.contents.inputs[0].name = "another".to_owned();
                Ok(completion(invocation.contents.inputs))
            }
        };
        underway.ended = true;
        result
    }
}
