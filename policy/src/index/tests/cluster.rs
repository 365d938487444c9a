//! A cluster of indexes against a plain account of who holds what.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
enum Act {
    Make { on: usize },
    Move { what: usize, to: usize, home_told: bool },
    Drop { what: usize },
    Register { who: usize },
    Sync,
    Look { what: usize, from: usize, paper: bool },
}

const NODES: usize = 4;

fn act() -> impl Strategy<Value = Act> {
    let who = || 0..NODES;
    prop_oneof![
        3 => who().prop_map(|on| Act::Make { on }),
        4 => (0..20usize, who(), any::<bool>())
            .prop_map(|(what, to, home_told)| Act::Move { what, to, home_told }),
        1 => (0..20usize).prop_map(|what| Act::Drop { what }),
        1 => who().prop_map(|who| Act::Register { who }),
        2 => Just(Act::Sync),
        8 => (0..20usize, who(), any::<bool>())
            .prop_map(|(what, from, paper)| Act::Look { what, from, paper }),
    ]
}

/// How many notes a node of the cluster keeps: few, so that tier 2 has to take over.
const FEW_NOTES: usize = 2;

/// A node that was registered.
fn registered(name: NodeName, epoch: Epoch) -> Index {
    Index { notes_max: FEW_NOTES, ..Index::new(name, epoch) }
}

/// Some nodes, their tier 2 as it was last told, and who really holds what.
struct Cluster {
    nodes: Vec<Index>,
    tier2: BTreeMap<DataId, BTreeSet<NodeName>>,
    held: BTreeMap<DataId, usize>,
    made: Vec<DataId>,
}

impl Cluster {
    fn at(&self, name: &NodeName) -> usize {
        self.nodes.iter().position(|index| index.node() == name).unwrap()
    }

    /// Moves an object; its home may not have been told yet.
    fn carry(&mut self, id: &DataId, to: usize, home_told: bool) {
        let Some(from) = self.held.insert(id.clone(), to) else {
            self.held.remove(id);
            return;
        };
        if from == to {
            return;
        }
        self.nodes[to].store(id, ENTRY).unwrap();
        let name = self.nodes[to].node().clone();
        match self.nodes[from].moved(id, Destination::Node(name.clone())).unwrap() {
            Tell::Tier2(forward) => self.learn(forward),
            Tell::Home(home) if home_told => {
                let home = self.at(&home);
                match self.nodes[home].note(id, name) {
                    Ok(forward) => forward.into_iter().for_each(|forward| self.learn(forward)),
                    // It may hold it itself, or have registered again.
                    Err(error) => assert!(matches!(error, Error::Stored(_) | Error::NotHome(_))),
                }
            }
            Tell::Home(_) | Tell::Nobody => {}
        }
    }

    /// Tells tier 2 what a home does not know any more.
    fn learn(&mut self, Forward { id, to }: Forward) {
        let home = self.at(&id.home);
        assert_ne!(self.nodes[home].answer(&id), HomeAnswer::Moved { to: to.clone() }, "{id} is noted");
        self.tier2.entry(id).or_default().insert(to);
    }

    /// Looks for an object: what is found is it, and what is there and known to tier 2 is found.
    fn look(&self, id: &DataId, from: usize, order: LookupOrder) {
        let (mut lookup, mut step) = Lookup::begin(order, &self.nodes[from], id.clone());
        let holder = self.held.get(id).copied();
        for _ in 0..STEPS_MAX {
            let answer = match &step {
                Step::Here(_) => return assert_eq!(holder, Some(from)),
                Step::AskHome(home) => Answer::Home(self.nodes[self.at(home)].answer(id)),
                Step::AskTier2 => Answer::Tier2(self.tier2.get(id).into_iter().flatten().cloned().collect()),
                Step::Fetch(node) if self.nodes[self.at(node)].lookup(id).is_some() => {
                    return assert_eq!(holder, Some(self.at(node)));
                }
                Step::Fetch(_) => Answer::NotFetched,
                Step::Lost | Step::Gone { .. } => {
                    let named = self.tier2.get(id).into_iter().flatten().map(|node| self.at(node));
                    let (right, wrong): (Vec<_>, Vec<_>) = named.partition(|&node| Some(node) == holder);
                    assert!(right.is_empty() || wrong.len() > 1, "{id} is where tier 2 says");
                    if let Some(holder) = holder {
                        assert_ne!(self.nodes[self.at(&id.home)].answer(id), HomeAnswer::Held);
                        assert_ne!(holder, from);
                    }
                    return;
                }
            };
            step = lookup.on(answer);
        }
        panic!("no end after {STEPS_MAX} steps: {step:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// D09: whatever is out of date, and however few notes a home keeps, a lookup ends, finds only what it
    /// looks for, and finds it when tier 2 is up to date or the object is at home.
    #[test]
    fn stale_entries_never_yield_wrong_data(acts in prop::collection::vec(act(), 1..60)) {
        let mut cluster = Cluster {
            nodes: (0..NODES as u64).map(|number| registered(node(number), Epoch(1))).collect(),
            tier2: BTreeMap::new(),
            held: BTreeMap::new(),
            made: Vec::new(),
        };
        let mut epoch = 1;
        for act in acts {
            match act {
                Act::Make { on } => {
                    let id = cluster.nodes[on].unique_id();
                    cluster.nodes[on].store(&id, ENTRY).unwrap();
                    cluster.held.insert(id.clone(), on);
                    prop_assert!(!cluster.made.contains(&id));
                    cluster.made.push(id);
                }
                Act::Move { what, to, home_told } => {
                    if let Some(id) = cluster.made.get(what).cloned() {
                        cluster.carry(&id, to, home_told);
                    }
                }
                Act::Drop { what } => {
                    if let Some(id) = cluster.made.get(what).cloned() {
                        let holder = cluster.held.remove(&id);
                        let dropped = holder.and_then(|holder| cluster.nodes[holder].drop(&id));
                        prop_assert_eq!(dropped.is_some(), holder.is_some());
                    }
                }
                Act::Register { who } => {
                    epoch += 1;
                    let name = cluster.nodes[who].node().clone();
                    cluster.nodes[who] = registered(name, Epoch(epoch));
                    cluster.held.retain(|_, holder| *holder != who);
                }
                Act::Sync => {
                    let holders = |holder: &usize| BTreeSet::from([cluster.nodes[*holder].node().clone()]);
                    cluster.tier2 =
                        cluster.held.iter().map(|(id, holder)| (id.clone(), holders(holder))).collect();
                }
                Act::Look { what, from, paper } => {
                    let order = if paper { LookupOrder::Paper } else { LookupOrder::HomeFirst };
                    if let Some(id) = cluster.made.get(what) {
                        cluster.look(id, from, order);
                    }
                }
            }
            for (at, index) in cluster.nodes.iter().enumerate() {
                let here = cluster.held.values().filter(|holder| **holder == at).count();
                prop_assert_eq!(index.len(), here);
                prop_assert!(index.notes.len() <= FEW_NOTES && index.notes.len() == index.turns.len());
            }
        }
    }
}
