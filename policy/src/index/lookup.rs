//! Where to fetch an object from: whom to ask, in which order, and when to give up (D09).
//!
//! ```text
//! home-first:  here ─► home ─┬─ held ──────────────────────────► fetch
//!                            ├─ moved to n ─► fetch ─ not held ─┐
//!                            └─ unknown ───► tier 2 ◄───────────┘
//! paper:       here ─► tier 2 ─┬─ held by n ─► fetch ─ not held ─► tier 2 once more ─► fetch, or home
//!                              └─ by nobody ─► home
//! ```
//!
//! Names are never given twice and a holder looks for the whole name, so an answer that is out of
//! date costs a step and never yields other data. Tier 2 is asked again once; what is then not where
//! it says is lost (`DATA_LOSS`). With either order the home is asked once before that: tier 2 has not
//! heard yet of what was stored, or came home, within the last sync period.

use std::fmt;

use millrace_types::{DataId, Epoch, NodeName};

use super::{Entry, HomeAnswer, Index};
use crate::names;

/// The most steps of a lookup, the last included: home, fetch, and twice tier 2 and fetch.
pub const STEPS_MAX: u32 = 7;
/// How often tier 2 is asked at most.
const TIER2_MAX: u32 = 2;

/// Who is asked first where something is that is not here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum LookupOrder {
    /// The node that made it. Ours: a central table is not asked for what has stayed where it was.
    #[default]
    HomeFirst,
    /// The global table, as in `FaaSTube` §5.2.
    Paper,
}

/// Every name, with what it stands for.
pub const LOOKUP_ORDERS: [(&str, LookupOrder); 2] =
    [("home-first", LookupOrder::HomeFirst), ("paper", LookupOrder::Paper)];

impl fmt::Display for LookupOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(names::of(&LOOKUP_ORDERS, self))
    }
}

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Step {
    /// Take it: it is on this node.
    Here(Entry),
    /// Ask its home, which sends it if it holds it.
    AskHome(NodeName),
    /// Ask the controllers who holds it.
    AskTier2,
    /// Have it sent from a node. What the home held comes with its answer.
    Fetch(NodeName),
    /// Give up: whoever was said to hold it does not.
    Lost,
    /// Give up: nobody knows of it, nor its home since it registered.
    Gone {
        /// Under this epoch.
        since: Epoch,
    },
}

/// What came of a step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Answer {
    /// The home said so.
    Home(HomeAnswer),
    /// The home could not be asked.
    HomeUnreachable,
    /// Tier 2 said that these nodes hold it.
    Tier2(Vec<NodeName>),
    /// The node that it was to be fetched from does not hold it, or could not be reached.
    NotFetched,
}

/// Whom a lookup has asked so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Calls {
    /// The home.
    pub home: u32,
    /// Tier 2.
    pub tier2: u32,
    /// Nodes that were said to hold it; the home is counted as such only if it was not asked before.
    pub holders: u32,
}

impl Calls {
    /// All of them.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.home + self.tier2 + self.holders
    }
}

/// What the last step waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiting {
    Home,
    Tier2,
    Fetch,
    Nothing,
}

/// One object being looked for, from one node.
#[derive(Debug)]
pub struct Lookup {
    id: DataId,
    node: NodeName,
    waiting: Waiting,
    calls: Calls,
    steps: u32,
    home_asked: bool,
    /// The home's epoch, where it did not know of it.
    since: Option<Epoch>,
    /// Whether somebody was said to hold it and did not.
    misled: bool,
    /// Who does not hold it, or is being asked for it. At most one a step.
    tried: Vec<NodeName>,
}

impl Lookup {
    /// Looks on this node, and says what to do next. What this node made and gave away it knows
    /// without asking.
    #[must_use]
    pub fn begin(order: LookupOrder, index: &Index, id: DataId) -> (Self, Step) {
        match index.lookup(&id) {
            Some(entry) => {
                let mut lookup = Self::of(index.node(), id);
                let step = lookup.step(Waiting::Nothing, Step::Here(entry));
                (lookup, step)
            }
            None => Self::elsewhere(order, index.node(), index.answer(&id), id),
        }
    }

