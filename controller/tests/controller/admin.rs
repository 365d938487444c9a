//! Tests of the admin API: calls, refusals, and that a refusal changes nothing.

use millrace_model::program::PackedProgram;
use millrace_proto::admin as api;
use millrace_types::limits::{PAGE_BYTES_MAX, TENSOR_NAME_BYTES_MAX};
use millrace_types::workflow::Signature;
use millrace_types::{DataType, Digest, Dim, Reason, TensorSpec};
use prost::Message as _;
use tonic::Code;

use crate::stub::Stub;
use crate::support::{Cluster, apply, apply_request, cnn, get, list, mlp, reason, record, until, upload};

#[tokio::test]
async fn a_function_is_applied_shown_listed_and_deleted() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    let uploaded = upload(&mut admin, &mlp()).await.unwrap();
    assert_eq!(uploaded.artifact.as_ref().unwrap().bytes, mlp().len() as u64);
    assert_eq!(uploaded.model.as_ref().unwrap().inputs[0].shape, vec![-1, 64]);
    let digests = [b"no model".as_slice(), &mlp()].map(|bytes| Digest::of(bytes).to_string()).into();
    let found = admin.find_artifacts(api::FindArtifactsRequest { digests }).await.unwrap().into_inner();
    let artifact = uploaded.artifact.clone().unwrap();
    let model = uploaded.model.clone().unwrap();
    assert_eq!((found.found, found.models), (vec![artifact], vec![model]));

    let applied = apply(&mut admin, "f", &mlp()).await.unwrap();
    assert_eq!(applied.outcome(), api::ApplyOutcome::Created);
    let function = applied.function.unwrap();
    assert_eq!((function.generation, function.updated_by.as_str()), (1, "anonymous"));
    assert_eq!(function.revisions[0].model, uploaded.model);
    assert_eq!(function.conditions[0].reason, "NoWorker");
    let function = record(function);
    assert_eq!(record(get(&mut admin, "f").await.unwrap()), function);
    assert_eq!(list(&mut admin).await.into_iter().map(record).collect::<Vec<_>>(), vec![function]);

    assert_eq!(apply(&mut admin, "f", &mlp()).await.unwrap().outcome(), api::ApplyOutcome::Unchanged);
    upload(&mut admin, &cnn()).await.unwrap();
    let changed = apply(&mut admin, "f", &cnn()).await.unwrap();
    assert_eq!(changed.outcome(), api::ApplyOutcome::Configured);
    assert_eq!(changed.function.unwrap().generation, 2);

    let delete = api::DeleteFunctionRequest { name: "f".into(), ..Default::default() };
    admin.delete_function(delete.clone()).await.unwrap();
    assert_eq!(reason(&get(&mut admin, "f").await.unwrap_err()), Reason::FunctionNotFound);
    assert_eq!(reason(&admin.delete_function(delete).await.unwrap_err()), Reason::FunctionNotFound);
    assert_eq!(list(&mut admin).await, vec![]);
}

