//! Tests of splitting sets into messages and assembling them, on reliable and on faulty streams.
#![allow(missing_docs, clippy::unwrap_used, reason = "tests, and the helpers of tests")]

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_proto::activity::{Activity, FunctionActivity, LatencyBucket};
use millrace_proto::parts::{
    ACTIVITY_FUNCTIONS_MAX, DesiredHead, DesiredItem, ItemSet, MESSAGE_BYTES_MAX, PART_BYTES_MAX,
    PartAssembler, PartError, PartMessage as _, PartSender, SetBounds, TEXT_BYTES_MAX, bound_activity,
    cut_text,
};
use millrace_proto::worker::{
    DesiredFunction, DesiredState, FunctionPhase, FunctionStatus, FunctionStatuses, Part, SequenceState,
    Sequences, TenantQuota,
};
use millrace_types::node::FUNCTIONS_PER_NODE_MAX;
use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use prost::Message as _;

/// A set by the keys of its items, with a value that changes.
type ExpectedSet = BTreeMap<(u8, u8), u8>;

fn item(&(tenant, name): &(u8, u8), &value: &u8) -> DesiredItem {
    let tenant = format!("t{tenant}");
    match name {
        0 => DesiredItem::Quota(TenantQuota { tenant, gpus_max: value.into(), ..Default::default() }),
        _ => DesiredItem::Function(DesiredFunction {
            tenant,
            name: format!("f{name}"),
            revision: u64::from(name % 3 + 1),
            // The items have many sizes, some larger than a part.
            digest: "x".repeat(usize::from(value) * 8),
            ..Default::default()
        }),
    }
}

fn items(wanted: &ExpectedSet) -> Arc<Vec<DesiredItem>> {
    let mut items: Vec<_> = wanted.iter().map(|(key, value)| item(key, value)).collect();
    items.sort_by(|a, b| DesiredState::key(a).cmp(&DesiredState::key(b)));
    Arc::new(items)
}

fn head(index: usize) -> DesiredHead {
    DesiredHead { term: 1, index: index as u64, ..DesiredHead::default() }
}

fn sets() -> impl Strategy<Value = Vec<ExpectedSet>> {
    vec(btree_map((0..3u8, 0..8u8), 0..=255u8, 0..16), 1..8)
}

/// Returns the messages of each set in turn.
fn cut(sets: &[ExpectedSet], part_bytes: usize) -> Vec<Vec<DesiredState>> {
    let mut sender = PartSender::with_part_bytes(part_bytes);
    sets.iter().enumerate().map(|(index, wanted)| sender.next(&head(index), &items(wanted))).collect()
}

/// The receiving end of a stream.
#[derive(Default)]
struct Receiver {
    assembler: PartAssembler<DesiredState>,
    set: ItemSet<DesiredState>,
}

impl Receiver {
    /// Takes a message. Returns whether the message completed a set, after checking the set against
    /// `sets`.
    fn take(&mut self, message: DesiredState, sets: &[ExpectedSet]) -> Result<bool, PartError> {
        let Some(update) = self.assembler.take(message)? else { return Ok(false) };
        self.set.apply(update)?;
        let index = usize::try_from(self.set.head().index).unwrap();
        assert_eq!(self.set.items(), items(&sets[index]).as_slice(), "set {index}");
        Ok(true)
    }
}

/// A fault of a stream, applied to a message.
#[derive(Debug, Clone, Copy)]
enum Fault {
    None,
    Lose,
    Repeat,
    /// The message is delivered again after this number of other messages.
    RepeatLater(usize),
    /// A new stream is opened, on which a sender begins with the current set.
    Reconnect,
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![
        12 => Just(Fault::None),
        1 => Just(Fault::Lose),
        1 => Just(Fault::Repeat),
        1 => (1..9usize).prop_map(Fault::RepeatLater),
        1 => Just(Fault::Reconnect),
    ]
}

