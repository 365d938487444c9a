//! The inference API of the fake.

use std::pin::Pin;

use futures::Stream;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_proto::inference::{self, grpc_inference_service_server as inference_server};
use millrace_types::Reason;
use tonic::{Request, Response, Status, Streaming};

use super::{FORGOTTEN, STALL, STALLED, Sequences, Service, refused};

type StreamOf<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Implements the whole service: `$served` are its working calls, and the other calls answer
/// UNIMPLEMENTED.
macro_rules! inference_service {
    ({ $($served:tt)* } $($method:ident: $request:ident -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl inference_server::GrpcInferenceService for Service {
            $($served)*
            $(async fn $method(
                &self,
                _: Request<inference::$request>,
            ) -> Result<Response<inference::$response>, Status> {
                Err(Status::unimplemented("the fake has no such call"))
            })*
        }
    };
}

inference_service! {
    {
        type ModelStreamInferStream = StreamOf<inference::ModelStreamInferResponse>;

        async fn server_ready(
            &self,
            _: Request<inference::ServerReadyRequest>,
        ) -> Result<Response<inference::ServerReadyResponse>, Status> {
            Ok(Response::new(inference::ServerReadyResponse { ready: true }))
        }

        async fn model_ready(
            &self,
            _: Request<inference::ModelReadyRequest>,
        ) -> Result<Response<inference::ModelReadyResponse>, Status> {
            Ok(Response::new(inference::ModelReadyResponse { ready: true }))
        }

        async fn model_metadata(
            &self,
            request: Request<inference::ModelMetadataRequest>,
        ) -> Result<Response<inference::ModelMetadataResponse>, Status> {
            let name = request.into_inner().name;
            let shape = match name.as_str() {
                "echo" | "full" | "silent" | "stalls" | "counts" | "forgets" => vec![-1, 2],
                "image" => vec![-1, 1, 2, 2],
                _ => return refused(Reason::FunctionNotFound, &format!("there is no function {name:?}")),
            };
            let tensor = |tensor: &str| inference::model_metadata_response::TensorMetadata {
                name: tensor.into(),
                datatype: "FP32".into(),
                shape: shape.clone(),
            };
            let versions = vec!["1".into()];
        let inputs = vec![tensor("x")];
        let outputs = vec![tensor("x")];
            let platform = "fake".into();
            let answer = inference::ModelMetadataResponse { name, versions, platform, inputs, outputs };
            Ok(Response::new(answer))
        }

        async fn model_infer(
            &self,
            request: Request<inference::ModelInferRequest>,
        ) -> Result<Response<inference::ModelInferResponse>, Status> {
            let id = request.metadata().get("x-request-id").cloned();
            if let Some(parent) = request.metadata().get("traceparent") {
                self.0.traceparents.lock().unwrap().push(parent.to_str().unwrap().to_owned());
            }
            let request = request.into_inner();
            self.0.enter(&request.id).await?;
            match request.model_name.as_str() {
                "typed" => Ok(Response::new(typed_answer())),
                "silent" => std::future::pending().await,
                "full" => refused(Reason::QueueFull, "the queue is full: 4 of 4 requests wait"),
                "stalls" => {
                    let mut served = self.0.stalls_served.lock().await;
                    *served += 1;
                    if *served == STALLED {
                        tokio::time::sleep(STALL).await;
                    }
                    Ok(Response::new(echo(request)))
                }
                "counts" | "forgets" => {
                    take_turn(&mut self.0.sequences.lock().unwrap(), &request)?;
                    Ok(Response::new(echo(request)))
                }
                "echo" | "image" | "once" => {
                    let mut answer = Response::new(echo(request));
                    let split = "queue;dur=0.1, swap;dur=0, run;dur=1.5, total;dur=2";
                    answer.metadata_mut().insert("server-timing", split.parse().unwrap());
                    if let Some(id) = id {
                        answer.metadata_mut().insert("x-request-id", id);
                    }
                    Ok(answer)
                }
                name => refused(Reason::FunctionNotFound, &format!("there is no function {name:?}")),
            }
        }

        async fn model_config(
            &self,
            request: Request<inference::ModelConfigRequest>,
        ) -> Result<Response<inference::ModelConfigResponse>, Status> {
            let name = request.into_inner().name;
            let idempotent = inference::ModelParameter { string_value: (name != "once").to_string() };
            let parameters = [("idempotent".to_owned(), idempotent)].into();
            let config = inference::ModelConfig { name, parameters, ..Default::default() };
            Ok(Response::new(inference::ModelConfigResponse { config: Some(config) }))
        }

        async fn model_stream_infer(
            &self,
            _: Request<Streaming<inference::ModelInferRequest>>,
        ) -> Result<Response<Self::ModelStreamInferStream>, Status> {
            Err(Status::unimplemented("the fake has no such call"))
        }
    }
    server_live: ServerLiveRequest -> ServerLiveResponse;
    server_metadata: ServerMetadataRequest -> ServerMetadataResponse;
    model_statistics: ModelStatisticsRequest -> ModelStatisticsResponse;
    repository_index: RepositoryIndexRequest -> RepositoryIndexResponse;
    repository_model_load: RepositoryModelLoadRequest -> RepositoryModelLoadResponse;
    repository_model_unload: RepositoryModelUnloadRequest -> RepositoryModelUnloadResponse;
    system_shared_memory_status: SystemSharedMemoryStatusRequest -> SystemSharedMemoryStatusResponse;
    system_shared_memory_register: SystemSharedMemoryRegisterRequest -> SystemSharedMemoryRegisterResponse;
    system_shared_memory_unregister: SystemSharedMemoryUnregisterRequest -> SystemSharedMemoryUnregisterResponse;
    cuda_shared_memory_status: CudaSharedMemoryStatusRequest -> CudaSharedMemoryStatusResponse;
    cuda_shared_memory_register: CudaSharedMemoryRegisterRequest -> CudaSharedMemoryRegisterResponse;
    cuda_shared_memory_unregister: CudaSharedMemoryUnregisterRequest -> CudaSharedMemoryUnregisterResponse;
    trace_setting: TraceSettingRequest -> TraceSettingResponse;
    log_settings: LogSettingsRequest -> LogSettingsResponse;
}

fn take_turn(sequences: &mut Sequences, request: &inference::ModelInferRequest) -> Result<(), Status> {
    let choice = |name: &str| request.parameters.get(name)?.parameter_choice.clone();
    let flag = |name: &str| choice(name) == Some(ParameterChoice::BoolParam(true));
    let Some(ParameterChoice::Int64Param(id)) = choice("sequence_id") else {
        return refused(Reason::MalformedRequest, "name a sequence");
    };
    let start = flag("sequence_start");
    let end = flag("sequence_end");
    sequences.asked.push((id, start, end));
    if request.model_name == "forgets" && sequences.asked.len().is_multiple_of(FORGOTTEN) {
        sequences.begun.clear();
    }
    if start {
        sequences.begun.insert(id);
    }
    if !sequences.begun.contains(&id) {
        return refused(Reason::SequenceNotFound, "there is no such sequence");
    }
    if end {
        sequences.begun.remove(&id);
    }
    Ok(())
}

fn echo(request: inference::ModelInferRequest) -> inference::ModelInferResponse {
    let output = |input: inference::model_infer_request::InferInputTensor| {
        inference::model_infer_response::InferOutputTensor {
            name: input.name,
            datatype: input.datatype,
            shape: input.shape,
            ..Default::default()
        }
    };
    inference::ModelInferResponse {
        model_name: request.model_name,
        id: request.id,
        outputs: request.inputs.into_iter().map(output).collect(),
        raw_output_contents: request.raw_input_contents,
        ..Default::default()
    }
}

fn typed_answer() -> inference::ModelInferResponse {
    let contents = inference::InferTensorContents { fp32_contents: vec![0.5, 0.25], ..Default::default() };
    let output = inference::model_infer_response::InferOutputTensor {
        name: "y".into(),
        datatype: "FP32".into(),
        shape: vec![1, 2],
        contents: Some(contents),
        ..Default::default()
    };
    inference::ModelInferResponse { outputs: vec![output], ..Default::default() }
}
