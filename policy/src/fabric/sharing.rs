//! Whose batch comes from the host next (`FaaSTube` §6.1; D12 to D16), as `--transfer-sharing` says.
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
use super::transfer::{Batch, Transfer};
use crate::ids::{FlowId, TransferId};
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
    fn there_by(self) -> Timestamp {
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
}

/// Transfers from the host that are over, by what they could count on at last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Nobody waited for them, or links are not shared by objective.
    pub unpromised: u64,
    /// They had the rate that they needed.
    pub admitted: u64,
    /// That rate did not fit beside those that were wanted earlier.
    pub crowded: u64,
    /// They could be in time when they began, and not any more.
    pub late: u64,
    /// They could not have been in time with their links to themselves.
    pub infeasible: u64,
}

impl Counts {
    fn add(&mut self, standing: Standing) {
        let count = match standing {
            Standing::Unpromised => &mut self.unpromised,
            Standing::Admitted { .. } => &mut self.admitted,
            Standing::Crowded { .. } => &mut self.crowded,
            Standing::Late { .. } => &mut self.late,
            Standing::Infeasible(_) => &mut self.infeasible,
        };
        *count += 1;
    }

    /// Each with its name.
    #[must_use]
    pub fn named(&self) -> [(&'static str, u64); 5] {
        let Self { unpromised, admitted, crowded, late, infeasible } = *self;
        [
            ("unpromised", unpromised),
            ("admitted", admitted),
            ("crowded", crowded),
            ("late", late),
            ("infeasible", infeasible),
        ]
    }
}

/// How long transfers waited for their first batch on a link.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Wait {
    /// How many had their first batch by it.
    pub transfers: u64,
    /// From their beginning until that could begin, together.
    pub waited: Duration,
}

/// What the fabric has counted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tally {
    /// Transfers from the host.
    pub from_host: Counts,
    /// By the link that issued their first batch.
    pub waits: BTreeMap<LinkId, Wait>,
}

/// How the links from the host are shared.
#[derive(Debug)]
pub(super) struct Shares {
    pub(super) sharing: Sharing,
    /// Those that are waited for, where it is by objective.
    rates: Option<Rates>,
    /// By meter: batches that passed those without a rate since one of theirs was granted.
    passed: BTreeMap<LinkId, u32>,
    /// When what is handled happened.
    pub(super) now: Timestamp,
    pub(super) tally: Tally,
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
        let rates = if sharing == Sharing::FaasTube { rates() } else { None };
        let (passed, now, tally) = (BTreeMap::new(), Timestamp::ZERO, Tally::default());
        Self { sharing, rates, passed, now, tally }
    }

    fn meter(&self, link: LinkId) -> LinkId {
        self.rates.as_ref().map_or(link, |rates| rates.meter(link))
    }

    /// Whether a transfer goes by its rate.
    fn sends(&self, transfer: TransferId) -> bool {
        self.rates.as_ref().is_some_and(|rates| rates.sends(FlowId(transfer.0)))
    }
}

impl Fabric {
    /// Whether it is a transfer's turn only when that is due by its rate.
    pub(super) fn goes_by_rate(&self, transfer: TransferId) -> bool {
        self.shares.sends(transfer)
    }

    /// Takes a transfer that comes from the host from now on. One that could not be in time alone has no
    /// rate, and says so at its end.
    pub(super) fn promise(&mut self, transfer: TransferId) {
        let now = self.shares.now;
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        let (Some(gpu), Some(wanted), None) = (state.host_to(), state.wanted, state.ending) else { return };
        let (id, bytes) = (FlowId(transfer.0), state.left());
        state.measured = now;
        let objective = Some(Objective { slo: wanted.by.since(now), infer: wanted.infer });
        let links = vec![self.lanes[self.paths[&Route::from_host(gpu)].lanes[0]].link];
        let Some(rates) = &mut self.shares.rates else { return };
        // One that is not taken has no objective.
        if rates.begin(now, &Flow { id, bytes, links, objective }).is_ok()
            && let Some(standing @ Standing::Infeasible(_)) = rates.standing(id)
        {
            state.standing = standing;
            self.end_flow(id);
        }
    }

