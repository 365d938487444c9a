//! Clients that write and read functions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use millrace_client::{Address, Admin, ApplyOptions, ApplyOutcome, DeleteOptions, Error, messages};
use millrace_proto::inference::grpc_inference_service_client::GrpcInferenceServiceClient;
use millrace_proto::inference::{RepositoryModelLoadRequest, RepositoryModelUnloadRequest};
use millrace_proto::status::from_status;
use millrace_transport::channel::{ChannelConfig, endpoint};
use millrace_types::Reason;
use rand::Rng as _;
use rand::rngs::StdRng;
use tonic::transport::Channel;
use tonic::{Code, Status};

use super::client::Client;
use super::keys::{self, Keys, PREFIX, VALUE};
use crate::history::{AdminAnswer, AdminHistory, AdminOp, AdminOperation, AdminResult, FunctionReading};

/// The pause of a client between two operations, in milliseconds.
const THINK_MS: std::ops::Range<u64> = 10..60;
/// Maximum wait of a reader for its controller, longer than an election.
const READ_TIMEOUT: Duration = Duration::from_secs(4);
/// Maximum wait for an enable or disable. An enable waits until the function is ready.
const ENABLE_TIMEOUT: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Writes until the load stops.
pub(super) async fn write(mut client: Client, keys: Arc<Keys>, history: Arc<AdminHistory>) {
    let admin = Admin::new(client.endpoints.clone());
    // Operations without an SDK call are sent to one endpoint and never retried.
    let repository: Vec<_> = client.endpoints.addresses().map(connect).collect();
    while client.think(THINK_MS).await {
        let (key, op) = match keys.pick_unused() {
            Some(unused) => (unused, AdminOp::Delete),
            None => (keys.pick(&mut client.rng), random_write(&keys, &mut client.rng)),
        };
        let invoked = client.timeline.now();
        let answer = match op {
            AdminOp::Apply(value) => apply(&admin, &keys, &key, value).await,
            AdminOp::Delete => delete(&admin, &key).await,
            AdminOp::Enable(enabled) => {
                let at = client.rng.random_range(0..repository.len());
                enable(repository[at].clone(), &key, enabled).await
            }
            AdminOp::Read => read_one(&admin, &key).await,
        };
        record(&client, &history, key, op, invoked, answer);
    }
}

fn random_write(keys: &Keys, rng: &mut StdRng) -> AdminOp {
    match rng.random_range(0..10) {
        0..6 => AdminOp::Apply(keys.value()),
        6..8 => AdminOp::Delete,
        _ => AdminOp::Enable(rng.random()),
    }
}

/// Reads at a controller until the load stops.
pub(super) async fn read(mut client: Client, keys: Arc<Keys>, history: Arc<AdminHistory>) {
    let admin = Admin::new(client.endpoints.clone());
    while client.think(THINK_MS).await {
        let key = keys.pick(&mut client.rng);
        let invoked = client.timeline.now();
        let answer = tokio::time::timeout(READ_TIMEOUT, read_one(&admin, &key)).await;
        let answer =
            answer.unwrap_or_else(|_| AdminAnswer::Unknown(format!("no answer in {READ_TIMEOUT:?}")));
        record(&client, &history, key, AdminOp::Read, invoked, answer);
    }
}

fn record(
    client: &Client,
    history: &AdminHistory,
    key: String,
    op: AdminOp,
    invoked: Duration,
    answer: AdminAnswer,
) {
    let returned = client.timeline.now();
    history.record(AdminOperation { key, client: client.number, op, invoked, returned, answer });
}

async fn apply(admin: &Admin, keys: &Keys, key: &str, value: u64) -> AdminAnswer {
    match admin.apply(&keys::spec(key, value), keys.model, ApplyOptions::default()).await {
        Ok(applied) => AdminAnswer::Done(match applied.outcome {
            ApplyOutcome::Created => AdminResult::Created,
            ApplyOutcome::Configured => AdminResult::Configured,
            ApplyOutcome::Unchanged => AdminResult::Unchanged,
        }),
        Err(error) => failed(&error),
    }
}

