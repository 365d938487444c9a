//! Which functions' models are kept in which nodes' host memory: the pure planner of a leader's
//! reconciler (Torpor's cluster manager, T02; node loss, T16 and Torpor §4.5; replicas in several
//! nodes' host memory, T31).
//!
//! ```text
//! View { functions, nodes, placements, flows }  ──►  Plan { steps, unplaced, more }
//!        what is wanted and what is                      ▲
//!                 ▲                                      │ commit a step, wait for the change, plan again
//!                 └──────────────────────────────────────┘
//! ```
//!
//! Steps are small and do no harm when repeated or left out: each is right by itself, given the
//! view. Carrying them out and planning again ends in a view that needs none. The rules, in the
//! order in which they are applied:
//!
//! 1. What nobody wants goes: of disabled functions, of unknown functions and nodes ([`table`]).
//! 2. Missing copies are placed, each function's first before any function's second, on nodes that
//!    have room and fewer than [`FUNCTIONS_PER_NODE_MAX`] functions, spread by memory, by expected load and
//!    by tenant ([`place`]).
//! 3. A function without any copy may have the room of others' spare ones ([`room`]).
//! 4. What is on a draining, lost or overfull node, and what is too many, goes once enough others
//!    are ready. The last ready copy of a function that is wanted never goes, but for one that keeps state,
//!    which goes once another is placed ([`leave`]).
//! 5. When nothing else is under way, functions that never ran move to their groups ([`together`]);
//!    and then a few copies from the fullest nodes to the emptiest, if those are far apart ([`balance`]).
//!    Neither moves what keeps state.
//!
//! **Groups** ([`groups`], D19): functions that pass data to each other in workflows belong on one node,
//! as FaasFlow places them, so that the data need not leave it. A copy that has to be placed goes where
//! most of what it passes is, as long as that node has room and time on its GPUs for it. Nothing that
//! ran moves for that alone. How much they pass the caller says: as declared, and once enough runs were
//! seen, as [`Measured`].
//!
//! Deliberately absent: copies are not shuffled about to make room for one large model that fits no
//! node's free memory while it would fit the sum. That is told instead ([`Why::HostMemory`]).

mod balance;
mod groups;
mod leave;
mod measured;
mod near;
mod place;
mod room;
mod rows;
mod table;
mod together;
mod view;

pub use millrace_types::node::FUNCTIONS_PER_NODE_MAX;

pub use measured::{Measured, PAIRS_MAX, Pair, RUNS_MIN, RUNS_WINDOW, Tally};
pub use view::{
    Flow, Function, GpuLoad, Limits, Model, Node, Phase, Placement, Plan, STEPS_MAX, Step, Unplaced, View,
    Why,
};

use table::Table;

/// Plans the next steps. The order of anything in `view` makes no difference.
#[must_use]
pub fn plan(view: &View, limits: &Limits) -> Plan {
    let mut draft = Draft { steps: Vec::new(), steps_max: limits.steps_max, more: false };
    let mut table = Table::new(view, &mut draft);
    table.group(&view.flows);
    let short = place::missing(&mut table, &mut draft);
    room::make(&mut table, &short, &mut draft);
    leave::let_go(&mut table, &short, &mut draft);
    if draft.steps.is_empty() && table.is_settled() {
        together::join(&mut table, &mut draft);
        if draft.steps.is_empty() {
            balance::level(&mut table, &mut draft);
        }
    }
    let unplaced = short.iter().map(|short| short.told(&table)).chain(table.failing()).collect();
    Plan { steps: draft.steps, unplaced, more: draft.more }
}

/// A plan in the making, with a bound.
struct Draft {
    steps: Vec<Step>,
    steps_max: usize,
    /// Whether a step found no place.
    more: bool,
}

impl Draft {
    fn is_full(&self) -> bool {
        self.steps.len() >= self.steps_max
    }

    /// Steps that find a place.
    fn left(&self) -> usize {
        self.steps_max.saturating_sub(self.steps.len())
    }

    fn push(&mut self, step: Step) {
        if self.is_full() {
            self.more = true;
        } else {
            self.steps.push(step);
        }
    }
}
