//! Tests of frames over real sockets and over streams cut at any position.
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{self, IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;

use bytes::Bytes;
use millrace_proto::executor::{Event, ProgramFailed, event};
use millrace_proto::frames::{
    DESCRIPTORS_MAX, FrameDecoder, FrameError, FrameQueue, MESSAGE_BYTES_MAX, OUTBOX_BYTES_MAX,
    ReceivedFrame, SocketFrame,
};
use proptest::prelude::*;
use prost::Message as _;
use rustix::fs::MemfdFlags;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

fn message(text: &str) -> Event {
    let failed = ProgramFailed { program: 1, message: text.to_owned() };
    Event { event: Some(event::Event::ProgramFailed(failed)) }
}

fn memfd() -> OwnedFd {
    rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap()
}

fn inode(fd: &OwnedFd) -> u64 {
    rustix::fs::fstat(fd).unwrap().st_ino
}

/// Returns a comparable form: the message's bytes, and the inodes of the descriptors.
fn seen(frame: ReceivedFrame) -> (Bytes, Vec<u64>) {
    (frame.message, frame.descriptors.iter().map(inode).collect())
}

fn error_of(error: &io::Error) -> &FrameError {
    error.get_ref().unwrap().downcast_ref().unwrap()
}

#[test]
fn a_message_and_its_descriptors_arrive_in_order_and_close_on_exec() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let files = [memfd(), memfd()];
    let expected = files.iter().map(inode).collect::<Vec<_>>();
    let mut outbox = FrameQueue::default();
    outbox.push(SocketFrame::new(&message("two files"), files.into()).unwrap()).unwrap();
    outbox.flush(&ours).unwrap();
    let frame = FrameDecoder::default().recv_frame(&theirs).unwrap().unwrap();
    assert_eq!(frame.decode::<Event>().unwrap(), message("two files"));
    for descriptor in &frame.descriptors {
        assert!(rustix::io::fcntl_getfd(descriptor).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
    assert_eq!(seen(frame).1, expected);
}

#[test]
fn descriptors_stay_with_their_frame_among_frames_without() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut outbox = FrameQueue::default();
    let mut expected = Vec::new();
    for (text, files) in [("a", 0), ("b", 0), ("c", 1), ("d", 0), ("e", 2), ("f", 1), ("g", 0)] {
        let files: Vec<_> = (0..files).map(|_| memfd()).collect();
        expected.push((Bytes::from(message(text).encode_to_vec()), files.iter().map(inode).collect()));
        outbox.push(SocketFrame::new(&message(text), files).unwrap()).unwrap();
    }
    outbox.flush(&ours).unwrap();
    let mut decoder = FrameDecoder::default();
    for expected in expected {
        assert_eq!(seen(decoder.recv_frame(&theirs).unwrap().unwrap()), expected);
    }
}

#[test]
fn a_frame_is_taken_back_only_before_its_first_byte_is_sent() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let mut outbox = FrameQueue::default();
    assert!(!outbox.take_back());
    let long = message(&"x".repeat(MESSAGE_BYTES_MAX - 64));
    for message in [&message("first"), &long, &message("last")] {
        outbox.push(SocketFrame::new(message, Vec::new()).unwrap()).unwrap();
    }
    while outbox.send_some(&ours).is_ok() {}
    assert_eq!(outbox.len(), 2);
    assert!(outbox.take_back(), "the last frame waits behind a half-sent frame");
    assert!(!outbox.take_back() && outbox.len() == 1);
    ours.set_nonblocking(false).unwrap();
    let reader = std::thread::spawn(move || {
        let mut decoder = FrameDecoder::default();
        let mut next = || decoder.recv_frame(&theirs).unwrap();
        (next().unwrap(), next().unwrap(), next().is_none())
    });
    outbox.flush(&ours).unwrap();
    drop(ours);
    let (first, second, end) = reader.join().unwrap();
    assert_eq!(first.decode::<Event>().unwrap(), message("first"));
    assert!(second.decode::<Event>().unwrap() == long && end);
}

