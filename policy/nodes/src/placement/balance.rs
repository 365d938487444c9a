//! Moves copies from the fullest nodes to the emptiest, after a node joined or the load shifted.
//! Moves are few, and only between nodes that differ widely, because a move costs a model's
//! transfer over the network. A copy beside its group stays, unless the node's GPUs have no time
//! for their present load.

use std::cmp::Reverse;

use super::draft::Draft;
use super::removal::{self, RemovalRank};
use super::rows::{CopyFate, WHOLE};
use super::table::PlanningTable;

/// Difference of fullness above which copies move, in shares of memory and GPUs. Greater than the
/// tenant's weight in a placement, so that placement and balance do not undo each other.
const GAP: u64 = WHOLE * 3 / 10;
/// Moves of one plan. The next plan waits until these are done.
const MOVES_MAX: usize = 8;

/// Plans the first half of moves: the copy on the emptier node. The copy on the fuller node is
/// removed as surplus once the new copy is ready.
pub(super) fn plan_moves(table: &mut PlanningTable<'_>, draft: &mut Draft) {
    let mut roles = vec![None; table.nodes.len()];
    for _ in 0..MOVES_MAX {
        let Some((function, from, to)) = best_move(table, &roles) else { return };
        if draft.is_full() {
            draft.more = true;
            return;
        }
        let step = table.place(function, to);
        draft.push(step);
        table.unplace(function, from);
        table.give_up(function, from);
        roles[from] = Some(Role::Gives);
        roles[to] = Some(Role::Takes);
    }
}

/// Role of a node in a plan. A node has a single role, because the memory of a given copy is in use
/// while the plan is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Gives,
    Takes,
}

/// Returns a function, the node that gives its copy and the emptiest node that takes the copy. The
/// giving node is the fullest node with a movable copy: a group that stays together on the very
/// fullest node must not stop the other nodes.
fn best_move(table: &PlanningTable<'_>, roles: &[Option<Role>]) -> Option<(usize, usize, usize)> {
    let open = |but: Role| {
        let is_open = move |&node: &usize| table.nodes[node].is_open() && roles[node] != Some(but);
        (0..table.nodes.len()).filter(is_open).collect::<Vec<_>>()
    };
    let fullness = |node: usize| table.nodes[node].fullness();
    let mut sources = open(Role::Takes);
    let mut targets = open(Role::Gives);
    sources.sort_by_key(|&from| Reverse((fullness(from), from)));
    targets.sort_by_key(|&to| fullness(to));
    let are_apart = |from: usize, to: usize| fullness(from) > fullness(to).saturating_add(GAP);
    if !are_apart(*sources.first()?, *targets.first()?) {
        return None;
    }
    let movable = movable(table);
    sources.into_iter().find_map(|from| {
        let mut targets = targets.iter().copied().take_while(|&to| are_apart(from, to));
        targets.find_map(|to| Some((largest(table, &movable[from], from, to)?, from, to)))
    })
}

/// Returns, for each node, the functions with a copy there that may move.
fn movable(table: &PlanningTable<'_>) -> Vec<Vec<usize>> {
    let mut on = vec![Vec::new(); table.nodes.len()];
    for (function, row) in table.functions.iter().enumerate() {
        if !row.of.keeps_state && row.copies.iter().all(|copy| copy.fate != CopyFate::Gone) {
            row.staying_on().for_each(|node| on[node].push(function));
        }
    }
    on
}

/// Returns the function to move between two nodes: the function that leaves least of its group
/// behind, and of equals the largest that does not make the target fuller than the source.
fn largest(table: &PlanningTable<'_>, movable: &[usize], from: usize, to: usize) -> Option<usize> {
    let may_part = !table.nodes[from].has_time_for(0);
    let gains = movable.iter().filter_map(|&function| {
        let row = &table.functions[function];
        let node = &table.nodes[to];
        if row.is_on(to) || node.of.gpu < row.of.gpu || !node.fits(table.added(function, to)) {
            return None;
        }
        let left = table.fullness_without(function, from);
        let gain = table.nodes[from].fullness() - left;
        if gain == 0 || left < table.fullness_with(function, to) {
            return None;
        }
        let parted = table.passed_within(function, from).saturating_sub(table.passed_within(function, to));
        let moves = (parted == 0 || may_part) && goes_from(table, function, from, to);
        moves.then_some((Reverse(parted), gain, Reverse(function)))
    });
    gains.max().map(|(.., Reverse(function))| function)
}

/// Returns whether this node's copy is removed once the other node has a copy.
fn goes_from(table: &PlanningTable<'_>, function: usize, from: usize, to: usize) -> bool {
    let row = &table.functions[function];
    let turn = |copy| removal::turn(table, function, copy);
    let coming = RemovalRank {
        near: Reverse(removal::near(table, function, to, row.load)),
        fullness: table.fullness_with(function, to),
        is_preparing: true,
        node: to,
    };
    let first = row.those_staying().filter(|copy| copy.node == from).map(turn).max();
    first > row.those_staying().filter(|copy| copy.node != from).map(turn).chain([coming]).max()
}