    fn end_flow(&mut self, flow: FlowId) {
        if let Some(rates) = &mut self.shares.rates {
            // Most transfers have none.
            drop(rates.end(self.shares.now, flow));
        }
    }

    /// A transfer asks for nothing more.
    pub(super) fn leave(&mut self, transfer: TransferId) {
        let flow = FlowId(transfer.0);
        let standing = self.shares.rates.as_ref().and_then(|rates| rates.standing(flow));
        if let (Some(standing), Some(state)) = (standing, self.transfers.get_mut(&transfer)) {
            state.standing = standing;
            self.end_flow(flow);
        }
    }

    /// Counts a transfer that is over.
    pub(super) fn count(&mut self, state: &Transfer) {
        if state.host_to().is_some() {
            self.shares.tally.from_host.add(state.standing);
        }
    }

    /// A batch of a transfer crossed (D16).
    pub(super) fn crossed(&mut self, transfer: TransferId, batch: &Batch, size: Bytes) {
        let now = self.shares.now;
        let link = self.first_link(batch.route);
        let Some(state) = self.transfers.get_mut(&transfer) else { return };
        if !std::mem::replace(&mut state.begun, true) {
            let wait = self.shares.tally.waits.entry(link).or_default();
            wait.transfers += 1;
            wait.waited += batch.not_before.since(state.began);
        }
        if let (Turn::Due(_) | Turn::Longest { spare: Some(_), .. }, Some(rates)) =
            (&batch.turn, &mut self.shares.rates)
        {
            let window = now.since(std::mem::replace(&mut state.measured, now));
            // Its flow may have ended before it.
            drop(rates.measured(now, FlowId(transfer.0), size, window));
        }
    }

    /// A batch did not cross: nobody has paid for it.
    pub(super) fn uncrossed(&mut self, batch: Batch) {
        let link = self.first_link(batch.route);
        let given = match batch.turn {
            Turn::Due(given) => Some(given),
            Turn::Longest { passed, spare } => {
                if batch.route.over.is_none() {
                    let now = self.shares.passed.entry(self.shares.meter(link)).or_default();
                    *now = passed.max(*now);
                }
                spare
            }
        };
        if let (Some(given), Some(rates)) = (given, &mut self.shares.rates) {
            // Its flow may have ended before it.
            rates.give_back(given).unwrap_or_default();
        }
    }

    /// Grants the next batch that is due by a rate, or spared for those without. False where there is
    /// none, and the links are for whoever was served longest ago.
    pub(super) fn grant_due(&mut self, actions: &mut Vec<Action>) -> bool {
        if self.shares.rates.as_ref().is_none_or(Rates::is_empty) {
            return false;
        }
        // What can be granted now, by the link that it enters by.
        let mut sizes: BTreeMap<FlowId, (LinkId, Bytes)> = BTreeMap::new();
        let mut out: BTreeMap<LinkId, usize> = BTreeMap::new();
        for (&transfer, state) in self.transfers.iter().filter(|(_, state)| state.wants()) {
            let Some(route) = state.host_to().map(Route::from_host) else { continue };
            if state.takes_more(&route) && self.path_takes_more(route) {
                let link = self.first_link(route);
                sizes.insert(FlowId(transfer.0), (link, state.next_size()));
                out.insert(link, self.out_on(route));
            }
        }
        let size = |flow: FlowId, _: LinkId| sizes.get(&flow).map_or(Bytes::ZERO, |&(_, size)| size);
        let Some(rates) = &mut self.shares.rates else { return false };
        let newcomers = out.keys().filter_map(|&link| Some((rates.newcomer_on(link, size)?, link)));
        let newcomer = newcomers.min().map(|(_, link)| link);
        let open = |transfer: TransferId| sizes.contains_key(&FlowId(transfer.0));
        if let Some(transfer) = self.spared(open, newcomer) {
            self.grant_longest(transfer, Route::from_host(self.transfers[&transfer].gpu), actions);
            return true;
        }
        let Some(rates) = &mut self.shares.rates else { return false };
        let mut links: Vec<_> = out.into_iter().collect();
        // Where nothing is out the link idles.
        links.sort_by_key(|&(link, out)| (Some(link) != newcomer, out, link));
        let due = links.into_iter().find_map(|(link, _)| rates.next_rated(link, size));
        let Some(due) = due else { return false };
        let (transfer, meter) = (TransferId(due.flow.0), self.shares.meter(due.link));
        let most = if self.waits_without_rate(meter) { SPARE_FIRM } else { SPARE_DUE };
        let passed = self.shares.passed.entry(meter).or_default();
        *passed = (*passed + 1).min(most.max(*passed));
        self.grant(transfer, Route::from_host(self.transfers[&transfer].gpu), Turn::Due(due), actions);
        true
    }

