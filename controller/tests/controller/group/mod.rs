//! Tests of three controllers in one process over loopback, through the interfaces of clients.

mod member;
mod threads;

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_cluster_state::ControllerId;
use millrace_controller::{ClusterStart, ControllerConfig, JoinAs};
use millrace_proto::admin as api;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_types::{Digest, Reason};
use tonic::Status;

pub(crate) use self::member::Member;
use self::member::run;
use crate::support::{apply, apply_request, channel, get, mlp, reason, until, upload};

/// Starts three voters, with the first as leader.
pub(crate) async fn three() -> Vec<Member> {
    let first = Member::start(1, ClusterStart::Bootstrap).await;
    let second = Member::start(2, first.joining(JoinAs::Voter)).await;
    let third = Member::start(3, second.joining(JoinAs::Voter)).await;
    // Controller 1 leads, unless the machine stalled for so long that another controller was elected.
    until("the leadership of controller 1", async || {
        let transfer = api::TransferLeadershipRequest { id: 1 };
        first.admin().transfer_leadership(transfer).await.ok()
    })
    .await;
    vec![first, second, third]
}

pub(crate) async fn status(member: &Member) -> api::ClusterStatus {
    member.admin().get_cluster_status(api::GetClusterStatusRequest {}).await.unwrap().into_inner()
}

/// Returns the warnings about the group, except warnings about disks, because a busy machine's disk may
/// be slow.
pub(crate) fn of_group(status: &api::ClusterStatus) -> Vec<&String> {
    status.warnings.iter().filter(|it| !it.starts_with("the disk of controller")).collect()
}

/// Returns each controller's role and right to vote, by id.
async fn roles(member: &Member) -> BTreeMap<u64, (api::ControllerRole, bool)> {
    let controllers = status(member).await.controllers.into_iter();
    controllers.map(|it| (it.id, (it.role(), it.voter))).collect()
}

pub(crate) async fn remove(
    member: &Member,
    id: u64,
) -> Result<tonic::Response<api::ChangeMembershipResponse>, Status> {
    member.admin().remove_controller(api::RemoveControllerRequest { id, no_wait: false }).await
}

async fn get_stale(member: &Member, name: &str) -> Result<api::Function, Status> {
    let request = api::GetFunctionRequest {
        name: name.into(),
        consistency: api::Consistency::Stale.into(),
        ..Default::default()
    };
    Ok(member.admin().get_function(request).await?.into_inner())
}

