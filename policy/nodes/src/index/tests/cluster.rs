//! A cluster of indexes, compared with a plain record of the reports to tier 2.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Act {
    Make {
        on: usize,
    },
    /// A node fetches a missing object from the node that a lookup finds.
    Fetch {
        what: usize,
        to: usize,
        paper: bool,
    },
    LetGo {
        what: usize,
        on: usize,
    },
    /// A node restarts under a new epoch.
    Register {
        who: usize,
    },
    Sync,
}

const NODES: usize = 4;

fn act() -> impl Strategy<Value = Act> {
    let who = || 0..NODES;
    let what = || 0..20usize;
    prop_oneof![
        3 => who().prop_map(|on| Act::Make { on }),
        8 => (what(), who(), any::<bool>()).prop_map(|(what, to, paper)| Act::Fetch { what, to, paper }),
        4 => (what(), who()).prop_map(|(what, on)| Act::LetGo { what, on }),
        1 => who().prop_map(|who| Act::Register { who }),
        2 => Just(Act::Sync),
    ]
}

/// A stored value that names its object, so that a wrong value is noticed.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Said(DataId);

impl IndexedObject for Said {
    fn bytes(&self) -> Bytes {
        Bytes(1)
    }

    fn files(&self) -> u64 {
        0
    }
}

/// Nodes with their epochs, and tier 2 as of the last sync.
struct Cluster {
    nodes: Vec<(Epoch, DataIndex<Said>)>,
    tier2: BTreeMap<DataId, BTreeSet<usize>>,
    made: Vec<DataId>,
}

fn name(number: usize) -> NodeName {
    node(number as u64)
}

fn registered(number: usize, epoch: u64) -> (Epoch, DataIndex<Said>) {
    (
        Epoch(epoch),
        DataIndex::new(name(number), IndexCapacity { bytes: Bytes(1000), files: 0, objects: 1000 }),
    )
}

impl Cluster {
    /// Returns the value that a node has under a name, and checks that the value was stored under
    /// that name.
    fn held(&self, on: usize, id: &DataId) -> Option<&Said> {
        let said = self.nodes[on].1.get(id);
        assert!(said.is_none_or(|said| said.0 == *id), "{said:?} for {id}");
        said
    }

    fn number(name: &NodeName) -> usize {
        (0..NODES).find(|&number| node(number as u64) == *name).unwrap()
    }

    fn make(&mut self, on: usize) {
        let (epoch, index) = &mut self.nodes[on];
        let counter = index.reserve(1);
        let said = Said(DataId { home: name(on), epoch: *epoch, counter });
        let id = index.put_as(*epoch, counter, said, Timestamp(1)).unwrap();
        assert!(!self.made.contains(&id));
        self.made.push(id);
    }

    /// Looks for an object. Checks that a found value is right, and that a holder known to tier 2
    /// is found.
    fn find(&self, id: &DataId, from: usize, order: LookupOrder) -> Option<Said> {
        let (mut lookup, mut step) = Lookup::begin(order, &name(from), &id.home);
        for _ in 0..STEPS_MAX {
            step = match &step {
                LookupAction::AskHome(node) | LookupAction::Fetch(node) => {
                    match self.held(Self::number(node), id) {
                        Some(said) => return Some(said.clone()),
                        None => lookup.not_held(),
                    }
                }
                LookupAction::AskTier2 => {
                    let holders: Vec<_> =
                        self.tier2.get(id).into_iter().flatten().copied().map(name).collect();
                    lookup.held_by(&holders)
                }
                LookupAction::Nowhere => {
                    let named = self.tier2.get(id).into_iter().flatten().copied();
                    let (right, wrong): (Vec<usize>, Vec<usize>) =
                        named.partition(|&number| self.held(number, id).is_some());
                    assert!(
                        right.is_empty() || wrong.len() > 1,
                        "{id} was not found, but a holder named by tier 2 has it"
                    );
                    assert!(
                        self.held(Self::number(&id.home), id).is_none(),
                        "{id} was not found, but its home has it"
                    );
                    return None;
                }
            };
        }
        panic!("the lookup did not end after {STEPS_MAX} steps: {step:?}");
    }

    fn act(&mut self, act: Act, epoch: u64) {
        match act {
            Act::Make { on } => self.make(on),
            Act::Fetch { what, to, paper } => {
                let order = if paper { LookupOrder::Paper } else { LookupOrder::Home };
                let Some(id) = self.made.get(what).cloned() else { return };
                if self.held(to, &id).is_none()
                    && let Some(found) = self.find(&id, to, order)
                {
                    assert!(self.nodes[to].1.put_copy(&id, found, Timestamp(1)));
                }
            }
            Act::LetGo { what, on } => {
                if let Some(id) = self.made.get(what).cloned() {
                    let held = self.held(on, &id).is_some();
                    assert_eq!(self.nodes[on].1.remove(&id), held);
                }
            }
            Act::Register { who } => self.nodes[who] = registered(who, epoch),
            Act::Sync => {
                let holders = |id: &DataId| (0..NODES).filter(|&on| self.held(on, id).is_some()).collect();
                self.tier2 = self.made.iter().map(|id| (id.clone(), holders(id))).collect();
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// D09: with any outdated entry, a lookup ends and never returns another object. A lookup
    /// succeeds if tier 2 is up to date or the home has the object.
    #[test]
    fn stale_entries_never_yield_wrong_data(acts in prop::collection::vec(act(), 1..60)) {
        let nodes = (0..NODES).map(|number| registered(number, 1)).collect();
        let mut cluster = Cluster { nodes, tier2: BTreeMap::new(), made: Vec::new() };
        // Each registration has an epoch of its own.
        for (epoch, act) in (2..).zip(acts) {
            cluster.act(act, epoch);
        }
    }
}
