//! A client of the admin API, with a method per call.

mod billing;
mod call;
mod cluster;
mod dry_run;
mod logs;
mod nodes;
mod operations;
mod pages;
mod policy;
mod profiles;
mod slices;
mod tenants;
mod workflows;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use futures::stream::BoxStream;
use millrace_proto::admin::{
    self, Consistency, DeleteFunctionRequest, FindArtifactsRequest, GetFunctionRequest,
    GetScalingSignalRequest, GetVersionRequest, InjectFaultRequest, ListFunctionsRequest,
    admin_client::AdminClient,
};
use millrace_proto::convert::{duration_wire, function_spec_wire};
use millrace_types::{Digest, FunctionKey, FunctionSpec, TenantName};
use tonic::transport::Channel;
use tonic::{IntoStreamingRequest, Request, Response, Status};

pub use dry_run::{ApplyItem, BrokenWorkflow, DryRun, DryRunStep, ItemRefusal, PendingModel};
pub use policy::PolicyChange;
pub use workflows::AppliedWorkflow;

use self::call::{CALL_TIMEOUT, admin_client, stamp, stamped};
use self::pages::PAGE;
use crate::endpoints::Endpoints;
use crate::error::Error;
use crate::failover::RetryPolicy;
use crate::model_file::{ModelFile, ReadFailure};

/// The timeout for the upload of a model: 100 GB at 30 MB/s.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(3600);
/// The number of artifacts in a `FindArtifacts` call, below a server's limit.
const DIGESTS_AT_ONCE: usize = 200;

/// A client of the admin API. Clones share their connections.
#[derive(Clone)]
pub struct Admin {
    endpoints: Endpoints,
    consistency: Consistency,
}

/// The options of an apply of a function or workflow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ApplyOptions {
    /// Whether the server makes every check but stores nothing.
    pub dry_run: bool,
    /// The version that the object must have; any other version is refused with `CONFLICT`. `None`
    /// accepts any version.
    pub resource_version: Option<u64>,
}

/// The options of a deletion of a function or workflow.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeleteOptions {
    /// Whether the server makes every check but deletes nothing.
    pub dry_run: bool,
    /// The version that the object must have; any other version is refused with `CONFLICT`. `None`
    /// accepts any version.
    pub resource_version: Option<u64>,
}

/// The effect of an apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ApplyOutcome {
    /// The apply created the object: the first revision of a function.
    Created,
    /// The apply changed the object: the next revision of a function.
    Configured,
    /// The object already was as the apply asked.
    Unchanged,
}

impl ApplyOutcome {
    fn read(wire: i32) -> Result<Self, Error> {
        match admin::ApplyOutcome::try_from(wire) {
            Ok(admin::ApplyOutcome::Created) => Ok(Self::Created),
            Ok(admin::ApplyOutcome::Configured) => Ok(Self::Configured),
            Ok(admin::ApplyOutcome::Unchanged) => Ok(Self::Unchanged),
            Ok(admin::ApplyOutcome::Unspecified) | Err(_) => {
                Err(Error::BadAnswer(format!("unknown outcome {wire}")))
            }
        }
    }
}

/// The response to an apply of a function.
#[derive(Debug, Clone, PartialEq)]
pub struct AppliedFunction {
    /// The effect of the apply.
    pub outcome: ApplyOutcome,
    /// The function after the apply.
    pub function: admin::Function,
}

impl Admin {
    /// Creates a client of the cluster at these endpoints.
    #[must_use]
    pub fn new(endpoints: Endpoints) -> Self {
        Self { endpoints, consistency: Consistency::Linearizable }
    }

    /// Returns a client with stale reads: an endpoint answers from its own copy, which may be out
    /// of date. Stale reads work while no controller leads.
    #[must_use]
    pub fn with_stale_reads(self) -> Self {
        Self { consistency: Consistency::Stale, ..self }
    }

    /// Sends a call that may run twice, as most calls may.
    async fn ask<M, T, Fut>(
        &self,
        message: M,
        make: impl Fn(AdminClient<Channel>, Request<M>) -> Fut,
    ) -> Result<T, Error>
    where
        M: Clone,
        Fut: Future<Output = Result<Response<T>, Status>>,
    {
        self.ask_with(RetryPolicy::Allowed, CALL_TIMEOUT, message, make).await
    }

    /// Sends a call: `make` sends the message to an endpoint.
    async fn ask_with<M, T, Fut>(
        &self,
        repeat: RetryPolicy,
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

    /// Returns the given artifacts that the cluster has, and that therefore need no upload.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn find_artifacts(&self, digests: &[Digest]) -> Result<Vec<Digest>, Error> {
        self.find(digests).await?.found.iter().map(digest_of).collect()
    }

