use std::io::Write as _;
use std::sync::LazyLock;
use std::time::Duration;

use flate2::Compression;
use flate2::write::GzEncoder;
use futures::{StreamExt as _, stream};
use http_body_util::{BodyExt as _, StreamBody};
use proptest::prelude::*;
use tonic::Code;

use super::*;
use crate::budget::ByteBudget;

fn framed(flag: u8, message: &[u8]) -> Vec<u8> {
    let len = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[flag][..], &len, message].concat()
}

fn gzip(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

static BULK: LazyLock<BulkThreads> = LazyLock::new(|| BulkThreads::start().unwrap());

const GRACE: Duration = Duration::from_secs(5);

/// Returns a budget of `mib` MiB for messages of 1 MiB.
fn budget(mib: u64) -> ByteBudget {
    ByteBudget::new(millrace_types::Bytes::mib(mib), millrace_types::Bytes::mib(1))
}

fn terms(budget: &ByteBudget, hold: ChargeRelease) -> BodyBounds {
    BodyBounds {
        share: budget.share(),
        message_len_max: 1 << 20,
        minimum_rate: MinimumRate { grace: GRACE, bytes_per_sec: 64 << 10 },
        bulk: BULK.clone(),
        encoding: Some(ContentEncoding::Gzip),
        hold,
        message_type: None,
    }
}

/// Sends `wire` in pieces of `piece` bytes, and returns the joined output.
async fn pass(wire: &[u8], piece: usize, terms: BodyBounds, ledger: CallCharges) -> Result<Vec<u8>, Status> {
    let frames: Vec<_> =
        wire.chunks(piece).map(|data| Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(data)))).collect();
    let body = ChargedMessages::new(StreamBody::new(stream::iter(frames)), terms, ledger);
    body.collect().await.map(|all| all.to_bytes().to_vec())
}

#[tokio::test]
async fn plain_messages_in_any_pieces_pass_unchanged() {
    let wire = [framed(0, b"one"), framed(0, b""), framed(0, &[7; 5000])].concat();
    for piece in [1, 2, 4, 5, 6, 100, 10_000] {
        let budget = budget(8);
        let ledger = CallCharges::default();
        let terms = terms(&budget, ChargeRelease::UntilClaimed);
        assert_eq!(pass(&wire, piece, terms, ledger.clone()).await.unwrap(), wire, "{piece}");
        assert_eq!(budget.used(), 5003);
        assert!(ledger.claim().is_some());
        assert_eq!(budget.used(), 5000);
        drop(ledger);
        assert_eq!(budget.used(), 0);
    }
}

#[tokio::test]
async fn compressed_messages_are_passed_on_and_charged_decompressed() {
    let plain = b"again ".repeat(10_000);
    let compressed = gzip(&plain);
    let wire = [framed(1, &compressed), framed(0, b"plain")].concat();
    let expected = [framed(0, &plain), framed(0, b"plain")].concat();
    for piece in [3, 1000, 1_000_000] {
        let budget = budget(8);
        let ledger = CallCharges::default();
        let terms = terms(&budget, ChargeRelease::UntilClaimed);
        assert_eq!(pass(&wire, piece, terms, ledger.clone()).await.unwrap(), expected);
        assert_eq!(budget.used(), (plain.len() + 5) as u64);
    }
}

#[tokio::test]
async fn asking_for_the_next_message_releases_the_charge_of_the_last_one() {
    let budget = budget(1);
    let (sender, pieces) = wire();
    let mut body =
        ChargedMessages::new(pieces, terms(&budget, ChargeRelease::UntilNext), CallCharges::default());
    for message in [framed(0, &[1; 700_000]), framed(0, &[2; 800_000])] {
        sender.unbounded_send(Bytes::from(message.clone())).unwrap();
        assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), message);
        assert_eq!(budget.used(), (message.len() - PREFIX_LEN) as u64);
    }
    // After this many bytes, other tasks get a turn first.
    for _ in 0..2 {
        assert!(futures::poll!(body.frame()).is_pending());
    }
    assert_eq!(budget.used(), 0, "the charge does not wait for the next message");
}

#[tokio::test(start_paused = true)]
async fn a_call_of_one_message_must_end_after_the_message() {
    let budget = budget(1);
    let message = Bytes::from(framed(0, &[1; 1000]));
    let wire_twice = [&message[..], &message[..]].concat();
    let refused =
        pass(&wire_twice, 64, terms(&budget, ChargeRelease::WholeCall), CallCharges::default()).await;
    assert_eq!(refused.unwrap_err().code(), Code::InvalidArgument);

    let (sender, pieces) = wire();
    let ledger = CallCharges::default();
    let mut body = ChargedMessages::new(pieces, terms(&budget, ChargeRelease::WholeCall), ledger.clone());
    sender.unbounded_send(message.clone()).unwrap();
    assert_eq!(body.frame().await.unwrap().unwrap().into_data().unwrap(), message);
    assert_eq!(body.frame().await.unwrap().unwrap_err().code(), Code::DeadlineExceeded);
    assert_eq!(budget.used(), 1000, "the handler still uses the message");
    drop(ledger);
    drop(body);
    assert_eq!(budget.used(), 0);
}

