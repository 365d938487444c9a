//! Calls of the SDK to small servers in this process: the messages sent, the responses read, and
//! the failover when an endpoint is gone.
#![allow(clippy::unwrap_used)]

mod fake;

use std::time::Duration;

use bytes::Bytes;
use fake::{Fake, FakeFault, dead_address};
use futures::{StreamExt as _, TryStreamExt as _};
use millrace_client::{
    Address, Admin, ApplyItem, ApplyOptions, ApplyOutcome, DeleteOptions, DryRun, DryRunStep, Endpoints,
    Error, InferRequest, Inference, LatencyBreakdown, ModelFile, PendingModel, PolicyChange, RetryPolicy,
    Tensor, log::Filter, messages,
};
use millrace_types::policy::DispatchName;
use millrace_types::workflow::{Step, StepTarget, WorkflowOutput};
use millrace_types::{
    DataType, Digest, FunctionKey, FunctionName, FunctionSpec, PolicySpec, Reason, TenantName, WorkflowSpec,
};

fn key(name: &str) -> FunctionKey {
    FunctionKey { tenant: TenantName::default(), name: FunctionName::new(name).unwrap() }
}

fn endpoints(addresses: &[&Address]) -> Endpoints {
    Endpoints::with_client_id(addresses.iter().map(|&address| address.clone()).collect(), 7).unwrap()
}

fn request(model: &str) -> InferRequest {
    InferRequest::new(model, vec![Tensor::from_f32("x", vec![1, 2], &[1.0, 2.0]).unwrap()])
}

#[tokio::test]
async fn an_applied_function_can_be_read_and_deleted() {
    let server = Fake::start().await;
    let admin = Admin::new(endpoints(&[&server.address]));
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("m.onnx"), vec![3; 3_000_000]).unwrap();
    let file = ModelFile::open(folder.path().join("m.onnx")).unwrap();

    assert_eq!(admin.find_artifacts(&[file.digest()]).await.unwrap(), []);
    let uploaded = admin.upload(&file, |_| {}).await.unwrap();
    assert_eq!(uploaded.artifact.unwrap().bytes, 3_000_000);
    assert_eq!(admin.find_artifacts(&[file.digest()]).await.unwrap(), [file.digest()]);
    let models = admin.find_models(&[Digest::of(b"another"), file.digest()]).await.unwrap();
    // More digests than a server accepts in a call: as many as a cluster's functions may have.
    let many: Vec<Digest> = (0..1_001_u32).map(|n| Digest::of(&n.to_le_bytes())).collect();
    let many = [many, vec![file.digest()]].concat();
    assert_eq!(admin.find_artifacts(&many).await.unwrap(), [file.digest()]);
    assert_eq!(admin.find_models(&many).await.unwrap(), models);
    let inputs = |model: &messages::ModelSummary| model.inputs[0].name.clone();
    assert_eq!(
        models.iter().map(|(&digest, it)| (digest, inputs(it))).collect::<Vec<_>>(),
        [(file.digest(), "x".to_owned())]
    );

    let spec = FunctionSpec::new(key("digits"));
    let options = ApplyOptions::default();
    let applied = admin.apply(&spec, file.digest(), options).await.unwrap();
    assert_eq!(applied.outcome, ApplyOutcome::Created);
    let dry = ApplyOptions { dry_run: true, ..options };
    assert_eq!(admin.apply(&spec, file.digest(), dry).await.unwrap().outcome, ApplyOutcome::Unchanged);
    let changed = FunctionSpec { idempotent: false, ..spec };
    assert_eq!(
        admin.apply(&changed, file.digest(), options).await.unwrap().outcome,
        ApplyOutcome::Configured
    );
    assert_eq!(admin.function(&key("digits")).await.unwrap().spec.unwrap().name, "digits");
    admin.delete(&key("digits"), DeleteOptions::default()).await.unwrap();
    assert_eq!(server.function_names(), Vec::<String>::new());
}

