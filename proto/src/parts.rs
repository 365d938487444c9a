//! Sets that grow with the number of functions on a node, split into messages below a limit and
//! assembled again: the desired state of a worker, and the statuses of its functions.
//!
//! ```text
//!   PartSender                 one ordered stream                    PartAssembler
//!   items of a set  ──►  {set 1, 0} {set 1, 1} {set 1, 2, last}  ──►  everything
//!   changed items   ──►  {set 2, 0, last, changes}               ──►  changes to set 1
//! ```
//!
//! The first set on a stream is whole, and the later sets are changes. The receiver acts only on
//! complete sets: a new first part drops an unfinished set. A part that does not continue its set
//! is an error, which ends the stream; the next stream begins with a whole set.
//!
//! Pure. The module also has the limits of the messages that carry the parts, so that both ends use
//! the same.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::mem;
use std::sync::Arc;

use millrace_types::checkpoint::SYNC_BYTES_MAX;
use millrace_types::node::FUNCTIONS_PER_NODE_MAX;
use prost::Message;
use tonic::transport::Channel;

use crate::activity::{Activity, FunctionActivity};
use crate::worker::worker_control_client::WorkerControlClient;
use crate::worker::worker_control_server::{WorkerControl, WorkerControlServer};
use crate::worker::worker_objects_client::WorkerObjectsClient;
use crate::worker::worker_objects_server::{WorkerObjects, WorkerObjectsServer};
use crate::worker::{
    DesiredFunction, DesiredState, FunctionStatus, FunctionStatuses, ItemName, NodeScheduling, Part, Policy,
    TenantQuota,
};

/// Maximum size of a message between workers and controllers, and of an object message between
/// workers, in bytes. Requests have limits of their own.
pub const MESSAGE_BYTES_MAX: usize = 4 << 20;
/// Maximum encoded size of a part, in bytes, unless the part has a single larger item.
pub const PART_BYTES_MAX: usize = 1 << 20;
/// Maximum size of a chunk of an artifact or object, in bytes.
pub const CHUNK_BYTES_MAX: usize = 1 << 20;
/// Maximum encoded size of an item, in bytes. A function comes from a command of the replicated
/// log, which is smaller.
pub const ITEM_BYTES_MAX: usize = 256 << 10;
/// Maximum number of items in a set: two revisions of each function, and a tenant's caps for each.
pub const ITEMS_MAX: usize = 3 * FUNCTIONS_PER_NODE_MAX;
/// Maximum encoded size of a set, in bytes. Two revisions of every function fit, each with the
/// maximum number of states with the longest names.
pub const SET_BYTES_MAX: usize = 640 << 20;
/// Maximum encoded size of telemetry, in bytes.
pub const TELEMETRY_BYTES_MAX: usize = 1 << 20;
/// Maximum number of functions in a process's activity report: the busiest ones.
pub const ACTIVITY_FUNCTIONS_MAX: usize = 4_096;
/// Maximum size of a text in a status or in the report of a broken stream, in bytes.
pub const TEXT_BYTES_MAX: usize = 1 << 10;

/// Upper bound on the encoded size of a part without items, in bytes: its position, and the stamp
/// and policy of a desired state.
const HEAD_BYTES: usize = 4 << 10;
/// Upper bound on the encoding around an item, in bytes: the field number and the length.
const AROUND_ITEM_BYTES: usize = 8;

const _: () = assert!(PART_BYTES_MAX + ITEM_BYTES_MAX + HEAD_BYTES < MESSAGE_BYTES_MAX);
const _: () = assert!(CHUNK_BYTES_MAX < MESSAGE_BYTES_MAX && TELEMETRY_BYTES_MAX < MESSAGE_BYTES_MAX);
const _: () = assert!(SYNC_BYTES_MAX < MESSAGE_BYTES_MAX);

