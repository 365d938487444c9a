use std::num::NonZeroU64;
use std::sync::Mutex;
use std::task::{Context, Wake, Waker};

use millrace_core::ids::{ObjectKey, RequestKey};
use millrace_scheduling::sequences::SequenceTotals;
use millrace_types::sequences::StateTensor;
use millrace_types::{
    DataType, Digest, Dim, Epoch, FunctionKey, FunctionName, GpuIndex, Incarnation, Revision, TenantName,
    TensorSpec,
};
use tokio::sync::watch;

use super::manager::{BEFORE_MAX, Tables};
use super::table::Table;
use super::*;
use crate::actor_runtime::spawn_forwarder;
use crate::object_handle::{HandleLocation, ObjectHandle, ObjectRange};
use crate::objects::{Contents, InputTensor, ObjectStore};
use crate::signature::{FunctionSignature, InputReader, Signatures};

const MINUTE: Duration = Duration::from_secs(60);
/// Size of one state.
const BYTES: u64 = 16;

fn revision() -> RevisionKey {
    let name = FunctionName::new("counter").unwrap();
    let function = FunctionKey { tenant: TenantName::default(), name };
    RevisionKey { function, revision: Revision::FIRST }
}

fn state(idle: Duration) -> FunctionState {
    let shape = vec![Dim::Fixed(4)];
    let input = TensorSpec { name: "h_in".into(), datatype: DataType::Fp32, shape };
    let tensor = StateTensor { input, output: "h_out".into(), bytes: BYTES as usize };
    FunctionState { tensors: [tensor].into(), idle, max: 4 }
}

fn signatures(state: FunctionState) -> Signatures {
    let signature = FunctionSignature {
        digest: Digest::of(b"counter"),
        inputs: Vec::new(),
        outputs: Vec::new(),
        reader: InputReader::Gpu,
        state: Some(state),
    };
    [(revision(), Arc::new(signature))].into()
}

/// Returns the sequences of one function, with memory for `states` states.
fn sequences(idle: Duration, states: u64) -> (SequenceManager, FunctionState) {
    let state = state(idle);
    let told = watch::Sender::new(Arc::new(signatures(state.clone()))).subscribe();
    let (objects, _told) = ObjectStore::registered(Bytes(states * BYTES));
    (SequenceManager::new(told, objects), state)
}

fn asked(sequence: u64, start: bool) -> InSequence {
    let id = SequenceId::Number(NonZeroU64::new(sequence).unwrap());
    InSequence { id, start, end: false }
}

/// Returns an output of a run.
fn output(name: &str, byte: u8) -> InputTensor {
    let contents = Contents::Inline(vec![byte; BYTES as usize].into());
    InputTensor { name: name.into(), datatype: "FP32".into(), shape: vec![4], contents }
}

/// Returns the state that a turn reads.
fn reads(turn: &SequenceTurn) -> Vec<u8> {
    let inputs = turn.inputs();
    let [InputTensor { name, shape, contents: Contents::Inline(data), .. }] = &inputs[..] else {
        panic!("{inputs:?}")
    };
    assert_eq!((name.as_str(), shape.as_slice()), ("h_in", &[4_i64][..]));
    data.to_vec()
}

impl SequenceManager {
    async fn next(&self, state: &FunctionState, sequence: u64, start: bool) -> SequenceTurn {
        let turn = self.turn(&revision(), state, asked(sequence, start), MINUTE).await;
        turn.unwrap_or_else(|failure| panic!("{failure:?}"))
    }

    async fn refused(&self, state: &FunctionState, sequence: u64, start: bool, timeout: Duration) -> Failure {
        let turn = self.turn(&revision(), state, asked(sequence, start), timeout).await;
        turn.err().expect("a refusal")
    }

    fn tally(&self) -> SequenceTally {
        self.tallies()[&revision().function]
    }
}

/// Ends a turn as a run that wrote `byte` as its state.
fn write(mut turn: SequenceTurn, byte: u8) {
    assert!(turn.take(output("h_out", byte)).unwrap().is_none());
    assert!(turn.take(output("y", 0)).unwrap().is_some(), "an output that is not state is the client's");
    turn.succeed().unwrap();
}

#[tokio::test]
async fn a_turn_reads_the_state_of_the_last_successful_turn() {
    let (sequences, state) = sequences(MINUTE, 8);
    let first = sequences.next(&state, 7, true).await;
    assert_eq!(reads(&first), [0; 16]);
    write(first, 1);
    let mut failed = sequences.next(&state, 7, false).await;
    assert!(failed.take(output("h_out", 2)).unwrap().is_none());
    drop(failed);
    let third = sequences.next(&state, 7, false).await;
    assert_eq!(reads(&third), [1; 16]);
    // The run gave no state.
    assert_eq!(third.succeed().unwrap_err().reason, Reason::Internal);
    assert_eq!(reads(&sequences.next(&state, 7, false).await), [1; 16]);
    assert_eq!(sequences.tally().live, 1);
}