#[test]
fn a_frame_larger_than_the_socket_buffer_arrives_through_a_non_blocking_pair() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let text = "x".repeat(MESSAGE_BYTES_MAX - 64);
    let file = memfd();
    let expected = inode(&file);
    let mut outbox = FrameQueue::default();
    outbox.push(SocketFrame::new(&message(&text), vec![file]).unwrap()).unwrap();
    outbox.push(SocketFrame::new(&message("after"), vec![]).unwrap()).unwrap();
    let mut decoder = FrameDecoder::default();
    let mut frames = Vec::new();
    // The outbox holds more than the socket's buffer, so the second send is refused at the latest.
    while outbox.send_some(&ours).is_ok() {}
    assert!(!outbox.is_empty());
    while frames.len() < 2 {
        if let Err(error) = outbox.send_some(&ours) {
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        }
        match decoder.recv_some(&theirs) {
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            Ok(bytes) => assert_ne!(bytes, 0),
        }
        frames.extend(std::iter::from_fn(|| decoder.next_frame()));
    }
    assert!(outbox.is_empty());
    assert_eq!(frames[0].decode::<Event>().unwrap(), message(&text));
    assert_eq!(seen(frames.remove(0)).1, [expected]);
    assert_eq!(frames[0].decode::<Event>().unwrap(), message("after"));
}

#[test]
fn closing_between_frames_ends_the_stream_and_within_a_frame_is_an_error() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut outbox = FrameQueue::default();
    outbox.push(SocketFrame::new(&message("whole"), vec![]).unwrap()).unwrap();
    outbox.flush(&ours).unwrap();
    (&ours).write_all(&[9, 0, 0, 0, 1]).unwrap();
    drop(ours);
    let mut decoder = FrameDecoder::default();
    assert!(decoder.recv_frame(&theirs).unwrap().is_some());
    let error = decoder.recv_frame(&theirs).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    assert_eq!(error_of(&error), &FrameError::ClosedInFrame { missing: 8 });

    let (ours, theirs) = UnixStream::pair().unwrap();
    drop(ours);
    assert!(FrameDecoder::default().recv_frame(&theirs).unwrap().is_none());
}

#[test]
fn a_length_over_the_limit_is_refused_by_both_sides() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (&ours).write_all(&u32::MAX.to_le_bytes()).unwrap();
    let error = FrameDecoder::default().recv_frame(&theirs).unwrap_err();
    assert_eq!(error_of(&error), &FrameError::MessageTooLong { bytes: u32::MAX as usize });
    let long = message(&"x".repeat(MESSAGE_BYTES_MAX));
    assert!(matches!(SocketFrame::new(&long, vec![]), Err(FrameError::MessageTooLong { .. })));
}

fn send_raw(socket: &UnixStream, bytes: &[u8], files: &[OwnedFd]) {
    let files: Vec<_> = files.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX * 2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty()).unwrap();
}

#[test]
fn more_descriptors_than_a_frame_may_have_are_refused_by_both_sides() {
    let refusal = |count: usize| {
        let files: Vec<_> = (0..count).map(|_| memfd()).collect();
        let (ours, theirs) = UnixStream::pair().unwrap();
        send_raw(&ours, &[0, 0, 0, 0], &files);
        let error = FrameDecoder::default().recv_frame(&theirs).unwrap_err();
        (error_of(&error).clone(), SocketFrame::new(&message(""), files).unwrap_err())
    };
    let too_many = |count| FrameError::TooManyDescriptors { count };
    let one_more = DESCRIPTORS_MAX + 1;
    let far_more = DESCRIPTORS_MAX * 2;
    assert_eq!(refusal(one_more), (too_many(one_more), too_many(one_more)));
    // More than the reader has space for: the kernel drops descriptors and sets a flag.
    assert_eq!(refusal(far_more), (FrameError::DescriptorsLost, too_many(far_more)));
}

#[test]
fn descriptors_in_the_middle_of_a_frame_are_refused() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (&ours).write_all(&[9, 0, 0, 0, 1]).unwrap();
    let mut decoder = FrameDecoder::default();
    assert_eq!(decoder.recv_some(&theirs).unwrap(), 5);
    send_raw(&ours, &[2, 3], &[memfd()]);
    let error = decoder.recv_some(&theirs).unwrap_err();
    assert_eq!(error_of(&error), &FrameError::StrayDescriptors);
}

