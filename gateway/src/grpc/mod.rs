//! The service `inference.GRPCInferenceService`: the protocol over gRPC.
//!
//! Each method reads its arguments, calls the [`InferenceHandler`], and writes the response. Failures become a
//! status in a single place, with the reason in `ErrorInfo`.

mod contents;
mod frames;
pub(crate) mod health;
pub(crate) mod infer;
mod sequences;
pub(crate) mod stream;

use std::sync::Arc;

use millrace_proto::inference::grpc_inference_service_server::GrpcInferenceService;
use millrace_proto::inference::{self as wire, ModelInferRequest, ModelInferResponse};
use millrace_proto::status::to_status;
use millrace_types::{Failure, Reason};
use tonic::{Extensions, Request, Response, Status, Streaming};

use crate::backend::{Intent, ModelAvailability};
use crate::call::CallContext;
use crate::descriptions;
use crate::handler::InferenceHandler;

#[derive(Clone)]
pub(crate) struct InferenceService(pub(crate) Arc<InferenceHandler>);

/// Returns the call, which the middleware stored.
fn call(extensions: &Extensions) -> Result<&CallContext, Status> {
    extensions.get().ok_or_else(|| Status::internal("the call did not pass the gateway's middleware"))
}

fn unserved<T>(what: &str, instead: &str) -> Result<T, Status> {
    let message = format!("{what} is not served: {instead}");
    Err(to_status(&Failure::new(Reason::Unimplemented, message)))
}

fn no_shared_memory<T>() -> Result<T, Status> {
    unserved("shared memory", "send tensors in the request's raw_input_contents")
}

impl InferenceService {
    /// Enables or disables a function for the repository calls.
    async fn set_intent(
        &self,
        call: &CallContext,
        name: &str,
        repository: &str,
        intent: Intent,
    ) -> Result<(), Failure> {
        if !repository.is_empty() {
            let message = "there is only one repository: omit repository_name";
            return Err(Failure::new(Reason::Unimplemented, message));
        }
        self.0.set_intent(call, name, intent).await
    }
}

#[tonic::async_trait]
impl GrpcInferenceService for InferenceService {
    async fn server_live(
        &self,
        _request: Request<wire::ServerLiveRequest>,
    ) -> Result<Response<wire::ServerLiveResponse>, Status> {
        Ok(Response::new(wire::ServerLiveResponse { live: true }))
    }

    async fn server_ready(
        &self,
        _request: Request<wire::ServerReadyRequest>,
    ) -> Result<Response<wire::ServerReadyResponse>, Status> {
        Ok(Response::new(wire::ServerReadyResponse { ready: self.0.ready() }))
    }

    async fn model_ready(
        &self,
        request: Request<wire::ModelReadyRequest>,
    ) -> Result<Response<wire::ModelReadyResponse>, Status> {
        let call = call(request.extensions())?;
        let wanted = request.get_ref();
        let model =
            self.0.find(call, &wanted.name, &wanted.version).map_err(|failure| to_status(&failure))?;
        let ready = model.availability == ModelAvailability::Ready;
        Ok(Response::new(wire::ModelReadyResponse { ready }))
    }

    async fn server_metadata(
        &self,
        _request: Request<wire::ServerMetadataRequest>,
    ) -> Result<Response<wire::ServerMetadataResponse>, Status> {
        Ok(Response::new(descriptions::server()))
    }

    async fn model_metadata(
        &self,
        request: Request<wire::ModelMetadataRequest>,
    ) -> Result<Response<wire::ModelMetadataResponse>, Status> {
        let call = call(request.extensions())?;
        let wanted = request.get_ref();
        let model = self.0.find_loaded(call, &wanted.name, &wanted.version);
        let model = model.map_err(|failure| to_status(&failure))?;
        Ok(Response::new(descriptions::metadata(&model)))
    }

    async fn model_infer(
        &self,
        request: Request<ModelInferRequest>,
    ) -> Result<Response<ModelInferResponse>, Status> {
        let (_, extensions, request) = request.into_parts();
        infer::infer(&self.0, call(&extensions)?, request).await.map_err(|failure| to_status(&failure))
    }

    type ModelStreamInferStream = frames::ResponseStream;

    /// Never called, because the route leads to [`stream::serve`].
    async fn model_stream_infer(
        &self,
        _request: Request<Streaming<ModelInferRequest>>,
    ) -> Result<Response<frames::ResponseStream>, Status> {
        Err(Status::internal("ModelStreamInfer has a route of its own"))
    }

