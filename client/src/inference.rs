//! A client of the Open Inference Protocol over gRPC, with raw tensor contents.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_proto::inference::{
    self as wire, InferParameter, ModelConfigRequest, ModelInferRequest, ModelInferResponse,
    ModelMetadataRequest, ModelReadyRequest, ServerReadyRequest,
    grpc_inference_service_client::GrpcInferenceServiceClient,
    infer_parameter::ParameterChoice,
    model_infer_request::{InferInputTensor, InferRequestedOutputTensor},
};
use millrace_proto::trace;
use millrace_types::function::DEFAULT_TIMEOUT;
use millrace_types::{DataType, InSequence, SequenceId, TenantName};
use tokio::time::Instant;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::transport::Channel;
use tonic::{Request, Response};

use crate::endpoints::Endpoints;
use crate::error::Error;
use crate::failover::{RetryPolicy, after_execution};
use crate::latency::LatencyBreakdown;
use crate::tensor::{Tensor, raw_contents};

/// The metadata key for the tenant of a request.
pub const TENANT_HEADER: &str = "millrace-tenant";
const REQUEST_ID_HEADER: &str = "x-request-id";
const SPLIT_HEADER: &str = "server-timing";
/// The parameter of a model's configuration that says whether requests may run twice.
const IDEMPOTENT: &str = "idempotent";
/// The timeout of a metadata call.
const METADATA_TIMEOUT: Duration = Duration::from_secs(30);
/// The time that the client waits beyond an inference's timeout, so that the server's own report of
/// the timeout can arrive.
const GRACE: Duration = Duration::from_millis(500);

/// A client of the inference API. Clones share their connections.
#[derive(Clone)]
pub struct Inference {
    endpoints: Endpoints,
    tenant: TenantName,
}

/// An inference request.
#[derive(Debug, Clone, PartialEq)]
pub struct InferRequest {
    /// The function's name. The protocol calls a function a model.
    pub model: String,
    /// The revision of the function. Empty for the latest.
    pub version: String,
    /// The request's id. `None` generates an id. The response repeats the id, and retries keep it.
    pub id: Option<String>,
    /// The time that the caller waits. The timeout travels with the request.
    pub timeout: Duration,
    /// The request's priority. 0 if none is set.
    pub priority: u64,
    /// The request's position in a sequence, if the function keeps state.
    pub sequence: Option<InSequence>,
    /// The model's input tensors.
    pub inputs: Vec<Tensor>,
    /// The names of the requested outputs. Empty for all.
    pub outputs: Vec<String>,
    /// The action when the connection breaks under the request. [`RetryPolicy::AsDeclared`] by default.
    pub repeat: RetryPolicy,
}

impl InferRequest {
    /// Creates a request for the latest revision, all outputs and the default timeout of 60 s.
    #[must_use]
    pub fn new(model: impl Into<String>, inputs: Vec<Tensor>) -> Self {
        Self {
            model: model.into(),
            version: String::new(),
            id: None,
            timeout: DEFAULT_TIMEOUT,
            priority: 0,
            sequence: None,
            inputs,
            outputs: Vec::new(),
            repeat: RetryPolicy::default(),
        }
    }
}

/// The response to an inference request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InferResponse {
    /// The name of the model that answered.
    pub model: String,
    /// The revision of the model that answered.
    pub version: String,
    /// The request's id.
    pub request_id: String,
    /// The output tensors.
    pub outputs: Vec<Tensor>,
    /// The latency breakdown, if the server reports a breakdown.
    pub split: Option<LatencyBreakdown>,
}

/// The declared inputs and outputs of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelMetadata {
    /// The model's name.
    pub name: String,
    /// The versions that a request may name.
    pub versions: Vec<String>,
    /// The model's framework and format.
    pub platform: String,
    /// The declared input tensors.
    pub inputs: Vec<TensorMetadata>,
    /// The declared output tensors.
    pub outputs: Vec<TensorMetadata>,
}

/// The declaration of an input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMetadata {
    /// The tensor's name.
    pub name: String,
    /// The type of each element.
    pub datatype: DataType,
    /// The size of each dimension, -1 if variable.
    pub shape: Vec<i64>,
}

impl Inference {
    /// Creates a client of the servers at these endpoints, for the default tenant.
    #[must_use]
    pub fn new(endpoints: Endpoints) -> Self {
        Self { endpoints, tenant: TenantName::default() }
    }

