//! Accounts of the tenants with caps: their admitted and their parked requests, and the decision
//! which parked request may enter the queue.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_types::tenancy::{Quota, ResourceShare};
use millrace_types::{GpuIndex, ModelId, Timestamp};

use super::window::{GpuTimeWindow, PeakWindow, WINDOW};
use crate::dispatch::{InputLocations, QueuedRequest};
use millrace_core::ids::{FunctionIndex, RequestKey, SeatIndex, TenantIndex};

/// A request that is parked outside the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ParkedRequest {
    pub(super) request: QueuedRequest,
    /// Blocks of the request's model.
    pub(super) blocks: u32,
}

/// Capacity of the node, which the tenants share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SharedCapacity {
    pub(super) gpus: u32,
    pub(super) blocks: u64,
}

/// A request that was admitted to the queue.
#[derive(Debug, Clone, Copy)]
struct AdmittedRequest {
    tenant: TenantIndex,
    model: ModelId,
    on: Option<GpuIndex>,
}

/// Requests and resource use of a tenant.
#[derive(Debug, Default)]
struct TenantAccount {
    quota: Quota,
    /// Parked requests, oldest first.
    parked: BTreeMap<RequestKey, ParkedRequest>,
    /// Number of admitted requests.
    inside: u32,
    /// Number of admitted requests that have no GPU.
    queued: u32,
    /// By model, the number of admitted requests and the blocks of a copy.
    models: BTreeMap<ModelId, (u32, u32)>,
    window: GpuTimeWindow,
    /// Seats that run the tenant's requests, with the start of the present turn.
    turns: BTreeMap<SeatIndex, Timestamp>,
    /// Peak number of GPUs that the tenant used at once within its share.
    peak: PeakWindow,
}

impl TenantAccount {
    fn blocks_max(&self, whole: SharedCapacity) -> u64 {
        self.quota.memory_share.map_or(u64::MAX, |share| share.of(whole.blocks))
    }

    /// Returns the blocks of the tenant's models, if each admitted request is on a GPU of its own.
    fn blocks(&self, whole: SharedCapacity) -> u64 {
        let taken =
            |&(requests, blocks): &(u32, u32)| u64::from(requests.min(whole.gpus)) * u64::from(blocks);
        self.models.values().map(taken).sum()
    }

    fn never_fits(&self, blocks: u32, whole: SharedCapacity) -> bool {
        u64::from(blocks) > self.blocks_max(whole)
    }