    /// The same of what is known not to be on this node, by whatever it keeps. `own` is what it says as
    /// the home, of what it made itself.
    #[must_use]
    pub fn elsewhere(order: LookupOrder, node: &NodeName, own: HomeAnswer, id: DataId) -> (Self, Step) {
        let mut lookup = Self::of(node, id);
        let step = if lookup.id.home == lookup.node {
            lookup.home_asked = true;
            lookup.home_says(own)
        } else {
            match order {
                LookupOrder::HomeFirst => lookup.ask_home(),
                LookupOrder::Paper => lookup.ask_tier2(),
            }
        };
        (lookup, step)
    }

    fn of(node: &NodeName, id: DataId) -> Self {
        Self {
            node: node.clone(),
            waiting: Waiting::Nothing,
            calls: Calls::default(),
            steps: 0,
            home_asked: false,
            since: None,
            misled: false,
            tried: Vec::new(),
            id,
        }
    }

    /// Takes what came of the last step, and says what to do next. An answer to another question
    /// than the last is ours to avoid; it ends the lookup as lost.
    pub fn on(&mut self, answer: Answer) -> Step {
        match (self.waiting, answer) {
            (Waiting::Home, Answer::Home(answer)) => self.home_says(answer),
            (Waiting::Home, Answer::HomeUnreachable) => self.ask_tier2(),
            (Waiting::Tier2, Answer::Tier2(holders)) => self.tier2_says(&holders),
            (Waiting::Fetch, Answer::NotFetched) => {
                self.misled = true;
                self.ask_tier2()
            }
            (waiting, answer) => {
                debug_assert!(false, "{answer:?} while waiting for {waiting:?}");
                self.step(Waiting::Nothing, Step::Lost)
            }
        }
    }

    /// Whom it has asked so far.
    #[must_use]
    pub fn calls(&self) -> Calls {
        self.calls
    }

    fn home_says(&mut self, answer: HomeAnswer) -> Step {
        match answer {
            HomeAnswer::Held => self.fetch(self.id.home.clone()),
            HomeAnswer::Moved { to } if self.may_hold(&to) => self.fetch(to),
            // A note that is out of date.
            HomeAnswer::Moved { .. } => self.ask_tier2(),
            HomeAnswer::UnknownSince(epoch) => {
                self.since = Some(epoch);
                self.tried.push(self.id.home.clone());
                self.ask_tier2()
            }
        }
    }

    fn tier2_says(&mut self, holders: &[NodeName]) -> Step {
        match holders.iter().find(|holder| self.may_hold(holder)) {
            Some(holder) => self.fetch(holder.clone()),
            // It named this node, or one that has just been asked.
            None if !holders.is_empty() => self.ask_tier2(),
            None if !self.home_asked => self.ask_home(),
            None => self.give_up(),
        }
    }

    /// Whether a node has not said, or shown, that it does not hold it.
    fn may_hold(&self, node: &NodeName) -> bool {
        *node != self.node && !self.tried.contains(node)
    }

    fn ask_home(&mut self) -> Step {
        self.home_asked = true;
        self.calls.home += 1;
        self.step(Waiting::Home, Step::AskHome(self.id.home.clone()))
    }

    fn ask_tier2(&mut self) -> Step {
        if self.calls.tier2 >= TIER2_MAX {
            return if self.home_asked { self.step(Waiting::Nothing, Step::Lost) } else { self.ask_home() };
        }
        self.calls.tier2 += 1;
        self.step(Waiting::Tier2, Step::AskTier2)
    }

    fn fetch(&mut self, from: NodeName) -> Step {
        let sent_with_its_answer = self.waiting == Waiting::Home && from == self.id.home;
        self.calls.holders += u32::from(!sent_with_its_answer);
        self.tried.push(from.clone());
        self.step(Waiting::Fetch, Step::Fetch(from))
    }

    fn give_up(&mut self) -> Step {
        let unknown = self.since.filter(|_| !self.misled);
        let step = unknown.map_or(Step::Lost, |since| Step::Gone { since });
        self.step(Waiting::Nothing, step)
    }

    fn step(&mut self, waiting: Waiting, step: Step) -> Step {
        self.waiting = waiting;
        self.steps += 1;
        debug_assert!(self.steps <= STEPS_MAX, "a lookup of too many steps");
        step
    }
}