async fn delete(admin: &Admin, key: &str) -> AdminAnswer {
    match admin.delete(&keys::key(key), DeleteOptions::default()).await {
        Ok(()) => AdminAnswer::Done(AdminResult::Deleted),
        Err(error) if error.reason() == Some(Reason::FunctionNotFound) => {
            AdminAnswer::Done(AdminResult::Absent)
        }
        Err(error) => failed(&error),
    }
}

async fn read_one(admin: &Admin, key: &str) -> AdminAnswer {
    match admin.function(&keys::key(key)).await {
        Ok(function) => seen(&function).map_or_else(
            || AdminAnswer::Unknown("a function without the harness's label".into()),
            |seen| AdminAnswer::Done(AdminResult::Found(seen)),
        ),
        Err(error) if error.reason() == Some(Reason::FunctionNotFound) => {
            AdminAnswer::Done(AdminResult::Absent)
        }
        Err(error) => failed(&error),
    }
}

fn failed(error: &Error) -> AdminAnswer {
    let why = error.to_string();
    if error.may_have_executed() { AdminAnswer::Unknown(why) } else { AdminAnswer::Refused(why) }
}

fn seen(function: &messages::Function) -> Option<FunctionReading> {
    let value = function.spec.as_ref()?.labels.get(VALUE)?.parse().ok()?;
    Some(FunctionReading { value, enabled: function.enabled, generation: function.generation })
}

/// Loads or unloads a model through the inference protocol, which has no idempotency key.
async fn enable(channel: Channel, key: &str, enabled: bool) -> AdminAnswer {
    let mut service = GrpcInferenceServiceClient::new(channel);
    let model_name = key.to_owned();
    let call = async {
        if enabled {
            let request = RepositoryModelLoadRequest { model_name, ..Default::default() };
            service.repository_model_load(request).await.map(|_| ())
        } else {
            let request = RepositoryModelUnloadRequest { model_name, ..Default::default() };
            service.repository_model_unload(request).await.map(|_| ())
        }
    };
    match tokio::time::timeout(ENABLE_TIMEOUT, call).await {
        Ok(Ok(())) => AdminAnswer::Done(AdminResult::Set),
        Ok(Err(status)) => not_set(&status, enabled),
        Err(_) => AdminAnswer::Unknown(format!("no answer in {ENABLE_TIMEOUT:?}")),
    }
}

/// Classifies the error of an enable or disable. An enable first sets the intent and then waits
/// until the function is ready. Only an error for want of a leader, or a connection that failed,
/// proves that the operation has no effect.
fn not_set(status: &Status, enabled: bool) -> AdminAnswer {
    let failure = from_status(status);
    let why = failure.message.clone();
    match failure.reason {
        _ if was_not_sent(status) => AdminAnswer::Refused(why),
        Reason::NoLeader if !failure.may_have_executed => AdminAnswer::Refused(why),
        Reason::FunctionNotFound if !enabled && status.code() == Code::NotFound => {
            AdminAnswer::Done(AdminResult::Absent)
        }
        _ => AdminAnswer::Unknown(why),
    }
}

fn was_not_sent(status: &Status) -> bool {
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        if error.is::<tonic::ConnectError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

fn connect(address: &Address) -> Channel {
    let endpoint = endpoint(address.authority(), ChannelConfig::default());
    endpoint.expect("an address was checked to be host:port").connect_timeout(CONNECT_TIMEOUT).connect_lazy()
}

/// Returns every function of the writers, as this client reads it now.
///
/// # Errors
/// If the call fails, or the cluster has a function with the writers' prefix and without their
/// label.
pub(crate) async fn read_all(admin: &Admin) -> anyhow::Result<BTreeMap<String, FunctionReading>> {
    let mut all = BTreeMap::new();
    let mut functions = admin.functions(None);
    while let Some(function) = functions.next().await {
        let function = function?;
        let name = function.spec.as_ref().map(|spec| spec.name.clone()).unwrap_or_default();
        if name.starts_with(PREFIX) {
            let seen = seen(&function);
            all.insert(name, seen.ok_or_else(|| anyhow::anyhow!("a function without the harness's label"))?);
        }
    }
    Ok(all)
}