#[tokio::test(start_paused = true)]
async fn requests_of_a_sequence_wait_for_each_other_until_their_timeout() {
    let (sequences, state) = sequences(MINUTE, 8);
    let first = sequences.next(&state, 7, true).await;
    let other = sequences.next(&state, 8, true).await;
    let late = sequences.refused(&state, 7, false, Duration::from_millis(5)).await;
    assert_eq!(late.reason, Reason::TimedOut);
    let mut second = Box::pin(sequences.next(&state, 7, false));
    assert!(futures::poll!(&mut second).is_pending());
    write(first, 1);
    assert_eq!(reads(&second.await), [1; 16]);
    drop(other);
    let unknown = sequences.refused(&state, 8, false, MINUTE).await;
    assert_eq!(unknown.reason, Reason::SequenceNotFound, "the sequence never began");
}

#[tokio::test]
async fn state_reserves_object_memory_and_releases_it() {
    let (sequences, state) = sequences(MINUTE, 2);
    write(sequences.next(&state, 7, true).await, 1);
    let second = sequences.next(&state, 7, false).await;
    let refused = sequences.refused(&state, 8, true, MINUTE).await;
    assert_eq!(refused.reason, Reason::QueueFull);
    assert!(refused.message.contains("--object-memory"), "{refused:?}");
    write(second, 2);
    write(sequences.next(&state, 8, true).await, 3);
    assert_eq!(sequences.tally().live, 2);
}

#[tokio::test]
async fn a_sequence_can_be_ended_without_memory_for_another_state() {
    let (sequences, state) = sequences(MINUTE, 2);
    write(sequences.next(&state, 7, true).await, 1);
    write(sequences.next(&state, 8, true).await, 2);
    let refused = sequences.refused(&state, 7, false, MINUTE).await;
    assert_eq!(refused.reason, Reason::QueueFull);
    let end = InSequence { end: true, ..asked(7, false) };
    let last = sequences.turn(&revision(), &state, end, MINUTE).await.unwrap();
    assert_eq!((reads(&last), last.outputs()), (vec![1; 16], vec![]));
    last.succeed().unwrap();
    assert_eq!(sequences.tally().live, 1);
    let next = sequences.next(&state, 8, false).await;
    assert_eq!((reads(&next), next.outputs()), (vec![2; 16], vec!["h_out".to_owned()]));
}

/// A waker that records whether a state could be reserved at each wake.
struct Room {
    objects: ObjectStore,
    found: Mutex<Vec<bool>>,
}

impl Wake for Room {
    fn wake(self: Arc<Self>) {
        let found = self.objects.claim(Bytes(BYTES), 1).is_some();
        self.found.lock().unwrap().push(found);
    }
}

