//! Whose batch crosses between the host and a GPU next (`FaaSTube` §6.1; D12 to D16), as the policy's
//! transfer sharing says. Each direction goes by itself.
//!
//! - `fair`: whoever was served longest ago, as on NVLinks.
//! - `fifo`: whoever came first.
//! - `faastube`: transfers that somebody waits for go by [`Rates`]: each at the least rate that has it there
//!   in time, the tightest with what is idle. The others, those that are wanted by nobody in particular,
//!   cannot be in time or have no rate beside those who can, are served in turns, longest ago first:
//!   while nobody with a rate could use the link; and besides, one batch of [`SPARE_EVERY`] is theirs
//!   wherever they wait. So that no promise is broken for it, rates are given out of what the links
//!   carry without that. Nobody starves: a link that cannot run short keeps nobody waiting (`lanes`), and
//!   at one that can all who cross it are counted.
//!
//! A transfer that is the tightest of its link as it begins is granted before anybody else, and has a
//! queued batch taken back for it: it waits for the batch that crosses (D13). A spare batch makes way like
//! any other, until as many again have passed: then it goes first and stays.
//!
//! Where links do not lead to the host as [`Rates`] wants it, or there are more than
//! [`FLOWS_MAX`](crate::rates::FLOWS_MAX) that are waited for, what is beyond that has no objective.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::topology::{LinkId, Topology};
use millrace_types::{Bytes, BytesPerSec, Timestamp};

use super::Fabric;
use super::lanes::Route;
use super::protocol::Action;
use super::tally::Tally;
use super::transfer::{Batch, Transfer};
use crate::ids::{FlowId, TransferId};
use crate::paths::{Direction, Each};
use crate::rates::{self, Config, Flow, Objective, Rates, Sharing, Standing};

/// One batch of so many on a link is for whoever has no rate there. Ours: the paper lets them wait.
pub const SPARE_EVERY: u32 = 16;
/// As many as may pass before it is their turn.
const SPARE_DUE: u32 = SPARE_EVERY - 1;
/// As many as may pass while those that have just come are let by.
const SPARE_FIRM: u32 = 2 * SPARE_EVERY - 1;

/// By when an answer is wanted, and what remains to be done once the bytes are there.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    by: Timestamp,
    infer: Duration,
}

impl Wanted {
    pub(super) fn new(now: Timestamp, objective: Objective) -> Self {
        Self { by: now + objective.slo, infer: objective.infer }
    }

