use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use futures::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody};
use proptest::prelude::*;
use tonic::Code;

use super::*;

fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    let len = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flag][..], &len, message].concat()
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

fn terms(budget: &Budget, hold: Hold) -> Terms {
    Terms {
        budget: budget.clone(),
        message_len_max: 1 << 20,
        stall_max: Duration::from_secs(30),
        encoding: Some(Encoding::Gzip),
        hold,
        message_type: None,
    }
}

/// Sends `wire` in pieces of `piece` bytes; everything that comes out, joined.
async fn pass(wire: &[u8], piece: usize, terms: Terms, ledger: Ledger) -> Result<Vec<u8>, Status> {
    let frames: Vec<_> =
        wire.chunks(piece).map(|data| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(data)))).collect();
    let body = Messages::new(StreamBody::new(stream::iter(frames)), terms, ledger);
    body.collect().await.map(|all| all.to_bytes().to_vec())
}

#[tokio::test]
async fn plain_messages_pass_unchanged_however_they_are_cut() {
    let wire = [framed(0, b"one"), framed(0, b""), framed(0, &[7; 5000])].concat();
    for piece in [1, 2, 4, 5, 6, 100, 10_000] {
        let budget = Budget::new(millrace_types::Bytes::mib(8));
        let ledger = Ledger::default();
        let terms = terms(&budget, Hold::UntilClaimed);
        assert_eq!(pass(&wire, piece, terms, ledger.clone()).await.unwrap(), wire, "{piece}");
        assert_eq!(budget.used(), 5003);
        assert!(ledger.claim().is_some());
        assert_eq!(budget.used(), 5000);
        drop(ledger);
        assert_eq!(budget.used(), 0);
    }
}

#[tokio::test]
async fn compressed_messages_leave_plain_and_are_charged_for_both_sizes() {
    let plain = b"again ".repeat(10_000);
    let compressed = gzip(&plain);
    let wire = [framed(1, &compressed), framed(0, b"plain")].concat();
    let expected = [framed(0, &plain), framed(0, b"plain")].concat();
    for piece in [3, 1000, 1_000_000] {
        let budget = Budget::new(millrace_types::Bytes::mib(8));
        let ledger = Ledger::default();
        let terms = terms(&budget, Hold::UntilClaimed);
        assert_eq!(pass(&wire, piece, terms, ledger.clone()).await.unwrap(), expected);
        assert_eq!(budget.used(), (compressed.len() + plain.len() + 5) as u64);
    }
}

#[tokio::test]
async fn the_next_message_of_a_call_gives_the_last_ones_bytes_back() {
    let budget = Budget::new(millrace_types::Bytes::mib(1));
    let wire = [framed(0, &[1; 700_000]), framed(0, &[2; 200_000])].concat();
    let ledger = Ledger::default();
    pass(&wire, 4096, terms(&budget, Hold::UntilNext), ledger.clone()).await.unwrap();
    assert_eq!(budget.used(), 200_000);
}

#[tokio::test]
async fn refuses_what_is_too_large_before_it_arrives() {
    let budget = Budget::new(millrace_types::Bytes::mib(8));
    let prefix_only = &framed(0, &vec![0; 2 << 20])[..5];
    let refused = pass(prefix_only, 5, terms(&budget, Hold::UntilNext), Ledger::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let bomb = framed(1, &gzip(&vec![0; 4 << 20]));
    let refused = pass(&bomb, 4096, terms(&budget, Hold::UntilNext), Ledger::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(budget.used(), 0);
}

#[tokio::test]
async fn a_spent_budget_refuses_a_call_and_makes_a_stream_wait() {
    let budget = Budget::new(millrace_types::Bytes::mib(1));
    let held = budget.try_take(1 << 20).unwrap();
    let wire = framed(0, b"hello");
    let refused = pass(&wire, 64, terms(&budget, Hold::UntilNext), Ledger::default()).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);

    let ledger = Ledger::default();
    let mut waiting = std::pin::pin!(pass(&wire, 64, terms(&budget, Hold::UntilClaimed), ledger));
    assert!(futures::poll!(waiting.as_mut()).is_pending());
    drop(held);
    assert_eq!(waiting.await.unwrap(), wire);
}

#[tokio::test(start_paused = true)]
async fn a_message_that_stalls_ends_the_call_and_a_quiet_stream_does_not() {
    let budget = Budget::new(millrace_types::Bytes::mib(1));
    let begun = Frame::data(Bytes::from_static(&[0, 0, 0, 0, 9, 1]));
    let frames = stream::once(async { Ok::<_, Status>(begun) }).chain(stream::pending());
    let mut body =
        Messages::new(StreamBody::new(Box::pin(frames)), terms(&budget, Hold::UntilNext), Ledger::default());
    assert!(body.frame().await.unwrap().is_ok());
    let stalled = body.frame().await.unwrap().unwrap_err();
    assert_eq!(stalled.code(), Code::DeadlineExceeded);

    let quiet = stream::pending::<Result<Frame<Bytes>, Status>>();
    let terms = terms(&budget, Hold::UntilClaimed);
    let mut body = Messages::new(StreamBody::new(quiet), terms, Ledger::default());
    let answer = tokio::time::timeout(Duration::from_secs(3600), body.frame()).await;
    assert!(answer.is_err(), "a stream may be quiet for long between messages");
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

proptest! {
    /// Whatever messages there are, compressed or not, and wherever they are cut.
    #[test]
    fn messages_keep_their_order_and_contents(
        messages in proptest::collection::vec((proptest::collection::vec(any::<u8>(), 0..300), any::<bool>()), 0..8),
        piece in 1usize..400,
    ) {
        let wire: Vec<u8> = messages
            .iter()
            .flat_map(|(plain, squeezed)| if *squeezed { framed(1, &gzip(plain)) } else { framed(0, plain) })
            .collect();
        let expected: Vec<u8> = messages.iter().flat_map(|(plain, _)| framed(0, plain)).collect();
        let budget = Budget::new(millrace_types::Bytes::mib(8));
        let ledger = Ledger::default();
        let passed = block_on(pass(&wire, piece, terms(&budget, Hold::UntilClaimed), ledger.clone()));
        prop_assert_eq!(passed.unwrap(), expected);
        let claimed = std::iter::from_fn(|| ledger.claim()).count();
        prop_assert_eq!(claimed, messages.len());
        prop_assert_eq!(budget.used(), 0);
    }

    /// Whatever a client sends, the bytes it was charged come back.
    #[test]
    fn garbage_costs_nothing_afterwards(wire in proptest::collection::vec(any::<u8>(), 0..600), piece in 1usize..100) {
        let budget = Budget::new(millrace_types::Bytes::mib(8));
        // Passed on or refused: either will do.
        let passed = block_on(pass(&wire, piece, terms(&budget, Hold::UntilNext), Ledger::default()));
        drop(passed);
        prop_assert_eq!(budget.used(), 0);
    }
}
