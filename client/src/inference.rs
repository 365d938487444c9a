//! The Open Inference Protocol over gRPC, with raw contents.

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

use crate::endpoints::{Endpoints, Repeat};
use crate::error::Error;
use crate::split::Split;
use crate::tensor::{Tensor, raw_contents};

/// The metadata key that names the tenant a request is for.
pub const TENANT_HEADER: &str = "millrace-tenant";
const REQUEST_ID_HEADER: &str = "x-request-id";
const SPLIT_HEADER: &str = "server-timing";
/// The parameter of a model's configuration that says whether it may run twice.
const IDEMPOTENT: &str = "idempotent";
/// How long a question about a model may take.
const METADATA_TIMEOUT: Duration = Duration::from_secs(30);
/// How much longer than its timeout an inference is waited for, so that the server's own account of
/// what happened arrives.
const GRACE: Duration = Duration::from_millis(500);

/// A client of the inference API. Clones share their connections.
#[derive(Clone)]
pub struct Inference {
    endpoints: Endpoints,
    tenant: TenantName,
}

/// One inference.
#[derive(Debug, Clone, PartialEq)]
pub struct InferRequest {
    /// The function's name: the protocol calls it a model.
    pub model: String,
    /// Its revision; empty for the latest.
    pub version: String,
    /// The request's id; `None` makes one. Echoed in the answer, and kept over retries.
    pub id: Option<String>,
    /// How long the caller waits. Travels with the request.
    pub timeout: Duration,
    /// 0 for none given.
    pub priority: u64,
    /// The sequence that it is of, where the function keeps state.
    pub sequence: Option<InSequence>,
    /// The model's inputs.
    pub inputs: Vec<Tensor>,
    /// The outputs wanted; empty for all.
    pub outputs: Vec<String>,
    /// What to do when the connection breaks under the request: [`Repeat::AsDeclared`] unless said.
    pub repeat: Repeat,
}

impl InferRequest {
    /// A request for the latest revision, every output, and the default timeout of 60 s.
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
            repeat: Repeat::default(),
        }
    }
}

/// The answer to an inference.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InferResponse {
    /// The model that answered.
    pub model: String,
    /// Which version of it.
    pub version: String,
    /// The request's id.
    pub request_id: String,
    /// Its outputs.
    pub outputs: Vec<Tensor>,
    /// Where the time went, if the server says.
    pub split: Option<Split>,
}

/// What a model takes and gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelMetadata {
    /// Its name.
    pub name: String,
    /// Its versions that can be asked for.
    pub versions: Vec<String>,
    /// Its framework and format.
    pub platform: String,
    /// Its inputs.
    pub inputs: Vec<TensorMetadata>,
    /// Its outputs.
    pub outputs: Vec<TensorMetadata>,
}

/// What a model declares of one input or output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMetadata {
    /// The tensor's name.
    pub name: String,
    /// Its element type.
    pub datatype: DataType,
    /// Its shape, -1 where free.
    pub shape: Vec<i64>,
}

impl Inference {
    /// A client of the servers at these endpoints, for the default tenant.
    #[must_use]
    pub fn new(endpoints: Endpoints) -> Self {
        Self { endpoints, tenant: TenantName::default() }
    }

    /// The same for another tenant.
    #[must_use]
    pub fn with_tenant(self, tenant: TenantName) -> Self {
        Self { tenant, ..self }
    }

    /// Runs a model once; where a gateway dies under the request, again at another, under the same
    /// id, if [`InferRequest::repeat`] lets it.
    ///
    /// # Errors
    /// [`Error::Refused`] with the server's reason; [`Error::TimedOut`] when it did not answer;
    /// [`Error::ConnectionLost`] when it may have run and must not run again.
    pub async fn infer(&self, request: InferRequest) -> Result<InferResponse, Error> {
        let id = request.id.clone().unwrap_or_else(|| self.endpoints.next_id());
        let message = message(&request, &id);
        let deadline = Instant::now() + request.timeout + GRACE;
        let left = || deadline.saturating_duration_since(Instant::now());
        let send = async |repeat: Repeat| {
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
            Err(lost @ Error::ConnectionLost { .. }) if request.repeat == Repeat::AsDeclared => {
                if !self.is_idempotent(&request, left()).await {
                    return Err(lost);
                }
                send(Repeat::Allowed).await
            }
            answer => answer,
        };
        let answer = answer.map_err(|error| match error {
            // What the caller asked for, without the grace.
            Error::TimedOut { address, .. } => Error::TimedOut { address, timeout: request.timeout },
            error => error,
        })?;
        read_answer(answer, id)
    }

    /// Whether a model's function is declared idempotent. What nobody says is not so.
    async fn is_idempotent(&self, request: &InferRequest, left: Duration) -> bool {
        let asked = ModelConfigRequest { name: request.model.clone(), version: request.version.clone() };
        let timeout = left.min(METADATA_TIMEOUT);
        let config = self.endpoints.call(Repeat::Allowed, timeout, async |channel, left| {
            service(channel).model_config(self.stamped(asked.clone(), left)).await
        });
        let config = config.await.ok().and_then(|answer| answer.into_inner().config);
        config.is_some_and(|config| {
            config.parameters.get(IDEMPOTENT).is_some_and(|parameter| parameter.string_value == "true")
        })
    }

    /// What a model takes and gives; an empty version is the latest.
    ///
    /// # Errors
    /// [`Error::Refused`] when there is no such model.
    pub async fn model_metadata(&self, name: &str, version: &str) -> Result<ModelMetadata, Error> {
        let request = ModelMetadataRequest { name: name.to_owned(), version: version.to_owned() };
        let answer = self
            .endpoints
            .call(Repeat::Allowed, METADATA_TIMEOUT, async |channel, left| {
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

    /// Whether a model can be inferred now; an empty version is the latest.
    ///
    /// # Errors
    /// [`Error::Refused`] when there is no such model.
    pub async fn model_ready(&self, name: &str, version: &str) -> Result<bool, Error> {
        let request = ModelReadyRequest { name: name.to_owned(), version: version.to_owned() };
        let answer = self
            .endpoints
            .call(Repeat::Allowed, METADATA_TIMEOUT, async |channel, left| {
                service(channel).model_ready(self.stamped(request.clone(), left)).await
            })
            .await?;
        Ok(answer.into_inner().ready)
    }

    /// Whether the server can serve inference.
    ///
    /// # Errors
    /// [`Error`] when the call fails.
    pub async fn server_ready(&self) -> Result<bool, Error> {
        let answer = self
            .endpoints
            .call(Repeat::Allowed, METADATA_TIMEOUT, async |channel, left| {
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

/// A stub that takes answers of any size: the server bounds what it sends by what was asked.
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

/// A place in a sequence, as Triton's clients write it.
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
        split: header(&metadata, SPLIT_HEADER).and_then(Split::parse),
    })
}

fn header<'a>(metadata: &'a MetadataMap, key: &str) -> Option<&'a str> {
    metadata.get(key)?.to_str().ok()
}

fn datatype(name: &str) -> Result<DataType, Error> {
    name.parse().map_err(|error: millrace_types::tensor::UnknownDataType| Error::BadAnswer(error.to_string()))
}