    /// Returns the models of the given artifacts that the cluster has.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn find_models(
        &self,
        digests: &[Digest],
    ) -> Result<BTreeMap<Digest, admin::ModelSummary>, Error> {
        let answer = self.find(digests).await?;
        if answer.models.len() != answer.found.len() {
            let why = "the artifacts lack their models: the server is older than this client";
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
                return Err(Error::BadAnswer(
                    "the server examined none of the requested artifacts".to_owned(),
                ));
            }
            all.found.extend(found);
            all.models.extend(models);
            left = &left[looked_at..];
        }
        Ok(all)
    }

    /// Uploads a model file. `progress` receives the number of bytes sent so far. The number starts
    /// again from a low value when the upload is repeated at another endpoint.
    ///
    /// # Errors
    /// [`Error::Refused`] when the cluster cannot serve the model, [`Error::File`] when the file
    /// cannot be read.
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
            .call(RetryPolicy::Allowed, UPLOAD_TIMEOUT, async |channel, left| {
                let messages = file.messages(progress.clone(), unread.clone());
                let mut request = messages.into_streaming_request();
                stamp(&mut request, left);
                admin_client(channel).upload_artifact(request).await
            })
            .await;
        // A read error takes precedence: the server's response to a truncated file means nothing.
        if let Some(error) = unread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            return Err(error);
        }
        Ok(answer?.into_inner())
    }

    /// Creates a function or the function's next revision.
    ///
    /// # Errors
    /// [`Error::Refused`] when the server refuses the spec or the artifact, or another client
    /// changed the function meanwhile.
    pub async fn apply(
        &self,
        spec: &FunctionSpec,
        artifact: Digest,
        options: ApplyOptions,
    ) -> Result<AppliedFunction, Error> {
        let request = admin::ApplyFunctionRequest {
            spec: Some(function_spec_wire(spec)),
            digest: artifact.to_string(),
            dry_run: options.dry_run,
            resource_version: options.resource_version.unwrap_or(0),
            idempotency_key: self.endpoints.next_id(),
        };
        let answer =
            self.ask(request, async |mut client, request| client.apply_function(request).await).await?;
        let outcome = ApplyOutcome::read(answer.outcome)?;
        let function =
            answer.function.ok_or_else(|| Error::BadAnswer("the response has no function".to_owned()))?;
        Ok(AppliedFunction { outcome, function })
    }

    /// Returns a function.
    ///
    /// # Errors
    /// [`Error::Refused`] with `FUNCTION_NOT_FOUND` when the function does not exist.
    pub async fn function(&self, key: &FunctionKey) -> Result<admin::Function, Error> {
        let request = GetFunctionRequest {
            tenant: key.tenant.to_string(),
            name: key.name.to_string(),
            consistency: self.consistency.into(),
            read_mask: None,
        };
        self.ask(request, async |mut client, request| client.get_function(request).await).await
    }

    /// Lists every function of a tenant, or of all tenants, page by page.
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
    /// [`Error::Refused`] with `FUNCTION_NOT_FOUND` when the function does not exist.
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

    /// Returns the number of nodes that the cluster needs, as the answering endpoint sees it.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn scaling_signal(&self) -> Result<admin::ScalingSignal, Error> {
        self.ask(GetScalingSignalRequest {}, async |mut client, request| {
            client.get_scaling_signal(request).await
        })
        .await
    }

    /// Returns the events after an earlier response's `next`. An empty `after` starts at the oldest
    /// event that is kept. Without new events, the server waits up to `wait`.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn events(&self, after: &str, wait: Duration) -> Result<admin::ListEventsResponse, Error> {
        let request = admin::ListEventsRequest {
            after: after.to_owned(),
            wait: Some(duration_wire(wait)),
            page_size: PAGE,
        };
        self.ask_with(RetryPolicy::Allowed, CALL_TIMEOUT + wait, request, async |mut client, request| {
            client.list_events(request).await
        })
        .await
    }

    /// Returns the activity of functions and links, summed over all controllers and workers: the
    /// busiest functions, up to `functions_max`.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn activity(&self, functions_max: u32) -> Result<admin::GetActivityResponse, Error> {
        let request = admin::GetActivityRequest { tenant: String::new(), functions_max };
        self.ask(request, async |mut client, request| client.get_activity(request).await).await
    }

    /// Returns the spans of a request or trace that controllers and workers still keep, by its id.
    ///
    /// # Errors
    /// [`Error::Refused`] with `TRACE_NOT_FOUND` when no process keeps a span of the trace.
    pub async fn trace(&self, id: &str) -> Result<admin::Trace, Error> {
        let request = admin::GetTraceRequest { id: id.to_owned() };
        self.ask(request, async |mut client, request| client.get_trace(request).await).await
    }

    /// Returns the version of the server and of its cluster.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn version(&self) -> Result<admin::GetVersionResponse, Error> {
        self.ask(GetVersionRequest {}, async |mut client, request| client.get_version(request).await).await
    }

    /// Injects a fault, for tests. Servers refuse the call unless they run with `--allow faults`.
    ///
    /// # Errors
    /// [`Error::Refused`] with `PERMISSION_DENIED` when the server does not allow faults.
    pub async fn inject_fault(&self, fault: InjectFaultRequest) -> Result<(), Error> {
        self.ask_with(RetryPolicy::Forbidden, CALL_TIMEOUT, fault, async |mut client, request| {
            client.inject_fault(request).await
        })
        .await?;
        Ok(())
    }
}

fn digest_of(artifact: &admin::Artifact) -> Result<Digest, Error> {
    artifact.digest.parse::<Digest>().map_err(|error| Error::BadAnswer(error.to_string()))
}
