//! Moves copies from the fullest nodes to the emptiest: after a node joined, or when load shifted.
//! Few at a time, and only where nodes are far apart: a move costs a model's way over the network. Who
//! is with its group stays, unless the node's GPUs have no time for all that is on it.

use std::cmp::Reverse;

use super::Draft;
use super::rows::{Fate, WHOLE};
use super::table::Table;

/// How far apart nodes may be, in shares of their memory and GPUs. More than the tenant's weight
/// in a placement, so that the one does not undo the other.
const GAP: u64 = WHOLE * 3 / 10;
/// Moves of one plan. The next comes when these are done.
const MOVES_MAX: usize = 8;

/// Plans the first half of moves: the copy on the emptier node. The one on the fuller node goes as
/// surplus once that is ready.
pub(super) fn level(table: &mut Table<'_>, draft: &mut Draft) {
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

/// A node has one part in a plan: what it gives is still there while the plan is carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Gives,
    Takes,
}

/// A copy of the fullest node, and the emptiest node that takes one. Of those copies the one that leaves
/// least of its group behind, and the largest that does not turn the two around.
fn best_move(table: &Table<'_>, roles: &[Option<Role>]) -> Option<(usize, usize, usize)> {
    let open = || (0..table.nodes.len()).filter(|&node| table.nodes[node].is_open());
    let fullness = |node: usize| table.nodes[node].fullness();
    let from = open().filter(|&node| roles[node] != Some(Role::Takes)).max_by_key(|&node| fullness(node))?;
    let takes =
        |to: usize| roles[to] != Some(Role::Gives) && fullness(from) > fullness(to).saturating_add(GAP);
    let mut targets: Vec<_> = open().filter(|&to| takes(to)).collect();
    targets.sort_by_key(|&to| fullness(to));
    targets.into_iter().find_map(|to| Some((largest(table, from, to)?, from, to)))
}

fn largest(table: &Table<'_>, from: usize, to: usize) -> Option<usize> {
    let movable = table.functions.iter().enumerate().filter(|(function, row)| {
        row.copies.iter().any(|copy| copy.node == from && copy.fate == Fate::Stay)
            && !row.is_on(to)
            && row.copies.iter().all(|copy| copy.fate != Fate::Gone)
            && table.nodes[to].of.gpu >= row.of.gpu
            && table.nodes[to].fits(table.added(*function, to))
    });
    let may_part = !table.nodes[from].has_time_for(0);
    let gains = movable.filter_map(|(function, _)| {
        let left = table.fullness_without(function, from);
        let gain = table.nodes[from].fullness() - left;
        if gain == 0 || left < table.fullness_with(function, to) {
            return None;
        }
        let parted = table.passed_within(function, from).saturating_sub(table.passed_within(function, to));
        (parted == 0 || may_part).then_some((Reverse(parted), gain, Reverse(function)))
    });
    gains.max().map(|(.., Reverse(function))| function)
}
