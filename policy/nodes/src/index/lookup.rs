//! Search for an object that is not on this node: which nodes to ask, in which order, and when to
//! give up (D09).
//!
//! ```text
//! home:   home ─ not held ─► tier 2 ─┬─ held by n ─► n ─ not held ─► tier 2 once more ─► n, or nowhere
//!                                    └─ by no node ─► nowhere
//! paper:  tier 2 ─┬─ held by n ─► n ─ not held ─► tier 2 once more ─► n, or home, or nowhere
//!                 └─ by no node ─► home ─ not held ─► tier 2 once more ─► n, or nowhere
//! ```
//!
//! Names are never reused and a holder compares the whole name, so an outdated answer costs a step
//! and never yields other data. No node is asked twice. Tier 2 is asked at most twice, and the
//! lookup gives up if the second answer is outdated too. So a lookup has at most six steps, the
//! last included: the home, and twice tier 2 and a holder. Both orders ask the home before giving
//! up, because tier 2 does not yet know objects stored within the last sync period. If no
//! controller answers, the lookup continues as if tier 2 knew no holder.

use std::fmt;
use std::str::FromStr;

use millrace_types::NodeName;

use millrace_core::names::{self, UnknownName};

/// Maximum number of queries to tier 2.
const TIER2_MAX: u32 = 2;

/// Order in which a lookup asks the home and tier 2.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum LookupOrder {
    /// The home is asked first. This order is ours: a central table need not be asked for data that
    /// its home still has.
    #[default]
    Home,
    /// Tier 2, the global table, is asked first, as in `FaaSTube` §5.2.
    Paper,
}

/// All orders by name.
pub const LOOKUP_ORDERS: [(&str, LookupOrder); 2] =
    [("home", LookupOrder::Home), ("paper", LookupOrder::Paper)];

impl FromStr for LookupOrder {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("lookup", &LOOKUP_ORDERS, text)
    }
}

impl fmt::Display for LookupOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(names::of(&LOOKUP_ORDERS, self))
    }
}

/// Next step of a lookup.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum LookupAction {
    /// Ask the home for the object.
    AskHome(NodeName),
    /// Ask the controllers for holders.
    AskTier2,
    /// Fetch the object from a holder according to tier 2.
    Fetch(NodeName),
    /// Give up: no node that was asked has the object.
    Nowhere,
}

/// Number of lookup steps of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct LookupCounts {
    /// Queries to homes.
    pub home: u64,
    /// Queries to tier 2.
    pub tier2: u64,
    /// Queries to holders named by tier 2.
    pub holders: u64,
}

impl LookupCounts {
    /// Adds a step.
    pub fn count(&mut self, step: &LookupAction) {
        match step {
            LookupAction::AskHome(_) => self.home += 1,
            LookupAction::AskTier2 => self.tier2 += 1,
            LookupAction::Fetch(_) => self.holders += 1,
            LookupAction::Nowhere => {}
        }
    }
}

/// The search of a node for an object that the node lacks.
#[derive(Debug)]
pub struct Lookup {
    home: NodeName,
    /// Number of queries to tier 2 so far.
    tier2_asked: u32,
    /// Nodes that lack the object or are being asked: this node, and at most one per step.
    tried: Vec<NodeName>,
}

impl Lookup {
    /// Starts a search from `node` for an object made by `home`, and returns its first step.
    #[must_use]
    pub fn begin(order: LookupOrder, node: &NodeName, home: &NodeName) -> (Self, LookupAction) {
        let mut lookup = Self { home: home.clone(), tier2_asked: 0, tried: vec![node.clone()] };
        let step = match order {
            LookupOrder::Home if node != home => lookup.ask_home(),
            LookupOrder::Home | LookupOrder::Paper => lookup.ask_tier2(),
        };
        (lookup, step)
    }

    /// Returns the next step if the asked node does not hold the object, or cannot be asked.
    #[must_use]
    pub fn not_held(&mut self) -> LookupAction {
        self.ask_tier2()
    }

    /// Returns the next step if tier 2 names these holders.
    #[must_use]
    pub fn held_by(&mut self, holders: &[NodeName]) -> LookupAction {
        match holders.iter().find(|holder| !self.tried.contains(holder)) {
            Some(holder) => {
                self.tried.push(holder.clone());
                LookupAction::Fetch(holder.clone())
            }
            None if holders.is_empty() => self.ask_home(),
            // Tier 2 named this node, or a node that was already asked.
            None => self.ask_tier2(),
        }
    }

    fn ask_home(&mut self) -> LookupAction {
        if self.tried.contains(&self.home) {
            return LookupAction::Nowhere;
        }
        self.tried.push(self.home.clone());
        LookupAction::AskHome(self.home.clone())
    }

    fn ask_tier2(&mut self) -> LookupAction {
        if self.tier2_asked == TIER2_MAX {
            return self.ask_home();
        }
        self.tier2_asked += 1;
        LookupAction::AskTier2
    }
}
