//! Placement of functions' models in nodes' host memory: the pure planner of the leader's
//! reconciler (Torpor's cluster manager, T02; node loss, T16 and Torpor §4.5; replicas in several
//! nodes' host memory, T31).
//!
//! ```text
//! ClusterSnapshot { functions, nodes, … }  ──►  PlacementPlan { steps, unplaced, more }
//!        desired and present state                       ▲
//!                 ▲                                      │ commit a step, wait for the change, plan again
//!                 └──────────────────────────────────────┘
//! ```
//!
//! Steps are small, and harmless when repeated or left out: each is right by itself, given the
//! view. A loop of carrying out steps and planning again ends in a view that needs no step. The
//! rules apply in this order:
//!
//! 1. Unwanted placements are removed: placements of disabled functions, of unknown functions and
//!    on unknown nodes ([`table`]).
//! 2. Missing copies are placed, each function's first before any function's second. A node needs
//!    room and fewer than [`FUNCTIONS_PER_NODE_MAX`] functions; copies are spread by memory, by
//!    expected load and by tenant ([`place`]).
//! 3. A function without any copy may get the room of other functions' spare copies ([`eviction`]).
//! 4. Copies on a draining, lost or overfull node, and surplus copies, are removed once enough
//!    others are ready. The last ready copy of a wanted function stays. The exception is a function
//!    that keeps state: its copy is removed once another is placed ([`removal`]).
//! 5. When no other change is under way, functions that never ran move to their groups
//!    ([`regroup`]). After that, a few copies move from the fullest nodes to the emptiest, if
//!    these differ widely ([`balance`]). Functions that keep state do not move.
//!
//! **Groups** ([`grouping`], D19): functions that pass data to each other in workflows belong on one
//! node, as FaasFlow places them, so that their data need not leave it. A copy that has to be
//! placed is placed beside most of its traffic, if that node has room and GPU time for it. A
//! function that ran never moves for that reason alone. The caller provides the traffic: as
//! declared, and after enough runs as [`MeasuredTraffic`].
//!
//! Deliberately absent: copies do not move to make room for one large model that would fit the sum
//! of the free memory, but no single node. The plan reports such a function instead
//! ([`UnplacedReason::HostMemory`]).

mod balance;
mod draft;
mod eviction;
mod grouping;
mod groups;
mod measured;
mod near;
mod place;
mod regroup;
mod removal;
mod rows;
mod table;
mod view;

pub use millrace_types::node::FUNCTIONS_PER_NODE_MAX;

pub use measured::{FunctionPair, MeasuredTraffic, PAIRS_MAX, RUNS_MIN, RUNS_WINDOW, TrafficCounts};
pub use view::{
    ClusterSnapshot, DataFlow, DesiredReplicas, FunctionPlacement, GpuLoad, PlacedModel, PlacementChange,
    PlacementNode, PlacementPhase, PlacementPlan, PlanLimits, STEPS_MAX, Unplaced, UnplacedReason,
};

use draft::Draft;
use table::PlanningTable;

/// Plans the next steps. The order of the entries in `view` makes no difference.
#[must_use]
pub fn plan(view: &ClusterSnapshot, limits: &PlanLimits) -> PlacementPlan {
    let mut draft = Draft { steps: Vec::new(), steps_max: limits.steps_max, more: false };
    let mut table = PlanningTable::new(view, &mut draft);
    table.group(&view.flows);
    let short = place::missing(&mut table, &mut draft);
    eviction::make(&mut table, &short, &mut draft);
    removal::remove_replaced_and_surplus(&mut table, &short, &mut draft);
    if draft.steps.is_empty() && table.is_settled() {
        regroup::join(&mut table, &mut draft);
        if draft.steps.is_empty() {
            balance::plan_moves(&mut table, &mut draft);
        }
    }
    let unplaced = short.iter().map(|short| short.to_unplaced(&table)).chain(table.failing()).collect();
    PlacementPlan { steps: draft.steps, unplaced, more: draft.more }
}
