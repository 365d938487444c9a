//! Tests of leases, in tables and against a model that only records when each node was last heard.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_nodes::lease::{GRACE, LEASE, LeaseLimits, LeaseState, LeaseTick, Leases, NodeRegistration};
use millrace_types::{Epoch, NodeName, Timestamp};
use proptest::prelude::*;

const ONE: Epoch = Epoch(1);
const TWO: Epoch = Epoch(2);

fn ms(ms: u64) -> Timestamp {
    Timestamp(ms * 1_000_000)
}

fn name(node: &str) -> NodeName {
    NodeName::new(node).expect("a node's name")
}

fn member(node: &str, epoch: Epoch) -> NodeRegistration {
    NodeRegistration { node: name(node), epoch }
}

/// Returns a leader elected at 0, with two nodes of epoch 1 and the default lease and grace.
fn leader() -> Leases {
    let mut leases = Leases::new(LeaseLimits::default());
    leases.elected(ms(0), [member("a", ONE), member("b", ONE)]);
    leases
}

/// Ticks at every wake-up time up to and including `until`. Returns the verdicts that are not
/// empty.
fn run(leases: &mut Leases, until: Timestamp) -> Vec<(Timestamp, LeaseTick)> {
    let mut verdicts = Vec::new();
    loop {
        let at = leases.next_wake().expect("a leader always wakes again").min(until);
        let verdict = leases.tick(at);
        if verdict != LeaseTick::default() {
            verdicts.push((at, verdict));
        }
        if at == until {
            return verdicts;
        }
    }
}

fn fenced(members: &[NodeRegistration]) -> LeaseTick {
    LeaseTick { fenced: members.to_vec(), ..LeaseTick::default() }
}

fn lost(members: &[NodeRegistration]) -> LeaseTick {
    LeaseTick { lost: members.to_vec(), ..LeaseTick::default() }
}

#[test]
fn a_sign_of_life_from_before_a_lease_was_granted_does_not_shorten_it() {
    let mut leases = leader();
    leases.registered(ms(900), member("c", TWO));
    assert_eq!(leases.record_sign_of_life(&name("c"), TWO, ms(500)), LeaseState::Believed);
    leases.tick(ms(900));
    run(&mut leases, ms(2899));
    assert_eq!(leases.lease_state(&name("c"), TWO), LeaseState::Believed);
    run(&mut leases, ms(2900));
    assert_eq!(leases.lease_state(&name("c"), TWO), LeaseState::Fenced);
}

#[test]
fn silence_fences_after_the_lease_and_loses_after_the_grace() {
    let mut leases = leader();
    run(&mut leases, ms(1000));
    assert_eq!(leases.record_sign_of_life(&name("a"), ONE, ms(1000)), LeaseState::Believed);
    let b = [member("b", ONE)];
    assert_eq!(run(&mut leases, ms(2600)), [(ms(2000), fenced(&b)), (ms(2500), lost(&b))]);
    assert_eq!(leases.lease_state(&name("a"), ONE), LeaseState::Believed);
    assert_eq!(leases.lease_state(&name("b"), ONE), LeaseState::Lost);
}

#[test]
fn a_fenced_node_that_is_heard_is_believed_again() {
    let mut leases = leader();
    run(&mut leases, ms(2200));
    assert_eq!(leases.lease_state(&name("a"), ONE), LeaseState::Fenced);
    assert_eq!(leases.record_sign_of_life(&name("a"), ONE, ms(2200)), LeaseState::Believed);
    assert_eq!(run(&mut leases, ms(4100)), [(ms(2500), lost(&[member("b", ONE)])),]);
    assert_eq!(run(&mut leases, ms(4300)), [(ms(4200), fenced(&[member("a", ONE)]))]);
}

#[test]
fn a_lost_node_stays_lost_and_is_reported_until_confirmed() {
    let mut leases = leader();
    run(&mut leases, ms(2500));
    assert_eq!(leases.record_sign_of_life(&name("a"), ONE, ms(2600)), LeaseState::Lost);
    let both = [member("a", ONE), member("b", ONE)];
    assert_eq!(run(&mut leases, ms(4500)), [(ms(4500), lost(&both))]);
    leases.remove_node(&name("a"), ONE);
    assert_eq!(leases.record_sign_of_life(&name("a"), ONE, ms(4600)), LeaseState::Unknown);
    assert_eq!(run(&mut leases, ms(6500)), [(ms(6500), lost(&both[1..]))]);
}

#[test]
fn a_new_registration_has_a_full_lease_and_ends_the_old_one() {
    let mut leases = leader();
    run(&mut leases, ms(2500));
    leases.registered(ms(2500), member("a", TWO));
    assert_eq!(leases.record_sign_of_life(&name("a"), ONE, ms(2500)), LeaseState::Unknown);
    assert_eq!(leases.lease_state(&name("a"), TWO), LeaseState::Believed);
    leases.remove_node(&name("a"), ONE);
    assert_eq!(
        leases.lease_state(&name("a"), TWO),
        LeaseState::Believed,
        "the loss concerned the old registration"
    );
    leases.registered(ms(2600), member("a", ONE));
    assert_eq!(leases.lease_state(&name("a"), TWO), LeaseState::Believed, "an older registration is ignored");
}