#[tokio::test]
async fn a_refused_apply_changes_nothing() {
    let cluster = Cluster::start().await;
    let _worker = Stub::start(&cluster, "n1").await;
    let before = cluster.deploy("f", &mlp()).await;
    let mut admin = cluster.admin();
    until("the worker to be ready", async || {
        (get(&mut admin, "f").await.unwrap().conditions[0].reason == "Prepared").then_some(())
    })
    .await;
    let files = cluster.files();
    let request = apply_request("f", &mlp());
    let edit = |edit: fn(&mut api::ApplyFunctionRequest)| {
        let mut request = request.clone();
        edit(&mut request);
        request
    };
    for (what, request, expected) in [
        ("no spec", edit(|it| it.spec = None), Reason::InvalidSpec),
        ("bad name", edit(|it| it.spec.as_mut().unwrap().name = "../f".into()), Reason::InvalidSpec),
        ("bad tenant", edit(|it| it.spec.as_mut().unwrap().tenant = "A".into()), Reason::InvalidSpec),
        (
            "percentile of 1",
            edit(|it| {
                let deadline = Some(prost_types::Duration { seconds: 1, nanos: 0 });
                it.spec.as_mut().unwrap().slo = Some(api::Slo { deadline, percentile: 1.0 });
            }),
            Reason::InvalidSpec,
        ),
        (
            "deadline of zero",
            edit(|it| {
                it.spec.as_mut().unwrap().slo = Some(api::Slo { deadline: None, percentile: 0.9 });
            }),
            Reason::InvalidSpec,
        ),
        ("bad digest", edit(|it| it.digest = "sha256:0".into()), Reason::MalformedRequest),
        ("unknown artifact", edit(|it| it.digest = Digest::of(b"x").to_string()), Reason::ArtifactNotFound),
        ("stale version", edit(|it| it.resource_version = 1), Reason::Conflict),
        (
            "larger than every GPU",
            edit(|it| {
                it.spec.as_mut().unwrap().resources = Some(api::Resources { gpu_memory_bytes: 2 << 30 });
            }),
            Reason::ModelTooLarge,
        ),
        ("long idempotency key", edit(|it| it.idempotency_key = "k".repeat(200)), Reason::MalformedRequest),
        (
            "labels without end",
            edit(|it| {
                it.spec.as_mut().unwrap().labels.insert("l".into(), "x".repeat(64 << 10));
            }),
            Reason::InvalidSpec,
        ),
    ] {
        let refused = admin.apply_function(request).await.unwrap_err();
        assert_eq!(reason(&refused), expected, "{what}: {refused}");
        let now = get(&mut admin, "f").await.unwrap();
        assert_eq!(api::Function { conditions: before.conditions.clone(), ..now }, before, "{what}");
        assert_eq!(cluster.files(), files, "{what}");
        assert_eq!(list(&mut admin).await.len(), 1, "{what}");
    }
}

#[tokio::test]
async fn a_model_too_large_is_refused_with_both_sizes() {
    let cluster = Cluster::start().await;
    let _worker = Stub::start(&cluster, "n1").await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    let mut request = apply_request("f", &mlp());
    request.spec.as_mut().unwrap().resources = Some(api::Resources { gpu_memory_bytes: 2 << 30 });
    let refused = admin.apply_function(request).await.unwrap_err();
    assert_eq!((refused.code(), reason(&refused)), (Code::InvalidArgument, Reason::ModelTooLarge));
    for size in ["2.0 GiB", "1.0 GiB"] {
        assert!(refused.message().contains(size), "{}", refused.message());
    }
}

#[tokio::test]
async fn one_of_two_concurrent_writes_with_the_same_version_wins() {
    let cluster = Cluster::start().await;
    let seen = cluster.deploy("f", &mlp()).await;
    let write = |seconds| {
        let mut request = apply_request("f", &mlp());
        request.resource_version = seen.resource_version;
        request.spec.as_mut().unwrap().timeout = Some(prost_types::Duration { seconds, nanos: 0 });
        let mut admin = cluster.admin();
        async move { admin.apply_function(request).await }
    };
    let results = tokio::join!(write(1), write(2));
    let (winner, loser) = match results {
        (Ok(won), Err(lost)) | (Err(lost), Ok(won)) => (won.into_inner(), lost),
        other => panic!("{other:?}"),
    };
    assert_eq!((loser.code(), reason(&loser)), (Code::Aborted, Reason::Conflict));
    let mut shown = get(&mut cluster.admin(), "f").await.unwrap();
    // The response of an apply has only the newest revision.
    shown.revisions.drain(..1);
    assert_eq!(shown, winner.function.unwrap());
}

#[tokio::test]
async fn a_dry_run_answers_and_stores_nothing() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    let dry = api::ApplyFunctionRequest { dry_run: true, ..apply_request("f", &mlp()) };
    let answer = admin.apply_function(dry.clone()).await.unwrap().into_inner();
    assert_eq!((answer.outcome(), answer.function.unwrap().generation), (api::ApplyOutcome::Created, 1));
    assert_eq!(list(&mut admin).await, vec![]);

    let before = cluster.deploy("f", &mlp()).await;
    let unknown = api::ApplyFunctionRequest { digest: Digest::of(b"x").to_string(), ..dry };
    let refused = admin.apply_function(unknown).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::ArtifactNotFound);
    let delete = api::DeleteFunctionRequest { name: "f".into(), dry_run: true, ..Default::default() };
    admin.delete_function(delete).await.unwrap();
    assert_eq!(get(&mut admin, "f").await.unwrap(), before);
}

