//! Properties under random arrivals and failures. The requests of a sequence run one at a time and
//! in order, each on the state of the last request that succeeded. Every request has one end. No
//! state is released while it is read or may be read, no state leaks, and no bound is exceeded.

use proptest::prelude::*;

use super::*;

const MAX: usize = 3;

#[derive(Debug, Clone, Copy)]
enum Step {
    Arrive { sequence: u64, start: bool, end: bool },
    Succeed(usize),
    Fail(usize),
    Lose(usize),
    LoseState(usize),
    Pass(u16),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (1..6u64, prop::bool::weighted(0.3), prop::bool::weighted(0.1))
            .prop_map(|(sequence, start, end)| Step::Arrive { sequence, start, end }),
        8 => any::<usize>().prop_map(Step::Succeed),
        3 => any::<usize>().prop_map(Step::Fail),
        1 => any::<usize>().prop_map(Step::Lose),
        1 => any::<usize>().prop_map(Step::LoseState),
        2 => (0u16..90).prop_map(Step::Pass),
    ]
}

/// A request without an end yet.
#[derive(Debug)]
struct Request {
    place: InSequence,
    /// States that the request reads and writes, while it runs.
    running: Option<(Option<StateId>, StateId)>,
}

struct Judge {
    world: World,
    /// Requests by key, which is in order of arrival.
    requests: BTreeMap<u64, Request>,
    /// Stored states.
    held: BTreeSet<StateId>,
    /// State that the next request of each sequence has to read.
    committed: BTreeMap<SequenceId, StateId>,
    next: u64,
}

impl Judge {
    fn new() -> Self {
        Self {
            world: World::new(MAX),
            requests: BTreeMap::new(),
            held: BTreeSet::new(),
            committed: BTreeMap::new(),
            next: 1,
        }
    }

    /// Returns the running request, or any request, with this number modulo their count.
    fn pick(&self, at: usize, running: bool) -> Option<u64> {
        let keys = self.requests.iter().filter(|(_, request)| !running || request.running.is_some());
        let keys: Vec<_> = keys.map(|(key, _)| *key).collect();
        (!keys.is_empty()).then(|| keys[at % keys.len()])
    }

    fn carry_out(&mut self, step: Step) -> Result<(), TestCaseError> {
        let event = match step {
            Step::Arrive { sequence, start, end } => {
                let key = self.next;
                let place = InSequence { id: id(sequence), start, end };
                self.next += 1;
                self.requests.insert(key, Request { place: place.clone(), running: None });
                Event::Arrive { key: RequestKey(key), place }
            }
            Step::Succeed(at) => {
                let Some(key) = self.pick(at, true) else { return Ok(()) };
                let Request { place, running } = self.requests.remove(&key).unwrap();
                let (_, writes) = running.unwrap();
                self.held.insert(writes);
                if place.end {
                    self.committed.remove(&place.id);
                } else {
                    self.committed.insert(place.id, writes);
                }
                Event::Succeeded { key: RequestKey(key) }
            }
            Step::Fail(at) => {
                let Some(key) = self.pick(at, false) else { return Ok(()) };
                self.requests.remove(&key);
                Event::Failed { key: RequestKey(key) }
            }
            Step::Lose(at) => {
                let Some(key) = self.pick(at, true) else { return Ok(()) };
                if let Some(request) = self.requests.remove(&key) {
                    self.committed.remove(&request.place.id);
                }
                Event::Lost { key: RequestKey(key) }
            }
            Step::LoseState(at) => {
                if self.held.is_empty() {
                    return Ok(());
                }
                let state = *self.held.iter().nth(at % self.held.len()).unwrap();
                let read = |request: &Request| request.running.is_some_and(|(reads, _)| reads == Some(state));
                if !self.requests.values().any(read) {
                    self.committed.retain(|_, committed| *committed != state);
                }
                Event::StateLost { state }
            }
            Step::Pass(secs) => {
                self.world.now = self.world.now + Duration::from_secs(secs.into());
                Event::Tick
            }
        };
        let actions = self.world.tell(event);
        self.judge(&actions)?;
        prop_assert!(self.world.core.live() <= MAX);
        Ok(())
    }

    fn judge(&mut self, actions: &[Action]) -> Result<(), TestCaseError> {
        for &action in actions {
            match action {
                Action::Run { key, reads, writes } => self.begins(key.0, reads, writes)?,
                Action::Refuse { key, .. } => {
                    let refused = self.requests.remove(&key.0);
                    prop_assert!(refused.is_some_and(|request| request.running.is_none()), "{key:?}");
                }
                Action::Release { state } => {
                    prop_assert!(self.held.remove(&state), "{state} is not held");
                    let read = self
                        .requests
                        .values()
                        .any(|it| it.running.is_some_and(|(reads, _)| reads == Some(state)));
                    prop_assert!(!read, "{state} is read");
                    // The sequence restarts, or was idle.
                    self.committed.retain(|_, committed| *committed != state);
                }
            }
        }
        Ok(())
    }

    fn begins(&mut self, key: u64, reads: Option<StateId>, writes: StateId) -> Result<(), TestCaseError> {
        let place = self.requests[&key].place.clone();
        for (other, request) in &self.requests {
            let same = *other != key && request.place.id == place.id;
            prop_assert!(!same || request.running.is_none(), "{other} and {key} run at once");
            prop_assert!(!same || *other > key, "{key} runs before {other}");
        }
        prop_assert!(!self.held.contains(&writes));
        prop_assert_eq!(reads.is_none(), place.start, "{}", key);
        prop_assert_eq!(reads, self.committed.get(&place.id).copied(), "{}", key);
        self.requests.get_mut(&key).unwrap().running = Some((reads, writes));
        Ok(())
    }
}

proptest! {
    #[test]
    fn requests_of_a_sequence_run_in_order_and_no_state_leaks(
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let mut judge = Judge::new();
        for step in steps {
            judge.carry_out(step)?;
        }
        while !judge.requests.is_empty() {
            let before = judge.requests.len();
            judge.carry_out(Step::Succeed(0))?;
            prop_assert!(judge.requests.len() < before, "{:?} wait although none runs", judge.requests);
        }
        judge.carry_out(Step::Pass(60))?;
        prop_assert_eq!((judge.world.core.live(), judge.held.len()), (0, 0));
    }
}
