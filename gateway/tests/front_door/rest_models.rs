//! Tests descriptions of the server and its models over REST, and the repository.

use bytes::Bytes;
use http::{Method, Request};
use http_body_util::Full;
use millrace_gateway::{GatewayConfig, GatewayLimits};
use millrace_types::Reason;
use serde_json::{Value as Json, json};

use crate::harness::{NOW, Server, config, row};

#[tokio::test]
async fn server_reports_that_it_is_live_and_whether_it_is_ready() {
    let server = Server::start().await;
    assert_eq!(server.get("/v2/health/live").await.json(), json!({ "live": true }));
    assert_eq!(server.get("/v2/health/ready").await.json(), json!({ "ready": true }));
    server.echo.set_ready(false);
    let reply = server.get("/v2/health/ready").await;
    assert_eq!((reply.status.as_u16(), reply.json()), (503, json!({ "ready": false })));
    assert_eq!(server.get("/v2/health/live").await.status, 200);
    for path in ["/v2", "/v2/"] {
        let json = server.get(path).await.json();
        assert_eq!((&json["name"], &json["version"]), (&json!("millrace"), &json!(millrace_proto::BUILD)));
        assert!(json["extensions"].as_array().unwrap().contains(&json!("binary_tensor_data")));
    }
}

#[tokio::test]
async fn ready_path_reports_whether_a_model_is_ready() {
    let server = Server::start().await;
    for (path, status) in [
        ("/v2/models/mlp/ready", 200),
        ("/v2/models/versioned/versions/2/ready", 200),
        ("/v2/models/preparing/ready", 503),
        ("/v2/models/unloaded/ready", 503),
        ("/v2/models/nowhere/ready", 404),
        ("/v2/models/mlp/versions/9/ready", 404),
    ] {
        assert_eq!(server.get(path).await.status, status, "{path}");
    }
    assert_eq!(server.get("/v2/models/mlp/ready").await.json(), json!({ "name": "mlp", "ready": true }));
}

#[tokio::test]
async fn model_path_describes_a_model() {
    let server = Server::start().await;
    let expected = json!({
        "name": "pair",
        "versions": ["1"],
        "platform": "millrace_onnx",
        "inputs": [
            { "name": "a", "datatype": "FP32", "shape": [-1, 4] },
            { "name": "b", "datatype": "INT64", "shape": [-1] },
        ],
        "outputs": [
            { "name": "a_out", "datatype": "FP32", "shape": [-1, 4] },
            { "name": "b_out", "datatype": "INT64", "shape": [-1] },
        ],
    });
    assert_eq!(server.get("/v2/models/pair").await.json(), expected);
    assert_eq!(server.get("/v2/models/pair/versions/1").await.json(), expected);
    server.get("/v2/models/nowhere").await.refuses(404, Reason::FunctionNotFound, "nowhere");
    server.get("/v2/models/mlp/versions/9").await.refuses(404, Reason::RevisionNotFound, "");
    server.get("/v2/models/unloaded").await.refuses(503, Reason::FunctionDisabled, "load");
}

#[tokio::test]
async fn config_path_describes_the_model_correctly() {
    let server = Server::start().await;
    let expected = json!({
        "name": "mlp",
        "platform": "millrace_onnx",
        "backend": "millrace",
        "runtime": "onnx",
        "version_policy": { "specific": { "versions": [1] } },
        "max_batch_size": 0,
        "input": [{ "name": "x", "data_type": "TYPE_FP32", "dims": [-1, 64] }],
        "output": [{ "name": "x_out", "data_type": "TYPE_FP32", "dims": [-1, 64] }],
        "parameters": {
            "idempotent": { "string_value": "true" },
            "timeout_ms": { "string_value": "60000" },
            "weights_bytes": { "string_value": "1048576" },
        },
        "model_transaction_policy": { "decoupled": false },
    });
    assert_eq!(server.get("/v2/models/mlp/config").await.json(), expected);
    assert_eq!(server.get("/v2/models/mlp/versions/1/config").await.json(), expected);
}

#[tokio::test]
async fn stats_path_counts_the_requests_of_models() {
    let server = Server::start().await;
    server.grpc().await.model_infer(row("mlp")).await.unwrap();
    let json = server.get("/v2/models/mlp/stats").await.json();
    let [mlp] = json["model_stats"].as_array().unwrap().as_slice() else { panic!("{json}") };
    assert_eq!((&mlp["name"], &mlp["version"]), (&json!("mlp"), &json!("1")));
    assert_eq!(u128::from(mlp["last_inference"].as_u64().unwrap()), NOW.as_millis());
    assert_eq!((&mlp["inference_count"], &mlp["execution_count"]), (&json!(1), &json!(1)));
    assert_eq!(mlp["inference_stats"]["queue"], json!({ "count": 1, "ns": 100_000 }));
    assert_eq!(mlp["inference_stats"]["fail"], json!({ "count": 0, "ns": 0 }));
    assert_eq!(mlp["batch_stats"][0]["compute_infer"], json!({ "count": 1, "ns": 300_000 }));
    let names = |json: Json| json["model_stats"].as_array().unwrap().len();
    assert_eq!(names(server.get("/v2/models/versioned/stats").await.json()), 3);
    assert_eq!(names(server.get("/v2/models/versioned/versions/2/stats").await.json()), 1);
    assert!(names(server.get("/v2/models/stats").await.json()) > 10);
    server.get("/v2/models/nowhere/stats").await.refuses(404, Reason::FunctionNotFound, "nowhere");
}

