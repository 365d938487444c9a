//! Tests that members stay equal through an upgrade although they apply different ranges of the log
//! again, and that a build refuses entries that it would apply by other rules.

use std::io::{self, Read, Write};
use std::num::NonZeroU32;
use std::path::Path;

use millrace_cluster_state::{
    CallerName, CommandOutcome, DecodeError, KnownRules, Proposal, RulesVersion, State, StateCommand,
    UnixMillis, UnknownRules,
};
use millrace_types::{ClusterId, Digest, Quota, TenantName};
use openraft::storage::{RaftLogStorageExt as _, RaftStateMachine as _};
use openraft::{EntryPayload, RaftLogReader as _, RaftSnapshotBuilder as _};

use super::tally::{identity, position};
use crate::{DataDir, Entry, Error, RaftStore, StateMachine, open};

/// The version after that of this build.
const NEXT: RulesVersion = RulesVersion::NEWEST.next();

/// The next build, whose rules cap a tenant at twice the GPUs that a command names. `GATED` is
/// whether the build checks the rules in force, as it must.
#[derive(Debug, Clone, Default, PartialEq)]
struct NextBuild<const GATED: bool>(State);

impl<const GATED: bool> StateMachine for NextBuild<GATED> {
    type Command = Proposal;
    type Outcome = CommandOutcome;
    type DecodeError = DecodeError;

    fn check_rules(&self, command: &Proposal) -> Result<(), UnknownRules> {
        self.0.check_rules(KnownRules::up_to(NEXT), command)
    }

    fn apply(&mut self, index: u64, command: &Proposal) -> CommandOutcome {
        let mut command = command.clone();
        if let StateCommand::SetQuota { quota, .. } = &mut command.command
            && (!GATED || self.0.rules() >= NEXT)
        {
            quota.gpus_max = quota.gpus_max.and_then(|gpus| gpus.checked_mul(NonZeroU32::new(2)?));
        }
        self.0.apply(index, &command)
    }

    fn write_to(&self, out: &mut dyn Write) -> io::Result<()> {
        self.0.write_to(out)
    }

    fn digest(&self) -> Digest {
        self.0.digest()
    }

    fn read_from(from: &mut dyn Read) -> Result<Self, DecodeError> {
        State::read_known(from, KnownRules::up_to(NEXT)).map(Self)
    }
}

fn proposal(command: StateCommand) -> Proposal {
    Proposal { stamp: UnixMillis(1_000), caller: CallerName("test".into()), idempotency: None, command }
}

fn cap(index: u64) -> StateCommand {
    let tenant = TenantName::new(&format!("t{index}")).unwrap();
    StateCommand::SetQuota { tenant, quota: Quota { gpus_max: NonZeroU32::new(index as u32), ..Quota::NONE } }
}

fn entry<M: StateMachine<Command = Proposal>>(index: u64, commands: Vec<StateCommand>) -> Entry<M> {
    let commands = commands.into_iter().map(proposal).collect();
    Entry::<M> { log_id: position(1, index), payload: EntryPayload::Normal(commands) }
}

fn switch(version: RulesVersion) -> StateCommand {
    StateCommand::SetClusterVersion { version }
}

/// Returns a log under this build's rules: a cluster begins, then one tenant after the other gets a
/// cap.
fn entries<M: StateMachine<Command = Proposal>>(to: u64) -> Vec<Entry<M>> {
    let begin = vec![
        switch(RulesVersion::NEWEST),
        StateCommand::InitCluster { cluster_id: ClusterId("test".into()) },
    ];
    std::iter::once(entry(0, begin)).chain((1..to).map(|index| entry(index, vec![cap(index)]))).collect()
}

fn open_as<M: StateMachine>(dir: &Path) -> Result<RaftStore<M>, Error> {
    open(DataDir::open(dir)?, &identity())
}

/// Returns a member's directory after this build: 12 entries in the log, and a snapshot that covers
/// some.
async fn member(snapshot_at: u64) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut log, mut machine } = open_as::<State>(dir.path()).unwrap();
    log.blocking_append(entries::<State>(12)).await.unwrap();
    machine.apply(entries(snapshot_at + 1)).await.unwrap();
    machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
    machine.apply(entries(12).split_off(snapshot_at as usize + 1)).await.unwrap();
    dir
}