#[tokio::test]
async fn a_repeated_idempotency_key_gets_the_same_answer() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    let request = api::ApplyFunctionRequest { idempotency_key: "k1".into(), ..apply_request("f", &mlp()) };
    let first = admin.apply_function(request.clone()).await.unwrap().into_inner();
    let again = admin.apply_function(request.clone()).await.unwrap().into_inner();
    assert_eq!(first, again, "the repeat reports the function as created too");
    let other = api::ApplyFunctionRequest { spec: Some(crate::support::spec("g")), ..request };
    let refused = admin.apply_function(other).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::MalformedRequest, "the key was used for another write");
}

#[tokio::test]
async fn listings_are_paged_and_filtered_by_tenant() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    upload(&mut admin, &mlp()).await.unwrap();
    for (tenant, name) in [("a", "x"), ("b", "1"), ("b", "2"), ("b", "3"), ("c", "x")] {
        let mut request = apply_request(name, &mlp());
        request.spec.as_mut().unwrap().tenant = tenant.into();
        admin.apply_function(request).await.unwrap();
    }
    let mut pages = async |tenant: &str| {
        let mut pages: Vec<Vec<String>> = Vec::new();
        let mut page_token = String::new();
        loop {
            let request = api::ListFunctionsRequest {
                tenant: tenant.into(),
                page_size: 2,
                page_token,
                ..Default::default()
            };
            let page = admin.list_functions(request).await.unwrap().into_inner();
            let specs = page.functions.into_iter().map(|it| it.spec.unwrap());
            pages.push(specs.map(|it| format!("{}/{}", it.tenant, it.name)).collect());
            page_token = page.next_page_token;
            if page_token.is_empty() {
                return pages;
            }
        }
    };
    assert_eq!(pages("").await, vec![vec!["a/x", "b/1"], vec!["b/2", "b/3"], vec!["c/x"]]);
    assert_eq!(pages("b").await, vec![vec!["b/1", "b/2"], vec!["b/3"]]);
    assert_eq!(pages("d").await, vec![Vec::<String>::new()]);
    let bad = api::ListFunctionsRequest { page_token: "elsewhere".into(), ..Default::default() };
    let refused = cluster.admin().list_functions(bad).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::MalformedRequest);
}

#[tokio::test]
async fn the_version_is_reported_and_faults_are_refused_unless_allowed() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    let version = admin.get_version(api::GetVersionRequest {}).await.unwrap().into_inner();
    assert_eq!(version.cluster_id, cluster.controller.cluster_id().to_string());
    assert_eq!(version.api_versions, vec!["millrace/v1"]);
    let fault = api::InjectFaultRequest { node: "n1".into(), ..Default::default() };
    let refused = admin.inject_fault(fault.clone()).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::PermissionDenied);

    let cluster = Cluster::start_with(|config| config.allow_faults = true).await;
    let refused = cluster.admin().inject_fault(fault.clone()).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::NoWorker);
    let _worker = Stub::start(&cluster, "n1").await;
    let negative = api::InjectFaultRequest { fault: -1, ..fault.clone() };
    let refused = cluster.admin().inject_fault(negative).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::MalformedRequest);
    cluster.admin().inject_fault(fault).await.unwrap();
}

#[tokio::test]
async fn metrics_show_the_control_plane() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut worker = Stub::start(&cluster, "n1").await;
    worker.told(&["f@1"]).await;
    let text = cluster.metrics().await;
    for line in [
        "millrace_functions 1",
        "millrace_artifacts 1",
        "millrace_workers_attached 1",
        "millrace_raft_leads 1",
        "millrace_nodes 1",
        "millrace_nodes_lost 0",
        "millrace_nodes_needed 1",
        "millrace_placements 1",
        "millrace_functions_short 0",
        "millrace_index_entries 0",
        "millrace_index_overflow 0",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
}