proptest! {
    #[test]
    fn the_receiver_assembles_each_set_from_parts_of_any_size(sets in sets(), part_bytes in 4_096..8_192usize) {
        let mut receiver = Receiver::default();
        for messages in cut(&sets, part_bytes) {
            let (last, unfinished) = messages.split_last().unwrap();
            for message in unfinished {
                prop_assert_eq!(receiver.take(message.clone(), &sets), Ok(false));
            }
            prop_assert_eq!(receiver.take(last.clone(), &sets), Ok(true));
        }
        prop_assert_eq!(receiver.set.items().to_vec(), items(sets.last().unwrap()).to_vec());
    }

    #[test]
    fn parts_keep_to_their_limit_or_have_a_single_item(sets in sets(), part_bytes in 4_096..8_192usize) {
        for message in cut(&sets, part_bytes).into_iter().flatten() {
            let several = message.functions.len() + message.quotas.len() + message.gone.len() > 1;
            prop_assert!(message.encoded_len() <= part_bytes || !several, "{}", message.encoded_len());
        }
    }

    #[test]
    fn faults_of_the_stream_never_mix_two_sets(
        sets in sets(),
        part_bytes in 4_096..6_000usize,
        faults in vec(fault(), 64),
    ) {
        let mut receiver = Receiver::default();
        let mut sender = PartSender::with_part_bytes(part_bytes);
        let mut faults = faults.into_iter().chain(std::iter::repeat(Fault::None));
        let mut later: Vec<(usize, DesiredState)> = Vec::new();
        for (index, wanted) in sets.iter().enumerate() {
            let mut messages = sender.next(&head(index), &items(wanted));
            messages.reverse();
            while let Some(message) = messages.pop() {
                let mut due = Vec::new();
                later.retain_mut(|(after, message)| {
                    *after -= 1;
                    if *after == 0 { due.push(message.clone()) }
                    *after > 0
                });
                let reconnect = match faults.next().unwrap() {
                    Fault::None => receiver.take(message, &sets).is_err(),
                    Fault::Lose => false,
                    Fault::Repeat => {
                        receiver.take(message.clone(), &sets).is_err() || receiver.take(message, &sets).is_err()
                    }
                    Fault::RepeatLater(after) => {
                        later.push((after, message.clone()));
                        receiver.take(message, &sets).is_err()
                    }
                    Fault::Reconnect => true,
                };
                let failed = due.into_iter().any(|message| receiver.take(message, &sets).is_err());
                if reconnect || failed {
                    // The applied set stays; only the stream is gone.
                    receiver = Receiver::default();
                    sender = PartSender::with_part_bytes(part_bytes);
                    later.clear();
                    messages = sender.next(&head(index), &items(wanted));
                    messages.reverse();
                }
            }
        }
        // A stream without faults delivers the last set.
        let mut receiver = Receiver::default();
        let mut sender = PartSender::with_part_bytes(part_bytes);
        for message in sender.next(&head(sets.len() - 1), &items(sets.last().unwrap())) {
            receiver.take(message, &sets).unwrap();
        }
        prop_assert_eq!(receiver.set.items().to_vec(), items(sets.last().unwrap()).to_vec());
    }

    #[test]
    fn parts_of_two_senders_on_a_stream_never_mix_into_a_set(
        one in sets(),
        other in sets(),
        order in vec(any::<bool>(), 0..64),
    ) {
        // The indices tell the sets of the two senders apart.
        let all: Vec<_> = one.iter().chain(&other).cloned().collect();
        let ours = cut(&one, 4_200).into_iter().flatten();
        let theirs = cut(&other, 4_200).into_iter().flatten();
        let theirs = theirs.map(|it| DesiredState { index: it.index + one.len() as u64, ..it });
        let mut ours = ours.peekable();
        let mut theirs = theirs.peekable();
        let mut receiver = Receiver::default();
        let mut order = order.into_iter().chain(std::iter::repeat(true));
        while ours.peek().is_some() || theirs.peek().is_some() {
            let next = if order.next().unwrap() { ours.next() } else { theirs.next() };
            let Some(message) = next.or_else(|| theirs.next()).or_else(|| ours.next()) else { break };
            if message.part.is_some_and(|part| part.changes) {
                // Changes of the two senders may continue each other's numbers. A real stream has a
                // single sender, so only whole sets are checked here.
                continue;
            }
            if receiver.take(message, &all).is_err() {
                receiver = Receiver::default();
            }
        }
    }
}

