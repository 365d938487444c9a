//! Computes the rate of each flow between host memory and GPUs, so that every flow meets its
//! objective (`FaaSTube` §6.1; D14 to D16, D18), and chooses the flow that sends the next batch
//! over a link (D12, D13). A [`RateAllocator`] covers a single direction of a node's links. Absent: time,
//! pinned memory (D17) and copying.
//!
//! A flow needs `Rate_least = bytes / (L_slo - L_infer)`. With `faastube`:
//!
//! 1. Flows are **admitted** at exactly that rate, in the order of their deadlines, ties by id. A
//!    flow is admitted if the rate fits on the flow's links beside the flows admitted before.
//! 2. The remaining bandwidth goes to **crowded** flows, which were not admitted, on their links.
//! 3. The bandwidth that is still idle goes wholly to the tightest admitted flow: link by link, to
//!    the tightest flow that may use the link.
//! 4. The bandwidth that these flows cannot use goes to flows without an objective and to
//!    **infeasible** flows. Such flows wait while links are full, and cross when no flow with a
//!    rate has anything to send.
//!
//! Steps 2 and 4 share each link max-min fairly. **Late** flows go through steps 1 and 2 after all
//! flows that may still be in time, admitted or crowded.
//!
//! **Re-weighting** (D16). A flow is behind if the measured rate was below the least rate by more
//! than [`TOLERANCE_PERCENT`], and if the flow is more than a batch short in total. The least rate
//! then rises to the remaining bytes over the remaining time, from the next batch on. Rates cannot
//! oscillate: a least rate never falls and does not depend on the rates given. A least rate ends at
//! the rate that the flow's links carry; then the flow is late for good. Nor can two flows displace
//! each other in turns, because deadlines do not change and the flow with the earlier deadline
//! stays.
//!
//! ```text
//! begin, end, measured ─────► ┌───────┐ ──► RateChange{allocations, guarantees}
//! next_rated, give_back ────► │ rates │ ──► RatedBatch{flow, link, bytes}
//!                             └───────┘
//! ```

mod config;
mod fair_queueing;
mod links;
mod protocol;

use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::time::Duration;

use millrace_types::topology::{LinkId, Topology};
use millrace_types::{Bytes, BytesPerSec, Timestamp};

pub use crate::batch::BATCH;

pub use self::config::{Config, SHARINGS, TransferSharing};
pub use self::protocol::{
    Error, Infeasible, RateAllocation, RateChange, RateGuarantee, RatedBatch, RatedFlow, TransferObjective,
};
pub use millrace_core::ids::FlowId;

use self::links::{FlowLayout, HostLinkTree, LinkRate};

/// Percentage by which a flow's measured rate may be below its least rate before the flow is
/// re-weighted.
pub const TOLERANCE_PERCENT: u64 = 5;
/// Concurrent flows at most: as many as can be decided on in less than 1 ms. Beginning a flow among
/// so many, which ask for twice the links' capacity, takes 0.4 ms (`cargo bench --bench index`).
/// The time grows with the square of the number of flows.
pub const FLOWS_MAX: usize = 128;

const NANOS_PER_SEC: u128 = 1_000_000_000;

/// The deadline of a flow, and the rate that meets it.
#[derive(Debug, Clone, Copy)]
struct FlowDeadline {
    deadline: Timestamp,
    least: NonZeroU64,
    /// Whether the deadline can no longer be met.
    late: bool,
}

#[derive(Debug)]
struct FlowState {
    bytes: u64,
    /// Bytes reported as carried, and bytes given out in batches.
    carried: u64,
    granted: u64,
    /// Whether a batch of the flow was ever given out. Such a flow is not new, even if the batch
    /// did not cross.
    served: bool,
    /// Position in the order of arrival.
    arrival: u64,
    promise: Option<FlowDeadline>,
    guarantee: RateGuarantee,
    /// Rate that the flow's links carry together, in bytes per second.
    alone: u64,
    parts: Vec<LinkRate>,
    /// Bytes that the flow was given to send beyond its share, by part.
    lead: Vec<i128>,
}

impl FlowState {
    /// Returns the sort key of the flow: the tightest flow is first, late flows are last.
    fn urgency(&self) -> (bool, Timestamp) {
        self.promise.map_or((true, Timestamp::MAX), |promise| (promise.late, promise.deadline))
    }

    /// Raises the least rate so that the rest is carried in the remaining time. Returns whether
    /// this changed the flow.
    fn renew(&mut self, now: Timestamp) -> bool {
        let left = self.bytes - self.carried;
        let Some(promise) = self.promise.as_mut().filter(|promise| !promise.late && left > 0) else {
            return false;
        };
        match rate_for(left, promise.deadline.since(now)).filter(|needed| needed.get() <= self.alone) {
            Some(needed) if needed <= promise.least => return false,
            Some(needed) => promise.least = needed,
            None => promise.late = true,
        }
        true
    }
}