#[tokio::test]
async fn a_listing_reads_every_page() {
    let server = Fake::start().await;
    let admin = Admin::new(endpoints(&[&server.address]));
    for name in ["a", "b", "c", "d", "e"] {
        let artifact = millrace_types::Digest::of(b"");
        admin.apply(&FunctionSpec::new(key(name)), artifact, ApplyOptions::default()).await.unwrap();
    }
    let names: Vec<String> =
        admin.functions(None).map_ok(|function| function.spec.unwrap().name).try_collect().await.unwrap();
    assert_eq!(names, ["a", "b", "c", "d", "e"]);
    assert!(server.pages_asked() > 1, "the fake pages by two");
    let first = admin.functions(None).next().await.unwrap().unwrap();
    assert_eq!(first.spec.unwrap().name, "a");
}

fn workflow(name: &str, function: &str) -> WorkflowSpec {
    let inputs = [("x".to_owned(), "input.x".parse().unwrap())].into();
    let run = StepTarget::Function(FunctionName::new(function).unwrap());
    let step = Step {
        name: FunctionName::new("only").unwrap(),
        run,
        inputs,
        each: None,
        when: None,
        deadline: None,
    };
    let outputs = vec![WorkflowOutput { name: "y".into(), from: "only.y".parse().unwrap() }];
    WorkflowSpec::new(key(name), vec!["x".into()], vec![step], outputs)
}

#[tokio::test]
async fn applied_workflows_can_be_read_and_deleted() {
    let server = Fake::start().await;
    let admin = Admin::new(endpoints(&[&server.address]));
    let options = ApplyOptions::default();
    let refused = admin.apply_workflow(&workflow("a", "digits"), options).await.unwrap_err();
    assert_eq!(refused.reason(), Some(Reason::InvalidSpec), "its function does not exist");
    let artifact = millrace_types::Digest::of(b"");
    admin.apply(&FunctionSpec::new(key("digits")), artifact, options).await.unwrap();

    let dry = ApplyOptions { dry_run: true, ..options };
    for name in ["a", "b", "c"] {
        let spec = workflow(name, "digits");
        assert_eq!(admin.apply_workflow(&spec, dry).await.unwrap().outcome, ApplyOutcome::Created);
        let applied = admin.apply_workflow(&spec, options).await.unwrap();
        assert_eq!(
            (applied.outcome, applied.workflow.spec.unwrap().name.as_str()),
            (ApplyOutcome::Created, name)
        );
        assert_eq!(admin.apply_workflow(&spec, options).await.unwrap().outcome, ApplyOutcome::Unchanged);
    }
    let found = admin.workflow(&key("b")).await.unwrap().spec.unwrap();
    assert_eq!(millrace_proto::convert::workflow_spec(found), Ok(workflow("b", "digits")));
    let names = || async {
        let names = admin.workflows(None).map_ok(|workflow| workflow.spec.unwrap().name);
        names.try_collect::<Vec<String>>().await.unwrap()
    };
    assert_eq!(names().await, ["a", "b", "c"], "the fake pages by two");
    admin.delete_workflow(&key("a"), DeleteOptions { dry_run: true, ..Default::default() }).await.unwrap();
    admin.delete_workflow(&key("b"), DeleteOptions::default()).await.unwrap();
    assert_eq!(names().await, ["a", "c"]);
    let gone = admin.delete_workflow(&key("b"), DeleteOptions::default()).await.unwrap_err();
    assert_eq!(gone.reason(), Some(Reason::WorkflowNotFound));
}

