//! Moves functions to their groups that were placed before anybody knew of the workflow: where a
//! workflow comes with its functions, these come first. Only such as never ran: what serves stays where
//! it is, and of what keeps state no two may serve.

use super::Draft;
use super::rows::Fate;
use super::table::Table;

/// Moves of one plan. The next comes when these are done.
const MOVES_MAX: usize = 8;

/// Plans the first half of moves: the copy beside more of its group. The other goes as surplus once
/// that is ready. Each move brings more of what is passed onto one node, so they come to an end.
pub(super) fn join(table: &mut Table<'_>, draft: &mut Draft) {
    let mut moves = 0;
    for function in 0..table.functions.len() {
        let Some((from, to)) = best_move(table, function) else { continue };
        if draft.is_full() {
            draft.more = true;
            return;
        }
        let step = table.place(function, to);
        draft.push(step);
        // Its bytes are there until it has gone.
        table.unplace(function, from);
        moves += 1;
        if moves == MOVES_MAX {
            return;
        }
    }
}

/// Of the copies of a function that never ran the one that is with least of its group, and the node
/// that is with most of it, if that is more.
fn best_move(table: &Table<'_>, function: usize) -> Option<(usize, usize)> {
    let row = &table.functions[function];
    table.groups.row_of(function).filter(|_| !row.of.ran && !row.of.keeps_state)?;
    if row.copies.iter().any(|copy| copy.fate == Fate::Gone) {
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
    // Of equals the first.
    let to = passed.keys().copied().filter(takes).max_by_key(|&to| (within(to), std::cmp::Reverse(to)))?;
    Some((from, to))
}