#[tokio::test]
async fn a_woken_turn_finds_the_memory_of_the_ended_turn_released() {
    let ends: [(fn(SequenceTurn), bool); 3] =
        [(|turn| write(turn, 2), false), (drop, false), (|turn| drop(turn.lost()), true)];
    for (end, start) in ends {
        let (sequences, state) = sequences(MINUTE, 2);
        write(sequences.next(&state, 7, true).await, 1);
        let running = sequences.next(&state, 7, false).await;
        let room = Arc::new(Room { objects: sequences.0.objects.clone(), found: Mutex::default() });
        let waker = Waker::from(Arc::clone(&room));
        let mut waiting = Box::pin(sequences.next(&state, 7, start));
        assert!(waiting.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        end(running);
        assert_eq!(*room.found.lock().unwrap(), [true]);
        drop(waiting.await);
    }
}

#[tokio::test]
async fn idle_sequences_end_and_lost_sequences_are_refused() {
    let (sequences, state) = sequences(Duration::from_nanos(1), 8);
    write(sequences.next(&state, 7, true).await, 1);
    sequences.sweep_once(&signatures(state.clone()));
    let idle = SequenceTotals { idle: 1, lost: 0 };
    assert_eq!(sequences.tally(), SequenceTally { live: 0, ended: idle });

    let (sequences, state) = self::sequences(MINUTE, 8);
    write(sequences.next(&state, 7, true).await, 1);
    let failure = sequences.next(&state, 7, false).await.lost();
    assert_eq!((failure.reason, failure.retryable), (Reason::SequenceNotFound, false));
    assert_eq!(sequences.refused(&state, 7, false, MINUTE).await, failure);
    let lost = SequenceTotals { idle: 0, lost: 1 };
    assert_eq!(sequences.tally(), SequenceTally { live: 0, ended: lost });
    assert_eq!(reads(&sequences.next(&state, 7, true).await), [0; 16]);
}

/// State on a GPU may be lost with its executor, or be there and fail to be copied.
#[test]
fn a_sequence_ends_if_its_state_is_lost_and_continues_if_a_copy_failed() {
    actix::System::new().block_on(async {
        let (sequences, state) = sequences(MINUTE, 8);
        let (home, _told) = spawn_forwarder();
        let object = Arc::new(ObjectHandle::new(GpuIndex(0), ObjectKey(1), BYTES, home));
        object.moves_to(HandleLocation::Gpu(Incarnation(1)));
        let part = ObjectRange { object: Arc::clone(&object), offset: 0, bytes: BYTES };
        let contents = Contents::Kept(part);
        let mut first = sequences.next(&state, 7, true).await;
        assert!(first.take(InputTensor { contents, ..output("h_out", 0) }).unwrap().is_none());
        first.succeed().unwrap();

        let failure = sequences.next(&state, 7, false).await.unread();
        assert_eq!((failure.reason, failure.retryable), (Reason::AttemptsExhausted, true), "{failure:?}");
        assert_eq!(sequences.tally(), SequenceTally { live: 1, ended: SequenceTotals::default() });

        let turn = sequences.next(&state, 7, false).await;
        object.moves_to(HandleLocation::Lost);
        assert_eq!(turn.unread().reason, Reason::SequenceNotFound);
        assert_eq!(sequences.tally(), SequenceTally { live: 0, ended: SequenceTotals { idle: 0, lost: 1 } });
    });
}

#[tokio::test]
async fn sequences_end_with_their_function_and_their_counts_stay() {
    let (sequences, state) = sequences(MINUTE, 8);
    write(sequences.next(&state, 7, true).await, 1);
    drop(sequences.next(&state, 7, false).await.lost());
    let running = sequences.next(&state, 8, true).await;
    let mut waiting = Box::pin(sequences.refused(&state, 8, false, MINUTE));
    assert!(futures::poll!(&mut waiting).is_pending());
    sequences.sweep_once(&Signatures::new());
    assert_eq!(waiting.await.reason, Reason::FunctionNotReady);
    // The running request is still answered, and its sequence has ended.
    write(running, 2);
    let lost = SequenceTotals { idle: 0, lost: 2 };
    assert_eq!(sequences.tally(), SequenceTally { live: 0, ended: lost });
}

/// The functions may have been served elsewhere meanwhile, and other sequences may have used the
/// names.
#[tokio::test]
async fn a_worker_that_registers_again_has_no_sequences() {
    let (sequences, state) = sequences(MINUTE, 8);
    write(sequences.next(&state, 7, true).await, 1);
    let running = sequences.next(&state, 8, true).await;
    let over = sequences.tables().registered(Some(Epoch(2)));
    drop(over);
    let lost = SequenceTotals { idle: 0, lost: 2 };
    assert_eq!(sequences.tally(), SequenceTally { live: 0, ended: lost });
    let other = sequences.next(&state, 9, true).await;
    write(running, 5);
    write(other, 2);
    assert_eq!(
        reads(&sequences.next(&state, 9, false).await),
        [2; 16],
        "a turn of an ended table changes nothing"
    );
    let refused = sequences.refused(&state, 7, false, MINUTE).await;
    assert_eq!(refused.reason, Reason::SequenceNotFound);
    assert_eq!(reads(&sequences.next(&state, 7, true).await), [0; 16]);
}

#[test]
fn the_oldest_counts_are_forgotten_and_counts_of_served_functions_stay() {
    let of = |number: usize| {
        let name = FunctionName::new(&format!("f{number}")).unwrap();
        FunctionKey { tenant: TenantName::default(), name }
    };
    let mut tables = Tables::default();
    let state = state(MINUTE);
    // The first function is served with another revision.
    let signature = Arc::clone(&signatures(state.clone())[&revision()]);
    let newer = RevisionKey { function: of(0), revision: Revision::FIRST.next() };
    let served: Signatures = [(newer, signature)].into();
    for number in 0..BEFORE_MAX + 2 {
        tables.requests += 1;
        let revision = RevisionKey { function: of(number), revision: Revision::FIRST };
        tables.revisions.insert(revision, Table::new(&state, RequestKey(tables.requests)));
        drop(tables.served(&served));
    }
    assert_eq!(tables.before.len(), BEFORE_MAX);
    let known = [0, 1, 2, 3, BEFORE_MAX + 1].map(|number| tables.before.contains_key(&of(number)));
    assert_eq!(known, [true, false, false, true, true]);
}