#[tokio::test]
async fn a_dry_run_of_several_items_returns_their_order() {
    let server = Fake::start().await;
    let admin = Admin::new(endpoints(&[&server.address]));
    let artifact = Digest::of(b"model");
    let tensor = |name: &str| messages::TensorSpec {
        name: name.into(),
        datatype: "FP32".into(),
        shape: vec![-1, 64],
        ..Default::default()
    };
    let model = messages::ModelSummary {
        launches: 1,
        inputs: vec![tensor("x")],
        outputs: vec![tensor("y")],
        ..Default::default()
    };
    let items = [
        ApplyItem::Workflow(workflow("chain", "digits")),
        ApplyItem::Function { spec: FunctionSpec::new(key("digits")), artifact },
    ];
    let DryRun::Refused(refusal) = admin.dry_run_apply(&items, Vec::new()).await.unwrap() else {
        panic!("the model does not exist")
    };
    assert_eq!((refusal.item, refusal.failure.reason), (1, Reason::ArtifactNotFound));
    let models = vec![PendingModel { digest: artifact, model }];
    let step = |item| DryRunStep { item, outcome: ApplyOutcome::Created };
    let taken = DryRun::Taken(vec![step(1), step(0)]);
    assert_eq!(admin.dry_run_apply(&items, models).await.unwrap(), taken);
    assert_eq!(server.function_names(), Vec::<String>::new());
}

#[tokio::test]
async fn a_refusal_keeps_its_reason_and_flags() {
    let server = Fake::start().await;
    let error = Admin::new(endpoints(&[&server.address])).function(&key("none")).await.unwrap_err();
    assert_eq!(error.reason(), Some(Reason::FunctionNotFound));
    assert!(!error.retryable() && !error.may_have_executed());
}

#[tokio::test]
async fn a_response_carries_outputs_id_and_split() {
    let server = Fake::start().await;
    let inference = Inference::new(endpoints(&[&server.address]));
    let answer = inference.infer(InferRequest { id: Some("mine".into()), ..request("echo") }).await.unwrap();
    assert_eq!(answer.request_id, "mine");
    let expected =
        Tensor::new("x", DataType::Fp32, vec![1, 2], request("").inputs[0].data().clone()).unwrap();
    assert_eq!(answer.outputs, [expected]);
    let micros = Duration::from_micros;
    let split = LatencyBreakdown {
        queue: micros(100),
        run: micros(1500),
        total: micros(2000),
        ..LatencyBreakdown::default()
    };
    assert_eq!(answer.split, Some(split));
    // Without an id from the caller, the client generates one that follows from its client id.
    assert_eq!(inference.infer(request("echo")).await.unwrap().request_id, "0000000000000007-0");
}

#[tokio::test]
async fn typed_contents_are_read_like_raw_contents() {
    let server = Fake::start().await;
    let inference = Inference::new(endpoints(&[&server.address]));
    let answer = inference.infer(request("typed")).await.unwrap();
    assert_eq!(answer.outputs[0].to_f32().unwrap(), [0.5, 0.25]);
    assert_eq!(answer.split, None);
}

#[tokio::test]
async fn a_client_stays_at_the_endpoint_that_answered() {
    let dead = dead_address().await;
    let server = Fake::start().await;
    let endpoints = endpoints(&[&dead, &server.address]);
    let inference = Inference::new(endpoints);
    assert_eq!(inference.infer(request("echo")).await.unwrap().model, "echo");
    assert_eq!(inference.infer(request("echo")).await.unwrap().model, "echo");
}

#[tokio::test]
async fn an_error_names_every_endpoint_when_none_can_be_reached() {
    let one = dead_address().await;
    let two = dead_address().await;
    let error = Admin::new(endpoints(&[&one, &two])).version().await.unwrap_err();
    let Error::Unreachable { addresses, .. } = &error else { panic!("{error:?}") };
    assert_eq!(*addresses, [one.clone(), two.clone()]);
    assert!(error.to_string().starts_with(&format!("cannot reach {one}, {two}: ")), "{error}");
    assert!(error.to_string().to_lowercase().contains("refused"), "{error}");
    assert!(error.retryable() && !error.may_have_executed());
}