/// Returns the rate that carries `bytes` in `time`, rounded up; `None` if no rate can.
fn rate_for(bytes: u64, time: Duration) -> Option<NonZeroU64> {
    let rate = (u128::from(bytes) * NANOS_PER_SEC).checked_div(time.as_nanos())?;
    let exact = rate * time.as_nanos() == u128::from(bytes) * NANOS_PER_SEC;
    NonZeroU64::new(u64::try_from(rate + u128::from(!exact)).unwrap_or(u64::MAX))
}

/// All flows of a node's links in one direction.
#[derive(Debug)]
pub struct RateAllocator {
    config: Config,
    links: HostLinkTree,
    flows: BTreeMap<FlowId, FlowState>,
    arrivals: u64,
    /// By meter link: the number of flows that had arrived when the crossing batch was given out.
    last_grants: Vec<Option<u64>>,
}

impl RateAllocator {
    /// Returns the rates of idle links.
    ///
    /// # Errors
    /// [`Error::UnknownLink`], [`Error::Apart`] and [`Error::Circle`]: the topology's host paths do
    /// not lead to the host.
    pub fn new(topology: &Topology, config: Config) -> Result<Self, Error> {
        let links = HostLinkTree::of(topology)?;
        let last_grants = vec![None; topology.links.len()];
        Ok(Self { config, links, flows: BTreeMap::new(), arrivals: 0, last_grants })
    }

    /// Adds a flow, and returns the changed rates. An infeasible flow is added and reported.
    ///
    /// # Errors
    /// [`Error::Begun`], [`Error::Empty`], [`Error::NoLink`] and [`Error::Full`]. In these cases
    /// nothing has changed.
    pub fn begin(&mut self, now: Timestamp, flow: &RatedFlow) -> Result<RateChange, Error> {
        let id = flow.id;
        if self.flows.contains_key(&id) {
            return Err(Error::Begun(id));
        }
        if flow.bytes == Bytes::ZERO {
            return Err(Error::Empty(id));
        }
        if self.flows.len() >= FLOWS_MAX {
            return Err(Error::Full);
        }
        let parts = self.parts(flow)?;
        let mut state = self.state(now, flow, parts);
        let told = state.guarantee;
        self.arrivals += 1;
        state.arrival = self.arrivals;
        self.flows.insert(id, state);
        let mut change = self.share(now);
        // The guarantee of a flow without a promise never changes, so it is reported here.
        if !change.guarantees.iter().any(|&(flow, _)| flow == id) {
            change.guarantees.push((id, told));
            change.guarantees.sort_unstable_by_key(|&(flow, _)| flow);
        }
        Ok(change)
    }