#[tokio::test]
async fn repository_lists_loads_and_unloads_models() {
    let server = Server::start().await;
    let index = server.post("/v2/repository/index", "").await.json();
    let entry =
        |name: &str| index.as_array().unwrap().iter().find(|model| model["name"] == name).unwrap().clone();
    assert_eq!(entry("mlp"), json!({ "name": "mlp", "version": "1", "state": "READY" }));
    let unloaded =
        json!({ "name": "unloaded", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded" });
    assert_eq!(entry("unloaded"), unloaded);
    assert_eq!(server.get("/v2/repository/index").await.json(), index);
    let ready = server.post("/v2/repository/index", r#"{"ready":true}"#).await.json();
    assert_eq!(ready.as_array().unwrap().len(), index.as_array().unwrap().len() - 3);

    let dependents = r#"{"parameters":{"unload_dependents":true}}"#;
    assert_eq!(server.post("/v2/repository/models/mlp/unload", dependents).await.status, 200);
    assert_eq!(server.get("/v2/models/mlp/ready").await.status, 503);
    assert_eq!(server.post("/v2/repository/models/mlp/load", "").await.status, 200);
    assert_eq!(server.get("/v2/models/mlp/ready").await.status, 200);

    let load = "/v2/repository/models/mlp/load";
    server.post("/v2/repository/models/nowhere/load", "").await.refuses(
        404,
        Reason::FunctionNotFound,
        "nowhere",
    );
    let config = r#"{"parameters":{"config":"{}"}}"#;
    server.post(load, config).await.refuses(501, Reason::Unimplemented, "config");
    server.post(load, "{").await.refuses(400, Reason::MalformedRequest, "protocol");
}

/// Calls of a web page that a developer has open: to the server's own address, or to a host name that
/// the page's author resolves to that address.
#[tokio::test]
async fn a_page_of_another_origin_cannot_change_anything() {
    let server = Server::start().await;
    let own = server.addr.to_string();
    let call = async |path: &str, host: &str, headers: &[(&str, &str)]| {
        let mut request = Request::builder().method(Method::POST).uri(path).header("host", host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        server.exchange(request.body(Full::new(Bytes::new())).unwrap()).await
    };
    let json = ("content-type", "application/json");
    let foreign = ("origin", "http://attacker.example");
    let unload = "/v2/repository/models/mlp/unload";
    let denied = Reason::PermissionDenied;
    call(unload, &own, &[json, foreign]).await.refuses(403, denied, "attacker.example");
    call(unload, &own, &[json, ("origin", "null")]).await.refuses(403, denied, "null");
    call(unload, "attacker.example", &[json]).await.refuses(403, denied, "attacker.example");
    let forwarded = ("x-forwarded-host", own.as_str());
    call(unload, "attacker.example", &[json, forwarded]).await.refuses(403, denied, "--host-name");
    let cross_site = ("sec-fetch-site", "cross-site");
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"] {
        let text = ("content-type", kind);
        let index = "/v2/repository/index";
        call(unload, &own, &[text, cross_site]).await.refuses(415, Reason::MalformedRequest, kind);
        call(index, &own, &[text, cross_site]).await.refuses(415, Reason::MalformedRequest, kind);
    }
    // Triton's C++ client and `curl -d` send this type, and are no browsers.
    let form = ("content-type", "application/x-www-form-urlencoded");
    assert_eq!(call("/v2/repository/index", &own, &[form]).await.status, 200);

    let grpc = ("content-type", "application/grpc");
    let unload = "/inference.GRPCInferenceService/RepositoryModelUnload";
    for (host, headers) in [(own.as_str(), [grpc, foreign]), ("attacker.example", [grpc, ("te", "trailers")])]
    {
        let reply = call(unload, host, &headers).await;
        assert_eq!(reply.header("grpc-status"), "7", "{reply:?}");
        assert!(reply.header("grpc-message").contains("attacker.example"), "{reply:?}");
    }
    assert_eq!(server.get("/v2/models/mlp/ready").await.status, 200, "the model is still loaded");

    // Accepted calls: a type with parameters, a request without a type, and a page of the server's
    // own origin.
    let page = format!("http://{own}");
    for headers in [[("content-type", "Application/JSON; charset=utf-8")], [("origin", page.as_str())]] {
        assert_eq!(call("/v2/repository/models/mlp/unload", &own, &headers).await.status, 200, "{headers:?}");
    }
    assert_eq!(server.get("/v2/models/mlp/ready").await.status, 503);
}

#[tokio::test]
async fn a_server_accepts_only_its_configured_host_names() {
    let config =
        GatewayConfig { host_names: vec!["models.example".into()], ..config(GatewayLimits::default()) };
    let server = Server::of(config, |door| door).await;
    for (host, status) in [("models.example:8080", 200), ("other.example", 403), ("localhost", 200)] {
        let request = Request::builder().uri("/v2").header("host", host).body(Full::new(Bytes::new()));
        assert_eq!(server.exchange(request.unwrap()).await.status, status, "{host}");
    }
}

#[tokio::test]
async fn unknown_paths_and_methods_are_refused_in_json() {
    let server = Server::start().await;
    for path in
        ["/", "/v1/models/mlp", "/v2/models", "/v2/models/mlp/explain", "/v2/health", "/v2/trace/setting"]
    {
        server.get(path).await.refuses(404, Reason::Unimplemented, path);
    }
    for (method, path, allow) in [
        (Method::GET, "/v2/models/mlp/infer", "POST"),
        (Method::POST, "/v2/health/live", "GET,HEAD"),
        (Method::DELETE, "/v2/models/mlp", "GET,HEAD"),
        (Method::GET, "/v2/repository/models/mlp/load", "POST"),
    ] {
        let reply = server.send(method, path, &[], Bytes::new()).await;
        reply.refuses(405, Reason::Unimplemented, allow);
        assert_eq!(reply.header("allow"), allow);
    }
    server.get("/v2/models/%ff").await.refuses(400, Reason::MalformedRequest, "path");
}