/// Creates a client of the service that workers attach to, with this module's message limits.
#[must_use]
pub fn control_client(channel: Channel) -> WorkerControlClient<Channel> {
    WorkerControlClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

/// Creates the server of the service that workers attach to, with this module's message limits.
pub fn control_server<T: WorkerControl>(service: T) -> WorkerControlServer<T> {
    WorkerControlServer::new(service)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

/// Creates a client of the service that transfers objects between workers, with this module's
/// message limits.
#[must_use]
pub fn objects_client(channel: Channel) -> WorkerObjectsClient<Channel> {
    WorkerObjectsClient::new(channel)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

/// Creates the server of the service that transfers objects between workers, with this module's
/// message limits.
pub fn objects_server<T: WorkerObjects>(service: T) -> WorkerObjectsServer<T> {
    WorkerObjectsServer::new(service)
        .max_decoding_message_size(MESSAGE_BYTES_MAX)
        .max_encoding_message_size(MESSAGE_BYTES_MAX)
}

/// Keeps the functions of a tenant, or of all tenants if `tenant` is empty, and of these the
/// [`ACTIVITY_FUNCTIONS_MAX`] busiest. The order does not change.
pub fn bound_activity(activity: &mut Activity, tenant: &str) {
    let functions = &mut activity.functions;
    functions.retain(|it| tenant.is_empty() || it.tenant == tenant);
    let left_out = functions.len().saturating_sub(ACTIVITY_FUNCTIONS_MAX);
    if left_out == 0 {
        return;
    }
    let done = |it: &FunctionActivity| (it.answered + it.failed, it.slo_requests, it.in_flight);
    functions.sort_by_key(|it| Reverse(done(it)));
    functions.truncate(ACTIVITY_FUNCTIONS_MAX);
    functions.sort_by(|a, b| (&a.tenant, &a.function).cmp(&(&b.tenant, &b.function)));
    activity.functions_left_out = u32::try_from(left_out).unwrap_or(u32::MAX);
}

/// Cuts a text at a character boundary, to at most [`TEXT_BYTES_MAX`].
pub fn cut_text(text: &mut String) {
    text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
}

/// The sort key of an item in its set. Tenants' caps have no function name and sort behind the
/// functions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ItemKey<'a> {
    is_quota: bool,
    tenant: &'a str,
    function: &'a str,
    revision: u64,
}

impl<'a> ItemKey<'a> {
    fn new(tenant: &'a str, function: &'a str, revision: u64) -> Self {
        Self { is_quota: function.is_empty(), tenant, function, revision }
    }

    fn name(self) -> ItemName {
        let Self { is_quota: _, tenant, function, revision } = self;
        ItemName { tenant: tenant.to_owned(), function: function.to_owned(), revision }
    }
}

/// An [`ItemKey`] that owns its names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct OwnedItemKey(bool, String, String, u64);

impl From<ItemName> for OwnedItemKey {
    fn from(name: ItemName) -> Self {
        Self(name.function.is_empty(), name.tenant, name.function, name.revision)
    }
}

impl OwnedItemKey {
    fn borrowed(&self) -> ItemKey<'_> {
        let Self(is_quota, tenant, function, revision) = self;
        ItemKey { is_quota: *is_quota, tenant, function, revision: *revision }
    }

    fn name(self) -> ItemName {
        let Self(_, tenant, function, revision) = self;
        ItemName { tenant, function, revision }
    }
}

/// A message type that carries a part of a set.
pub trait PartMessage: Message + Default + Sized {
    type Item: Clone + PartialEq + Debug;
    /// The fields that are equal in all parts of a set.
    type Head: Clone + PartialEq + Debug + Default;

    /// Returns the sort key of an item.
    fn key(item: &Self::Item) -> ItemKey<'_>;
    /// Returns the encoded size of an item, in bytes.
    fn item_bytes(item: &Self::Item) -> usize;
    /// Builds a message from the pieces of a part.
    fn compose(head: &Self::Head, part: Part, items: Vec<Self::Item>, gone: Vec<ItemName>) -> Self;
    /// Splits a message into the pieces of a part.
    fn decompose(self) -> PartPieces<Self>;
}

/// The contents of a part.
#[derive(Debug, Clone)]
pub struct PartPieces<M: PartMessage> {
    head: M::Head,
    part: Option<Part>,
    items: Vec<M::Item>,
    gone: Vec<ItemName>,
}

/// The fields that are equal in all parts of a desired state.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DesiredHead {
    pub term: u64,
    /// The index of the last command that the state includes.
    pub index: u64,
    /// The scheduling state that the operator wants for the node.
    pub scheduling: NodeScheduling,
    /// The scheduling policy; `None` means the default preset.
    pub policy: Option<Policy>,
    /// The alphas with which the node begins, in millionths, by priority.
    pub alphas_ppm: BTreeMap<u32, u32>,
}

