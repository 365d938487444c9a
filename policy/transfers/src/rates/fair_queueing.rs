//! Chooses the batch that crosses a link next (D13), so that each flow is sent at its rate.
//!
//! The algorithm is worst-case fair weighted queueing (WF2Q, Bennett and Zhang 1996), counted in
//! bytes instead of virtual time, so that rates may change at any batch. Every batch that crosses a
//! link is credited to all flows that have something to send there, in proportion to their rates;
//! the flow that sends the batch pays. The next batch comes from the flows that are not ahead: the
//! flow that would be due first after a batch, ties by urgency, then by id. While the flows of a
//! link stay the same, each flow has been given the promised rate since the start, up to a batch
//! less or more. So in any window a flow gets the rate minus two batches at worst, and minus one
//! batch in a window that begins when the flow begins.
//!
//! The links of a switch share the uplink, so flows by all links of a switch are counted together,
//! at the last link on the way that can run short. A flow that is ahead there waits, with an idle
//! link, while another flow is not ahead. Otherwise PCIe would give each link half of the uplink,
//! regardless of the rates.
//!
//! A new flow that is the tightest of a link sends the first batch before all others, and pays for
//! the batch like any other flow: a new flow waits only for the batch that is crossing. The new
//! flow's rate counts from the start of the crossing batch. So each new flow costs the others a
//! batch at most. D13 says "no later than after the current batch"; we apply this to the tightest
//! new flow only. Of several flows that arrive together a single flow can be next, and the others
//! are served when they are due, as admission promised them.
//!
//! The fabric asks only for batches that are due by a rate ([`RateAllocator::next_rated`]), link by link as
//! each has room. Flows without a rate take turns in the fabric. `sim` uses the rates without
//! batches.

use millrace_types::topology::LinkId;
use millrace_types::{Bytes, Timestamp};

use super::links::LinkRate;
use super::protocol::LeadChange;
use super::{BATCH, Error, FlowId, FlowState, RateAllocator, RatedBatch, TransferSharing};

/// A flow that has something to send by a link.
struct Sender {
    id: FlowId,
    arrival: u64,
    part: usize,
    link: usize,
    rate: u64,
    lead: i128,
    batch: u64,
}

/// Has a flow pay for a batch of its own and credits every other flow a share, so that the sum of
/// all leads stays zero. Returns the changes of the leads.
fn transfer(senders: &mut [Sender], payer: usize) -> Vec<LeadChange> {
    let total: u128 = senders.iter().map(|sender| u128::from(sender.rate)).sum();
    let bytes = u128::from(senders[payer].batch);
    let share = |sender: &Sender| i128::try_from(bytes * u128::from(sender.rate) / total).unwrap_or(0);
    let mut dues: Vec<_> = senders
        .iter()
        .map(|sender| {
            let &Sender { id: flow, arrival, part, .. } = sender;
            LeadChange { flow, arrival, part, lead: -share(sender) }
        })
        .collect();
    dues[payer].lead = 0;
    dues[payer].lead = -dues.iter().map(|due| due.lead).sum::<i128>();
    for (sender, due) in senders.iter_mut().zip(&dues) {
        sender.lead += due.lead;
    }
    dues
}

/// Credits the flows that arrived while the last batch was crossing with a share of that batch, at
/// the cost of the other flows, which were credited for the batch.
fn credit_the_wait(senders: &mut [Sender], last: u64) {
    let total: u128 = senders.iter().map(|sender| u128::from(sender.rate)).sum();
    for newcomer in (0..senders.len()).filter(|&at| senders[at].arrival > last).collect::<Vec<_>>() {
        let rate = u128::from(senders[newcomer].rate);
        let share = u128::from(BATCH.0) * rate / total;
        let mut credit = 0;
        for (at, sender) in senders.iter_mut().enumerate() {
            if at != newcomer {
                // The other flows have a rate together, because there is at least one.
                let part = share * u128::from(sender.rate) / (total - rate);
                let part = i128::try_from(part).unwrap_or(0);
                sender.lead += part;
                credit += part;
            }
        }
        senders[newcomer].lead -= credit;
    }
}

impl FlowState {
    /// Returns the size of the flow's next batch; 0 if all of its bytes were given out.
    fn next_bytes(&self) -> u64 {
        (self.bytes - self.granted).min(BATCH.0)
    }
}

impl RateAllocator {
    /// Returns the next batch of a link, from the flows that have a rate there. `sized` returns the
    /// bytes of a flow that can enter by a link now: zero if the link has no room, so that no flow
    /// waits for a busy link.
    ///
    /// The caller asks when the link is free, and reports the bytes that the batch carried to
    /// [`Self::measured`]. Returns `None` if no flow with a rate has bytes left for the link, or
    /// while a flow by another link of the same uplink is due first. The caller asks again when
    /// rates change, and for all free links when a batch has ended.
    pub fn next_rated(
        &mut self,
        link: LinkId,
        sized: impl Fn(FlowId, LinkId) -> Bytes,
    ) -> Option<RatedBatch> {
        let place = self.links.place(link)?;
        let meter = self.links.meter(place);
        let mut senders = self.senders(meter, &sized);
        if senders.is_empty() {
            self.last_grants[meter] = None;
            return None;
        }
        if let Some(last) = self.last_grants[meter].as_mut() {
            credit_the_wait(&mut senders, std::mem::replace(last, self.arrivals));
        }
        let chosen = self.newcomer(&senders, place).or_else(|| self.most_due(&senders, place));
        let paid = chosen.map(|chosen| (senders[chosen].id, Bytes(senders[chosen].batch)));
        let dues = chosen.map_or_else(Vec::new, |chosen| transfer(&mut senders, chosen));
        for sender in &senders {
            if let Some(state) = self.flows.get_mut(&sender.id) {
                state.lead[sender.part] = sender.lead;
            }
        }
        let (flow, bytes) = paid?;
        self.grant(flow, link, bytes, dues)
    }

