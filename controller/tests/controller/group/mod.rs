//! Three controllers in one process, over loopback, through the interfaces that people use.

mod member;
mod threads;

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_cluster_state::ControllerId;
use millrace_controller::{ControllerConfig, JoinAs, Start};
use millrace_proto::admin as api;
use millrace_proto::status::from_status;
use millrace_proto::worker as wire;
use millrace_proto::worker::worker_control_client::WorkerControlClient;
use millrace_types::{Digest, Reason};
use tonic::Status;

pub(crate) use self::member::Member;
use self::member::run;
use crate::support::{apply, apply_request, channel, get, mlp, reason, until, upload};

/// Three voters; the first leads.
pub(crate) async fn three() -> Vec<Member> {
    let first = Member::start(1, Start::Bootstrap).await;
    let second = Member::start(2, first.joining(JoinAs::Voter)).await;
    let third = Member::start(3, second.joining(JoinAs::Voter)).await;
    // It does, unless the machine stood still for so long that another was elected.
    until("controller 1 leads", async || {
        let transfer = api::TransferLeadershipRequest { id: 1 };
        first.admin().transfer_leadership(transfer).await.ok()
    })
    .await;
    vec![first, second, third]
}

pub(crate) async fn status(member: &Member) -> api::ClusterStatus {
    member.admin().get_cluster_status(api::GetClusterStatusRequest {}).await.unwrap().into_inner()
}

/// What is said of the group: of a busy machine's disk more may be said, and rightly.
pub(crate) fn of_group(status: &api::ClusterStatus) -> Vec<&String> {
    status.warnings.iter().filter(|it| !it.starts_with("the disk of controller")).collect()
}

/// Each controller's part, by id.
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
async fn any_controller_takes_writes_and_reads_what_was_written_through_another() {
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
            // Without a key, a write that a change of the leader has caught is not tried again.
            idempotency_key: format!("generation {generation}"),
            ..apply_request("f", &mlp())
        };
        let (writer, reader) = if generation % 2 == 0 { (b, c) } else { (c, b) };
        writer.admin().apply_function(request).await.unwrap();
        let read = get(&mut reader.admin(), "f").await.unwrap();
        assert_eq!(read.generation, u64::try_from(generation).unwrap());
    }
}

/// Four times as long as followers hear nothing before one of them stands for election.
const BLOCKED: Duration = Duration::from_secs(2);
/// A busy machine may cost a leader its place at any time, though not each time.
const BLOCKED_ROUNDS: u32 = 5;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_whose_request_threads_are_blocked_still_leads() {
    let members = three().await;
    for _ in 0..BLOCKED_ROUNDS {
        let led =
            until("a leader", async || Some(status(&members[0]).await.leader).filter(|it| *it > 0)).await;
        let leader = members.iter().position(|member| member.id() == led).unwrap();
        members[leader].block(BLOCKED).await;
        // Of a member that heard of every election meanwhile.
        let other = &members[(leader + 1) % members.len()];
        if status(other).await.leader == led {
            return;
        }
    }
    panic!("{BLOCKED_ROUNDS} leaders lost their places while their threads were blocked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_file_is_on_a_majority_at_once_and_everywhere_soon() {
    let mut members = three().await;
    members[0].kill();
    // Two of three are left, and both must hold it.
    until("a leader", async || upload(&mut members[1].admin(), &mlp()).await.ok()).await;
    assert!(members[1].has_file(&mlp()) && members[2].has_file(&mlp()));
    apply(&mut members[2].admin(), "f", &mlp()).await.unwrap();
    members[0].restart().await;
    until("the one that was away fetches it", async || {
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
    assert!(!members[0].has_file(&crate::support::cnn()), "nothing is left of it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn writes_resume_when_the_leader_is_killed_and_again_when_it_is_back() {
    let mut members = three().await;
    upload(&mut members[0].admin(), &mlp()).await.unwrap();
    apply(&mut members[1].admin(), "before", &mlp()).await.unwrap();
    members[0].kill();
    let mut admin = members[1].admin();
    until("writes resume", async || apply(&mut admin, "after", &mlp()).await.ok()).await;
    assert_eq!(get(&mut members[2].admin(), "before").await.unwrap().generation, 1);
    assert!(status(&members[2]).await.warnings.iter().any(|it| it.contains("one more lost")));

    members[0].restart().await;
    assert_eq!(get(&mut members[0].admin(), "after").await.unwrap().generation, 1);
    assert_eq!(of_group(&status(&members[0]).await), Vec::<&String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_last_one_up_refuses_writes_and_reads_stale() {
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
    // The leader may not have heard from it yet: then it says that it may be asked again.
    let promoted = until("it has the log", async || {
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
    until("it hears that it is one", async || {
        (roles(&members[0]).await == BTreeMap::from(expected)).then_some(())
    })
    .await;
    until("it holds the model files too", async || {
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
async fn a_leader_that_goes_down_in_order_hands_leadership_over() {
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
async fn a_leader_that_lost_its_followers_says_that_a_write_is_unknown_and_then_takes_none() {
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
async fn an_empty_directory_is_refused_where_one_was_expected() {
    let refused = Member::try_start(2, Start::Reopen, |_| {}).await.err().unwrap();
    assert!(refused.to_string().contains("is empty"), "{refused}");
    let mut first = Member::start(1, Start::Bootstrap).await;
    let other = ControllerConfig { id: ControllerId(2), ..first.config.clone() };
    first.kill();
    let refused = run(&other).await.err().unwrap();
    assert!(refused.to_string().contains("belongs to controller 1"), "{refused}");
    first.config.start = Start::Reopen;
    first.restart().await;
    assert_eq!(status(&first).await.leader, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_group_comes_back_after_all_of_it_was_killed() {
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
    // A controller that moved says so itself.
    again.internal_listen.set_port(0);
    members[1].config = again;
    members[1].restart().await;
    let moved = members[1].up.as_ref().unwrap().1.internal_addr().to_string();
    until("the group knows where it is", async || {
        let controllers = status(&members[0]).await.controllers;
        controllers.into_iter().find(|it| it.id == 2 && it.internal_address == moved && it.reachable)
    })
    .await;
    tokio::time::timeout(Duration::from_secs(20), apply(&mut members[1].admin(), "g", &mlp()))
        .await
        .unwrap()
        .unwrap();
}
