//! The admin API, one method a call.

mod billing;
mod cluster;
mod dry_run;
mod logs;
mod nodes;
mod operations;
mod pages;
mod policy;
mod tenants;
mod workflows;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::stream::BoxStream;
use millrace_proto::admin::{
    self, ApplyOutcome, Consistency, DeleteFunctionRequest, FindArtifactsRequest, GetFunctionRequest,
    GetScalingSignalRequest, GetVersionRequest, InjectFaultRequest, ListFunctionsRequest,
    admin_client::AdminClient,
};
use millrace_proto::convert::{duration_wire, function_spec_wire};
use millrace_proto::trace;
use millrace_types::limits::ANSWER_BYTES_MAX;
use millrace_types::{Digest, FunctionKey, FunctionSpec, TenantName};
use tonic::transport::Channel;
use tonic::{IntoStreamingRequest, Request, Response, Status};

pub use dry_run::{ApplyItem, BrokenWorkflow, DryRun, DryRunStep, ItemRefusal, PendingModel};
pub use policy::PolicyChange;
pub use workflows::AppliedWorkflow;

use self::pages::PAGE;
use crate::endpoints::{Endpoints, Repeat};
use crate::error::Error;
use crate::model_file::{ModelFile, ReadFailure};

/// How long a call may take, other than an upload.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the upload of one model may take: 100 GB at 30 MB/s.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);
/// How many artifacts are asked after in one call. Fewer than a server takes.
const DIGESTS_AT_ONCE: usize = 200;

/// A client of the admin API. Clones share their connections.
#[derive(Clone)]
pub struct Admin {
    endpoints: Endpoints,
    consistency: Consistency,
}

/// How to apply a function or workflow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ApplyOptions {
    /// Every check, nothing stored.
    pub dry_run: bool,
    /// Refuse with `CONFLICT` unless it is at this version; `None` takes whatever is
    /// there.
    pub resource_version: Option<u64>,
}

/// How to delete a function or workflow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeleteOptions {
    /// Every check, nothing deleted.
    pub dry_run: bool,
    /// Refuse with `CONFLICT` unless it is at this version; `None` takes whatever is
    /// there.
    pub resource_version: Option<u64>,
}

/// What an apply did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// There was none: a function's first revision.
    Created,
    /// There was one, and it was changed: a function's next revision.
    Configured,
    /// It was like this already.
    Unchanged,
}

impl Outcome {
    fn read(wire: i32) -> Result<Self, Error> {
        match ApplyOutcome::try_from(wire) {
            Ok(ApplyOutcome::Created) => Ok(Self::Created),
            Ok(ApplyOutcome::Configured) => Ok(Self::Configured),
            Ok(ApplyOutcome::Unchanged) => Ok(Self::Unchanged),
            Ok(ApplyOutcome::Unspecified) | Err(_) => {
                Err(Error::BadAnswer(format!("outcome {wire} is not known")))
            }
        }
    }
}

/// The answer to an apply of a function.
#[derive(Debug, Clone, PartialEq)]
pub struct Applied {
    /// What was done.
    pub outcome: Outcome,
    /// The function as it is now.
    pub function: admin::Function,
}

impl Admin {
    /// A client of the cluster at these endpoints.
    #[must_use]
    pub fn new(endpoints: Endpoints) -> Self {
        Self { endpoints, consistency: Consistency::Linearizable }
    }

    /// The same, reading what the endpoint that answers has: perhaps not the newest, and also while
    /// no controller leads.
    #[must_use]
    pub fn stale(self) -> Self {
        Self { consistency: Consistency::Stale, ..self }
    }

    /// Makes a call that may be made again where its connection breaks, as most may.
    async fn ask<M, T, Fut>(
        &self,
        message: M,
        make: impl Fn(AdminClient<Channel>, Request<M>) -> Fut,
    ) -> Result<T, Error>
    where
        M: Clone,
        Fut: Future<Output = Result<Response<T>, Status>>,
    {
        self.ask_with(Repeat::Allowed, CALL_TIMEOUT, message, make).await
    }

    /// Makes a call: `make` sends the message to one endpoint.
    async fn ask_with<M, T, Fut>(
        &self,
        repeat: Repeat,
        timeout: Duration,
        message: M,
        make: impl Fn(AdminClient<Channel>, Request<M>) -> Fut,
    ) -> Result<T, Error>
    where
        M: Clone,
        Fut: Future<Output = Result<Response<T>, Status>>,
    {
        let make = |channel, left| make(admin_client(channel), stamped(message.clone(), left));
        Ok(self.endpoints.call(repeat, timeout, make).await?.into_inner())
    }