    /// Returns the client with another tenant.
    #[must_use]
    pub fn with_tenant(self, tenant: TenantName) -> Self {
        Self { tenant, ..self }
    }

    /// Runs a model. If the connection breaks under the request and [`InferRequest::repeat`] allows
    /// it, sends the request to another endpoint under the same id.
    ///
    /// # Errors
    /// [`Error::Refused`] with the server's reason; [`Error::TimedOut`] when the server did not
    /// answer in time; [`Error::ConnectionLost`] when the request may have run and must not run
    /// again.
    pub async fn infer(&self, request: InferRequest) -> Result<InferResponse, Error> {
        let id = request.id.clone().unwrap_or_else(|| self.endpoints.next_id());
        let message = message(&request, &id);
        let deadline = Instant::now() + request.timeout + GRACE;
        let left = || deadline.saturating_duration_since(Instant::now());
        let send = async |repeat: RetryPolicy| {
            let make = async |channel, left| {
                let mut call = self.stamped(message.clone(), left);
                if let Ok(id) = MetadataValue::try_from(id.as_str()) {
                    call.metadata_mut().insert(REQUEST_ID_HEADER, id);
                }
                service(channel).model_infer(call).await
            };
            self.endpoints.call(repeat, left(), make).await
        };
        let answer = match send(request.repeat).await {
            Err(lost @ Error::ConnectionLost { .. }) if request.repeat == RetryPolicy::AsDeclared => {
                if !self.is_idempotent(&request, left()).await {
                    return Err(lost);
                }
                send(RetryPolicy::Allowed).await.map_err(|last| after_execution(last, Some(lost)))
            }
            answer => answer,
        };
        let answer = answer.map_err(|error| match error {
            // Reports the caller's timeout, without the grace period.
            Error::TimedOut { address, .. } => Error::TimedOut { address, timeout: request.timeout },
            error => error,
        })?;
        read_answer(answer, id)
    }

    /// Returns whether a model's function is declared idempotent. Without an answer, a function
    /// counts as not idempotent.
    async fn is_idempotent(&self, request: &InferRequest, left: Duration) -> bool {
        let asked = ModelConfigRequest { name: request.model.clone(), version: request.version.clone() };
        let timeout = left.min(METADATA_TIMEOUT);
        let config = self.endpoints.call(RetryPolicy::Allowed, timeout, async |channel, left| {
            service(channel).model_config(self.stamped(asked.clone(), left)).await
        });
        let config = config.await.ok().and_then(|answer| answer.into_inner().config);
        config.is_some_and(|config| {
            config.parameters.get(IDEMPOTENT).is_some_and(|parameter| parameter.string_value == "true")
        })
    }

    /// Returns the declared inputs and outputs of a model. An empty version is the latest.
    ///
    /// # Errors
    /// [`Error::Refused`] when the model does not exist.
    pub async fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, Error> {
        let request = ModelMetadataRequest { name: name.to_owned(), version: version.to_owned() };
        let answer = self
            .endpoints
            .call(RetryPolicy::Allowed, METADATA_TIMEOUT, async |channel, left| {
                service(channel).model_metadata(self.stamped(request.clone(), left)).await
            })
            .await?
            .into_inner();
        let tensor = |tensor: wire::model_metadata_response::TensorMetadata| {
            Ok(TensorMetadata {
                datatype: datatype(&tensor.datatype)?,
                name: tensor.name,
                shape: tensor.shape,
            })
        };
        Ok(ModelMetadata {
            name: answer.name,
            versions: answer.versions,
            platform: answer.platform,
            inputs: answer.inputs.into_iter().map(tensor).collect::<Result<_, Error>>()?,
            outputs: answer.outputs.into_iter().map(tensor).collect::<Result<_, Error>>()?,
        })
    }

    /// Returns whether a model is ready for inference. An empty version is the latest.
    ///
    /// # Errors
    /// [`Error::Refused`] when the model does not exist.
    pub async fn model_ready(&self, name: &str, version: &str) -> Result<bool, Error> {
        let request = ModelReadyRequest { name: name.to_owned(), version: version.to_owned() };
        let answer = self
            .endpoints
            .call(RetryPolicy::Allowed, METADATA_TIMEOUT, async |channel, left| {
                service(channel).model_ready(self.stamped(request.clone(), left)).await
            })
            .await?;
        Ok(answer.into_inner().ready)
    }

