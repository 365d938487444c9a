//! Who of the tenants with caps may come to the queue, and when. Keeps what they have at work and
//! what of theirs has to wait outside.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::tenancy::{Quota, Share};
use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::window::{Peak, WINDOW, Window};
use crate::dispatch::{Inputs, Request};
use crate::ids::{FunctionIndex, RequestKey, TenantIndex};

/// A request that waits outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Parked {
    pub(super) request: Request,
    /// The memory of its model.
    pub(super) blocks: u32,
}

/// What there is to share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Whole {
    pub(super) gpus: u32,
    pub(super) blocks: u64,
}

/// A request that was let in.
#[derive(Debug, Clone, Copy)]
struct Inside {
    tenant: TenantIndex,
    model: ModelId,
    on: Option<GpuIndex>,
}

#[derive(Debug, Default)]
struct Account {
    quota: Quota,
    /// Outside, the oldest first.
    parked: BTreeMap<RequestKey, Parked>,
    /// Let in.
    inside: u32,
    /// Of those, in the queue.
    queued: u32,
    /// Of each model, the requests that were let in and the blocks of one copy.
    models: BTreeMap<ModelId, (u32, u32)>,
    window: Window,
    /// GPUs that work for it, and since when.
    turns: BTreeMap<GpuIndex, Timestamp>,
    /// The GPUs of its share that it used at once.
    peak: Peak,
}

impl Account {
    fn blocks_max(&self, whole: Whole) -> u64 {
        self.quota.memory_share.map_or(u64::MAX, |share| share.of(whole.blocks))
    }

    /// The memory that its models take if each request that was let in is on another GPU.
    fn blocks(&self, whole: Whole) -> u64 {
        let taken =
            |&(requests, blocks): &(u32, u32)| u64::from(requests.min(whole.gpus)) * u64::from(blocks);
        self.models.values().map(taken).sum()
    }

    fn never_fits(&self, blocks: u32, whole: Whole) -> bool {
        u64::from(blocks) > self.blocks_max(whole)
    }

    /// Whether one more request keeps it within the caps that always hold.
    fn takes(&self, parked: &Parked, whole: Whole) -> bool {
        if self.quota.is_none() {
            return true;
        }
        let seats = self.quota.gpus_max.map_or(whole.gpus, |max| max.get().min(whole.gpus));
        let copies = self.models.get(&parked.request.model).map_or(0, |&(requests, _)| requests);
        let more = if copies < whole.gpus { u64::from(parked.blocks) } else { 0 };
        self.inside < seats && self.blocks(whole) + more <= self.blocks_max(whole)
    }

    fn gpu_time(&mut self, now: Timestamp) -> Duration {
        let under_way = self.turns.values().map(|&since| now.since(since).min(WINDOW)).sum::<Duration>();
        self.window.total(now) + under_way
    }

    /// Whether it had more than its share of the window.
    fn over_time(&mut self, now: Timestamp, whole: Whole) -> bool {
        let Some(share) = self.quota.gpu_share else { return false };
        let window = WINDOW.as_nanos() as u64 * u64::from(whole.gpus);
        self.gpu_time(now).as_nanos() > u128::from(share.of(window))
    }

    /// The GPUs that its share is at one moment, rounded up.
    fn seats(&self, whole: Whole) -> u32 {
        let seats = |share: Share| {
            let exact = u64::from(share.ppm()) * u64::from(whole.gpus);
            u32::try_from(exact.div_ceil(Share::ALL.ppm().into())).unwrap_or(u32::MAX)
        };
        self.quota.gpu_share.map_or(u32::MAX, seats)
    }

    /// The GPUs that others leave to it: what it used of its share at once, lately, and what it uses
    /// beyond. Who had more than its share over time is left what it uses.
    fn claim(&mut self, now: Timestamp, whole: Whole) -> u32 {
        if self.over_time(now, whole) {
            return self.inside;
        }
        self.peak.most(now) + self.inside.saturating_sub(self.seats(whole))
    }

    fn counted(&mut self, now: Timestamp, whole: Whole) {
        self.peak.set(now, self.inside.min(self.seats(whole)).min(whole.gpus));
    }

    /// The oldest outside, if the caps that always hold let it in.
    fn first(&self, whole: Whole) -> Option<RequestKey> {
        self.parked.values().next().filter(|first| self.takes(first, whole)).map(|first| first.request.key)
    }
}