    async fn model_config(
        &self,
        request: Request<wire::ModelConfigRequest>,
    ) -> Result<Response<wire::ModelConfigResponse>, Status> {
        let call = call(request.extensions())?;
        let wanted = request.get_ref();
        let model = self.0.find_loaded(call, &wanted.name, &wanted.version);
        let model = model.map_err(|failure| to_status(&failure))?;
        Ok(Response::new(wire::ModelConfigResponse { config: Some(descriptions::config(&model)) }))
    }

    async fn model_statistics(
        &self,
        request: Request<wire::ModelStatisticsRequest>,
    ) -> Result<Response<wire::ModelStatisticsResponse>, Status> {
        let call = call(request.extensions())?;
        let wanted = request.get_ref();
        let stats = descriptions::statistics(&self.0, call, &wanted.name, &wanted.version);
        let model_stats = stats.map_err(|failure| to_status(&failure))?;
        Ok(Response::new(wire::ModelStatisticsResponse { model_stats }))
    }

    async fn repository_index(
        &self,
        request: Request<wire::RepositoryIndexRequest>,
    ) -> Result<Response<wire::RepositoryIndexResponse>, Status> {
        let call = call(request.extensions())?;
        let wanted = request.get_ref();
        if !wanted.repository_name.is_empty() {
            return unserved("a named repository", "omit repository_name");
        }
        let models =
            descriptions::index(&self.0, call, wanted.ready).map_err(|failure| to_status(&failure))?;
        Ok(Response::new(wire::RepositoryIndexResponse { models }))
    }

    async fn repository_model_load(
        &self,
        request: Request<wire::RepositoryModelLoadRequest>,
    ) -> Result<Response<wire::RepositoryModelLoadResponse>, Status> {
        let call = call(request.extensions())?;
        let wanted = request.get_ref();
        let parameter = wanted.parameters.keys().next();
        if let Some(name) = parameter {
            return unserved(&format!("load parameter {name:?}"), "change a function with millrace apply");
        }
        let loaded = self.set_intent(call, &wanted.model_name, &wanted.repository_name, Intent::Serve).await;
        loaded.map_err(|failure| to_status(&failure))?;
        Ok(Response::new(wire::RepositoryModelLoadResponse {}))
    }

    async fn repository_model_unload(
        &self,
        request: Request<wire::RepositoryModelUnloadRequest>,
    ) -> Result<Response<wire::RepositoryModelUnloadResponse>, Status> {
        // The only parameter, unload_dependents, concerns ensembles, and a function is none.
        let call = call(request.extensions())?;
        let wanted = request.get_ref();
        let unloaded =
            self.set_intent(call, &wanted.model_name, &wanted.repository_name, Intent::Refuse).await;
        unloaded.map_err(|failure| to_status(&failure))?;
        Ok(Response::new(wire::RepositoryModelUnloadResponse {}))
    }

    async fn system_shared_memory_status(
        &self,
        _request: Request<wire::SystemSharedMemoryStatusRequest>,
    ) -> Result<Response<wire::SystemSharedMemoryStatusResponse>, Status> {
        no_shared_memory()
    }

    async fn system_shared_memory_register(
        &self,
        _request: Request<wire::SystemSharedMemoryRegisterRequest>,
    ) -> Result<Response<wire::SystemSharedMemoryRegisterResponse>, Status> {
        no_shared_memory()
    }

    async fn system_shared_memory_unregister(
        &self,
        _request: Request<wire::SystemSharedMemoryUnregisterRequest>,
    ) -> Result<Response<wire::SystemSharedMemoryUnregisterResponse>, Status> {
        no_shared_memory()
    }

    async fn cuda_shared_memory_status(
        &self,
        _request: Request<wire::CudaSharedMemoryStatusRequest>,
    ) -> Result<Response<wire::CudaSharedMemoryStatusResponse>, Status> {
        no_shared_memory()
    }

    async fn cuda_shared_memory_register(
        &self,
        _request: Request<wire::CudaSharedMemoryRegisterRequest>,
    ) -> Result<Response<wire::CudaSharedMemoryRegisterResponse>, Status> {
        no_shared_memory()
    }

    async fn cuda_shared_memory_unregister(
        &self,
        _request: Request<wire::CudaSharedMemoryUnregisterRequest>,
    ) -> Result<Response<wire::CudaSharedMemoryUnregisterResponse>, Status> {
        no_shared_memory()
    }

    async fn trace_setting(
        &self,
        _request: Request<wire::TraceSettingRequest>,
    ) -> Result<Response<wire::TraceSettingResponse>, Status> {
        unserved("trace settings", "send a traceparent, and configure telemetry where the server starts")
    }

    async fn log_settings(
        &self,
        _request: Request<wire::LogSettingsRequest>,
    ) -> Result<Response<wire::LogSettingsResponse>, Status> {
        unserved("log settings", "configure logging where the server starts")
    }
}