/// An item of a desired state.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "almost every item is a function")]
pub enum DesiredItem {
    /// A revision to serve.
    Function(DesiredFunction),
    /// The caps on a tenant.
    Quota(TenantQuota),
}

impl PartMessage for DesiredState {
    type Item = DesiredItem;
    type Head = DesiredHead;

    fn key(item: &DesiredItem) -> ItemKey<'_> {
        match item {
            DesiredItem::Function(it) => ItemKey::new(&it.tenant, &it.name, it.revision),
            DesiredItem::Quota(it) => ItemKey::new(&it.tenant, "", 0),
        }
    }

    fn item_bytes(item: &DesiredItem) -> usize {
        match item {
            DesiredItem::Function(it) => it.encoded_len(),
            DesiredItem::Quota(it) => it.encoded_len(),
        }
    }

    fn compose(head: &DesiredHead, part: Part, items: Vec<DesiredItem>, gone: Vec<ItemName>) -> Self {
        let mut functions = Vec::with_capacity(items.len());
        let mut quotas = Vec::new();
        for item in items {
            match item {
                DesiredItem::Function(function) => functions.push(function),
                DesiredItem::Quota(quota) => quotas.push(quota),
            }
        }
        let DesiredHead { term, index, scheduling, policy, alphas_ppm } = head.clone();
        let part = Some(part);
        let scheduling = scheduling.into();
        Self { term, index, functions, scheduling, quotas, policy, part, gone, alphas_ppm }
    }

    fn decompose(self) -> PartPieces<Self> {
        let scheduling = self.scheduling();
        let Self { term, index, functions, scheduling: _, quotas, policy, part, gone, alphas_ppm } = self;
        let head = DesiredHead { term, index, scheduling, policy, alphas_ppm };
        let functions = functions.into_iter().map(DesiredItem::Function);
        let items = functions.chain(quotas.into_iter().map(DesiredItem::Quota)).collect();
        PartPieces { head, part, items, gone }
    }
}

impl PartMessage for FunctionStatuses {
    type Item = FunctionStatus;
    type Head = ();

    fn key(item: &FunctionStatus) -> ItemKey<'_> {
        ItemKey::new(&item.tenant, &item.name, item.revision)
    }

    fn item_bytes(item: &FunctionStatus) -> usize {
        item.encoded_len()
    }

    fn compose((): &(), part: Part, functions: Vec<FunctionStatus>, gone: Vec<ItemName>) -> Self {
        Self { functions, part: Some(part), gone }
    }

    fn decompose(self) -> PartPieces<Self> {
        let Self { functions, part, gone } = self;
        PartPieces { head: (), part, items: functions, gone }
    }
}

/// Splits the sets of a stream into messages.
#[derive(Debug)]
pub struct PartSender<M: PartMessage> {
    part_bytes_max: usize,
    set: u64,
    /// The items that the other end has.
    known_items: Option<Arc<Vec<M::Item>>>,
}

impl<M: PartMessage> Default for PartSender<M> {
    fn default() -> Self {
        Self::with_part_bytes(PART_BYTES_MAX)
    }
}

impl<M: PartMessage> PartSender<M> {
    /// Creates a sender of parts of at most this many bytes, or of a single larger item.
    #[must_use]
    pub fn with_part_bytes(part_bytes_max: usize) -> Self {
        Self { part_bytes_max, set: 0, known_items: None }
    }

