//! Tests descriptions of the server and its models over gRPC, and the repository.

use millrace_proto::inference::model_version_policy::PolicyChoice;
use millrace_proto::inference::{
    self as wire, DataType, ModelConfigRequest, ModelMetadataRequest, ModelReadyRequest,
    ModelRepositoryParameter, ModelStatisticsRequest, RepositoryIndexRequest, RepositoryModelLoadRequest,
    RepositoryModelUnloadRequest, model_repository_parameter,
};
use millrace_types::Reason;
use tonic::Code;

use crate::harness::{NOW, Server, refuses, row};

#[tokio::test]
async fn server_reports_that_it_is_live_and_whether_it_is_ready() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    assert!(client.server_live(wire::ServerLiveRequest {}).await.unwrap().into_inner().live);
    assert!(client.server_ready(wire::ServerReadyRequest {}).await.unwrap().into_inner().ready);
    server.echo.set_ready(false);
    assert!(!client.server_ready(wire::ServerReadyRequest {}).await.unwrap().into_inner().ready);
    let metadata = client.server_metadata(wire::ServerMetadataRequest {}).await.unwrap().into_inner();
    assert_eq!((metadata.name.as_str(), metadata.version.as_str()), ("millrace", millrace_proto::BUILD));
    for extension in ["binary_tensor_data", "sequence", "sequence(string_id)"] {
        assert!(metadata.extensions.contains(&extension.to_owned()), "{extension}");
    }
}

#[tokio::test]
async fn model_ready_reports_whether_a_model_is_ready() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let mut ready = async |name: &str, version: &str| {
        let request = ModelReadyRequest { name: name.into(), version: version.into() };
        client.model_ready(request).await.map(|response| response.into_inner().ready)
    };
    assert!(ready("mlp", "").await.unwrap());
    assert!(ready("versioned", "2").await.unwrap());
    assert!(!ready("preparing", "").await.unwrap());
    assert!(!ready("unloaded", "1").await.unwrap());
    refuses(&ready("nowhere", "").await.unwrap_err(), Code::NotFound, Reason::FunctionNotFound, "nowhere");
    refuses(&ready("mlp", "7").await.unwrap_err(), Code::NotFound, Reason::RevisionNotFound, "");
}

#[tokio::test]
async fn model_metadata_describes_a_model() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let request = ModelMetadataRequest { name: "pair".into(), version: String::new() };
    let metadata = client.model_metadata(request).await.unwrap().into_inner();
    assert_eq!((metadata.name.as_str(), metadata.platform.as_str()), ("pair", "millrace_onnx"));
    assert_eq!(metadata.versions, ["1"]);
    let inputs: Vec<_> = metadata
        .inputs
        .iter()
        .map(|input| (input.name.as_str(), input.datatype.as_str(), input.shape.as_slice()))
        .collect();
    assert_eq!(inputs, [("a", "FP32", [-1, 4].as_slice()), ("b", "INT64", &[-1])]);
    let request = ModelMetadataRequest { name: "unloaded".into(), version: String::new() };
    let status = client.model_metadata(request).await.unwrap_err();
    refuses(&status, Code::Unavailable, Reason::FunctionDisabled, "load");
}

#[tokio::test]
async fn model_config_describes_the_model_correctly() {
    let server = Server::start().await;
    let request = ModelConfigRequest { name: "versioned".into(), version: String::new() };
    let config = server.grpc().await.model_config(request).await.unwrap().into_inner().config.unwrap();
    assert_eq!((config.name.as_str(), config.platform.as_str()), ("versioned", "millrace_onnx"));
    assert_eq!(config.max_batch_size, 0);
    assert_eq!(config.input[0].data_type(), DataType::TypeFp32);
    assert_eq!(
        (config.input[0].dims.as_slice(), config.output[0].name.as_str()),
        ([-1, 64].as_slice(), "x_out")
    );
    let Some(PolicyChoice::Specific(policy)) = config.version_policy.unwrap().policy_choice else { panic!() };
    assert_eq!(policy.versions, [1, 2, 3]);
    assert!(!config.model_transaction_policy.unwrap().decoupled);
}

#[tokio::test]
async fn model_statistics_count_the_requests_of_models() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    for _ in 0..3 {
        client.model_infer(row("mlp")).await.unwrap();
    }
    let mut wrong = row("mlp");
    wrong.inputs[0].name = "wrong".into();
    client.model_infer(wrong).await.unwrap_err();
    let mut stats = async |name: &str, version: &str| {
        let request = ModelStatisticsRequest { name: name.into(), version: version.into() };
        client.model_statistics(request).await.map(|response| response.into_inner().model_stats)
    };
    let [mlp] = stats("mlp", "").await.unwrap().try_into().unwrap();
    assert_eq!((mlp.inference_count, mlp.execution_count), (3, 3));
    assert_eq!(u128::from(mlp.last_inference), NOW.as_millis());
    let of = mlp.inference_stats.unwrap();
    assert_eq!(of.success.unwrap().count, 3);
    assert!(of.success.unwrap().ns > 0);
    assert_eq!(of.fail.unwrap().count, 1);
    assert_eq!((of.queue.unwrap().count, of.queue.unwrap().ns), (3, 300_000));
    assert_eq!(of.compute_input.unwrap().ns, 600_000);
    assert_eq!(of.compute_infer.unwrap().ns, 900_000);
    let [batch] = mlp.batch_stats.try_into().unwrap();
    assert_eq!((batch.batch_size, batch.compute_infer.unwrap().count), (1, 3));

    let versions = stats("versioned", "").await.unwrap();
    assert_eq!(versions.iter().map(|stats| stats.version.as_str()).collect::<Vec<_>>(), ["1", "2", "3"]);
    assert_eq!(stats("versioned", "2").await.unwrap().len(), 1);
    assert!(stats("", "").await.unwrap().len() > 10);
    refuses(&stats("nowhere", "").await.unwrap_err(), Code::NotFound, Reason::FunctionNotFound, "nowhere");
    refuses(&stats("mlp", "9").await.unwrap_err(), Code::NotFound, Reason::RevisionNotFound, "");
}

