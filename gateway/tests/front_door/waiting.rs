//! Tests requests for models that are expected to become ready.

use std::time::Duration;

use millrace_gateway::GatewayLimits;
use millrace_gateway::backend::ModelAvailability;
use millrace_proto::inference::infer_parameter::ParameterChoice;
use millrace_types::Reason;
use tonic::Code;

use crate::harness::{Server, parameter, refuses, row};

/// Waits until this number of requests wait for their model, according to the metrics.
async fn kept(server: &Server, requests: usize) {
    let line = format!("millrace_requests_waiting {requests}\n");
    let seen =
        async { while !String::from_utf8_lossy(&server.get("/metrics").await.body).contains(&line) {} };
    tokio::time::timeout(Duration::from_secs(60), seen).await.unwrap();
}

#[tokio::test]
async fn a_request_waits_for_its_model_and_is_answered() {
    let server = Server::start().await;
    let away = ModelAvailability::Away("it is placed on w1, not attached to this controller now".into());
    for before in [ModelAvailability::Preparing, away] {
        server.echo.make("preparing", &before);
        let mut client = server.grpc().await;
        let asked = tokio::spawn(async move { client.model_infer(row("preparing")).await });
        kept(&server, 1).await;
        server.echo.make("preparing", &ModelAvailability::Ready);
        assert_eq!(asked.await.unwrap().unwrap().into_inner().model_name, "preparing");
        kept(&server, 0).await;
    }
}

#[tokio::test]
async fn a_request_is_refused_when_its_model_will_not_become_ready() {
    let server = Server::start().await;
    for (then, reason, says) in [
        (ModelAvailability::Disabled, Reason::FunctionDisabled, "unloaded"),
        (
            ModelAvailability::Unavailable("its model file is gone".into()),
            Reason::FunctionNotReady,
            "is gone",
        ),
    ] {
        server.echo.make("preparing", &ModelAvailability::Preparing);
        let mut client = server.grpc().await;
        let asked = tokio::spawn(async move { client.model_infer(row("preparing")).await });
        kept(&server, 1).await;
        server.echo.make("preparing", &then);
        refuses(&asked.await.unwrap().unwrap_err(), Code::Unavailable, reason, says);
    }
    assert_eq!(server.echo.calls(), 0);
}

#[tokio::test]
async fn a_bad_request_is_refused_before_it_waits() {
    let server = Server::start().await;
    let mut wrong = row("preparing");
    wrong.inputs[0].shape = vec![3];
    let refused = server.grpc().await.model_infer(wrong).await.unwrap_err();
    refuses(&refused, Code::InvalidArgument, Reason::InvalidInput, "[3]");
}

#[tokio::test]
async fn an_expired_wait_reports_the_state_of_the_model() {
    let server = Server::start().await;
    server.echo.make("preparing", &ModelAvailability::Away("it is placed on w1".into()));
    let mut hurried = row("preparing");
    hurried.parameters.insert("timeout".into(), parameter(ParameterChoice::Int64Param(20_000)));
    let refused = server.grpc().await.model_infer(hurried).await.unwrap_err();
    refuses(&refused, Code::Unavailable, Reason::FunctionNotReady, "placed on w1");
    let failure = millrace_proto::status::from_status(&refused);
    assert!(failure.retryable && !failure.may_have_executed, "{failure}");
}

#[tokio::test]
async fn a_wait_ends_if_workers_stay_away_and_continues_on_new_workers() {
    let server =
        Server::with(GatewayLimits { away_max: Duration::from_millis(20), ..GatewayLimits::default() }).await;
    let away = ModelAvailability::Away("it is placed on w1".into());
    server.echo.make("preparing", &away);
    let refused = server.grpc().await.model_infer(row("preparing")).await.unwrap_err();
    refuses(&refused, Code::Unavailable, Reason::FunctionNotReady, "placed on w1");

    server.echo.add_moving("moving");
    let mut client = server.grpc().await;
    let asked = tokio::spawn(async move { client.model_infer(row("moving")).await });
    server.echo.waited_for(3).await;
    server.echo.make("moving", &ModelAvailability::Ready);
    asked.await.unwrap().unwrap();
}

#[tokio::test]
async fn requests_beyond_waiting_max_are_refused() {
    let server = Server::with(GatewayLimits { waiting_max: 1, ..GatewayLimits::default() }).await;
    let mut client = server.grpc().await;
    let first = tokio::spawn(async move { client.model_infer(row("preparing")).await });
    kept(&server, 1).await;
    let refused = server.grpc().await.model_infer(row("preparing")).await.unwrap_err();
    refuses(&refused, Code::Unavailable, Reason::FunctionNotReady, "too many");
    server.echo.make("preparing", &ModelAvailability::Ready);
    first.await.unwrap().unwrap();
}