    /// Returns the messages that bring the other end to these items: the first time all items,
    /// later only the differences. The items must be in the order of their keys.
    pub fn next(&mut self, head: &M::Head, items: &Arc<Vec<M::Item>>) -> Vec<M> {
        debug_assert!(items.is_sorted_by(|a, b| M::key(a) < M::key(b)), "items are in order, each once");
        self.set += 1;
        let place = Part { set: self.set, number: 0, last: false, changes: self.known_items.is_some() };
        let mut cut = SetSplitter::new(head, place, self.part_bytes_max);
        match self.known_items.replace(items.clone()) {
            None => items.iter().for_each(|item| cut.item(item)),
            Some(told) if Arc::ptr_eq(&told, items) => {}
            Some(told) => differences::<M>(&told, items, &mut cut),
        }
        cut.end()
    }

    /// Forgets the items that the other end has, so that the next set is whole.
    pub fn forget(&mut self) {
        self.known_items = None;
    }
}

/// Adds the differences between two sets, which are in the order of their keys.
fn differences<M: PartMessage>(old: &[M::Item], new: &[M::Item], cut: &mut SetSplitter<'_, M>) {
    let mut old = old.iter().peekable();
    for item in new {
        let key = M::key(item);
        while let Some(gone) = old.next_if(|it| M::key(it) < key) {
            cut.gone(M::key(gone));
        }
        let known = old.next_if(|it| M::key(it) == key);
        if known != Some(item) {
            cut.item(item);
        }
    }
    old.for_each(|gone| cut.gone(M::key(gone)));
}

/// The state of splitting a set into parts.
struct SetSplitter<'a, M: PartMessage> {
    part_bytes_max: usize,
    head: &'a M::Head,
    place: Part,
    items: Vec<M::Item>,
    gone: Vec<ItemName>,
    bytes: usize,
    done: Vec<M>,
}

impl<'a, M: PartMessage> SetSplitter<'a, M> {
    fn new(head: &'a M::Head, place: Part, part_bytes_max: usize) -> Self {
        Self {
            part_bytes_max,
            head,
            place,
            items: Vec::new(),
            gone: Vec::new(),
            bytes: HEAD_BYTES,
            done: Vec::new(),
        }
    }

    fn item(&mut self, item: &M::Item) {
        self.make_room(M::item_bytes(item));
        self.items.push(item.clone());
    }

    fn gone(&mut self, key: ItemKey<'_>) {
        let name = key.name();
        self.make_room(name.encoded_len());
        self.gone.push(name);
    }

    /// Reserves bytes in the part; if they do not fit, ends the part first.
    fn make_room(&mut self, bytes: usize) {
        let bytes = bytes + AROUND_ITEM_BYTES;
        let is_empty = self.items.is_empty() && self.gone.is_empty();
        if !is_empty && self.bytes + bytes > self.part_bytes_max {
            self.end_part(false);
        }
        self.bytes += bytes;
    }

    fn end_part(&mut self, last: bool) {
        let place = Part { last, ..self.place };
        self.done.push(M::compose(self.head, place, mem::take(&mut self.items), mem::take(&mut self.gone)));
        self.place.number += 1;
        self.bytes = HEAD_BYTES;
    }

    fn end(mut self) -> Vec<M> {
        self.end_part(true);
        self.done
    }
}

/// A completely received set.
#[derive(Debug, Clone, PartialEq)]
pub struct SetUpdate<M: PartMessage> {
    /// The head, equal in all parts of the set.
    pub head: M::Head,
    /// Whether the set is whole, so that items without a name in it are gone.
    pub is_whole: bool,
    /// New or changed items, in the order of their keys.
    pub items: Vec<M::Item>,
    /// Removed items.
    pub gone: Vec<ItemName>,
    /// Encoded size of the items and names, in bytes.
    bytes: usize,
}