const fn role(role: api::ControllerRole, voter: bool) -> (api::ControllerRole, bool) {
    (role, voter)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_through_any_controller_is_read_through_any_other() {
    let members = three().await;
    use api::ControllerRole::{Follower, Leader};
    let expected = [(1, role(Leader, true)), (2, role(Follower, true)), (3, role(Follower, true))];
    for member in &members {
        let status = status(member).await;
        assert_eq!((status.leader, status.answered_by, status.quorum), (1, member.id(), true));
        assert_eq!(of_group(&status), Vec::<&String>::new());
        assert_eq!(roles(member).await, BTreeMap::from(expected));
    }
    let [a, b, c] = [&members[0], &members[1], &members[2]];
    upload(&mut b.admin(), &mlp()).await.unwrap();
    apply(&mut b.admin(), "f", &mlp()).await.unwrap();
    for member in [a, b, c] {
        assert_eq!(get(&mut member.admin(), "f").await.unwrap().generation, 1);
    }
    for generation in 2..20 {
        let request = api::ApplyFunctionRequest {
            spec: Some(api::FunctionSpec {
                timeout: Some(prost_types::Duration { seconds: generation, nanos: 0 }),
                ..crate::support::spec("f")
            }),
            // Without a key, a write is not retried after a change of leadership.
            idempotency_key: format!("generation {generation}"),
            ..apply_request("f", &mlp())
        };
        let (writer, reader) = if generation % 2 == 0 { (b, c) } else { (c, b) };
        writer.admin().apply_function(request).await.unwrap();
        let read = get(&mut reader.admin(), "f").await.unwrap();
        assert_eq!(read.generation, u64::try_from(generation).unwrap());
    }
}

/// Four election timeouts.
const BLOCKED: Duration = Duration::from_secs(2);
/// Rounds of the test: a busy machine may cost a leader its leadership at any time, but not in each
/// round.
const BLOCKED_ROUNDS: u32 = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_with_blocked_request_threads_keeps_its_leadership() {
    let members = three().await;
    for _ in 0..BLOCKED_ROUNDS {
        let led =
            until("a leader", async || Some(status(&members[0]).await.leader).filter(|it| *it > 0)).await;
        let leader = members.iter().position(|member| member.id() == led).unwrap();
        members[leader].block(BLOCKED).await;
        // Ask a member that heard of every election meanwhile.
        let other = &members[(leader + 1) % members.len()];
        if status(other).await.leader == led {
            return;
        }
    }
    panic!("{BLOCKED_ROUNDS} leaders lost their places while their threads were blocked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_file_is_on_a_majority_after_its_upload_and_soon_on_all_controllers() {
    let mut members = three().await;
    members[0].kill();
    // Two of three controllers are up, so both must hold the file.
    until("a leader", async || upload(&mut members[1].admin(), &mlp()).await.ok()).await;
    assert!(members[1].has_file(&mlp()) && members[2].has_file(&mlp()));
    apply(&mut members[2].admin(), "f", &mlp()).await.unwrap();
    members[0].restart().await;
    until("the fetch by the restarted controller", async || {
        status(&members[0]).await;
        members[0].has_file(&mlp()).then_some(())
    })
    .await;
    assert_eq!(get(&mut members[0].admin(), "f").await.unwrap().generation, 1);

    let control = WorkerControlClient::new(channel(members[1].internal()));
    let fetch = async || {
        let request = wire::FetchArtifactRequest { digest: Digest::of(&mlp()).to_string() };
        let mut chunks = control.clone().fetch_artifact(request).await?.into_inner();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.message().await? {
            bytes.extend_from_slice(&chunk.data);
        }
        Ok::<_, Status>(bytes)
    };
    members[1].write_file(&mlp(), &vec![7; mlp().len()]);
    assert_eq!(reason(&fetch().await.unwrap_err()), Reason::DigestMismatch);
    assert_eq!(fetch().await.unwrap(), mlp(), "from another controller");

    members[1].kill();
    members[2].kill();
    let alone = upload(&mut members[0].admin(), &crate::support::cnn()).await.unwrap_err();
    assert_eq!(reason(&alone), Reason::NoLeader);
    assert!(alone.message().contains("only 1 of 3 controllers hold"), "{alone}");
    assert!(!members[0].has_file(&crate::support::cnn()), "the refused upload leaves no file");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_resume_after_the_leader_is_killed_and_after_it_restarts() {
    let mut members = three().await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[1].admin(), "before", &mlp()).await.unwrap();
    members[0].kill();
    let mut admin = members[1].admin();
    until("writes resume", async || apply(&mut admin, "after", &mlp()).await.ok()).await;
    assert_eq!(get(&mut members[2].admin(), "before").await.unwrap().generation, 1);
    assert!(status(&members[2]).await.warnings.iter().any(|it| it.contains("after one more loss")));

    members[0].restart().await;
    assert_eq!(get(&mut members[0].admin(), "after").await.unwrap().generation, 1);
    assert_eq!(of_group(&status(&members[0]).await), Vec::<&String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_controller_refuses_writes_and_serves_stale_reads() {
    let mut members = three().await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[2].admin(), "f", &mlp()).await.unwrap();
    members[0].kill();
    members[1].kill();
    let left = &members[2];
    assert_eq!(reason(&get(&mut left.admin(), "f").await.unwrap_err()), Reason::NoLeader);
    let refused = apply(&mut left.admin(), "g", &mlp()).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::NoLeader);
    assert_eq!(get_stale(left, "f").await.unwrap().generation, 1);
    let status = status(left).await;
    assert!(!status.quorum);
    let reachable: Vec<_> = status.controllers.iter().map(|it| it.reachable).collect();
    assert_eq!(reachable, vec![false, false, true]);
    let refused = remove(left, 1).await.unwrap_err();
    assert_eq!(reason(&refused), Reason::NoLeader);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_controller_is_replaced() {
    use api::ControllerRole::{Follower, Leader, Learner};
    let mut members = three().await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    members[2].kill();
    let rejoin = members[0].joining(JoinAs::Voter);
    let wiped = Member::try_start(3, rejoin.clone(), |config| config.seed = 8).await.err().unwrap();
    assert!(wiped.to_string().contains("millrace cluster remove 3"), "{wiped}");

    remove(&members[1], 3).await.unwrap();
    let fourth = Member::try_start(4, members[1].joining(JoinAs::Learner), |_| {}).await.unwrap();
    assert_eq!(roles(&fourth).await[&4], role(Learner, false));
    // The leader may not have heard from the new member yet: then the refusal is retryable.
    let promoted = until("the promotion", async || {
        let asked =
            fourth.admin().promote_controller(api::PromoteControllerRequest { id: 4, no_wait: false }).await;
        match asked {
            Ok(group) => Some(group.into_inner()),
            Err(status) => {
                assert!(millrace_proto::status::from_status(&status).retryable, "{status}");
                None
            }
        }
    })
    .await;
    let voters: Vec<_> = promoted.members.iter().filter(|it| it.voter).map(|it| it.id).collect();
    assert_eq!(voters, vec![1, 2, 4]);
    let expected = [(1, role(Leader, true)), (2, role(Follower, true)), (4, role(Follower, true))];
    until("the new membership", async || {
        (roles(&members[0]).await == BTreeMap::from(expected)).then_some(())
    })
    .await;
    until("the fetch of the model file", async || {
        status(&fourth).await;
        fourth.has_file(&mlp()).then_some(())
    })
    .await;

    let leader = remove(&members[0], 1).await.unwrap_err();
    assert!(leader.message().contains("transfer"), "{leader}");
    let transfer = api::TransferLeadershipRequest { id: 4 };
    let led = members[1].admin().transfer_leadership(transfer).await.unwrap().into_inner();
    assert_eq!(led.leader, 4);
    let group = remove(&members[1], 1).await.unwrap().into_inner();
    assert!(group.warnings.iter().any(|it| it.contains("run 1, 3 or 5")), "{group:?}");
    apply(&mut fourth.admin(), "f", &mlp()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_hands_leadership_over_at_shutdown() {
    let mut members = three().await;
    upload(&mut members[1].admin(), &mlp()).await.unwrap();
    let (threads, controller) = members[0].up.take().unwrap();
    threads.requests.spawn(controller.shutdown(Duration::ZERO)).await.unwrap();
    threads.end();
    let status = status(&members[1]).await;
    assert!([2, 3].contains(&status.leader) && status.quorum, "{status:?}");
    apply(&mut members[2].admin(), "f", &mlp()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_without_followers_reports_an_unknown_write_and_then_refuses_writes() {
    let mut members = three().await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    members[1].kill();
    members[2].kill();
    let mut admin = members[0].admin();
    let refused = apply(&mut admin, "f", &mlp()).await.unwrap_err();
    let unknown = from_status(&refused);
    assert_eq!((unknown.reason, unknown.may_have_executed), (Reason::NoLeader, true), "{unknown}");
    let refused = from_status(&apply(&mut admin, "g", &mlp()).await.unwrap_err());
    assert_eq!((refused.reason, refused.may_have_executed), (Reason::NoLeader, false), "{refused}");
    assert_eq!(reason(&get(&mut admin, "f").await.unwrap_err()), Reason::NoLeader);
}

#[tokio::test]
async fn an_empty_directory_is_refused_by_a_controller_that_must_reopen_one() {
    let refused = Member::try_start(2, ClusterStart::Reopen, |_| {}).await.err().unwrap();
    assert!(refused.to_string().contains("is empty"), "{refused}");
    let mut first = Member::start(1, ClusterStart::Bootstrap).await;
    let other = ControllerConfig { id: ControllerId(2), ..first.config.clone() };
    first.kill();
    let refused = run(&other).await.err().unwrap();
    assert!(refused.to_string().contains("belongs to controller 1"), "{refused}");
    first.config.start = ClusterStart::Reopen;
    first.restart().await;
    assert_eq!(status(&first).await.leader, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_recovers_after_all_its_members_were_killed() {
    let mut members = three().await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[1].admin(), "f", &mlp()).await.unwrap();
    for member in &mut members {
        member.kill();
    }
    for member in &mut members {
        member.restart().await;
    }
    let mut admin = members[2].admin();
    let read = until("a leader", async || get(&mut admin, "f").await.ok()).await;
    assert_eq!(read.generation, 1);
    let mut again = ControllerConfig { insecure: false, ..members[1].config.clone() };
    members[1].kill();
    // A controller with a new address reports the address itself.
    again.internal_listen.set_port(0);
    members[1].config = again;
    members[1].restart().await;
    let moved = members[1].up.as_ref().unwrap().1.internal_addr().to_string();
    until("the new address in the group's status", async || {
        let controllers = status(&members[0]).await.controllers;
        controllers.into_iter().find(|it| it.id == 2 && it.internal_address == moved && it.reachable)
    })
    .await;
    tokio::time::timeout(Duration::from_secs(20), apply(&mut members[1].admin(), "g", &mlp()))
        .await
        .unwrap()
        .unwrap();
}