/// Returns a program with the given number of inputs, and names of the given length.
fn wide_program(inputs: usize, name_bytes: usize) -> Vec<u8> {
    let tensor = |name: String| TensorSpec { name, datatype: DataType::Fp32, shape: vec![Dim::Fixed(1)] };
    let inputs = (0..inputs).map(|n| tensor(format!("{n:x>name_bytes$}"))).collect();
    let declared = Signature { inputs, outputs: vec![tensor("y".into())] };
    PackedProgram { signature: declared, file: b"#!/bin/true\n".to_vec().into() }.pack().unwrap().to_vec()
}

fn program_request(name: &str, program: &[u8]) -> api::ApplyFunctionRequest {
    let mut request = apply_request(name, program);
    request.spec.as_mut().unwrap().runtime = "process".into();
    request
}

/// Every list is paged, so that a client with gRPC's default message limit can read the list, even with
/// large items.
#[tokio::test]
async fn functions_of_one_hundred_kilobytes_are_all_listed() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    let program = wide_program(360, TENSOR_NAME_BYTES_MAX);
    upload(&mut admin, &program).await.unwrap();
    for n in 0..50 {
        admin.apply_function(program_request(&format!("f{n:02}"), &program)).await.unwrap();
    }
    let mut names = Vec::new();
    let mut page_token = String::new();
    let mut pages = 0;
    loop {
        let request = api::ListFunctionsRequest { page_size: 500, page_token, ..Default::default() };
        let page = admin.list_functions(request).await.unwrap().into_inner();
        let bytes = page.encoded_len();
        assert!(bytes <= PAGE_BYTES_MAX + 100, "{bytes} bytes of {} functions", page.functions.len());
        pages += 1;
        names.extend(page.functions.into_iter().map(|it| it.spec.unwrap().name));
        page_token = page.next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    assert_eq!(names, (0..50).map(|n| format!("f{n:02}")).collect::<Vec<_>>());
    assert!(pages > 4, "{pages} pages");

    // A look-up returns as many artifacts as fit, and counts the digests that are left for another
    // request.
    let digests = vec![Digest::of(&program).to_string(); 30];
    let found = admin.find_artifacts(api::FindArtifactsRequest { digests }).await.unwrap().into_inner();
    assert!(found.encoded_len() <= PAGE_BYTES_MAX + 1_000, "{} bytes", found.encoded_len());
    assert_eq!(
        (found.found.len(), found.found.len() + found.not_looked_at as usize),
        (found.models.len(), 30)
    );
    assert!(found.not_looked_at > 0);
}

#[tokio::test]
async fn names_over_their_bounds_are_refused_before_anything_is_stored() {
    let cluster = Cluster::start().await;
    let mut admin = cluster.admin();
    let refused = upload(&mut admin, &wide_program(1, TENSOR_NAME_BYTES_MAX + 1)).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::InvalidModel);
    assert!(refused.message().contains("TENSOR_NAME_BYTES_MAX is 256"), "{refused}");
    assert_eq!(cluster.files(), [""; 0]);

    upload(&mut admin, &mlp()).await.unwrap();
    let mut request = apply_request("f", &mlp());
    let pair = api::SequenceState { input: "x".repeat(48_000), output: "y".into() };
    let sequences = api::Sequences { state: vec![pair], ..Default::default() };
    request.spec.as_mut().unwrap().sequences = Some(sequences);
    let dry = api::ApplyFunctionRequest { dry_run: true, ..request.clone() };
    for request in [request, dry] {
        let refused = admin.apply_function(request).await.unwrap_err();
        assert_eq!(reason(&refused), Reason::InvalidSpec);
        assert!(refused.message().contains("TENSOR_NAME_BYTES_MAX is 256"), "{refused}");
    }
    assert_eq!(list(&mut admin).await, vec![]);
}