/// The reason why a set cannot be assembled. The stream of the set has to be closed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartError {
    /// The part does not continue the unfinished set.
    #[error("part {number} of set {set} does not continue the previous part")]
    OutOfOrder { set: u64, number: u32 },
    /// The set changes a set that this end does not have.
    #[error("set {set} changes a set that was not received: the last complete set is {last:?}")]
    NoBase {
        set: u64,
        /// The number of the last complete set; `None` if no set was completed.
        last: Option<u64>,
    },
    /// The parts of a set have different heads.
    #[error("part {number} of set {set} contradicts the previous parts")]
    Contradiction { set: u64, number: u32 },
    /// The set has too many items.
    #[error("a set has more than {max} items: place fewer functions on the node")]
    TooManyItems { max: usize },
    /// The set has too many bytes.
    #[error("a set has more than {max} bytes: place fewer functions on the node")]
    TooManyBytes { max: usize },
}

/// The limits of a set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SetBounds {
    /// Maximum number of items.
    pub items: usize,
    /// Maximum encoded size, in bytes.
    pub bytes: usize,
}

impl Default for SetBounds {
    fn default() -> Self {
        Self { items: ITEMS_MAX, bytes: SET_BYTES_MAX }
    }
}

/// Assembles the sets of a stream from their parts.
#[derive(Debug)]
pub struct PartAssembler<M: PartMessage> {
    bounds: SetBounds,
    /// The number of the last complete set.
    complete: Option<u64>,
    unfinished: Option<PartialSet<M>>,
}

#[derive(Debug)]
struct PartialSet<M: PartMessage> {
    part: Part,
    head: M::Head,
    /// The changes by key; `None` means that the item is gone.
    items: BTreeMap<OwnedItemKey, Option<M::Item>>,
    bytes: usize,
}

impl<M: PartMessage> Default for PartAssembler<M> {
    fn default() -> Self {
        Self::new(SetBounds::default())
    }
}

impl<M: PartMessage> PartAssembler<M> {
    /// Creates an assembler that has received nothing.
    #[must_use]
    pub fn new(bounds: SetBounds) -> Self {
        Self { bounds, complete: None, unfinished: None }
    }

    /// Adds a part, and returns the set if the part completes it.
    ///
    /// # Errors
    /// [`PartError`]. Afterwards the assembler accepts only a whole set: neither the rest of the
    /// unfinished set nor changes to the previous one.
    pub fn take(&mut self, message: M) -> Result<Option<SetUpdate<M>>, PartError> {
        let taken = self.put(message);
        if taken.is_err() {
            self.forget();
        }
        taken
    }

    /// Forgets all sets, so that the next set has to be whole.
    pub fn forget(&mut self) {
        self.complete = None;
        self.unfinished = None;
    }

    fn put(&mut self, message: M) -> Result<Option<SetUpdate<M>>, PartError> {
        let PartPieces { head, part, items, gone } = message.decompose();
        let part = part.unwrap_or(Part { set: 0, number: 0, last: true, changes: false });
        let mut unfinished = self.place(part, head)?;
        for name in gone {
            let bytes = name.encoded_len();
            unfinished.add(name.into(), None, bytes, self.bounds)?;
        }
        for item in items {
            let bytes = M::item_bytes(&item);
            unfinished.add(M::key(&item).name().into(), Some(item), bytes, self.bounds)?;
        }
        if !part.last {
            self.unfinished = Some(unfinished);
            return Ok(None);
        }
        self.complete = Some(part.set);
        Ok(Some(unfinished.complete()))
    }

    /// Returns the set that a part begins or continues.
    fn place(&mut self, part: Part, head: M::Head) -> Result<PartialSet<M>, PartError> {
        let Part { set, number, changes, .. } = part;
        let before = self.unfinished.take();
        if number == 0 {
            if changes && self.complete.is_none_or(|last| last.checked_add(1) != Some(set)) {
                return Err(PartError::NoBase { set, last: self.complete });
            }
            return Ok(PartialSet { part, head, items: BTreeMap::new(), bytes: 0 });
        }
        let continued = |it: &PartialSet<M>| {
            let Part { set: its_set, number: its_number, changes: its_changes, .. } = it.part;
            (its_set, its_changes) == (set, changes) && its_number.checked_add(1) == Some(number)
        };
        let mut unfinished = before.filter(continued).ok_or(PartError::OutOfOrder { set, number })?;
        if unfinished.head != head {
            return Err(PartError::Contradiction { set, number });
        }
        unfinished.part = part;
        Ok(unfinished)
    }
}