#[tokio::test]
async fn repository_lists_loads_and_unloads_models() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let request = RepositoryIndexRequest::default();
    let all = client.repository_index(request).await.unwrap().into_inner().models;
    let state = |name: &str| {
        let model = all.iter().find(|model| model.name == name).unwrap();
        (model.version.as_str(), model.state.as_str(), model.reason.as_str())
    };
    assert_eq!(state("mlp"), ("1", "READY", ""));
    assert_eq!(state("preparing"), ("1", "LOADING", "being prepared"));
    assert_eq!(state("unloaded"), ("1", "UNAVAILABLE", "unloaded"));
    assert_eq!(state("broken"), ("1", "UNAVAILABLE", "its model file is gone"));
    assert!(all.iter().all(|model| model.name != "private"), "another tenant's model");
    let request = RepositoryIndexRequest { ready: true, ..RepositoryIndexRequest::default() };
    let ready = client.repository_index(request).await.unwrap().into_inner().models;
    assert!(ready.iter().all(|model| model.state == "READY") && ready.len() == all.len() - 3);

    let unload = RepositoryModelUnloadRequest { model_name: "mlp".into(), ..Default::default() };
    client.repository_model_unload(unload).await.unwrap();
    let status = client.model_infer(row("mlp")).await.unwrap_err();
    refuses(&status, Code::Unavailable, Reason::FunctionDisabled, "load");
    let load = RepositoryModelLoadRequest { model_name: "mlp".into(), ..Default::default() };
    client.repository_model_load(load).await.unwrap();
    client.model_infer(row("mlp")).await.unwrap();
}

#[tokio::test]
async fn unsupported_repository_calls_are_refused() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let load = RepositoryModelLoadRequest { model_name: "nowhere".into(), ..Default::default() };
    let status = client.repository_model_load(load.clone()).await.unwrap_err();
    refuses(&status, Code::NotFound, Reason::FunctionNotFound, "nowhere");
    let config = model_repository_parameter::ParameterChoice::StringParam("{}".into());
    let config = ModelRepositoryParameter { parameter_choice: Some(config) };
    let with_config = RepositoryModelLoadRequest {
        model_name: "mlp".into(),
        parameters: [("config".to_owned(), config)].into(),
        ..load
    };
    let status = client.repository_model_load(with_config).await.unwrap_err();
    refuses(&status, Code::Unimplemented, Reason::Unimplemented, "config");
    let named = RepositoryIndexRequest { repository_name: "other".into(), ..Default::default() };
    let status = client.repository_index(named).await.unwrap_err();
    refuses(&status, Code::Unimplemented, Reason::Unimplemented, "repository");
    let unload = RepositoryModelUnloadRequest {
        model_name: "mlp".into(),
        repository_name: "other".into(),
        ..Default::default()
    };
    let status = client.repository_model_unload(unload).await.unwrap_err();
    refuses(&status, Code::Unimplemented, Reason::Unimplemented, "repository");
}

#[tokio::test]
async fn unsupported_calls_are_refused_as_unimplemented() {
    let server = Server::start().await;
    let mut client = server.grpc().await;
    let status = [
        client
            .system_shared_memory_status(wire::SystemSharedMemoryStatusRequest::default())
            .await
            .unwrap_err(),
        client
            .system_shared_memory_register(wire::SystemSharedMemoryRegisterRequest::default())
            .await
            .unwrap_err(),
        client
            .system_shared_memory_unregister(wire::SystemSharedMemoryUnregisterRequest::default())
            .await
            .unwrap_err(),
        client.cuda_shared_memory_status(wire::CudaSharedMemoryStatusRequest::default()).await.unwrap_err(),
        client
            .cuda_shared_memory_register(wire::CudaSharedMemoryRegisterRequest::default())
            .await
            .unwrap_err(),
        client
            .cuda_shared_memory_unregister(wire::CudaSharedMemoryUnregisterRequest::default())
            .await
            .unwrap_err(),
        client.trace_setting(wire::TraceSettingRequest::default()).await.unwrap_err(),
        client.log_settings(wire::LogSettingsRequest::default()).await.unwrap_err(),
    ];
    for status in status {
        refuses(&status, Code::Unimplemented, Reason::Unimplemented, "not served");
    }
}