#[test]
fn an_outbox_refuses_frames_when_the_peer_never_reads() {
    let mut outbox = FrameQueue::default();
    let text = "x".repeat(MESSAGE_BYTES_MAX - 64);
    for _ in 0..OUTBOX_BYTES_MAX / MESSAGE_BYTES_MAX {
        outbox.push(SocketFrame::new(&message(&text), vec![]).unwrap()).unwrap();
    }
    let refused = outbox.push(SocketFrame::new(&message(&text), vec![]).unwrap());
    assert_eq!(refused.unwrap_err(), FrameError::OutboxFull);
}

/// Generates the message length and the number of descriptors of each frame.
fn frames() -> impl Strategy<Value = Vec<(usize, usize)>> {
    let length = prop_oneof![4 => 0..40usize, 1 => 0..5000usize, 1 => 60_000..200_000usize];
    prop::collection::vec((length, prop_oneof![3 => Just(0usize), 1 => 1..4usize]), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_stream_cut_at_any_position_yields_the_same_frames(
        frames in frames(),
        cuts in prop::collection::vec(1..9000usize, 1..40),
    ) {
        // The kernel guarantees that a read ends no later than a send with descriptors.
        let mut stream: Vec<u8> = Vec::new();
        let mut files: Vec<(usize, Vec<OwnedFd>)> = Vec::new();
        let mut barriers = Vec::new();
        let mut expected = Vec::new();
        for &(length, count) in &frames {
            let own: Vec<_> = (0..count).map(|_| memfd()).collect();
            let body: Vec<u8> = (0..length).map(|i| (i * 7 + count) as u8).collect();
            expected.push((Bytes::from(body.clone()), own.iter().map(inode).collect::<Vec<_>>()));
            let start = stream.len();
            stream.extend((length as u32).to_le_bytes());
            stream.extend(body);
            if count > 0 {
                files.push((start, own));
                barriers.push(stream.len());
            }
        }
        let mut decoder = FrameDecoder::default();
        let mut files = files.into_iter().peekable();
        let mut at = 0;
        let mut cut = cuts.iter().cycle();
        while at < stream.len() {
            let barrier = barriers.iter().copied().find(|&end| end > at).unwrap_or(stream.len());
            let end = (at + cut.next().unwrap()).min(barrier);
            let own = files.next_if(|(start, _)| *start < end).map(|(_, own)| own).unwrap_or_default();
            decoder.feed(&stream[at..end], own).unwrap();
            at = end;
        }
        decoder.close().unwrap();
        let frames: Vec<_> = std::iter::from_fn(|| decoder.next_frame()).map(seen).collect();
        prop_assert_eq!(frames, expected);
    }

    #[test]
    fn frames_survive_a_socket_with_a_small_buffer(
        frames in frames(),
        reads in prop::collection::vec(0..4u8, 1..20),
    ) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096).unwrap();
        let mut outbox = FrameQueue::default();
        let mut decoder = FrameDecoder::default();
        let mut expected = Vec::new();
        for &(length, count) in &frames {
            let own: Vec<_> = (0..count).map(|_| memfd()).collect();
            let event = message(&"y".repeat(length));
            expected.push((Bytes::from(event.encode_to_vec()), own.iter().map(inode).collect::<Vec<_>>()));
            outbox.push(SocketFrame::new(&event, own).unwrap()).unwrap();
        }
        let mut arrived = Vec::new();
        let mut reads = reads.iter().cycle();
        while arrived.len() < expected.len() {
            let stuck = match outbox.send_some(&ours) {
                Ok(bytes) => bytes == 0,
                Err(error) => {
                    prop_assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
                    true
                }
            };
            // Reads are rarer than writes, so that frames pile up in the socket.
            if stuck || *reads.next().unwrap() == 0 {
                match decoder.recv_some(&theirs) {
                    Ok(_) => arrived.extend(std::iter::from_fn(|| decoder.next_frame()).map(seen)),
                    Err(error) => prop_assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
                }
            }
        }
        prop_assert_eq!(arrived, expected);
    }
}