    /// Records that a flow without a rate is given a batch that no flow pays for. Returns `None` if
    /// there is no such flow, or if all of its bytes were given out.
    pub fn take_spare(&mut self, flow: FlowId, link: LinkId, bytes: Bytes) -> Option<RatedBatch> {
        self.grant(flow, link, bytes, Vec::new()).filter(|batch| batch.bytes > Bytes::ZERO)
    }

    /// Returns the new flow that is next by a link, and the flow's deadline.
    #[must_use]
    pub fn newcomer_on(
        &self,
        link: LinkId,
        sized: impl Fn(FlowId, LinkId) -> Bytes,
    ) -> Option<(Timestamp, FlowId)> {
        let place = self.links.place(link)?;
        let senders = self.senders(self.links.meter(place), &sized);
        let id = senders[self.newcomer(&senders, place)?].id;
        Some((self.flows[&id].urgency().1, id))
    }

    /// Whether a flow has a rate, and bytes that were not given out.
    #[must_use]
    pub fn sends(&self, flow: FlowId) -> bool {
        let sends =
            |state: &FlowState| state.next_bytes() > 0 && state.parts.iter().any(|part| part.rate > 0);
        self.flows.get(&flow).is_some_and(sends)
    }

    /// Returns the link at which flows that enter by `link` are counted, together with the other
    /// flows that could leave them too little room.
    #[must_use]
    pub fn meter(&self, link: LinkId) -> LinkId {
        self.links.place(link).map_or(link, |place| LinkId(self.links.meter(place) as u32))
    }

    fn grant(
        &mut self,
        flow: FlowId,
        link: LinkId,
        bytes: Bytes,
        dues: Vec<LeadChange>,
    ) -> Option<RatedBatch> {
        let meter = self.links.meter(self.links.place(link)?);
        let state = self.flows.get_mut(&flow)?;
        let bytes = state.next_bytes().min(bytes.0);
        state.granted += bytes;
        state.served = true;
        let follows = self.last_grants[meter].replace(self.arrivals).is_some();
        Some(RatedBatch { flow, link, bytes: Bytes(bytes), arrival: state.arrival, follows, dues })
    }

    /// Takes back a batch that did not cross, with all payments and credits for it.
    ///
    /// # Errors
    /// [`Error::Unknown`] if its flow has ended.
    pub fn give_back(&mut self, batch: RatedBatch) -> Result<(), Error> {
        let of = |state: &&mut FlowState, arrival: u64| state.arrival == arrival;
        let state = self.flows.get_mut(&batch.flow).filter(|state| of(state, batch.arrival));
        let state = state.ok_or(Error::Unknown(batch.flow))?;
        state.granted -= batch.bytes.0;
        if let Some(place) = self.links.place(batch.link).filter(|_| !batch.follows) {
            // The next flow to arrive has not waited for this batch, nor for another batch.
            self.last_grants[self.links.meter(place)] = None;
        }
        for due in batch.dues {
            if let Some(state) = self.flows.get_mut(&due.flow).filter(|state| of(state, due.arrival)) {
                state.lead[due.part] -= due.lead;
            }
        }
        Ok(())
    }

    /// Returns the flows with a rate and something to send now, for each link that is counted at a
    /// meter; by id.
    fn senders(&self, meter: usize, sized: &dyn Fn(FlowId, LinkId) -> Bytes) -> Vec<Sender> {
        let mut senders = Vec::new();
        for (&id, state) in &self.flows {
            let next = state.next_bytes();
            for (part, &LinkRate { link, rate }) in state.parts.iter().enumerate() {
                if rate == 0 || next == 0 || self.links.meter(link) != meter {
                    continue;
                }
                let batch = next.min(sized(id, LinkId(link as u32)).0);
                if batch > 0 {
                    let arrival = state.arrival;
                    let lead = state.lead[part];
                    senders.push(Sender { id, arrival, part, link, rate, lead, batch });
                }
            }
        }
        senders
    }

    /// Returns the tightest flow of a link if none of its batches was given out yet.
    fn newcomer(&self, senders: &[Sender], link: usize) -> Option<usize> {
        if self.config.sharing != TransferSharing::FaasTube {
            return None;
        }
        let here = (0..senders.len()).filter(|&at| senders[at].link == link);
        let tightest = here.min_by_key(|&at| (self.flows[&senders[at].id].urgency(), senders[at].id))?;
        let state = &self.flows[&senders[tightest].id];
        let in_time = state.promise.is_some_and(|promise| !promise.late);
        (in_time && !state.served).then_some(tightest)
    }

    /// Returns the flow that is next by a link; `None` while flows by another link come first.
    fn most_due(&self, senders: &[Sender], link: usize) -> Option<usize> {
        let due = |&a: &usize, &b: &usize| {
            let a = &senders[a];
            let b = &senders[b];
            // Compares the times at which each would be due, (lead + batch) / rate, without
            // dividing.
            let when =
                |it: &Sender, other: &Sender| (it.lead + i128::from(it.batch)) * i128::from(other.rate);
            let urgency = |it: &Sender| (self.flows[&it.id].urgency(), it.id, it.link);
            when(a, b).cmp(&when(b, a)).then_with(|| urgency(a).cmp(&urgency(b)))
        };
        let here = |at: &usize| senders[*at].link == link;
        let not_ahead = || (0..senders.len()).filter(|&at| senders[at].lead <= 0);
        if not_ahead().next().is_some() {
            return not_ahead().filter(here).min_by(due);
        }
        // All flows are ahead if the flows that were behind have left.
        (0..senders.len()).min_by(due).filter(here)
    }
}