#[tokio::test]
async fn an_inference_is_sent_again_after_a_lost_gateway_only_if_it_may_run_twice() {
    for (model, repeat, again) in [
        ("echo", RetryPolicy::AsDeclared, true),
        ("once", RetryPolicy::AsDeclared, false),
        ("once", RetryPolicy::Allowed, true),
        ("echo", RetryPolicy::Forbidden, false),
    ] {
        let dies = Fake::broken(FakeFault::Dies).await;
        let lives = Fake::start().await;
        let inference = Inference::new(endpoints(&[&dies.address, &lives.address]));
        let answer = inference.infer(InferRequest { repeat, ..request(model) }).await;
        let case = format!("{model} {repeat:?}");
        assert_eq!(dies.ids(), ["0000000000000007-0"], "{case}");
        match again {
            true => {
                assert_eq!(answer.unwrap().request_id, "0000000000000007-0", "{case}");
                assert_eq!(lives.ids(), dies.ids(), "{case}: under the same id");
            }
            false => {
                let error = answer.unwrap_err();
                assert!(
                    matches!(&error, Error::ConnectionLost { address, .. } if *address == dies.address),
                    "{case}: {error:?}"
                );
                assert!(error.may_have_executed() && lives.ids().is_empty(), "{case}");
            }
        }
    }
}

#[tokio::test]
async fn an_inference_is_not_repeated_after_another_vendors_server_hangs_up() {
    let hangs_up = fake::hangs_up_in_the_middle().await;
    let inference = Inference::new(endpoints(&[&hangs_up]));
    let error = inference.infer(request("echo")).await.unwrap_err();
    assert!(matches!(&error, Error::ConnectionLost { address, .. } if *address == hangs_up), "{error:?}");
}

#[tokio::test]
async fn a_write_keeps_its_key_when_its_endpoint_dies() {
    let dies = Fake::broken(FakeFault::Dies).await;
    let lives = Fake::start().await;
    let admin = Admin::new(endpoints(&[&dies.address, &lives.address]));
    let artifact = millrace_types::Digest::of(b"");
    admin.apply(&FunctionSpec::new(key("digits")), artifact, ApplyOptions::default()).await.unwrap();
    assert_eq!(dies.ids(), ["0000000000000007-0"]);
    assert_eq!(lives.ids(), dies.ids());
}

#[tokio::test]
async fn a_write_waits_for_a_leader_and_keeps_its_key() {
    let one = Fake::broken(FakeFault::Unled(2)).await;
    let two = Fake::broken(FakeFault::Unled(2)).await;
    let admin = Admin::new(endpoints(&[&one.address, &two.address]));
    let artifact = millrace_types::Digest::of(b"");
    admin.apply(&FunctionSpec::new(key("digits")), artifact, ApplyOptions::default()).await.unwrap();
    assert_eq!(one.ids(), ["0000000000000007-0"; 3]);
    assert_eq!(two.ids(), ["0000000000000007-0"; 2]);
}

#[tokio::test]
async fn a_client_leaves_a_server_that_shuts_down() {
    let down = Fake::broken(FakeFault::GoesDown).await;
    let up = Fake::start().await;
    let inference = Inference::new(endpoints(&[&down.address, &up.address]));
    for _ in 0..2 {
        assert_eq!(inference.infer(request("echo")).await.unwrap().model, "echo");
    }
    assert_eq!((down.ids().len(), up.ids().len()), (1, 2), "the client stays at the endpoint that answered");
    let alone = Inference::new(endpoints(&[&down.address])).infer(request("echo")).await.unwrap_err();
    assert_eq!(alone.reason(), Some(Reason::ShuttingDown));
}

#[tokio::test]
async fn a_membership_change_is_never_sent_twice() {
    let dies = Fake::broken(FakeFault::Dies).await;
    let lives = Fake::start().await;
    let admin = Admin::new(endpoints(&[&dies.address, &lives.address]));
    let error = admin.remove_controller(2).await.unwrap_err();
    assert!(matches!(error, Error::ConnectionLost { .. }) && error.may_have_executed(), "{error:?}");
    assert_eq!((dies.ids(), lives.ids()), (vec!["remove 2".to_owned()], vec![]));
}