    /// Removes a flow, carried or not, and returns the changed rates.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn end(&mut self, now: Timestamp, flow: FlowId) -> Result<RateChange, Error> {
        self.flows.remove(&flow).ok_or(Error::Unknown(flow))?;
        Ok(self.share(now))
    }

    /// Records the bytes that a flow carried since the last measurement or the start (D16), and
    /// returns the changed rates.
    ///
    /// # Errors
    /// [`Error::Unknown`].
    pub fn measured(
        &mut self,
        now: Timestamp,
        flow: FlowId,
        bytes: Bytes,
        window: Duration,
    ) -> Result<RateChange, Error> {
        let state = self.flows.get_mut(&flow).ok_or(Error::Unknown(flow))?;
        state.carried = state.carried.saturating_add(bytes.0).min(state.bytes);
        let Some(promise) = state.promise else { return Ok(RateChange::default()) };
        let at_least = |time: Duration| u128::from(promise.least.get()) * time.as_nanos() / NANOS_PER_SEC;
        let slow = u128::from(bytes.0) * 100 < at_least(window) * u128::from(100 - TOLERANCE_PERCENT);
        let expected = at_least(promise.deadline.since(now)) + u128::from(BATCH.0);
        let behind = slow && u128::from(state.bytes - state.carried) > expected;
        Ok(if behind && state.renew(now) { self.share(now) } else { RateChange::default() })
    }

    /// Returns the rate guarantee of a flow; `None` if the flow is unknown.
    #[must_use]
    pub fn guarantee(&self, flow: FlowId) -> Option<RateGuarantee> {
        self.flows.get(&flow).map(|state| state.guarantee)
    }

    /// Whether there is no flow.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// Returns the links that a flow may enter by, without duplicates.
    fn parts(&self, flow: &RatedFlow) -> Result<Vec<LinkRate>, Error> {
        let mut parts: Vec<LinkRate> = Vec::with_capacity(flow.links.len());
        for &link in &flow.links {
            let link = self.links.place(link).ok_or(Error::NoLink(flow.id))?;
            if parts.iter().all(|part| part.link != link) {
                parts.push(LinkRate { link, rate: 0 });
            }
        }
        if parts.is_empty() { Err(Error::NoLink(flow.id)) } else { Ok(parts) }
    }

    fn state(&self, now: Timestamp, flow: &RatedFlow, parts: Vec<LinkRate>) -> FlowState {
        let links = parts.iter().map(|part| part.link).collect();
        let alone = FlowLayout::new(&self.links, std::iter::once(links)).push(0, u64::MAX);
        let promise = flow.objective.map(|objective| {
            let slack = objective.slack().ok_or(Infeasible::NoSlack)?;
            let least = rate_for(flow.bytes.0, slack).ok_or(Infeasible::NoSlack)?;
            if least.get() > alone {
                let least = BytesPerSec(least.get());
                let links = BytesPerSec(alone);
                return Err(Infeasible::BeyondLinks { least, links });
            }
            Ok(FlowDeadline { deadline: now + slack, least, late: false })
        });
        let (promise, guarantee) = match promise {
            None => (None, RateGuarantee::Unpromised),
            Some(Err(why)) => (None, RateGuarantee::Infeasible(why)),
            // Other sharings keep no promise.
            Some(Ok(_)) if self.config.sharing != TransferSharing::FaasTube => {
                (None, RateGuarantee::Unpromised)
            }
            Some(Ok(promise)) => (Some(promise), RateGuarantee::Unpromised),
        };
        let lead = vec![0; parts.len()];
        FlowState {
            bytes: flow.bytes.0,
            carried: 0,
            granted: 0,
            served: false,
            arrival: 0,
            promise,
            guarantee,
            alone,
            parts,
            lead,
        }
    }

    /// Computes the rates of all flows again, and returns the changes.
    fn share(&mut self, now: Timestamp) -> RateChange {
        for state in self.flows.values_mut() {
            // A crowded flow falls behind without being measured.
            if matches!(state.guarantee, RateGuarantee::Crowded { .. }) {
                state.renew(now);
            }
        }
        let mut order: Vec<FlowId> = self.flows.keys().copied().collect();
        match self.config.sharing {
            // The sort is stable, so ties stay in the order of ids.
            TransferSharing::FaasTube => order.sort_by_key(|id| self.flows[id].urgency()),
            TransferSharing::Fifo => order.sort_by_key(|id| self.flows[id].arrival),
            TransferSharing::Fair => {}
        }
        let links = |id: &FlowId| self.flows[id].parts.iter().map(|part| part.link).collect();
        let mut split = FlowLayout::new(&self.links, order.iter().map(links));
        let promises: Vec<_> = order.iter().map(|id| self.flows[id].promise).collect();
        let all: Vec<_> = (0..order.len()).collect();
        let mut admitted = vec![false; order.len()];
        match self.config.sharing {
            TransferSharing::FaasTube => admitted = by_objective(&mut split, &promises),
            TransferSharing::Fair => split.fill(&all),
            TransferSharing::Fifo => all.iter().for_each(|&flow| {
                split.push(flow, u64::MAX);
            }),
        }
        let parts = split.into_flows();
        let mut change = RateChange::default();
        for ((id, parts), admitted) in order.into_iter().zip(parts).zip(admitted) {
            if let Some(state) = self.flows.get_mut(&id) {
                state.settle(id, parts, admitted, &mut change);
            }
        }
        change.allocations.sort_unstable_by_key(|allocation| allocation.flow);
        change.guarantees.sort_unstable_by_key(|&(flow, _)| flow);
        change
    }
}

/// Carries out the steps of the module's description over flows in the order of their urgency.
/// Returns whether each flow was admitted.
fn by_objective(split: &mut FlowLayout<'_>, promises: &[Option<FlowDeadline>]) -> Vec<bool> {
    let mut admitted = vec![false; promises.len()];
    let mut crowded = Vec::new();
    let mut late = Vec::new();
    let mut others = Vec::new();
    for (flow, promise) in promises.iter().enumerate() {
        match promise {
            Some(promise) if promise.late => late.push((flow, promise.least.get())),
            Some(promise) if split.admit(flow, promise.least.get()) => admitted[flow] = true,
            Some(_) => crowded.push(flow),
            None => others.push(flow),
        }
    }
    split.fill(&crowded);
    let mut slower = Vec::new();
    for (flow, least) in late {
        admitted[flow] = split.admit(flow, least);
        if !admitted[flow] {
            slower.push(flow);
        }
    }
    split.fill(&slower);
    for flow in (0..promises.len()).filter(|&flow| admitted[flow]) {
        split.push(flow, u64::MAX);
    }
    split.fill(&others);
    admitted
}

impl FlowState {
    /// Sets the flow's new rates and guarantee, and records the changes.
    fn settle(&mut self, id: FlowId, parts: Vec<LinkRate>, admitted: bool, change: &mut RateChange) {
        if self.parts != parts {
            self.parts = parts;
            let given = self.parts.iter().filter(|part| part.rate > 0);
            let rates = given.map(|part| (LinkId(part.link as u32), BytesPerSec(part.rate))).collect();
            change.allocations.push(RateAllocation { flow: id, rates });
        }
        let Some(promise) = self.promise else { return };
        let least = BytesPerSec(promise.least.get());
        let guarantee = match (promise.late, admitted) {
            (true, _) => RateGuarantee::Late { least },
            (false, true) => RateGuarantee::Admitted { least },
            (false, false) => RateGuarantee::Crowded { least },
        };
        if self.guarantee != guarantee {
            self.guarantee = guarantee;
            change.guarantees.push((id, guarantee));
        }
    }
}

#[cfg(test)]
mod properties;
#[cfg(test)]
mod runs;
#[cfg(test)]
mod tests;
