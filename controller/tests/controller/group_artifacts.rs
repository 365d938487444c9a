//! Tests of the holders of model files in a group, and that no removed controller takes the last copy
//! of a file away.

use std::collections::BTreeSet;
use std::time::Duration;

use millrace_controller::{ClusterStart, JoinAs};
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_types::{Digest, Reason};
use tonic::Status;

use crate::group::{Member, remove, three};
use crate::support::{apply, channel, list, mlp, reason, until, upload};

/// Returns the holders of a file by this member's state.
pub(crate) fn holders(member: &Member, model: &[u8]) -> BTreeSet<u64> {
    let state = member.state();
    state
        .artifact(&Digest::of(model))
        .map(|it| it.holders.iter().map(|id| id.0).collect())
        .unwrap_or_default()
}

/// Waits until a file has exactly these holders. Each look is a round trip to the member.
pub(crate) async fn held_by(member: &Member, model: &[u8], expected: &[u64]) {
    let expected: BTreeSet<u64> = expected.iter().copied().collect();
    until("its holders to be known", async || {
        list(&mut member.admin()).await;
        (holders(member, model) == expected).then_some(())
    })
    .await;
}

/// Fetches a file like a worker.
pub(crate) async fn fetch(member: &Member, model: &[u8]) -> Result<Vec<u8>, Status> {
    let mut control = WorkerControlClient::new(channel(member.internal()));
    let request = wire::FetchArtifactRequest { digest: Digest::of(model).to_string() };
    let mut chunks = control.fetch_artifact(request).await?.into_inner();
    let mut bytes = Vec::new();
    while let Some(chunk) = chunks.message().await? {
        bytes.extend_from_slice(&chunk.data);
    }
    Ok(bytes)
}

/// Makes a disk refuse further files until it is [mended](mend).
fn break_disk(member: &Member) {
    std::fs::remove_dir_all(member.config.data_dir.join("artifacts/incoming")).unwrap();
}

fn mend(member: &Member) {
    std::fs::create_dir(member.config.data_dir.join("artifacts/incoming")).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_or_damaged_copy_does_not_count_until_it_is_fetched_again() {
    let mut members = three().await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[0].admin(), "f", &mlp()).await.unwrap();
    held_by(&members[0], &mlp(), &[1, 2, 3]).await;

    members[1].kill();
    std::fs::remove_file(members[1].file(&mlp())).unwrap();
    members[1].restart().await;
    until("the fetch of the missing file", async || {
        list(&mut members[0].admin()).await;
        members[1].has_file(&mlp()).then_some(())
    })
    .await;
    held_by(&members[0], &mlp(), &[1, 2, 3]).await;

    members[2].write_file(&mlp(), &vec![7; mlp().len()]);
    break_disk(&members[2]);
    assert_eq!(reason(&fetch(&members[2], &mlp()).await.unwrap_err()), Reason::DigestMismatch);
    held_by(&members[0], &mlp(), &[1, 2]).await;
    mend(&members[2]);
    held_by(&members[0], &mlp(), &[1, 2, 3]).await;
    assert_eq!(fetch(&members[2], &mlp()).await.unwrap(), mlp());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_only_copy_is_set_aside_and_can_be_uploaded_again() {
    let alone = Member::start(1, ClusterStart::Bootstrap).await;
    upload(&mut alone.admin(), &mlp()).await.unwrap();
    apply(&mut alone.admin(), "f", &mlp()).await.unwrap();
    alone.write_file(&mlp(), &vec![7; mlp().len()]);
    assert_eq!(reason(&fetch(&alone, &mlp()).await.unwrap_err()), Reason::DigestMismatch);
    assert_eq!(reason(&fetch(&alone, &mlp()).await.unwrap_err()), Reason::ArtifactNotFound);
    upload(&mut alone.admin(), &mlp()).await.unwrap();
    assert_eq!(fetch(&alone, &mlp()).await.unwrap(), mlp());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_controller_is_no_longer_a_holder() {
    let quick = |config: &mut millrace_controller::ControllerConfig| {
        config.limits.collect_every = Duration::from_millis(10);
    };
    let first = Member::try_start(1, ClusterStart::Bootstrap, quick).await.unwrap();
    let second = Member::try_start(2, first.joining(JoinAs::Voter), quick).await.unwrap();
    let mut third = Member::try_start(3, first.joining(JoinAs::Voter), quick).await.unwrap();
    upload(&mut first.admin(), &mlp()).await.unwrap();
    apply(&mut first.admin(), "f", &mlp()).await.unwrap();
    held_by(&first, &mlp(), &[1, 2, 3]).await;
    third.kill();
    remove(&second, 3).await.unwrap();
    held_by(&first, &mlp(), &[1, 2]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_live_controller_is_removed_once_the_others_have_its_model_files() {
    let members = three().await;
    break_disk(&members[1]);
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[0].admin(), "f", &mlp()).await.unwrap();
    held_by(&members[0], &mlp(), &[1, 3]).await;
    let refused = from_status(&remove(&members[1], 3).await.unwrap_err());
    assert_eq!((refused.reason, refused.retryable), (Reason::MembershipRefused, true), "{refused}");
    assert!(refused.message.contains("still being copied to controller 2"), "{refused}");
    mend(&members[1]);
    until("its files are copied", async || remove(&members[1], 3).await.ok()).await;
    assert!(members[1].has_file(&mlp()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_controller_is_removed_even_if_only_one_other_has_its_model_files() {
    let mut members = three().await;
    break_disk(&members[1]);
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[0].admin(), "f", &mlp()).await.unwrap();
    held_by(&members[0], &mlp(), &[1, 3]).await;
    members[2].kill();
    remove(&members[1], 3).await.unwrap();
    mend(&members[1]);
    held_by(&members[0], &mlp(), &[1, 2, 3]).await;
}
