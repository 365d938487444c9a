//! Makes room for functions without any copy by removing spare copies of others: one copy of every
//! function is worth more than a second of some.

use std::cmp::Reverse;

use super::draft::Draft;
use super::place::UnplaceableFunction;
use super::rows::{CopyFate, PlacedCopy};
use super::table::PlanningTable;
use super::view::UnplacedReason;

/// Memory that a node could free, and the part that is already promised.
#[derive(Default)]
struct Offer {
    /// Functions with a spare copy here, because others of their copies are ready. Functions with
    /// most ready copies come first, of these the functions with least load.
    spare: Vec<usize>,
    /// Bytes freed by steps of this plan.
    freed: u64,
    /// Bytes promised to functions that the next plan places.
    promised: u64,
}

/// Unplaces spare copies if that makes room for a function without any copy. The next plan, which
/// sees the room, places the function.
pub(super) fn make(table: &mut PlanningTable<'_>, short: &[UnplaceableFunction], draft: &mut Draft) {
    let homeless = |short: &&UnplaceableFunction| {
        matches!(short.why, UnplacedReason::HostMemory { .. })
            && table.functions[short.function].staying() == 0
    };
    let homeless: Vec<_> = short.iter().filter(homeless).map(|short| short.function).collect();
    if homeless.is_empty() {
        return;
    }
    let mut offers = offers(table);
    for function in homeless {
        if draft.is_full() {
            draft.more = true;
            return;
        }
        let Some((node, victims)) = best(table, &offers, function) else { continue };
        if victims.len() > draft.steps_max {
            continue;
        }
        if victims.len() > draft.left() {
            // All victims or none: otherwise the next plan would fill half of the room again.
            draft.more = true;
            return;
        }
        let offer = &mut offers[node];
        offer.promised = offer.promised.saturating_add(table.added(function, node));
        for victim in victims {
            offer.freed = offer.freed.saturating_add(table.freed_for(function, victim, node));
            draft.push(table.unplace(victim, node));
        }
    }
}

fn offers(table: &PlanningTable<'_>) -> Vec<Offer> {
    let mut offers: Vec<Offer> = Vec::new();
    offers.resize_with(table.nodes.len(), Offer::default);
    for (function, row) in table.functions.iter().enumerate().filter(|(_, row)| row.ready() > 1) {
        for copy in row.those_staying() {
            offers[copy.node].spare.push(function);
        }
    }
    for offer in &mut offers {
        offer
            .spare
            .sort_by_key(|&function| (Reverse(table.functions[function].ready()), table.load(function)));
    }
    offers
}

/// Returns the node where the fewest copies have to be removed, and these copies.
fn best(table: &PlanningTable<'_>, offers: &[Offer], function: usize) -> Option<(usize, Vec<usize>)> {
    let row = &table.functions[function];
    let open = table.nodes.iter().enumerate().filter(|(number, node)| {
        node.is_open() && !node.is_full() && node.of.gpu >= row.of.gpu && !row.is_on(*number)
    });
    open.filter_map(|(number, _)| Some((number, victims(table, &offers[number], function, number)?)))
        .min_by_key(|(_, victims)| victims.len())
}

/// Returns spare copies that make room on a node, or `None` if all of them would not suffice.
fn victims(table: &PlanningTable<'_>, offer: &Offer, function: usize, node: usize) -> Option<Vec<usize>> {
    let added = table.added(function, node).saturating_add(offer.promised);
    let needs = table.nodes[node].lacks(added, offer.freed);
    let mut lacks = needs;
    let mut chosen = Vec::new();
    for &spare in &offer.spare {
        if lacks == 0 {
            break;
        }
        let stays = |it: &PlacedCopy| it.node == node && it.fate == CopyFate::Stay;
        let still_spare =
            table.functions[spare].ready() > 1 && table.functions[spare].copies.iter().any(stays);
        let freed = table.freed_for(function, spare, node);
        if still_spare && freed > 0 {
            lacks = lacks.saturating_sub(freed);
            chosen.push((spare, freed));
        }
    }
    if lacks > 0 {
        return None;
    }
    Some(without_needless(chosen, needs))
}

/// Drops victims that are not needed, the first chosen ones first.
fn without_needless(chosen: Vec<(usize, u64)>, lacks: u64) -> Vec<usize> {
    let mut surplus = chosen.iter().map(|(_, freed)| freed).sum::<u64>().saturating_sub(lacks);
    let needed = |(spare, freed): (usize, u64)| {
        if freed <= surplus {
            surplus -= freed;
            None
        } else {
            Some(spare)
        }
    };
    chosen.into_iter().filter_map(needed).collect()
}
