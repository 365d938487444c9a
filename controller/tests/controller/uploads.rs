//! Tests of model files: accepted and refused uploads, and garbage collection.

use std::time::Duration;

use millrace_proto::admin as api;
use millrace_types::{Bytes, Digest, Reason};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::support::{
    Cluster, apply, apply_request, cnn, data, header, list, mlp, reason, soon, until, upload,
};

/// Uploads these messages and returns the reason of the refusal.
async fn refused_upload(cluster: &Cluster, messages: Vec<api::UploadArtifactRequest>) -> Reason {
    reason(&cluster.admin().upload_artifact(futures::stream::iter(messages)).await.unwrap_err())
}

#[tokio::test]
async fn a_refused_upload_leaves_neither_a_file_nor_a_record() {
    let cluster = Cluster::start_with(|config| config.limits.artifact_bytes = Bytes::mib(64)).await;
    let model = mlp();
    let digest = Digest::of(&model).to_string();
    let text = b"not a model";
    for (what, messages, expected) in [
        (
            "another digest",
            vec![header(&Digest::of(b"x").to_string(), model.len()), data(&model)],
            Reason::DigestMismatch,
        ),
        ("cut short", vec![header(&digest, model.len()), data(&model[1..])], Reason::MalformedRequest),
        ("too long", vec![header(&digest, model.len() - 1), data(&model)], Reason::MalformedRequest),
        ("no header", vec![data(&model)], Reason::MalformedRequest),
        (
            "two headers",
            vec![header(&digest, model.len()), header(&digest, model.len())],
            Reason::MalformedRequest,
        ),
        ("nothing at all", vec![], Reason::MalformedRequest),
        ("a bad digest", vec![header("md5:0", 3), data(b"abc")], Reason::MalformedRequest),
        ("too large", vec![header(&digest, 65 << 20)], Reason::ModelTooLarge),
        (
            "not ONNX",
            vec![header(&Digest::of(text).to_string(), text.len()), data(text)],
            Reason::InvalidModel,
        ),
    ] {
        assert_eq!(refused_upload(&cluster, messages).await, expected, "{what}");
        assert_eq!(cluster.files(), Vec::<String>::new(), "{what}");
        let asked = api::FindArtifactsRequest { digests: vec![digest.clone()] };
        let found = cluster.admin().find_artifacts(asked).await.unwrap().into_inner().found;
        assert_eq!(found, vec![], "{what}");
    }
}

#[tokio::test]
async fn an_aborted_upload_leaves_nothing() {
    let cluster = Cluster::start().await;
    let model = mlp();
    let (sender, receiver) = mpsc::channel(4);
    let mut admin = cluster.admin();
    let uploading = tokio::spawn(async move { admin.upload_artifact(ReceiverStream::new(receiver)).await });
    sender.send(header(&Digest::of(&model).to_string(), model.len())).await.unwrap();
    sender.send(data(&model[..100])).await.unwrap();
    let mut admin = cluster.admin();
    until("the upload to begin", async || {
        list(&mut admin).await;
        (cluster.files().len() == 1).then_some(())
    })
    .await;
    uploading.abort();
    until("its file to go", async || {
        list(&mut admin).await;
        cluster.files().is_empty().then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_model_belongs_to_the_cluster_and_functions_of_any_tenant_can_use_it() {
    let cluster = Cluster::start().await;
    cluster.deploy("f", &mlp()).await;
    let mut admin = cluster.admin();
    let mut of_another = apply_request("f", &mlp());
    of_another.spec.as_mut().unwrap().tenant = "acme".into();
    let applied = admin.apply_function(of_another).await.unwrap().into_inner();
    assert_eq!(applied.outcome(), api::ApplyOutcome::Created);
}

#[tokio::test]
async fn only_unused_models_are_collected_after_their_grace_period() {
    let cluster = Cluster::start_with(|config| {
        config.limits.collect_every = Duration::from_millis(1);
        config.limits.artifact_grace = Duration::from_millis(500);
    })
    .await;
    let mut admin = cluster.admin();
    // On a busy machine the file may be collected before the first use.
    until("the function to be applied", async || {
        upload(&mut admin, &mlp()).await.unwrap();
        apply(&mut admin, "f", &mlp()).await.ok()
    })
    .await;
    upload(&mut admin, &cnn()).await.unwrap();
    let used = Digest::of(&mlp());
    let unused = Digest::of(&cnn());
    // This file is like a file that a crash left without a record.
    let orphan = cluster.dir.path().join("artifacts").join(Digest::of(b"orphan").hex());
    std::fs::write(&orphan, b"orphan").unwrap();

    until("the orphan to go", async || {
        list(&mut admin).await;
        (!orphan.exists()).then_some(())
    })
    .await;
    until("the unused file to go", async || {
        let digests = vec![used.to_string(), unused.to_string()];
        let found = admin.find_artifacts(api::FindArtifactsRequest { digests }).await.unwrap().into_inner();
        (found.found.len() == 1).then_some(())
    })
    .await;
    soon(
        "the file",
        until("the file to go", async || {
            list(&mut admin).await;
            (cluster.files() == vec![used.hex()]).then_some(())
        }),
    )
    .await;
}
