//! Places missing copies, each function's first copy before any function's second. The functions of
//! a group are placed one after the other, near each other ([`near`](super::near)).

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::draft::Draft;
use super::table::PlanningTable;
use super::view::{Unplaced, UnplacedReason};

/// A function that found no node for a copy.
pub(super) struct UnplaceableFunction {
    pub(super) function: usize,
    pub(super) why: UnplacedReason,
}

impl UnplaceableFunction {
    /// Returns the report to the caller.
    pub(super) fn to_unplaced(&self, table: &PlanningTable<'_>) -> Unplaced {
        let row = &table.functions[self.function];
        Unplaced {
            function: row.of.key.clone(),
            copies: row.staying(),
            missing: row.missing(),
            why: self.why,
        }
    }
}

/// Places missing copies on the nearest and cheapest nodes. Returns the functions that found no
/// node.
pub(super) fn missing(table: &mut PlanningTable<'_>, draft: &mut Draft) -> Vec<UnplaceableFunction> {
    let lacking = (0..table.functions.len()).filter(|&function| table.functions[function].missing() > 0);
    let mut urgent: BinaryHeap<_> = lacking.map(|function| urgency(table, function)).collect();
    let mut short = Vec::new();
    while let Some((.., (.., Reverse(function)))) = urgent.pop() {
        if draft.is_full() {
            draft.more = true;
            break;
        }
        let Some(node) = cheapest(table, function) else {
            short.push(UnplaceableFunction { function, why: table.why(function) });
            continue;
        };
        let step = table.place(function, node);
        draft.push(step);
        if table.functions[function].missing() > 0 {
            urgent.push(urgency(table, function));
        }
    }
    short
}

/// Placement order; the greatest is placed first. Functions with the fewest copies come first, of
/// these the functions without a leaving copy, of these the largest group: small functions still
/// fit when little room is left. Within a group the largest function comes first. A function
/// without a group counts as a group of its own.
type Urgency = (Reverse<u32>, Reverse<u32>, Size, Size);
/// Bytes, load, and the number that breaks ties in favour of the first.
type Size = (u64, u64, Reverse<usize>);

fn urgency(table: &PlanningTable<'_>, function: usize) -> Urgency {
    let row = &table.functions[function];
    let own = (table.needed(function), table.load(function), Reverse(function));
    let group = table.groups.row_of(function);
    let group = group.map_or(own, |group| (group.bytes, group.load, Reverse(group.first)));
    (Reverse(row.staying()), Reverse(row.leaving()), group, own)
}

/// Returns the node nearest to the function's group, and of equally near nodes the cheapest.
fn cheapest(table: &PlanningTable<'_>, function: usize) -> Option<usize> {
    let row = &table.functions[function];
    let passed = table.passed(function);
    let mut best = None;
    for (number, node) in table.nodes.iter().enumerate() {
        if !node.is_open() || node.of.gpu < row.of.gpu || row.is_on(number) {
            continue;
        }
        let added = table.added(function, number);
        if !node.fits(added) {
            continue;
        }
        let nearness = table.nearness(function, number, &passed);
        let cost = (Reverse(nearness), table.cost(function, number, added));
        if best.is_none_or(|(least, _)| cost < least) {
            best = Some((cost, number));
        }
    }
    best.map(|(_, number)| number)
}
