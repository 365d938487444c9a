//! Tests of model files in an object store that the controllers share, here a folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use millrace_controller::{ClusterStart, ControllerConfig, JoinAs};
use millrace_proto::admin as api;
use millrace_proto::status::from_status;
use millrace_types::{Bytes, Digest, Reason};
use tempfile::TempDir;

use crate::group::{Member, of_group, remove, status};
use crate::group_artifacts::{fetch, held_by, holders};
use crate::support::{apply, cnn, list, mlp, reason, until, upload};

/// The folder that all controllers share.
struct Shared(TempDir);

impl Shared {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn root(&self) -> PathBuf {
        self.0.path().join("models")
    }

    fn make(&self) {
        std::fs::create_dir(self.root()).unwrap();
    }

    fn url(&self) -> String {
        format!("file://{}", self.root().display())
    }

    fn configure(&self, config: &mut ControllerConfig) {
        config.artifacts = Some(self.url().parse().unwrap());
    }

    async fn alone(&self, edit: impl FnOnce(&mut ControllerConfig)) -> Member {
        let start = |config: &mut ControllerConfig| {
            self.configure(config);
            edit(config);
        };
        Member::try_start(1, ClusterStart::Bootstrap, start).await.unwrap()
    }

    async fn three(&self) -> Vec<Member> {
        let first = self.alone(|_| {}).await;
        let second = Member::try_start(2, first.joining(JoinAs::Voter), |it| self.configure(it)).await;
        let third = Member::try_start(3, first.joining(JoinAs::Voter), |it| self.configure(it)).await;
        vec![first, second.unwrap(), third.unwrap()]
    }

    /// Returns the path of a model in the store.
    fn object(&self, model: &[u8]) -> PathBuf {
        let cluster = std::fs::read_dir(self.root()).unwrap().next().unwrap().unwrap().path();
        cluster.join("sha256").join(Digest::of(model).hex())
    }
}

fn aside(object: &Path) -> PathBuf {
    object.with_extension("damaged")
}