    /// Returns whether the server is ready for inference.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn server_ready(&self) -> Result<bool, Error> {
        let answer = self
            .endpoints
            .call(RetryPolicy::Allowed, METADATA_TIMEOUT, async |channel, left| {
                service(channel).server_ready(self.stamped(ServerReadyRequest {}, left)).await
            })
            .await?;
        Ok(answer.into_inner().ready)
    }

    fn stamped<T>(&self, message: T, left: Duration) -> Request<T> {
        let mut request = Request::new(message);
        request.set_timeout(left);
        let tenant = MetadataValue::try_from(self.tenant.as_str()).expect("a tenant's name is plain ASCII");
        request.metadata_mut().insert(TENANT_HEADER, tenant);
        trace::inject(request.metadata_mut());
        request
    }
}

/// Returns a stub that accepts responses of any size: the server bounds a response by its request.
fn service(channel: Channel) -> GrpcInferenceServiceClient<Channel> {
    GrpcInferenceServiceClient::new(channel).max_decoding_message_size(usize::MAX)
}

fn message(request: &InferRequest, id: &str) -> ModelInferRequest {
    let micros = i64::try_from(request.timeout.as_micros()).unwrap_or(i64::MAX);
    let mut parameters = BTreeMap::from([parameter("timeout", ParameterChoice::Int64Param(micros))]);
    if request.priority > 0 {
        parameters.extend([parameter("priority", ParameterChoice::Uint64Param(request.priority))]);
    }
    parameters.extend(request.sequence.iter().flat_map(sequence));
    let input = |tensor: &Tensor| InferInputTensor {
        name: tensor.name().to_owned(),
        datatype: tensor.datatype().to_string(),
        shape: tensor.shape().to_vec(),
        ..Default::default()
    };
    let output = |name: &String| InferRequestedOutputTensor { name: name.clone(), ..Default::default() };
    ModelInferRequest {
        model_name: request.model.clone(),
        model_version: request.version.clone(),
        id: id.to_owned(),
        parameters,
        inputs: request.inputs.iter().map(input).collect(),
        outputs: request.outputs.iter().map(output).collect(),
        raw_input_contents: request.inputs.iter().map(|tensor| tensor.data().clone()).collect(),
    }
}

/// Encodes a position in a sequence as the parameters that Triton clients send.
fn sequence(InSequence { id, start, end }: &InSequence) -> [(String, InferParameter); 3] {
    let id = match id {
        SequenceId::Number(number) => ParameterChoice::Uint64Param(number.get()),
        SequenceId::Name(name) => ParameterChoice::StringParam(name.clone()),
    };
    let flag = |name, flag: &bool| parameter(name, ParameterChoice::BoolParam(*flag));
    [parameter("sequence_id", id), flag("sequence_start", start), flag("sequence_end", end)]
}

fn parameter(name: &str, choice: ParameterChoice) -> (String, InferParameter) {
    (name.to_owned(), InferParameter { parameter_choice: Some(choice) })
}

fn read_answer(answer: Response<ModelInferResponse>, id: String) -> Result<InferResponse, Error> {
    let (metadata, answer, _) = answer.into_parts();
    let mut raw = answer.raw_output_contents.into_iter();
    let outputs = answer
        .outputs
        .into_iter()
        .map(|output| {
            let datatype = datatype(&output.datatype)?;
            let data = match (&output.contents, raw.len()) {
                (Some(contents), 0) => raw_contents(datatype, contents),
                _ => raw.next().unwrap_or_default(),
            };
            Tensor::new(output.name, datatype, output.shape, data)
                .map_err(|e| Error::BadAnswer(e.to_string()))
        })
        .collect::<Result<_, _>>()?;
    Ok(InferResponse {
        model: answer.model_name,
        version: answer.model_version,
        request_id: header(&metadata, REQUEST_ID_HEADER).map_or(id, str::to_owned),
        outputs,
        split: header(&metadata, SPLIT_HEADER).and_then(LatencyBreakdown::parse),
    })
}

fn header<'a>(metadata: &'a MetadataMap, key: &str) -> Option<&'a str> {
    metadata.get(key)?.to_str().ok()
}

fn datatype(name: &str) -> Result<DataType, Error> {
    name.parse().map_err(|error: millrace_types::tensor::UnknownDataType| Error::BadAnswer(error.to_string()))
}