/// The tenants that have caps.
#[derive(Debug)]
pub(super) struct Gate {
    whole: Whole,
    accounts: BTreeMap<TenantIndex, Account>,
    owners: BTreeMap<FunctionIndex, TenantIndex>,
    inside: BTreeMap<RequestKey, Inside>,
    /// Where each request waits that waits outside.
    parked: BTreeMap<RequestKey, TenantIndex>,
    /// Requests of tenants without caps.
    others: Peak,
}

impl Gate {
    pub(super) fn new(whole: Whole) -> Self {
        Self {
            whole,
            accounts: BTreeMap::new(),
            owners: BTreeMap::new(),
            inside: BTreeMap::new(),
            parked: BTreeMap::new(),
            others: Peak::default(),
        }
    }

    pub(super) fn set(&mut self, tenant: TenantIndex, quota: Quota) {
        self.accounts.entry(tenant).or_default().quota = quota;
        self.accounts.retain(|_, it| !it.quota.is_none() || it.inside > 0 || !it.parked.is_empty());
    }

    pub(super) fn own(&mut self, function: FunctionIndex, tenant: Option<TenantIndex>) {
        match tenant {
            Some(tenant) => self.owners.insert(function, tenant),
            None => self.owners.remove(&function),
        };
    }

    /// Who has to keep to caps with a function's requests.
    pub(super) fn owner(&self, function: FunctionIndex) -> Option<TenantIndex> {
        let owner = self.owners.get(&function).copied()?;
        self.accounts.contains_key(&owner).then_some(owner)
    }

    pub(super) fn park(&mut self, tenant: TenantIndex, parked: Parked) {
        let key = parked.request.key;
        self.parked.insert(key, tenant);
        self.accounts.entry(tenant).or_default().parked.insert(key, parked);
    }

    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    pub(super) fn holds(&self, key: RequestKey) -> bool {
        self.parked.contains_key(&key)
    }

    /// Takes a request from outside. `None` if it is not there.
    pub(super) fn unpark(&mut self, key: RequestKey) -> Option<Parked> {
        let tenant = self.parked.remove(&key)?;
        self.accounts.get_mut(&tenant)?.parked.remove(&key)
    }

    /// The data of a request is elsewhere now. Says whether it waits outside.
    pub(super) fn reads(&mut self, key: RequestKey, inputs: Inputs) -> bool {
        let Some(tenant) = self.parked.get(&key) else { return false };
        let parked = self.accounts.get_mut(tenant).and_then(|account| account.parked.get_mut(&key));
        parked.into_iter().for_each(|parked| parked.request.inputs = inputs);
        true
    }

    /// The youngest request outside of the tenant that has the most there; of several such tenants, the
    /// youngest of all.
    pub(super) fn newest_of_most(&self) -> Option<RequestKey> {
        let newest = |account: &Account| {
            account.parked.last_key_value().map(|(&newest, _)| (account.parked.len(), newest))
        };
        self.accounts.values().filter_map(newest).max().map(|(_, newest)| newest)
    }

    /// Whether so much memory is more than a tenant may ever have.
    pub(super) fn never_fits(&self, tenant: TenantIndex, blocks: u32) -> bool {
        self.accounts.get(&tenant).is_some_and(|account| account.never_fits(blocks, self.whole))
    }

    /// One that waits outside for what its tenant can never have.
    pub(super) fn hopeless(&self) -> Option<RequestKey> {
        let whole = self.whole;
        let first = |account: &Account| {
            account.parked.values().next().map(|it| (it.request.key, account.never_fits(it.blocks, whole)))
        };
        self.accounts.values().filter_map(first).find_map(|(key, never)| never.then_some(key))
    }

    /// So many requests are here, outside not counted.
    pub(super) fn count(&mut self, now: Timestamp, in_flight: usize) {
        let others = in_flight.saturating_sub(self.inside.len());
        self.others.set(now, u32::try_from(others).unwrap_or(u32::MAX));
    }