    /// Grants a batch of the transfer that was served longest ago.
    pub(super) fn grant_longest(&mut self, transfer: TransferId, route: Route, actions: &mut Vec<Action>) {
        let mut turn = Turn::Longest { passed: 0, spare: None };
        if route.over.is_none()
            && let Some(state) = self.transfers.get(&transfer)
        {
            let (link, bytes) = (self.first_link(route), state.next_size());
            let passed = self.shares.passed.insert(self.shares.meter(link), 0).unwrap_or(0);
            let rates = self.shares.rates.as_mut();
            let spare = rates.and_then(|rates| rates.take_spare(FlowId(transfer.0), link, bytes));
            turn = Turn::Longest { passed, spare };
        }
        self.grant(transfer, route, turn, actions);
    }

    /// Whether a transfer from the host waits under a meter that does not go by its rate.
    fn waits_without_rate(&self, meter: LinkId) -> bool {
        self.without_rate().any(|(_, _, its)| its == meter)
    }

    /// Transfers from the host that do not go by their rates and want more, and the meters they are under.
    fn without_rate(&self) -> impl Iterator<Item = (TransferId, &Transfer, LinkId)> {
        self.transfers.iter().filter_map(|(&transfer, state)| {
            let route = Route::from_host(state.host_to().filter(|_| state.wants())?);
            let meter = self.shares.meter(self.first_link(route));
            (state.takes_more(&route) && !self.shares.sends(transfer)).then_some((transfer, state, meter))
        })
    }

    /// Whose turn it is in spite of those who have rates, if its path has room: the transfer without one
    /// that was served longest ago where enough have passed such.
    fn spared(&self, open: impl Fn(TransferId) -> bool, newcomer: Option<LinkId>) -> Option<TransferId> {
        let newcomer = newcomer.map(|link| self.shares.meter(link));
        let mut found = None;
        for (&meter, &passed) in &self.shares.passed {
            let due = if newcomer == Some(meter) { SPARE_FIRM } else { SPARE_DUE };
            if passed < due {
                continue;
            }
            let under = self.without_rate().filter(|&(_, _, its)| its == meter);
            let first = under.min_by_key(|&(transfer, state, _)| (state.served, transfer));
            found = found.or(first.map(|(transfer, ..)| transfer).filter(|&transfer| open(transfer)));
        }
        found
    }

    /// The transfers that have just come and are the tightest of their links, and find no room there.
    pub(super) fn newcomers_without_room(&self) -> Vec<TransferId> {
        let Some(rates) = &self.shares.rates else { return Vec::new() };
        let size = |flow: FlowId, _: LinkId| {
            let state = self.transfers.get(&TransferId(flow.0)).filter(|state| state.wants());
            state.map_or(Bytes::ZERO, Transfer::next_size)
        };
        let waits = |state: &&Transfer| state.wants() && state.out.is_empty();
        let waiting = self.transfers.values().filter(waits).filter_map(Transfer::host_to);
        let full = waiting.map(Route::from_host).filter(|route| !self.path_takes_more(*route));
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
            Self::Due(_) => match (newcomer.wanted, other.wanted) {
                (Some(newcomer), Some(other)) => newcomer.there_by() < other.there_by(),
                _ => false,
            },
        }
    }
}