#[tokio::test]
async fn a_silent_server_is_given_up_after_the_timeout() {
    let server = Fake::start().await;
    let inference = Inference::new(endpoints(&[&server.address]));
    let timeout = Duration::from_millis(20);
    let error = inference.infer(InferRequest { timeout, ..request("silent") }).await.unwrap_err();
    assert!(matches!(error, Error::TimedOut { timeout: asked, .. } if asked == timeout), "{error:?}");
}

#[tokio::test]
async fn model_metadata_has_types_and_shapes() {
    let server = Fake::start().await;
    let inference = Inference::new(endpoints(&[&server.address]));
    let model = inference.model_metadata("echo", "").await.unwrap();
    assert_eq!((model.inputs[0].datatype, model.inputs[0].shape.as_slice()), (DataType::Fp32, &[-1, 2][..]));
    assert!(inference.model_ready("echo", "").await.unwrap());
    assert!(inference.server_ready().await.unwrap());
}

#[tokio::test]
async fn a_large_tensor_round_trips() {
    let server = Fake::start().await;
    let inference = Inference::new(endpoints(&[&server.address]));
    let data = Bytes::from(vec![1u8; 24 << 20]);
    let tensor = Tensor::new("x", DataType::Uint8, vec![24 << 20], data).unwrap();
    let answer = inference.infer(InferRequest::new("echo", vec![tensor.clone()])).await.unwrap();
    assert_eq!(answer.outputs, [tensor]);
}

#[tokio::test]
async fn a_policy_change_sets_only_the_named_fields() {
    let server = Fake::start().await;
    let admin = Admin::new(endpoints(&[&server.address]));
    let spec = PolicySpec { dispatch: Some(DispatchName::Torpor), ..PolicySpec::NONE };
    let change = PolicyChange { spec, fields: Some(vec!["dispatch".into()]), ..PolicyChange::default() };
    let dry = PolicyChange { dry_run: true, ..change.clone() };
    assert_eq!(admin.update_policy(&dry).await.unwrap().generation, 1);
    assert_eq!(admin.policy().await.unwrap().generation, 0, "a dry run stores nothing");
    let first = PolicyChange { resource_version: Some(0), ..change.clone() };
    let changed = admin.update_policy(&first).await.unwrap();
    assert_eq!(
        (changed.spec.unwrap().dispatch.as_str(), changed.updated_by.as_str()),
        ("torpor", "dispatch")
    );
    // 0 is the version before the first change.
    for stale in [7, 0] {
        let stale = PolicyChange { resource_version: Some(stale), ..change.clone() };
        let refused = admin.update_policy(&stale).await.unwrap_err();
        assert_eq!(refused.reason(), Some(Reason::Conflict));
    }
}

#[tokio::test]
async fn the_client_waits_for_operations_and_reads_log_lines_page_by_page() {
    let server = Fake::start().await;
    let admin = Admin::new(endpoints(&[&server.address]));
    assert_eq!(admin.operations().await.unwrap().len(), 1);
    let mut seen = Vec::new();
    let ended = admin.wait_operation("1", Duration::from_millis(1), |it| seen.push(it.done)).await.unwrap();
    assert_eq!((ended.done, seen), (3, vec![1, 2, 3]));
    let unknown = admin.operation("9").await.unwrap_err();
    assert_eq!(unknown.reason(), Some(Reason::OperationNotFound));
    let mut after = String::new();
    let mut read = Vec::new();
    while read.len() < 3 {
        let page = admin.logs(&[], &Filter::default(), &after, Duration::ZERO).await.unwrap();
        read.extend(page.lines.into_iter().map(|line| line.message));
        after = page.next;
    }
    assert_eq!(read, ["line 1", "line 2", "line 3"]);
}