    /// The oldest request whose turn to come in it is, of a node with so many GPUs `up`, `queued` being
    /// all that wait inside. Of each tenant the oldest comes first, whatever the others would need.
    pub(super) fn next(&mut self, now: Timestamp, queued: usize, up: u32) -> Option<RequestKey> {
        let within = self.accounts.values_mut().filter_map(|it| {
            let first = it.first(self.whole)?;
            (it.inside < it.seats(self.whole) && !it.over_time(now, self.whole)).then_some(first)
        });
        if let Some(best) = within.min() {
            return Some(best);
        }
        // Whoever is over its share yields to those who wait and are not, and to those who come.
        if self.waits_within(now, queued) {
            return None;
        }
        let claimed: u32 = self.accounts.values_mut().map(|it| it.claim(now, self.whole)).sum();
        let claimed = self.others.most(now).saturating_add(claimed);
        let over = self.accounts.values_mut().filter_map(|it| {
            let first = it.first(self.whole)?;
            let by_others = claimed - it.claim(now, self.whole);
            (by_others.saturating_add(it.inside) < up).then_some(first)
        });
        over.min()
    }

    /// Whether one of those who wait inside is not of a tenant that is over its share.
    fn waits_within(&mut self, now: Timestamp, queued: usize) -> bool {
        let over = self.accounts.values_mut().filter_map(|it| {
            (it.inside > it.seats(self.whole) || it.over_time(now, self.whole)).then_some(it.queued as usize)
        });
        queued > over.sum()
    }

    /// The oldest that the caps which always hold let in, where those who wait inside and are within
    /// their shares leave a GPU idle.
    pub(super) fn next_for_idle(&mut self, now: Timestamp, queued: usize) -> Option<RequestKey> {
        let wait = self.waits_within(now, queued);
        self.accounts.values().filter(|_| wait).filter_map(|it| it.first(self.whole)).min()
    }

    /// A request was let in.
    pub(super) fn entered(
        &mut self,
        now: Timestamp,
        tenant: TenantIndex,
        &Parked { request, blocks: needed }: &Parked,
    ) {
        let account = self.accounts.entry(tenant).or_default();
        account.inside += 1;
        account.queued += 1;
        account.counted(now, self.whole);
        let (requests, blocks) = account.models.entry(request.model).or_default();
        (*requests, *blocks) = (*requests + 1, needed);
        self.inside.insert(request.key, Inside { tenant, model: request.model, on: None });
    }

    /// A tenant's request that waits outside is whose.
    pub(super) fn tenant_of(&self, key: RequestKey) -> Option<TenantIndex> {
        self.parked.get(&key).copied()
    }

    /// A request came to a GPU, or left it.
    pub(super) fn moved(&mut self, key: RequestKey, on: Option<GpuIndex>) {
        let Some(inside) = self.inside.get_mut(&key) else { return };
        let (before, tenant) = (std::mem::replace(&mut inside.on, on), inside.tenant);
        let Some(account) = self.accounts.get_mut(&tenant) else { return };
        match (before, on) {
            (None, Some(_)) => account.queued -= 1,
            (Some(_), None) => account.queued += 1,
            _ => {}
        }
    }

    /// A GPU begins to work for whoever a request belongs to.
    pub(super) fn turn_began(&mut self, now: Timestamp, key: RequestKey, gpu: GpuIndex) {
        if let Some(account) = self.inside.get(&key).and_then(|it| self.accounts.get_mut(&it.tenant)) {
            account.turns.insert(gpu, now);
        }
    }

    /// It no longer does.
    pub(super) fn turn_ended(&mut self, now: Timestamp, key: RequestKey, gpu: GpuIndex) {
        if let Some(account) = self.inside.get(&key).and_then(|it| self.accounts.get_mut(&it.tenant))
            && let Some(since) = account.turns.remove(&gpu)
        {
            account.window.add(since, now);
        }
    }

    /// Whether a request that was let in has no GPU.
    pub(super) fn waits(&self, key: RequestKey) -> bool {
        self.inside.get(&key).is_some_and(|inside| inside.on.is_none())
    }

    /// A request is not this node's any more.
    pub(super) fn gone(&mut self, now: Timestamp, key: RequestKey) {
        let Some(Inside { tenant, model, on }) = self.inside.remove(&key) else { return };
        let Some(account) = self.accounts.get_mut(&tenant) else { return };
        account.inside -= 1;
        account.counted(now, self.whole);
        account.queued -= u32::from(on.is_none());
        if let Some((requests, _)) = account.models.get_mut(&model) {
            *requests -= 1;
            if *requests == 0 {
                account.models.remove(&model);
            }
        }
    }
}