async fn found(member: &Member, model: &[u8]) -> bool {
    let digests = vec![Digest::of(model).to_string()];
    let found = member.admin().find_artifacts(api::FindArtifactsRequest { digests }).await.unwrap();
    !found.into_inner().found.is_empty()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_single_controller_stores_models_in_the_store_and_caches_them_locally() {
    let shared = Shared::new();
    shared.make();
    let alone = shared.alone(|_| {}).await;
    upload(&mut alone.admin(), &mlp()).await.unwrap();
    apply(&mut alone.admin(), "f", &mlp()).await.unwrap();
    assert_eq!(holders(&alone, &mlp()).into_iter().collect::<Vec<_>>(), [0], "the store is the only holder");
    assert_eq!(std::fs::read(shared.object(&mlp())).unwrap(), mlp());
    assert_eq!(fetch(&alone, &mlp()).await.unwrap(), mlp());

    std::fs::remove_file(alone.file(&mlp())).unwrap();
    assert!(found(&alone, &mlp()).await, "the store has it");
    assert_eq!(fetch(&alone, &mlp()).await.unwrap(), mlp(), "from the store");
    assert_eq!(std::fs::read(alone.file(&mlp())).unwrap(), mlp(), "the fetched file is cached");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_object_is_refused_and_can_be_uploaded_again() {
    let shared = Shared::new();
    shared.make();
    let alone = shared.alone(|_| {}).await;
    upload(&mut alone.admin(), &mlp()).await.unwrap();
    apply(&mut alone.admin(), "f", &mlp()).await.unwrap();
    std::fs::remove_file(alone.file(&mlp())).unwrap();
    let object = shared.object(&mlp());
    std::fs::write(&object, vec![7; mlp().len()]).unwrap();
    let damaged = fetch(&alone, &mlp()).await.unwrap_err();
    assert_eq!(reason(&damaged), Reason::DigestMismatch);
    assert!(damaged.message().contains(&shared.url()), "{damaged}");
    assert!(!alone.has_file(&mlp()), "no part of it is cached");
    assert!(aside(&object).exists() && !object.exists());
    assert!(!found(&alone, &mlp()).await, "the client must upload it again");
    upload(&mut alone.admin(), &mlp()).await.unwrap();
    std::fs::remove_file(alone.file(&mlp())).unwrap();
    assert_eq!(fetch(&alone, &mlp()).await.unwrap(), mlp());

    // An object of another size is detected before any byte is sent.
    std::fs::remove_file(alone.file(&mlp())).unwrap();
    std::fs::write(&object, b"short").unwrap();
    assert_eq!(reason(&fetch(&alone, &mlp()).await.unwrap_err()), Reason::DigestMismatch);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_needs_no_local_copies_of_models_in_the_store() {
    let shared = Shared::new();
    shared.make();
    let mut members = shared.three().await;
    upload(&mut members[1].admin(), &mlp()).await.unwrap();
    apply(&mut members[2].admin(), "f", &mlp()).await.unwrap();
    assert!(!members[0].has_file(&mlp()) && !members[2].has_file(&mlp()));
    assert_eq!(fetch(&members[2], &mlp()).await.unwrap(), mlp());
    assert_eq!(of_group(&status(&members[0]).await), Vec::<&String>::new());

    // The store lost the file: a controller with a copy serves the file, and restores the store's copy.
    std::fs::remove_file(shared.object(&mlp())).unwrap();
    assert_eq!(fetch(&members[0], &mlp()).await.unwrap(), mlp());
    until("the restored file in the store", async || {
        list(&mut members[0].admin()).await;
        shared.object(&mlp()).exists().then_some(())
    })
    .await;

    // The controller that received the upload may be removed, dead or alive.
    remove(&members[0], 2).await.unwrap();
    members[1].kill();
    assert_eq!(fetch(&members[0], &mlp()).await.unwrap(), mlp());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_store_is_named_in_errors_and_requests_are_still_served() {
    let shared = Shared::new();
    shared.make();
    let mut members = shared.three().await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[0].admin(), "f", &mlp()).await.unwrap();
    let gone = shared.0.path().join("gone");
    std::fs::rename(shared.root(), &gone).unwrap();

    let check = |status: tonic::Status, expected: &str| {
        let failure = from_status(&status);
        assert_eq!((failure.reason, failure.retryable), (Reason::StoreUnavailable, true), "{failure}");
        assert!(failure.message.contains(&shared.url()) && failure.message.contains(expected), "{failure}");
    };
    check(upload(&mut members[1].admin(), &cnn()).await.unwrap_err(), "try again");
    assert!(!members[1].has_file(&cnn()) && !shared.root().exists(), "the refused upload leaves no file");
    assert_eq!(fetch(&members[0], &mlp()).await.unwrap(), mlp(), "the controller has a copy");
    assert_eq!(
        fetch(&members[1], &mlp()).await.unwrap(),
        mlp(),
        "the controller sends its copy to the others"
    );
    assert!(found(&members[0], &mlp()).await);
    apply(&mut members[2].admin(), "g", &mlp()).await.unwrap();
    for member in &members {
        if member.has_file(&mlp()) {
            std::fs::remove_file(member.file(&mlp())).unwrap();
        }
    }
    check(fetch(&members[2], &mlp()).await.unwrap_err(), "try again");
    // A controller starts without the store too.
    members[2].kill();
    members[2].restart().await;

    // An unmounted volume looks like an empty folder.
    shared.make();
    check(upload(&mut members[0].admin(), &cnn()).await.unwrap_err(), "is the volume mounted");
    std::fs::remove_dir_all(shared.root()).unwrap();
    std::fs::rename(&gone, shared.root()).unwrap();
    upload(&mut members[0].admin(), &cnn()).await.unwrap();
    assert_eq!(fetch(&members[2], &mlp()).await.unwrap(), mlp());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unused_models_leave_the_store_after_their_grace_period() {
    let shared = Shared::new();
    shared.make();
    let alone = shared
        .alone(|config| {
            config.limits.collect_every = Duration::from_millis(1);
            config.limits.artifact_grace = Duration::from_millis(500);
        })
        .await;
    // On a busy machine the file may be collected before the first use.
    until("the function to be applied", async || {
        upload(&mut alone.admin(), &mlp()).await.unwrap();
        apply(&mut alone.admin(), "f", &mlp()).await.ok()
    })
    .await;
    upload(&mut alone.admin(), &cnn()).await.unwrap();
    // This file is like the remains of an upload that was never recorded.
    let orphan = shared.object(b"orphan");
    std::fs::write(&orphan, b"orphan").unwrap();
    until("the removal of the orphan", async || {
        list(&mut alone.admin()).await;
        (!orphan.exists()).then_some(())
    })
    .await;
    until("the removal of the unused model", async || {
        list(&mut alone.admin()).await;
        (!shared.object(&cnn()).exists() && !alone.has_file(&cnn())).then_some(())
    })
    .await;
    assert!(shared.object(&mlp()).exists() && alone.has_file(&mlp()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn models_move_into_the_store_when_a_group_gets_one() {
    let shared = Shared::new();
    shared.make();
    let mut alone = Member::start(1, ClusterStart::Bootstrap).await;
    upload(&mut alone.admin(), &mlp()).await.unwrap();
    apply(&mut alone.admin(), "f", &mlp()).await.unwrap();
    alone.kill();
    shared.configure(&mut alone.config);
    alone.config.limits.collect_every = Duration::from_millis(10);
    alone.restart().await;
    held_by(&alone, &mlp(), &[0, 1]).await;
    assert_eq!(std::fs::read(shared.object(&mlp())).unwrap(), mlp());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_local_cache_of_the_store_stays_within_its_limit() {
    let shared = Shared::new();
    shared.make();
    let alone = shared
        .alone(|config| {
            config.limits.collect_every = Duration::from_millis(10);
            config.limits.artifact_cache = Bytes(cnn().len().max(mlp().len()) as u64);
        })
        .await;
    for model in [mlp(), cnn()] {
        upload(&mut alone.admin(), &model).await.unwrap();
    }
    until("the removal of the older file", async || {
        list(&mut alone.admin()).await;
        (!alone.has_file(&mlp())).then_some(())
    })
    .await;
    assert!(alone.has_file(&cnn()));
    assert_eq!(fetch(&alone, &mlp()).await.unwrap(), mlp());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_controller_without_the_groups_store_yields_a_warning_and_fetches_from_the_others() {
    let shared = Shared::new();
    shared.make();
    let first = shared.alone(|_| {}).await;
    upload(&mut first.admin(), &mlp()).await.unwrap();
    apply(&mut first.admin(), "f", &mlp()).await.unwrap();
    std::fs::remove_file(first.file(&mlp())).unwrap();
    let second = Member::try_start(2, first.joining(JoinAs::Voter), |_| {}).await.unwrap();
    let warnings = status(&second).await.warnings;
    let unlike = |warning: &String| {
        warning.contains(&format!("controller 1: {}", shared.url()))
            && warning.contains("controller 2: its own disk")
    };
    assert!(warnings.iter().any(unlike), "{warnings:?}");
    assert_eq!(fetch(&second, &mlp()).await.unwrap(), mlp());
    let mut alone = first;
    alone.kill();
    alone.config.artifacts = None;
    alone.restart().await;
    until("the warning about the missing store", async || {
        let warnings = status(&alone).await.warnings;
        warnings.iter().any(|it| it.contains("1 model files are in an object store")).then_some(())
    })
    .await;
}