    /// Returns whether a further request keeps the tenant within the caps that always apply.
    fn takes(&self, parked: &ParkedRequest, whole: SharedCapacity) -> bool {
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

    /// Returns whether the tenant used more than its share of the window.
    fn over_time(&mut self, now: Timestamp, whole: SharedCapacity) -> bool {
        let Some(share) = self.quota.gpu_share else { return false };
        let window = WINDOW.as_nanos() as u64 * u64::from(whole.gpus);
        self.gpu_time(now).as_nanos() > u128::from(share.of(window))
    }

    /// Returns the number of GPUs that the tenant's share amounts to, rounded up.
    fn seats(&self, whole: SharedCapacity) -> u32 {
        let seats = |share: ResourceShare| {
            let exact = u64::from(share.ppm()) * u64::from(whole.gpus);
            u32::try_from(exact.div_ceil(ResourceShare::ALL.ppm().into())).unwrap_or(u32::MAX)
        };
        self.quota.gpu_share.map_or(u32::MAX, seats)
    }

    /// Returns the number of GPUs that other tenants leave to this tenant: the recent peak within
    /// its share, plus its use beyond the share. A tenant over its share of time keeps only its
    /// present use.
    fn claim(&mut self, now: Timestamp, whole: SharedCapacity) -> u32 {
        if self.over_time(now, whole) {
            return self.inside;
        }
        self.peak.most(now) + self.inside.saturating_sub(self.seats(whole))
    }

    fn counted(&mut self, now: Timestamp, whole: SharedCapacity) {
        self.peak.set(now, self.inside.min(self.seats(whole)).min(whole.gpus));
    }

    /// Returns the oldest parked request, if the caps that always apply admit it.
    fn first(&self, whole: SharedCapacity) -> Option<RequestKey> {
        self.parked.values().next().filter(|first| self.takes(first, whole)).map(|first| first.request.key)
    }
}

/// Accounts of all tenants with caps.
#[derive(Debug)]
pub(super) struct TenantAccounts {
    whole: SharedCapacity,
    accounts: BTreeMap<TenantIndex, TenantAccount>,
    owners: BTreeMap<FunctionIndex, TenantIndex>,
    inside: BTreeMap<RequestKey, AdmittedRequest>,
    /// Tenant of each parked request.
    parked: BTreeMap<RequestKey, TenantIndex>,
    /// Peak number of requests of tenants without caps.
    others: PeakWindow,
}

impl TenantAccounts {
    pub(super) fn new(whole: SharedCapacity) -> Self {
        Self {
            whole,
            accounts: BTreeMap::new(),
            owners: BTreeMap::new(),
            inside: BTreeMap::new(),
            parked: BTreeMap::new(),
            others: PeakWindow::default(),
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

    /// Returns the tenant of a function, if the tenant has caps.
    pub(super) fn owner(&self, function: FunctionIndex) -> Option<TenantIndex> {
        let owner = self.owners.get(&function).copied()?;
        self.accounts.contains_key(&owner).then_some(owner)
    }

    pub(super) fn park(&mut self, tenant: TenantIndex, parked: ParkedRequest) {
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

    /// Removes a parked request. Returns `None` if the request is not parked.
    pub(super) fn unpark(&mut self, key: RequestKey) -> Option<ParkedRequest> {
        let tenant = self.parked.remove(&key)?;
        self.accounts.get_mut(&tenant)?.parked.remove(&key)
    }

    /// Updates the location of a parked request's inputs. Returns whether the request is parked.
    pub(super) fn reads(&mut self, key: RequestKey, inputs: InputLocations) -> bool {
        let Some(tenant) = self.parked.get(&key) else { return false };
        let parked = self.accounts.get_mut(tenant).and_then(|account| account.parked.get_mut(&key));
        parked.into_iter().for_each(|parked| parked.request.inputs = inputs);
        true
    }

    /// Returns the newest request of the tenant with most parked requests; among several such
    /// tenants, the newest of all.
    pub(super) fn newest_of_most(&self) -> Option<RequestKey> {
        let newest = |account: &TenantAccount| {
            account.parked.last_key_value().map(|(&newest, _)| (account.parked.len(), newest))
        };
        self.accounts.values().filter_map(newest).max().map(|(_, newest)| newest)
    }

    /// Returns whether a model of `blocks` blocks exceeds a tenant's memory share.
    pub(super) fn never_fits(&self, tenant: TenantIndex, blocks: u32) -> bool {
        self.accounts.get(&tenant).is_some_and(|account| account.never_fits(blocks, self.whole))
    }

    /// Returns a parked request that exceeds its tenant's memory share.
    pub(super) fn oversized_request(&self) -> Option<RequestKey> {
        let whole = self.whole;
        let first = |account: &TenantAccount| {
            account.parked.values().next().map(|it| (it.request.key, account.never_fits(it.blocks, whole)))
        };
        self.accounts.values().filter_map(first).find_map(|(key, never)| never.then_some(key))
    }

    /// Updates the number of requests of tenants without caps; `in_flight` counts all requests but
    /// the parked ones.
    pub(super) fn count(&mut self, now: Timestamp, in_flight: usize) {
        let others = in_flight.saturating_sub(self.inside.len());
        self.others.set(now, u32::try_from(others).unwrap_or(u32::MAX));
    }

    /// Returns the oldest parked request that may be admitted on a node with `up` GPUs up and
    /// `queued` requests in the queue. Each tenant's oldest request goes first, independent of the
    /// other tenants' needs.
    pub(super) fn next(&mut self, now: Timestamp, queued: usize, up: u32) -> Option<RequestKey> {
        let within = self.accounts.values_mut().filter_map(|it| {
            let first = it.first(self.whole)?;
            (it.inside < it.seats(self.whole) && !it.over_time(now, self.whole)).then_some(first)
        });
        if let Some(best) = within.min() {
            return Some(best);
        }
        // A tenant over its share yields to waiting requests of tenants within theirs, and to
        // future ones.
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

    /// Returns whether a queued request belongs to a tenant that is not over its share.
    fn waits_within(&mut self, now: Timestamp, queued: usize) -> bool {
        let over = self.accounts.values_mut().filter_map(|it| {
            (it.inside > it.seats(self.whole) || it.over_time(now, self.whole)).then_some(it.queued as usize)
        });
        queued > over.sum()
    }

    /// Returns the oldest parked request that the caps which always apply admit, for a GPU that the
    /// queued requests within their shares leave idle.
    pub(super) fn next_for_idle(&mut self, now: Timestamp, queued: usize) -> Option<RequestKey> {
        let wait = self.waits_within(now, queued);
        self.accounts.values().filter(|_| wait).filter_map(|it| it.first(self.whole)).min()
    }

    /// Accounts for an admitted request.
    pub(super) fn entered(
        &mut self,
        now: Timestamp,
        tenant: TenantIndex,
        &ParkedRequest { request, blocks: needed }: &ParkedRequest,
    ) {
        let account = self.accounts.entry(tenant).or_default();
        account.inside += 1;
        account.queued += 1;
        account.counted(now, self.whole);
        let (requests, blocks) = account.models.entry(request.model).or_default();
        (*requests, *blocks) = (*requests + 1, needed);
        self.inside.insert(request.key, AdmittedRequest { tenant, model: request.model, on: None });
    }

    /// Returns the tenant of a parked request.
    pub(super) fn tenant_of(&self, key: RequestKey) -> Option<TenantIndex> {
        self.parked.get(&key).copied()
    }

    /// Accounts for a request that moved to a GPU or left a GPU.
    pub(super) fn moved(&mut self, key: RequestKey, on: Option<GpuIndex>) {
        let Some(inside) = self.inside.get_mut(&key) else { return };
        let before = std::mem::replace(&mut inside.on, on);
        let tenant = inside.tenant;
        let Some(account) = self.accounts.get_mut(&tenant) else { return };
        match (before, on) {
            (None, Some(_)) => account.queued -= 1,
            (Some(_), None) => account.queued += 1,
            _ => {}
        }
    }

    /// Starts a turn of the request's tenant on a seat.
    pub(super) fn turn_began(&mut self, now: Timestamp, key: RequestKey, seat: SeatIndex) {
        if let Some(account) = self.inside.get(&key).and_then(|it| self.accounts.get_mut(&it.tenant)) {
            account.turns.insert(seat, now);
        }
    }

    /// Ends a turn of the request's tenant on a seat, and charges the GPU time.
    pub(super) fn turn_ended(&mut self, now: Timestamp, key: RequestKey, seat: SeatIndex) {
        if let Some(account) = self.inside.get(&key).and_then(|it| self.accounts.get_mut(&it.tenant))
            && let Some(since) = account.turns.remove(&seat)
        {
            account.window.add(since, now);
        }
    }

    /// Returns whether an admitted request has no GPU.
    pub(super) fn waits(&self, key: RequestKey) -> bool {
        self.inside.get(&key).is_some_and(|inside| inside.on.is_none())
    }

    /// Removes an admitted request that left the node.
    pub(super) fn gone(&mut self, now: Timestamp, key: RequestKey) {
        let Some(AdmittedRequest { tenant, model, on }) = self.inside.remove(&key) else { return };
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