#[test]
fn a_stalled_leader_fences_no_node_before_a_further_lease() {
    let mut leases = leader();
    run(&mut leases, ms(1800));
    let after = ms(1800 + 1001);
    let stalled = LeaseTick { stalled: Some(Duration::from_millis(1001)), ..LeaseTick::default() };
    assert_eq!(leases.tick(after), stalled);
    assert_eq!(leases.lease_state(&name("a"), ONE), LeaseState::Believed);
    let both = [member("a", ONE), member("b", ONE)];
    assert_eq!(run(&mut leases, after + LEASE), [(after + LEASE, fenced(&both))]);
}

#[test]
fn half_a_lease_is_not_yet_a_stall() {
    let mut leases = leader();
    run(&mut leases, ms(1500));
    let both = [member("a", ONE), member("b", ONE)];
    let fenced_and_lost = LeaseTick { fenced: both.to_vec(), lost: both.to_vec(), stalled: None };
    assert_eq!(leases.tick(ms(2500)), fenced_and_lost);
}

#[test]
fn a_stall_restores_fenced_nodes_but_not_lost_ones() {
    let mut leases = leader();
    run(&mut leases, ms(1000));
    leases.record_sign_of_life(&name("b"), ONE, ms(500));
    run(&mut leases, ms(2500));
    assert_eq!(leases.lease_state(&name("b"), ONE), LeaseState::Fenced);
    leases.tick(ms(4000));
    assert_eq!(leases.lease_state(&name("a"), ONE), LeaseState::Lost);
    assert_eq!(leases.lease_state(&name("b"), ONE), LeaseState::Believed);
}

#[test]
fn a_controller_that_does_not_lead_judges_no_node() {
    let mut leases = Leases::new(LeaseLimits::default());
    leases.registered(ms(0), member("a", ONE));
    assert_eq!(leases.next_wake(), None);
    assert_eq!(leases.tick(ms(9000)), LeaseTick::default());
    leases.elected(ms(9000), [member("a", ONE)]);
    assert_eq!(leases.tick(ms(9001)), LeaseTick::default(), "a full lease");
}

#[derive(Debug, Clone)]
enum Step {
    Heard(u8),
    /// The leader ticks for this many milliseconds.
    Run(u64),
    /// The leader stalls for this many milliseconds.
    Stall(u64),
    Elected,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4u8).prop_map(Step::Heard),
        6 => (1..900u64).prop_map(Step::Run),
        1 => (1001..6000u64).prop_map(Step::Stall),
        1 => Just(Step::Elected),
    ]
}

/// Start of a node's silence as far as the leader can know, and whether the node was declared lost.
#[derive(Debug, Clone, Copy)]
struct Silence {
    since: Timestamp,
    lost: bool,
}

struct Model {
    leases: Leases,
    now: Timestamp,
    silence: BTreeMap<NodeName, Silence>,
}

impl Model {
    fn new() -> Self {
        let mut model =
            Self { leases: Leases::new(LeaseLimits::default()), now: ms(0), silence: BTreeMap::new() };
        model.elect();
        model
    }

    fn elect(&mut self) {
        let names: Vec<_> = (0..4).map(|node| name(&format!("n{node}"))).collect();
        self.leases
            .elected(self.now, names.iter().map(|node| NodeRegistration { node: node.clone(), epoch: ONE }));
        let silence = Silence { since: self.now, lost: false };
        self.silence = names.into_iter().map(|node| (node, silence)).collect();
    }

    fn tick(&mut self, at: Timestamp) {
        self.now = at;
        let verdict = self.leases.tick(at);
        if verdict.stalled.is_some() {
            assert_eq!(
                (&verdict.fenced, &verdict.lost),
                (&vec![], &vec![]),
                "a stalled leader declares no node fenced or lost"
            );
            for silence in self.silence.values_mut() {
                silence.since = at;
            }
        }
        for member in &verdict.lost {
            let silence = self.silence.get_mut(&member.node).expect("a node of the table");
            assert!(at.since(silence.since) >= LEASE + GRACE || silence.lost, "{member:?} was heard");
            silence.lost = true;
        }
        for (node, silence) in &self.silence {
            let silent = at.since(silence.since);
            let expected = match () {
                () if silence.lost => LeaseState::Lost,
                () if silent >= LEASE + GRACE => panic!("{node} silent for {silent:?} and not lost"),
                () if silent >= LEASE => LeaseState::Fenced,
                () => LeaseState::Believed,
            };
            assert_eq!(self.leases.lease_state(node, ONE), expected, "{node} silent for {silent:?}");
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Heard(node) => {
                let node = name(&format!("n{node}"));
                self.leases.record_sign_of_life(&node, ONE, self.now);
                self.silence.get_mut(&node).expect("a node of the table").since = self.now;
            }
            Step::Run(for_ms) => {
                let until = self.now + Duration::from_millis(for_ms);
                while self.now < until {
                    let wake = self.leases.next_wake().expect("a leader always wakes again");
                    assert!(wake > self.now, "the next wake-up is not in the future");
                    self.tick(wake.min(until));
                }
            }
            Step::Stall(for_ms) => self.tick(self.now + Duration::from_millis(for_ms)),
            Step::Elected => self.elect(),
        }
    }
}

proptest! {
    /// A node is fenced after a lease of silence and lost after the grace, exactly at the tick of
    /// that moment. A stall or an election counts as hearing every node.
    #[test]
    fn nodes_are_fenced_and_lost_exactly_by_their_silence(steps in prop::collection::vec(step(), 0..60)) {
        let mut model = Model::new();
        for step in steps {
            model.step(step);
        }
    }
}
