//! Removes copies on draining, lost and overfull nodes, and surplus copies. A copy is removed only
//! once enough others are ready, or placed, if two copies must not serve at once.

use std::cmp::Reverse;

use super::draft::Draft;
use super::place::UnplaceableFunction;
use super::rows::{CopyFate, PlacedCopy};
use super::table::PlanningTable;

/// Unplaces copies that are no longer needed.
pub(super) fn remove_replaced_and_surplus(
    table: &mut PlanningTable<'_>,
    short: &[UnplaceableFunction],
    draft: &mut Draft,
) {
    let mut is_short = vec![false; table.functions.len()];
    for short in short {
        is_short[short.function] = true;
    }
    for (function, is_short) in is_short.into_iter().enumerate() {
        replaced(table, function, is_short, draft);
        surplus(table, function, draft);
    }
}

/// Unplaces copies that others have replaced.
fn replaced(table: &mut PlanningTable<'_>, function: usize, is_short: bool, draft: &mut Draft) {
    let row = &table.functions[function];
    let ready = if row.of.keeps_state { row.staying() } else { row.ready() };
    let all = ready >= row.wanted;
    // If no more copies can be placed, the copies that could be placed suffice to end a drain. At
    // least one copy has to serve in any case.
    let failing = row.missing() == 0 && row.staying() < row.wanted;
    let enough = all || (is_short || failing) && ready >= row.staying().max(1);
    let goes = |copy: &&PlacedCopy| match copy.fate {
        CopyFate::Leave => enough,
        CopyFate::Lost => all,
        // Without the record of its failed copy, the node would be the emptiest and be tried again.
        // But a function with state must not come to serve on a recovered node beside the copy that
        // has the state.
        CopyFate::Failed => row.of.keeps_state && row.ready() >= row.wanted,
        CopyFate::Stay | CopyFate::Gone => false,
    };
    let gone: Vec<_> = row.copies.iter().filter(goes).map(|copy| copy.node).collect();
    for node in gone {
        draft.push(table.unplace(function, node));
    }
}

/// Removal order among surplus copies; the greatest is removed first. The copy with least traffic
/// to its group on its node is removed first, of equals the copy on the fullest node.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RemovalRank {
    pub(super) near: Reverse<u64>,
    pub(super) fullness: u64,
    pub(super) is_preparing: bool,
    pub(super) node: usize,
}

/// Returns the removal order of a copy.
pub(super) fn turn(table: &PlanningTable<'_>, function: usize, copy: &PlacedCopy) -> RemovalRank {
    let fullness = table.nodes[copy.node].fullness();
    let near = Reverse(near(table, function, copy.node, 0));
    RemovalRank { near, fullness, is_preparing: !copy.ready, node: copy.node }
}

/// Returns the bytes that a function passes to its group on a node, or 0 if the node's GPUs have no
/// time for `load` more. So a copy that leaves a busy node may leave its group behind.
pub(super) fn near(table: &PlanningTable<'_>, function: usize, node: usize, load: u64) -> u64 {
    if table.nodes[node].has_time_for(load) { table.passed_within(function, node) } else { 0 }
}

/// Unplaces copies beyond the wanted number, in removal order.
fn surplus(table: &mut PlanningTable<'_>, function: usize, draft: &mut Draft) {
    loop {
        let row = &table.functions[function];
        if row.staying() <= row.wanted {
            return;
        }
        let last = row.those_staying().max_by_key(|copy| turn(table, function, copy));
        let Some(&PlacedCopy { node, ready, .. }) = last else { return };
        if row.ready() - u32::from(ready) < row.wanted {
            return;
        }
        draft.push(table.unplace(function, node));
        table.give_up(function, node);
    }
}