fn function(number: usize, name_bytes: usize) -> DesiredFunction {
    let name = |kind: &str| format!("{kind}{}", "n".repeat(name_bytes));
    let state = (0..if name_bytes > 0 { 16 } else { 0 })
        .map(|_| SequenceState { input: name("i"), output: name("o") })
        .collect();
    DesiredFunction {
        tenant: "default".into(),
        name: format!("f{number:05}"),
        revision: 1,
        digest: format!("sha256:{}", "0".repeat(64)),
        artifact_bytes: 1 << 30,
        created_at_ms: 1_700_000_000_000,
        sequences: (name_bytes > 0).then(|| Sequences { state, ..Sequences::default() }),
        ..DesiredFunction::default()
    }
}

#[test]
fn messages_keep_to_the_limit_with_the_maximum_of_functions() {
    for name_bytes in [0, 256] {
        // Two revisions of each function are served.
        let revisions = (0..FUNCTIONS_PER_NODE_MAX).flat_map(|number| {
            [1, 2].map(|revision| DesiredFunction { revision, ..function(number, name_bytes) })
        });
        let items: Vec<_> = revisions.map(DesiredItem::Function).collect();
        let mut items = Arc::new(items);
        let bytes: usize = items.iter().map(DesiredState::item_bytes).sum();
        assert!(bytes > MESSAGE_BYTES_MAX, "{bytes}: the set fits a single message");
        let mut sender = PartSender::default();
        let mut assembler = PartAssembler::<DesiredState>::default();
        let mut set = ItemSet::default();
        let mut bring = |items: &Arc<Vec<DesiredItem>>| {
            let messages = sender.next(&head(0), items);
            let count = messages.len();
            let largest = messages.iter().map(prost::Message::encoded_len).max();
            assert!(largest.unwrap() <= PART_BYTES_MAX, "{largest:?}");
            for message in messages {
                if let Some(update) = assembler.take(message).unwrap() {
                    set.apply(update).unwrap();
                }
            }
            assert_eq!(set.items(), items.as_slice());
            count
        };
        assert!(bring(&items) > 1);
        // A function more or fewer needs only a single message.
        Arc::make_mut(&mut items).pop();
        assert_eq!(bring(&items), 1);
        Arc::make_mut(&mut items).push(DesiredItem::Function(function(FUNCTIONS_PER_NODE_MAX, 0)));
        assert_eq!(bring(&items), 1);
    }
}

#[test]
fn messages_keep_to_the_limit_with_the_maximum_of_statuses() {
    let mut message = "é".repeat(TEXT_BYTES_MAX);
    cut_text(&mut message);
    assert_eq!(message.len(), TEXT_BYTES_MAX);
    let status = |number: usize| FunctionStatus {
        tenant: "default".into(),
        name: format!("f{number:05}"),
        revision: 1,
        phase: FunctionPhase::Failed.into(),
        message: message.clone(),
    };
    let items = Arc::new((0..FUNCTIONS_PER_NODE_MAX).map(status).collect());
    for message in PartSender::<FunctionStatuses>::default().next(&(), &items) {
        assert!(message.encoded_len() <= PART_BYTES_MAX, "{}", message.encoded_len());
    }
}

#[test]
fn activity_lists_the_busiest_functions() {
    let function = |number: usize| FunctionActivity {
        tenant: if number.is_multiple_of(2) { "even" } else { "odd" }.into(),
        function: format!("f{number:05}"),
        answered: number as u64,
        latencies: (0..40).map(|count| LatencyBucket { up_to_seconds: 0.5, count }).collect(),
        ..FunctionActivity::default()
    };
    let all =
        || Activity { functions: (0..FUNCTIONS_PER_NODE_MAX).map(function).collect(), ..Activity::default() };
    for (tenant, of) in [("", FUNCTIONS_PER_NODE_MAX), ("even", FUNCTIONS_PER_NODE_MAX / 2)] {
        let mut activity = all();
        bound_activity(&mut activity, tenant);
        assert_eq!(activity.functions_left_out as usize, of - ACTIVITY_FUNCTIONS_MAX);
        assert!(activity.encoded_len() <= MESSAGE_BYTES_MAX, "{}", activity.encoded_len());
        let least = activity.functions.iter().map(|it| it.answered).min().unwrap();
        assert!(least as usize >= FUNCTIONS_PER_NODE_MAX - 2 * ACTIVITY_FUNCTIONS_MAX);
        assert!(activity.functions.is_sorted_by_key(|it| (it.tenant.clone(), it.function.clone())));
    }
    let mut few = Activity { functions: vec![function(1), function(2)], ..Activity::default() };
    bound_activity(&mut few, "odd");
    assert_eq!((few.functions.len(), few.functions_left_out), (1, 0));
}