impl<M: PartMessage> PartialSet<M> {
    fn add(
        &mut self,
        key: OwnedItemKey,
        item: Option<M::Item>,
        bytes: usize,
        bounds: SetBounds,
    ) -> Result<(), PartError> {
        self.bytes += bytes;
        if self.bytes > bounds.bytes {
            return Err(PartError::TooManyBytes { max: bounds.bytes });
        }
        self.items.insert(key, item);
        if self.items.len() > bounds.items {
            return Err(PartError::TooManyItems { max: bounds.items });
        }
        Ok(())
    }

    fn complete(self) -> SetUpdate<M> {
        let mut update = SetUpdate {
            head: self.head,
            is_whole: !self.part.changes,
            items: Vec::with_capacity(self.items.len()),
            gone: Vec::new(),
            bytes: self.bytes,
        };
        for (key, item) in self.items {
            match item {
                Some(item) => update.items.push(item),
                None => update.gone.push(key.name()),
            }
        }
        update
    }
}

/// The items of a set after the last complete update.
#[derive(Debug, Clone, PartialEq)]
pub struct ItemSet<M: PartMessage> {
    head: M::Head,
    items: Vec<M::Item>,
    /// Upper bound on the encoded size of the items, in bytes.
    bytes: usize,
}

impl<M: PartMessage> Default for ItemSet<M> {
    fn default() -> Self {
        Self { head: M::Head::default(), items: Vec::new(), bytes: 0 }
    }
}

impl<M: PartMessage> ItemSet<M> {
    /// Returns the head, equal in all parts.
    #[must_use]
    pub fn head(&self) -> &M::Head {
        &self.head
    }

    /// Returns the items in the order of their keys.
    #[must_use]
    pub fn items(&self) -> &[M::Item] {
        &self.items
    }

    /// Applies a complete set.
    ///
    /// # Errors
    /// [`PartError`] if the result exceeds the limits of a set. The set is empty then.
    pub fn apply(&mut self, update: SetUpdate<M>) -> Result<(), PartError> {
        let SetUpdate { head, is_whole, items, gone, bytes } = update;
        let before = mem::take(&mut self.items);
        self.head = head;
        self.bytes = if is_whole { bytes } else { self.bytes.saturating_add(bytes) };
        let items = if is_whole { items } else { merged::<M>(before, items, gone) };
        if items.len() > ITEMS_MAX {
            return Err(PartError::TooManyItems { max: ITEMS_MAX });
        }
        if self.bytes > SET_BYTES_MAX {
            // Replaced and removed items counted until here, so the exact size is computed only
            // now.
            self.bytes = items.iter().map(M::item_bytes).sum();
        }
        if self.bytes > SET_BYTES_MAX {
            return Err(PartError::TooManyBytes { max: SET_BYTES_MAX });
        }
        self.items = items;
        Ok(())
    }
}

/// Merges two lists in the order of their keys. Of items with the same key, that of the second list
/// stays.
fn merged<M: PartMessage>(before: Vec<M::Item>, changed: Vec<M::Item>, gone: Vec<ItemName>) -> Vec<M::Item> {
    let gone: BTreeSet<OwnedItemKey> = gone.into_iter().map(OwnedItemKey::from).collect();
    let mut all = Vec::with_capacity(before.len() + changed.len());
    let mut before = before.into_iter().peekable();
    let mut gone = gone.iter().peekable();
    let mut stays = |item: &M::Item| {
        let key = M::key(item);
        while gone.next_if(|it| it.borrowed() < key).is_some() {}
        gone.next_if(|it| it.borrowed() == key).is_none()
    };
    for item in changed {
        while let Some(known) = before.next_if(|it| M::key(it) < M::key(&item)) {
            if stays(&known) {
                all.push(known);
            }
        }
        // The changed item replaces the item with the same key.
        drop(before.next_if(|it| M::key(it) == M::key(&item)));
        all.push(item);
    }
    all.extend(before.filter(|known| stays(known)));
    all
}