#[tokio::test]
async fn too_large_messages_are_refused_before_they_arrive() {
    let budget = budget(8);
    let prefix_only = &framed(0, &vec![0; 2 << 20])[..5];
    let refused = pass(prefix_only, 5, terms(&budget, ChargeRelease::UntilNext), CallCharges::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let bomb = framed(1, &gzip(&vec![0; 4 << 20]));
    let refused = pass(&bomb, 4096, terms(&budget, ChargeRelease::UntilNext), CallCharges::default())
        .await
        .unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert_eq!(budget.used(), 0);
}

#[tokio::test]
async fn a_spent_budget_refuses_a_call_and_makes_a_stream_wait() {
    let budget = budget(1);
    let held = budget.share().try_take(1 << 20).unwrap();
    let wire = framed(0, b"hello");
    for hold in [ChargeRelease::WholeCall, ChargeRelease::UntilDecoded] {
        let refused = pass(&wire, 64, terms(&budget, hold), CallCharges::default()).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
    }
    let ledgers = [CallCharges::default(), CallCharges::default()];
    let next = pass(&wire, 64, terms(&budget, ChargeRelease::UntilNext), ledgers[0].clone());
    let claimed = pass(&wire, 64, terms(&budget, ChargeRelease::UntilClaimed), ledgers[1].clone());
    let mut next = Box::pin(next);
    let mut claimed = Box::pin(claimed);
    assert!(futures::poll!(next.as_mut()).is_pending());
    assert!(futures::poll!(claimed.as_mut()).is_pending());
    drop(held);
    assert_eq!(next.await.unwrap(), wire);
    assert_eq!(claimed.await.unwrap(), wire);
}

#[tokio::test]
async fn the_charge_of_a_waiting_call_is_released_once_the_message_is_decoded() {
    let budget = budget(1);
    let (sender, pieces) = wire();
    let ledger = CallCharges::default();
    let mut body = ChargedMessages::new(pieces, terms(&budget, ChargeRelease::UntilDecoded), ledger.clone());
    sender.unbounded_send(Bytes::from(framed(0, &[7; 1000]))).unwrap();
    drop(sender);
    assert!(body.frame().await.unwrap().is_ok());
    assert_eq!(budget.used(), 1000);
    assert!(body.frame().await.is_none());
    // tonic drops the body once the message is complete.
    drop(body);
    assert_eq!(budget.used(), 0);
    drop(ledger);
}

/// Returns a sender of bytes, and a body of the sent bytes.
fn wire() -> (futures::channel::mpsc::UnboundedSender<Bytes>, impl Body<Data = Bytes, Error = Status> + Unpin)
{
    let (sender, pieces) = futures::channel::mpsc::unbounded();
    (sender, StreamBody::new(pieces.map(|piece| Ok(Frame::data(piece)))))
}

#[tokio::test]
async fn bytes_are_charged_when_they_arrive_and_a_prefix_waits_for_half_of_its_message() {
    let budget = budget(8);
    let (sender, pieces) = wire();
    let mut body =
        ChargedMessages::new(pieces, terms(&budget, ChargeRelease::WholeCall), CallCharges::default());
    let message = framed(0, &vec![7; 1 << 20]);
    let mut sent = 0;
    let mut passed = Vec::new();
    for piece in message.chunks(100_000) {
        sender.unbounded_send(Bytes::copy_from_slice(piece)).unwrap();
        sent += piece.len();
        while let Poll::Ready(Some(frame)) = futures::poll!(body.frame()) {
            passed.extend(frame.unwrap().into_data().unwrap());
        }
        assert_eq!(budget.used(), (sent - PREFIX_LEN) as u64);
        // tonic reserves as much memory as the prefix announces once it sees the prefix.
        assert_eq!(passed.len(), if 2 * sent < message.len() { 0 } else { sent });
    }
    assert_eq!(passed, message);
}

#[tokio::test]
async fn small_held_back_pieces_keep_their_order() {
    let budget = budget(8);
    let message = framed(0, &(0..1 << 20).map(|at| (at % 251) as u8).collect::<Vec<_>>());
    let sizes = [1, 20_000, 7, 100, 16 << 10, 3];
    let (sender, pieces) = wire();
    let mut rest = message.as_slice();
    for size in sizes.into_iter().cycle() {
        let (piece, more) = rest.split_at(size.min(rest.len()));
        sender.unbounded_send(Bytes::copy_from_slice(piece)).unwrap();
        rest = more;
        if rest.is_empty() {
            break;
        }
    }
    drop(sender);
    let body =
        ChargedMessages::new(pieces, terms(&budget, ChargeRelease::UntilClaimed), CallCharges::default());
    assert_eq!(body.collect().await.unwrap().to_bytes(), message);
}

#[tokio::test]
async fn a_stream_message_that_waits_for_capacity_has_no_charge() {
    let budget = ByteBudget::new(millrace_types::Bytes(1 << 20), millrace_types::Bytes(1 << 20));
    let message = framed(0, &vec![7; 1 << 20]);
    let held = budget.share().try_take(1).unwrap();
    let (sender, pieces) = wire();
    let mut body =
        ChargedMessages::new(pieces, terms(&budget, ChargeRelease::UntilClaimed), CallCharges::default());
    sender.unbounded_send(Bytes::copy_from_slice(&message[..message.len() / 2])).unwrap();
    assert!(futures::poll!(body.frame()).is_pending());
    assert_eq!(budget.used(), 1);
    drop(held);
    assert!(futures::poll!(body.frame()).is_pending());
    assert_eq!(budget.used(), (message.len() / 2 - PREFIX_LEN) as u64);
    sender.unbounded_send(Bytes::copy_from_slice(&message[message.len() / 2..])).unwrap();
    drop(sender);
    assert_eq!(body.collect().await.unwrap().to_bytes(), message);
}

#[tokio::test]
async fn one_of_two_streams_that_fill_the_budget_is_refused_and_the_other_served() {
    let budget = ByteBudget::new(millrace_types::Bytes(1 << 20), millrace_types::Bytes(1 << 20));
    let message = framed(0, &vec![7; 1 << 20]);
    let bodies = [(); 2].map(|()| {
        let (sender, pieces) = wire();
        (
            sender,
            ChargedMessages::new(pieces, terms(&budget, ChargeRelease::UntilClaimed), CallCharges::default()),
        )
    });
    let [(first, mut first_body), (second, mut second_body)] = bodies;
    // Both streams see capacity while nothing has arrived, and both begin.
    for (sender, body) in [(&first, &mut first_body), (&second, &mut second_body)] {
        sender.unbounded_send(Bytes::copy_from_slice(&message[..PREFIX_LEN])).unwrap();
        assert!(futures::poll!(body.frame()).is_pending());
    }
    let quarter = Bytes::copy_from_slice(&message[PREFIX_LEN..PREFIX_LEN + (1 << 18)]);
    let mut refused = None;
    for _ in 0..4 {
        for (at, (sender, body)) in
            [(&first, &mut first_body), (&second, &mut second_body)].into_iter().enumerate()
        {
            sender.unbounded_send(quarter.clone()).unwrap();
            while let Poll::Ready(Some(frame)) = futures::poll!(body.frame()) {
                if let Err(status) = frame {
                    assert_eq!(refused.replace((at, status.code())), None, "only one stream may be refused");
                }
            }
        }
    }
    let (at, code) = refused.unwrap();
    assert_eq!(code, Code::ResourceExhausted);
    let (held, dropped) = if at == 0 { (second_body, first_body) } else { (first_body, second_body) };
    drop(dropped);
    assert_eq!(budget.used(), 1 << 20, "the other stream has its whole message");
    drop(held);
    assert_eq!(budget.used(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_message_below_the_minimum_rate_ends_the_call_and_a_quiet_stream_does_not() {
    let budget = budget(1);
    let (sender, pieces) = wire();
    let mut body =
        ChargedMessages::new(pieces, terms(&budget, ChargeRelease::UntilNext), CallCharges::default());
    sender.unbounded_send(Bytes::from(framed(0, &vec![0; 1 << 20])).slice(..PREFIX_LEN)).unwrap();
    let began = tokio::time::Instant::now();
    let drip = async {
        for _ in 0..60 {
            tokio::time::sleep(Duration::from_secs(1)).await;
            sender.unbounded_send(Bytes::from_static(b"1")).unwrap();
        }
    };
    let slow = tokio::select! {
        frame = body.frame() => frame.unwrap().unwrap_err(),
        () = drip => unreachable!(),
    };
    assert_eq!(slow.code(), Code::DeadlineExceeded);
    assert_eq!(began.elapsed().as_secs(), GRACE.as_secs());

    let quiet = stream::pending::<Result<Frame<Bytes>, Status>>();
    let terms = terms(&budget, ChargeRelease::UntilClaimed);
    let mut body = ChargedMessages::new(StreamBody::new(quiet), terms, CallCharges::default());
    let answer = tokio::time::timeout(Duration::from_secs(3600), body.frame()).await;
    assert!(answer.is_err(), "a stream may be quiet for long between messages");
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap().block_on(future)
}

proptest! {
    /// Any sequence of messages, compressed or not, in pieces of any size.
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
        let budget = budget(8);
        let ledger = CallCharges::default();
        let passed = block_on(pass(&wire, piece, terms(&budget, ChargeRelease::UntilClaimed), ledger.clone()));
        prop_assert_eq!(passed.unwrap(), expected);
        let claimed = std::iter::from_fn(|| ledger.claim()).count();
        prop_assert_eq!(claimed, messages.len());
        prop_assert_eq!(budget.used(), 0);
    }

    /// For any bytes of a client, all charges are released.
    #[test]
    fn garbage_leaves_no_charge(wire in proptest::collection::vec(any::<u8>(), 0..600), piece in 1usize..100) {
        let budget = budget(8);
        // The bytes may be passed on or refused.
        let passed = block_on(pass(&wire, piece, terms(&budget, ChargeRelease::UntilNext), CallCharges::default()));
        drop(passed);
        prop_assert_eq!(budget.used(), 0);
    }
}