/// Opens a member's directory, applies the rest of its log again, and then further entries.
async fn upgraded<M: StateMachine<Command = Proposal>>(dir: &Path) -> M {
    let RaftStore { mut log, mut machine } = open_as::<M>(dir).unwrap();
    let after = vec![cap(12), switch(NEXT), cap(13)];
    let more = vec![entry(12, after), entry(13, vec![cap(14)])];
    log.blocking_append(more).await.unwrap();
    let from = machine.last().map_or(0, |last| last.index + 1);
    machine.apply(log.try_get_log_entries(from..).await.unwrap()).await.unwrap();
    machine.reader().latest().state.clone()
}

#[tokio::test]
async fn members_with_snapshots_of_different_entries_are_equal_after_an_upgrade() {
    let [early, late] = [member(3).await, member(8).await];
    let early = upgraded::<NextBuild<true>>(early.path()).await;
    let late = upgraded::<NextBuild<true>>(late.path()).await;
    assert_eq!(early.digest(), late.digest());
    let caps =
        early.0.tenants().map(|tenant| (tenant.name.to_string(), tenant.quota.gpus_max.unwrap().get()));
    let caps: std::collections::BTreeMap<_, _> = caps.collect();
    assert_eq!((caps["t11"], caps["t12"], caps["t13"], caps["t14"]), (11, 12, 26, 28));
}

/// The fault that the versions prevent: a check that cannot fail would show nothing.
#[tokio::test]
async fn members_of_a_build_that_ignores_the_rules_in_force_differ() {
    let [early, late] = [member(3).await, member(8).await];
    let early = upgraded::<NextBuild<false>>(early.path()).await;
    let late = upgraded::<NextBuild<false>>(late.path()).await;
    assert_ne!(early.digest(), late.digest());
}

#[tokio::test]
async fn a_downgrade_is_refused_after_the_switch_and_not_before() {
    let dir = member(3).await;
    drop(open_as::<NextBuild<true>>(dir.path()).unwrap());
    drop(open_as::<State>(dir.path()).expect("nothing was switched"));

    upgraded::<NextBuild<true>>(dir.path()).await;
    let RaftStore { mut log, mut machine } = open_as::<State>(dir.path()).unwrap();
    let refused = machine.apply(log.try_get_log_entries(4..).await.unwrap()).await.unwrap_err().to_string();
    let expected = format!("log entry 12 cannot be applied: cluster version {NEXT} is not one of");
    assert!(refused.contains(&expected), "{refused}");
    assert!(refused.contains(&format!("start a build that knows version {NEXT}")), "{refused}");
    drop((log, machine));

    let RaftStore { mut log, mut machine } = open_as::<NextBuild<true>>(dir.path()).unwrap();
    machine.apply(log.try_get_log_entries(4..).await.unwrap()).await.unwrap();
    machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
    drop((log, machine));
    let refused = open_as::<State>(dir.path()).map(drop).unwrap_err();
    assert!(matches!(refused, Error::BadState { .. }), "{refused}");
    assert!(refused.to_string().contains(&format!("start a build that knows version {NEXT}")), "{refused}");
}

#[tokio::test]
async fn a_directory_without_a_version_opens_as_version_9_and_is_switched_after() {
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut machine, .. } = open_as::<State>(dir.path()).unwrap();
    let begin = vec![StateCommand::InitCluster { cluster_id: ClusterId("test".into()) }];
    machine.apply([entry(0, begin)]).await.unwrap();
    machine.get_snapshot_builder().await.build_snapshot().await.unwrap();
    drop(machine);
    let RaftStore { mut machine, .. } = open_as::<State>(dir.path()).unwrap();
    assert_eq!(machine.reader().latest().state.rules(), RulesVersion(9));
    machine.apply([entry(1, vec![switch(RulesVersion(10))])]).await.unwrap();
    assert_eq!(machine.reader().latest().state.rules(), RulesVersion(10));
}

#[tokio::test]
async fn digests_are_taken_at_the_set_interval_of_entries() {
    let dir = tempfile::tempdir().unwrap();
    let RaftStore { mut machine, .. } = open_as::<State>(dir.path()).unwrap();
    machine.set_digest_every(std::num::NonZeroU64::new(4).unwrap());
    let mut digests = machine.reader().digests();
    for expected in [4, 8, 12] {
        let next = entries::<State>(expected + 1).split_off(expected as usize - 3);
        let next = if expected == 4 { entries(5) } else { next };
        machine.apply(next).await.unwrap();
        let taken = digests.wait_for(|it| it.last().is_some_and(|it| it.index == expected)).await.unwrap();
        assert_eq!(taken.last().unwrap().digest, machine.reader().latest().state.digest());
    }
    assert_eq!(digests.borrow().iter().map(|it| it.index).collect::<Vec<_>>(), [0, 4, 8, 12]);
}