    /// Which of these artifacts the cluster has: what need not be uploaded.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn find_artifacts(&self, digests: &[Digest]) -> Result<Vec<Digest>, Error> {
        self.find(digests).await?.found.iter().map(digest_of).collect()
    }

    /// What those of these artifacts are that the cluster has.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn find_models(
        &self,
        digests: &[Digest],
    ) -> Result<BTreeMap<Digest, admin::ModelSummary>, Error> {
        let answer = self.find(digests).await?;
        if answer.models.len() != answer.found.len() {
            let why = "it does not say what its artifacts are: the server is older than this client";
            return Err(Error::BadAnswer(why.to_owned()));
        }
        let digests = answer.found.iter().map(digest_of);
        digests.zip(answer.models).map(|(digest, model)| Ok((digest?, model))).collect()
    }

    async fn find(&self, digests: &[Digest]) -> Result<admin::FindArtifactsResponse, Error> {
        let mut all = admin::FindArtifactsResponse::default();
        let mut left = digests;
        while !left.is_empty() {
            let some = &left[..left.len().min(DIGESTS_AT_ONCE)];
            let request = FindArtifactsRequest { digests: some.iter().map(Digest::to_string).collect() };
            let asked = self.ask(request, async |mut client, request| client.find_artifacts(request).await);
            let admin::FindArtifactsResponse { found, models, not_looked_at } = asked.await?;
            let looked_at = some.len().saturating_sub(not_looked_at as usize);
            if looked_at == 0 {
                return Err(Error::BadAnswer("it looked at none of the artifacts asked after".to_owned()));
            }
            all.found.extend(found);
            all.models.extend(models);
            left = &left[looked_at..];
        }
        Ok(all)
    }

    /// Sends a model file. `progress` hears the bytes handed over so far; it starts again from
    /// little when the upload goes on to another endpoint.
    ///
    /// # Errors
    /// [`Error::Refused`] when the model cannot be served, [`Error::File`] when the file cannot be
    /// read.
    pub async fn upload<P>(
        &self,
        file: &ModelFile,
        progress: P,
    ) -> Result<admin::UploadArtifactResponse, Error>
    where
        P: Fn(u64) + Send + Sync + 'static,
    {
        let progress = Arc::new(progress);
        let unread = ReadFailure::default();
        let answer = self
            .endpoints
            .call(Repeat::Allowed, UPLOAD_TIMEOUT, async |channel, left| {
                let messages = file.messages(progress.clone(), unread.clone());
                let mut request = messages.into_streaming_request();
                stamp(&mut request, left);
                admin_client(channel).upload_artifact(request).await
            })
            .await;
        // What the server made of half a file does not matter.
        if let Some(error) = unread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        Ok(answer?.into_inner())
    }

    /// Creates a function or makes its next revision.
    ///
    /// # Errors
    /// [`Error::Refused`] when the spec or the artifact is, or the function changed meanwhile.
    pub async fn apply(
        &self,
        spec: &FunctionSpec,
        artifact: Digest,
        options: ApplyOptions,
    ) -> Result<Applied, Error> {
        let request = admin::ApplyFunctionRequest {
            spec: Some(function_spec_wire(spec)),
            digest: artifact.to_string(),
            dry_run: options.dry_run,
            resource_version: options.resource_version.unwrap_or(0),
            idempotency_key: self.endpoints.next_id(),
        };
        let answer =
            self.ask(request, async |mut client, request| client.apply_function(request).await).await?;
        let outcome = Outcome::read(answer.outcome)?;
        let function = answer.function.ok_or_else(|| Error::BadAnswer("it has no function".to_owned()))?;
        Ok(Applied { outcome, function })
    }

    /// One function.
    ///
    /// # Errors
    /// [`Error::Refused`] with `FUNCTION_NOT_FOUND` when there is none.
    pub async fn function(&self, key: &FunctionKey) -> Result<admin::Function, Error> {
        let request = GetFunctionRequest {
            tenant: key.tenant.to_string(),
            name: key.name.to_string(),
            consistency: self.consistency.into(),
            read_mask: None,
        };
        self.ask(request, async |mut client, request| client.get_function(request).await).await
    }

    /// Every function of a tenant, or of all tenants, page after page.
    #[must_use]
    pub fn functions(
        &self,
        tenant: Option<&TenantName>,
    ) -> BoxStream<'static, Result<admin::Function, Error>> {
        let request = ListFunctionsRequest {
            tenant: tenant.map(TenantName::to_string).unwrap_or_default(),
            page_size: PAGE,
            page_token: String::new(),
            consistency: self.consistency.into(),
            read_mask: None,
        };
        pages::all(self.endpoints.clone(), move |channel, left, page_token| {
            let request = ListFunctionsRequest { page_token, ..request.clone() };
            Box::pin(async move { admin_client(channel).list_functions(stamped(request, left)).await })
        })
    }

    /// Deletes a function and all its revisions.
    ///
    /// # Errors
    /// [`Error::Refused`] with `FUNCTION_NOT_FOUND` when there is none.
    pub async fn delete(&self, key: &FunctionKey, options: DeleteOptions) -> Result<(), Error> {
        let request = DeleteFunctionRequest {
            tenant: key.tenant.to_string(),
            name: key.name.to_string(),
            resource_version: options.resource_version.unwrap_or(0),
            dry_run: options.dry_run,
            idempotency_key: self.endpoints.next_id(),
        };
        self.ask(request, async |mut client, request| client.delete_function(request).await).await?;
        Ok(())
    }

    /// How many nodes the cluster needs, as the endpoint that answers sees it.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn scaling_signal(&self) -> Result<admin::ScalingSignal, Error> {
        self.ask(GetScalingSignalRequest {}, async |mut client, request| {
            client.get_scaling_signal(request).await
        })
        .await
    }

    /// What happened after an earlier answer's `next` (empty: from the oldest that is kept), waiting so
    /// long where there is nothing new.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn events(&self, after: &str, wait: Duration) -> Result<admin::ListEventsResponse, Error> {
        let request = admin::ListEventsRequest {
            after: after.to_owned(),
            wait: Some(duration_wire(wait)),
            page_size: PAGE,
        };
        self.ask_with(Repeat::Allowed, CALL_TIMEOUT + wait, request, async |mut client, request| {
            client.list_events(request).await
        })
        .await
    }

    /// What functions and links did, as all controllers and workers count it together: the busiest
    /// functions, at most so many.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn activity(&self, functions_max: u32) -> Result<admin::GetActivityResponse, Error> {
        let request = admin::GetActivityRequest { tenant: String::new(), functions_max };
        self.ask(request, async |mut client, request| client.get_activity(request).await).await
    }

    /// What controllers and workers still know of a request or a trace, by its id.
    ///
    /// # Errors
    /// [`Error::Refused`] with `TRACE_NOT_FOUND` where nobody keeps a span of it.
    pub async fn trace(&self, id: &str) -> Result<admin::Trace, Error> {
        let request = admin::GetTraceRequest { id: id.to_owned() };
        self.ask(request, async |mut client, request| client.get_trace(request).await).await
    }

    /// The server's version and its cluster's.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn version(&self) -> Result<admin::GetVersionResponse, Error> {
        self.ask(GetVersionRequest {}, async |mut client, request| client.get_version(request).await).await
    }

    /// Breaks something, for tests. Servers refuse it unless started with `--allow-faults`.
    ///
    /// # Errors
    /// [`Error::Refused`] with `PERMISSION_DENIED` where faults are not allowed.
    pub async fn inject_fault(&self, fault: InjectFaultRequest) -> Result<(), Error> {
        self.ask_with(Repeat::Forbidden, CALL_TIMEOUT, fault, async |mut client, request| {
            client.inject_fault(request).await
        })
        .await?;
        Ok(())
    }
}

fn digest_of(artifact: &admin::Artifact) -> Result<Digest, Error> {
    artifact.digest.parse::<Digest>().map_err(|error| Error::BadAnswer(error.to_string()))
}

/// A client of one endpoint that takes what a server may answer, and no more.
fn admin_client(channel: Channel) -> AdminClient<Channel> {
    AdminClient::new(channel).max_decoding_message_size(ANSWER_BYTES_MAX)
}

fn stamped<T>(message: T, left: Duration) -> Request<T> {
    let mut request = Request::new(message);
    stamp(&mut request, left);
    request
}

/// Adds what every call carries: how long it may take, and its trace.
fn stamp<T>(request: &mut Request<T>, left: Duration) {
    request.set_timeout(left);
    trace::inject(request.metadata_mut());
}
