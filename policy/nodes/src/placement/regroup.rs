//! Moves functions to groups that became known after their placement, for a workflow's functions
//! are created before the workflow. Only functions that never ran move: a function that serves
//! stays, and two copies of a function with state must not serve.

use super::draft::Draft;
use super::rows::CopyFate;
use super::table::PlanningTable;

/// Moves of one plan. The next plan waits until these are done.
const MOVES_MAX: usize = 8;

/// Plans the first half of moves: a copy beside more of its group. The old copy is removed as
/// surplus once the new copy is ready. Each move brings more of the traffic onto one node, so the
/// moves end.
pub(super) fn join(table: &mut PlanningTable<'_>, draft: &mut Draft) {
    let mut moves = 0;
    for function in 0..table.functions.len() {
        let Some((from, to)) = best_move(table, function) else { continue };
        if draft.is_full() {
            draft.more = true;
            return;
        }
        let step = table.place(function, to);
        draft.push(step);
        // The bytes of the old copy stay on the node until the copy is removed.
        table.unplace(function, from);
        moves += 1;
        if moves == MOVES_MAX {
            return;
        }
    }
}

/// Returns the copy of a function that never ran with least of its group beside it, and the node
/// with most of its group, if that is more.
fn best_move(table: &PlanningTable<'_>, function: usize) -> Option<(usize, usize)> {
    let row = &table.functions[function];
    table.groups.row_of(function).filter(|_| !row.of.ran && !row.of.keeps_state)?;
    if row.copies.iter().any(|copy| copy.fate == CopyFate::Gone) {
        return None;
    }
    let passed = table.passed(function);
    let within = |node: usize| passed.get(&node).map_or(0, |(within, _)| *within);
    let from = row.staying_on().min_by_key(|&node| (within(node), node))?;
    let takes = |&to: &usize| {
        let node = &table.nodes[to];
        node.is_open()
            && node.of.gpu >= row.of.gpu
            && !row.is_on(to)
            && node.fits(table.added(function, to))
            && node.has_time_for(row.load)
            && within(to) > within(from)
    };
    // Of equals the first node.
    let to = passed.keys().copied().filter(takes).max_by_key(|&to| (within(to), std::cmp::Reverse(to)))?;
    Some((from, to))
}
