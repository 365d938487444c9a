//! Whom to ask for an object that is not here, in which order, and when to give up (D09).
//!
//! ```text
//! home:   home ─ not held ─► tier 2 ─┬─ held by n ─► n ─ not held ─► tier 2 once more ─► n, or nowhere
//!                                    └─ by nobody ─► nowhere
//! paper:  tier 2 ─┬─ held by n ─► n ─ not held ─► tier 2 once more ─► n, or home, or nowhere
//!                 └─ by nobody ─► home ─ not held ─► tier 2 once more ─► n, or nowhere
//! ```
//!
//! Names are never given twice and a holder looks for the whole name, so an answer that is out of date
//! costs a step and never yields other data. No node is asked twice. Tier 2 is asked again once; what is
//! then not where it says is given up. So a lookup has at most six steps, the last included: the home, and
//! twice tier 2 and a holder. With either order the home is asked before that: tier 2 has not
//! heard yet of what was stored within the last sync period. It may also be that no controller answers:
//! that counts as nobody.

use std::fmt;
use std::str::FromStr;

use millrace_types::NodeName;

use crate::names::{self, UnknownName};

/// How often tier 2 is asked at most.
const TIER2_MAX: u32 = 2;

/// Who is asked first where something is that is not here.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum LookupOrder {
    /// The node that made it. Ours: a central table is not asked for what its maker still has.
    #[default]
    Home,
    /// The global table, as in `FaaSTube` §5.2.
    Paper,
}

/// Every name, with what it stands for.
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

/// What to do next.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Step {
    /// Have it sent by its home, which may have it.
    AskHome(NodeName),
    /// Ask the controllers who holds it.
    AskTier2,
    /// Have it sent by a node that holds it by tier 2.
    Fetch(NodeName),
    /// Give up: whoever was asked does not have it.
    Nowhere,
}

/// Whom lookups have asked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Calls {
    /// The home.
    pub home: u64,
    /// Tier 2.
    pub tier2: u64,
    /// Nodes that hold it by tier 2.
    pub holders: u64,
}

impl Calls {
    /// Counts a step.
    pub fn count(&mut self, step: &Step) {
        match step {
            Step::AskHome(_) => self.home += 1,
            Step::AskTier2 => self.tier2 += 1,
            Step::Fetch(_) => self.holders += 1,
            Step::Nowhere => {}
        }
    }
}

/// One object being looked for, from one node that does not hold it.
#[derive(Debug)]
pub struct Lookup {
    home: NodeName,
    /// How often tier 2 was asked.
    tier2_asked: u32,
    /// Who does not hold it, or is being asked for it. At most one a step, and the node itself.
    tried: Vec<NodeName>,
}

impl Lookup {
    /// Says what to do first, from this node, for what `home` made.
    #[must_use]
    pub fn begin(order: LookupOrder, node: &NodeName, home: &NodeName) -> (Self, Step) {
        let mut lookup = Self { home: home.clone(), tier2_asked: 0, tried: vec![node.clone()] };
        let step = match order {
            LookupOrder::Home if node != home => lookup.ask_home(),
            LookupOrder::Home | LookupOrder::Paper => lookup.ask_tier2(),
        };
        (lookup, step)
    }

    /// Says what to do next where the node that was to send it does not hold it, or cannot be asked.
    #[must_use]
    pub fn not_held(&mut self) -> Step {
        self.ask_tier2()
    }

    /// Says what to do next where these nodes hold it by tier 2.
    #[must_use]
    pub fn held_by(&mut self, holders: &[NodeName]) -> Step {
        match holders.iter().find(|holder| !self.tried.contains(holder)) {
            Some(holder) => {
                self.tried.push(holder.clone());
                Step::Fetch(holder.clone())
            }
            None if holders.is_empty() => self.ask_home(),
            // It named this node, or one that has just been asked.
            None => self.ask_tier2(),
        }
    }

    fn ask_home(&mut self) -> Step {
        if self.tried.contains(&self.home) {
            return Step::Nowhere;
        }
        self.tried.push(self.home.clone());
        Step::AskHome(self.home.clone())
    }

    fn ask_tier2(&mut self) -> Step {
        if self.tier2_asked == TIER2_MAX {
            return self.ask_home();
        }
        self.tier2_asked += 1;
        Step::AskTier2
    }
}