fn part(set: u64, number: u32, last: bool, changes: bool) -> DesiredState {
    let place = Part { set, number, last, changes };
    let functions = vec![function(usize::try_from(set).unwrap() * 10 + number as usize, 0)];
    DesiredState { functions, part: Some(place), ..DesiredState::default() }
}

#[test]
fn a_part_that_does_not_continue_its_set_is_an_error() {
    let taken = |messages: &[DesiredState]| {
        let mut assembler = PartAssembler::default();
        let taken = messages.iter().map(|message| assembler.take(message.clone()).map(|it| it.is_some()));
        taken.collect::<Vec<_>>().pop().unwrap()
    };
    let out_of_order = |set, number| Err(PartError::OutOfOrder { set, number });
    assert_eq!(taken(&[part(1, 0, false, false), part(1, 1, true, false)]), Ok(true));
    assert_eq!(taken(&[part(1, 1, true, false)]), out_of_order(1, 1));
    assert_eq!(taken(&[part(1, 0, false, false), part(1, 2, true, false)]), out_of_order(1, 2));
    assert_eq!(taken(&[part(1, 0, false, false), part(2, 1, true, false)]), out_of_order(2, 1));
    assert_eq!(taken(&[part(1, 0, false, false), part(1, 1, true, true)]), out_of_order(1, 1));
    assert_eq!(
        taken(&[part(1, 0, false, false), part(2, 0, true, false)]),
        Ok(true),
        "a first part begins a new set"
    );
    let no_base = |set, last| Err(PartError::NoBase { set, last });
    assert_eq!(taken(&[part(1, 0, true, true)]), no_base(1, None));
    assert_eq!(taken(&[part(1, 0, true, false), part(3, 0, true, true)]), no_base(3, Some(1)));
    assert_eq!(taken(&[part(1, 0, true, false), part(2, 0, true, true)]), Ok(true));
    let other = DesiredState { index: 7, ..part(1, 1, true, false) };
    assert_eq!(
        taken(&[part(1, 0, false, false), other]),
        Err(PartError::Contradiction { set: 1, number: 1 })
    );
    // After an error only a whole set is accepted.
    let broken = [part(1, 0, true, false), part(2, 1, true, false), part(2, 0, true, true)];
    assert_eq!(taken(&broken), no_base(2, None));
    assert_eq!(taken(&[broken.as_slice(), &[part(3, 0, true, false)]].concat()), Ok(true));
}

#[test]
fn an_endless_set_is_refused_at_its_limits() {
    let one = function(0, 0).encoded_len();
    let taken = |bounds| {
        let mut assembler = PartAssembler::new(bounds);
        (0..8).map(|number| assembler.take(part(1, number, false, false))).find_map(Result::err)
    };
    assert_eq!(taken(SetBounds { items: 8, bytes: 9 * one }), None);
    let too_many = PartError::TooManyItems { max: 7 };
    assert_eq!(taken(SetBounds { items: 7, bytes: 9 * one }), Some(too_many));
    let too_large = PartError::TooManyBytes { max: 7 * one };
    assert_eq!(taken(SetBounds { items: 8, bytes: 7 * one }), Some(too_large));
}

#[test]
fn a_message_without_a_part_field_is_a_whole_set() {
    let state = DesiredState { functions: vec![function(1, 0)], ..DesiredState::default() };
    let mut receiver: PartAssembler<DesiredState> = PartAssembler::default();
    let update = receiver.take(state).unwrap().unwrap();
    assert!(update.is_whole && update.items.len() == 1);
}