    /// When the bytes have to be there.
    pub(super) fn there_by(self) -> Timestamp {
        Timestamp(self.by.0.saturating_sub(u64::try_from(self.infer.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// Why a batch was granted.
#[derive(Debug)]
pub(super) enum Turn {
    /// Its transfer was served longest ago. So many had passed those without a rate.
    Longest { passed: u32, spare: Option<rates::Batch> },
    /// It was due by its rate.
    Due(rates::Batch),
    /// Its own way had no room, and that of a neighbour was idle. One that was granted before its transfer
    /// was promised anything is no part of what that is.
    Forwarded { promised: bool },
}

/// How the host's links are shared.
#[derive(Debug)]
pub(super) struct Shares {
    pub(super) sharing: Sharing,
    ways: Each<Way>,
    /// When what is handled happened.
    pub(super) now: Timestamp,
    pub(super) tally: Tally,
}

/// One direction of the host's links.
#[derive(Debug)]
struct Way {
    /// Those that are waited for, where it is by objective.
    rates: Option<Rates>,
    /// By meter: batches that passed those without a rate since one of theirs was granted.
    passed: BTreeMap<LinkId, u32>,
}

impl Way {
    fn meter(&self, link: LinkId) -> LinkId {
        self.rates.as_ref().map_or(link, |rates| rates.meter(link))
    }

    /// Whether a transfer goes by its rate.
    fn sends(&self, transfer: TransferId) -> bool {
        self.rates.as_ref().is_some_and(|rates| rates.sends(FlowId(transfer.0)))
    }
}

impl Shares {
    pub(super) fn new(topology: &Topology, sharing: Sharing) -> Self {
        let of_rates = |rate: BytesPerSec| {
            let rate = u128::from(rate.0) * u128::from(SPARE_DUE) / u128::from(SPARE_EVERY);
            BytesPerSec(u64::try_from(rate).unwrap_or(u64::MAX))
        };
        let mut without_spare = topology.clone();
        without_spare.links.iter_mut().for_each(|link| link.rate = of_rates(link.rate));
        let rates = || Rates::new(&without_spare, Config { sharing }).ok();
        let way = || Way {
            rates: if sharing == Sharing::FaasTube { rates() } else { None },
            passed: BTreeMap::new(),
        };
        let ways = Each { to_gpu: way(), from_gpu: way() };
        Self { sharing, ways, now: Timestamp::ZERO, tally: Tally::default() }
    }
}

impl Fabric {
    /// Shares the host's links otherwise. Batches that are out stay granted; the rest of each transfer goes by
    /// the new rule, with a new promise.
    pub(super) fn share_anew(&mut self, sharing: Sharing) {
        if self.shares.sharing == sharing {
            return;
        }
        let before = std::mem::replace(&mut self.shares, Shares::new(&self.topology, sharing));
        self.shares.now = before.now;
        self.shares.tally = before.tally;
        for state in self.transfers.values_mut() {
            state.standing = Standing::Unpromised;
            for batch in &mut state.out {
                // The old rates are gone: no batch can be given back to them.
                batch.turn = match batch.turn {
                    Turn::Forwarded { .. } => Turn::Forwarded { promised: false },
                    Turn::Due(_) | Turn::Longest { .. } => Turn::Longest { passed: 0, spare: None },
                };
            }
        }
        for transfer in self.transfers.keys().copied().collect::<Vec<_>>() {
            self.promise(transfer);
        }
    }

    /// Whether it is a transfer's turn only when that is due by its rate.
    pub(super) fn goes_by_rate(&self, transfer: TransferId) -> bool {
        Direction::BOTH.into_iter().any(|direction| self.shares.ways[direction].sends(transfer))
    }

    /// Whether what is granted of a transfer now is part of what it was promised.
    pub(super) fn is_promised(&self, transfer: TransferId) -> bool {
        let promised = |rates: &Rates| rates.standing(FlowId(transfer.0)).is_some();
        Direction::BOTH.into_iter().any(|way| self.shares.ways[way].rates.as_ref().is_some_and(promised))
    }

    /// Takes a transfer that comes from the host from now on, or goes there. One that could not be in time
    /// alone has no rate, and says so at its end.
    pub(super) fn promise(&mut self, transfer: TransferId) {
        let now = self.shares.now;
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let (Some(route), Some(wanted), None) = (state.host_route(), state.wanted, state.ending) else {
            return;
        };
        let (id, bytes, direction) = (FlowId(transfer.0), state.left(), state.cargo.direction());
        state.measured = now;
        let objective = Some(Objective { slo: wanted.by.since(now), infer: wanted.infer });
        let links = vec![self.lanes[self.paths[&route].lanes[0]].link];
        let Some(rates) = &mut self.shares.ways[direction].rates else { return };
        // One that is not taken has no objective.
        if rates.begin(now, &Flow { id, bytes, links, objective }).is_ok()
            && let Some(standing @ Standing::Infeasible(_)) = rates.standing(id)
        {
            state.standing = standing;
            self.end_flow(id, direction);
        }
    }

    fn end_flow(&mut self, flow: FlowId, direction: Direction) {
        let now = self.shares.now;
        if let Some(rates) = &mut self.shares.ways[direction].rates {
            // Most transfers have none.
            drop(rates.end(now, flow));
        }
    }

    /// A transfer asks for nothing more.
    pub(super) fn leave(&mut self, transfer: TransferId) {
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let (flow, direction) = (FlowId(transfer.0), state.cargo.direction());
        let rates = self.shares.ways[direction].rates.as_ref();
        if let Some(standing) = rates.and_then(|rates| rates.standing(flow)) {
            state.standing = standing;
            self.end_flow(flow, direction);
        }
    }

    /// Counts a transfer that is over.
    pub(super) fn count(&mut self, state: &Transfer) {
        if let Some(direction) = state.host_route().and_then(|route| route.host_way()) {
            self.shares.tally.ended[direction].add(state.standing);
        }
    }

    /// A batch of a transfer crossed (D16).
    pub(super) fn crossed(&mut self, transfer: TransferId, batch: &Batch, size: Bytes) {
        let now = self.shares.now;
        let link = self.first_link(batch.route);
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let direction = state.cargo.direction();
        if !std::mem::replace(&mut state.begun, true) {
            let wait = self.shares.tally.waits.entry((link, direction)).or_default();
            wait.transfers += 1;
            wait.waited += batch.not_before.since(state.began);
        }
        let promised = match &batch.turn {
            Turn::Due(_) => true,
            Turn::Longest { spare, .. } => spare.is_some(),
            Turn::Forwarded { promised } => *promised,
        };
        if let Some(rates) = self.shares.ways[direction].rates.as_mut().filter(|_| promised) {
            let window = now.since(std::mem::replace(&mut state.measured, now));
            // Its flow may have ended before it.
            drop(rates.measured(now, FlowId(transfer.0), size, window));
        }
    }

    /// A batch did not cross: nobody has paid for it.
    pub(super) fn uncrossed(&mut self, batch: Batch) {
        let link = self.first_link(batch.route);
        let Some(direction) = batch.route.host_way() else { return };
        let way = &mut self.shares.ways[direction];
        let given = match batch.turn {
            Turn::Due(given) => Some(given),
            Turn::Longest { passed, spare } => {
                let now = way.passed.entry(way.meter(link)).or_default();
                *now = passed.max(*now);
                spare
            }
            Turn::Forwarded { .. } => None,
        };
        if let (Some(given), Some(rates)) = (given, &mut way.rates) {
            // Its flow may have ended before it.
            rates.give_back(given).unwrap_or_default();
        }
    }

    /// Grants the next batch that is due by a rate, or spared for those without. False where there is
    /// none, and the links are for whoever was served longest ago.
    pub(super) fn grant_due(&mut self, actions: &mut Vec<Action>) -> bool {
        Direction::BOTH.into_iter().any(|direction| self.grant_due_one_way(direction, actions))
    }

    fn grant_due_one_way(&mut self, direction: Direction, actions: &mut Vec<Action>) -> bool {
        if self.shares.ways[direction].rates.as_ref().is_none_or(Rates::is_empty) {
            return false;
        }
        // What can be granted now, by the link that it enters by.
        let mut sizes: BTreeMap<FlowId, (LinkId, Bytes)> = BTreeMap::new();
        let mut out: BTreeMap<LinkId, usize> = BTreeMap::new();
        for (transfer, state, route) in self.one_way(direction) {
            if state.takes_more(&route) && self.path_takes_more(route) {
                let link = self.first_link(route);
                sizes.insert(FlowId(transfer.0), (link, state.next_size()));
                out.insert(link, self.out_on(route));
            }
        }
        let size = |flow: FlowId, _: LinkId| sizes.get(&flow).map_or(Bytes::ZERO, |&(_, size)| size);
        let Some(rates) = &mut self.shares.ways[direction].rates else { return false };
        let newcomers = out.keys().filter_map(|&link| Some((rates.newcomer_on(link, size)?, link)));
        let newcomer = newcomers.min().map(|(_, link)| link);
        let open = |transfer: TransferId| sizes.contains_key(&FlowId(transfer.0));
        let route = |transfer: TransferId, this: &Self| Route::Host(direction, this.transfers[&transfer].gpu);
        if let Some(transfer) = self.spared(direction, open, newcomer) {
            self.grant_longest(transfer, route(transfer, self), actions);
            return true;
        }
        let Some(rates) = &mut self.shares.ways[direction].rates else { return false };
        let mut links: Vec<_> = out.into_iter().collect();
        // Where nothing is out the link idles.
        links.sort_by_key(|&(link, out)| (Some(link) != newcomer, out, link));
        let due = links.into_iter().find_map(|(link, _)| rates.next_rated(link, size));
        let Some(due) = due else { return false };
        let (transfer, meter) = (TransferId(due.flow.0), self.shares.ways[direction].meter(due.link));
        let waits = self.without_rate(direction).any(|(_, _, its)| its == meter);
        let most = if waits { SPARE_FIRM } else { SPARE_DUE };
        let passed = self.shares.ways[direction].passed.entry(meter).or_default();
        *passed = (*passed + 1).min(most.max(*passed));
        self.grant(transfer, route(transfer, self), Turn::Due(due), actions);
        true
    }

    /// Grants a batch of the transfer that was served longest ago.
    pub(super) fn grant_longest(&mut self, transfer: TransferId, route: Route, actions: &mut Vec<Action>) {
        let mut turn = Turn::Longest { passed: 0, spare: None };
        if let Some(direction) = route.host_way()
            && let Some(state) = self.transfers.get(&transfer)
        {
            let (link, bytes) = (self.first_link(route), state.next_size());
            let way = &mut self.shares.ways[direction];
            let passed = way.passed.insert(way.meter(link), 0).unwrap_or(0);
            let rates = way.rates.as_mut();
            let spare = rates.and_then(|rates| rates.take_spare(FlowId(transfer.0), link, bytes));
            turn = Turn::Longest { passed, spare };
        }
        self.grant(transfer, route, turn, actions);
    }

    /// Transfers between the host and GPUs that go one way and want more, each with its route.
    fn one_way(&self, direction: Direction) -> impl Iterator<Item = (TransferId, &Transfer, Route)> {
        self.transfers.iter().filter_map(move |(&transfer, state)| {
            let route = state.host_route().filter(|_| state.wants())?;
            (route.host_way() == Some(direction)).then_some((transfer, state, route))
        })
    }

    /// Those of them that do not go by their rates, and the meters they are under.
    fn without_rate(&self, direction: Direction) -> impl Iterator<Item = (TransferId, &Transfer, LinkId)> {
        let way = &self.shares.ways[direction];
        self.one_way(direction).filter_map(|(transfer, state, route)| {
            let meter = way.meter(self.first_link(route));
            (state.takes_more(&route) && !way.sends(transfer)).then_some((transfer, state, meter))
        })
    }

    /// Whose turn it is in spite of those who have rates, if its path has room: the transfer without one
    /// that was served longest ago where enough have passed such.
    fn spared(
        &self,
        direction: Direction,
        open: impl Fn(TransferId) -> bool,
        newcomer: Option<LinkId>,
    ) -> Option<TransferId> {
        let way = &self.shares.ways[direction];
        let newcomer = newcomer.map(|link| way.meter(link));
        let mut found = None;
        for (&meter, &passed) in &way.passed {
            let due = if newcomer == Some(meter) { SPARE_FIRM } else { SPARE_DUE };
            if passed < due {
                continue;
            }
            let under = self.without_rate(direction).filter(|&(_, _, its)| its == meter);
            let first = under.min_by_key(|&(transfer, state, _)| (state.served, transfer));
            found = found.or(first.map(|(transfer, ..)| transfer).filter(|&transfer| open(transfer)));
        }
        found
    }

    /// The transfers that have just come and are the tightest of their links, and find no room there.
    pub(super) fn newcomers_without_room(&self) -> Vec<TransferId> {
        Direction::BOTH.into_iter().flat_map(|direction| self.newcomers_one_way(direction)).collect()
    }

    fn newcomers_one_way(&self, direction: Direction) -> Vec<TransferId> {
        let Some(rates) = &self.shares.ways[direction].rates else { return Vec::new() };
        let size = |flow: FlowId, _: LinkId| {
            let state = self.transfers.get(&TransferId(flow.0)).filter(|state| state.wants());
            state.map_or(Bytes::ZERO, Transfer::next_size)
        };
        let waiting = self.one_way(direction).filter(|(_, state, _)| state.out.is_empty());
        let full = waiting.map(|(_, _, route)| route).filter(|route| !self.path_takes_more(*route));
        let mut links: Vec<_> = full.map(|route| self.first_link(route)).collect();
        links.sort_unstable();
        links.dedup();
        let newcomers = links.into_iter().filter_map(|link| rates.newcomer_on(link, size));
        newcomers.map(|(_, flow)| TransferId(flow.0)).collect()
    }
}

impl Turn {
    /// Whether a batch of a transfer may be taken back for one that has just come.
    pub(super) fn makes_way_for(&self, newcomer: &Transfer, other: &Transfer) -> bool {
        match self {
            Self::Longest { passed, .. } => *passed < SPARE_FIRM,
            Self::Forwarded { .. } => true,
            Self::Due(_) => match (newcomer.wanted, other.wanted) {
                (Some(newcomer), Some(other)) => newcomer.there_by() < other.there_by(),
                _ => false,
            },
        }
    }
}
