//! Calls from a worker, played by the test at the other end of the socket.
#![allow(clippy::unwrap_used)]

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use millrace_function::{DataType, Error, INLINE_BYTES_MAX, Session};
use millrace_proto::FUNCTION_PROTOCOL_VERSION;
use millrace_proto::frames::{FrameDecoder, FrameQueue, SocketFrame};
use millrace_proto::function::from_process::Message as Said;
use millrace_proto::function::tensor::Contents;
use millrace_proto::function::to_process::Message as Told;
use millrace_proto::function::{self as wire, NotFetched, NotStored};
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};

/// The worker's end of the socket.
struct Worker {
    socket: UnixStream,
    decoder: FrameDecoder,
}

impl Worker {
    /// Greets a session and assigns it `names` ids.
    fn greet(version: u32, names: u64) -> (Self, Result<Session, Error>) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut worker = Self { socket: ours, decoder: FrameDecoder::default() };
        worker.tell(
            Told::Hello(wire::Hello {
                protocol_version: version,
                ids: Some(block(1, names)),
                ..Default::default()
            }),
            Vec::new(),
        );
        (worker, Session::over(OwnedFd::from(theirs)))
    }

    fn tell(&mut self, message: Told, descriptors: Vec<OwnedFd>) {
        let mut outbox = FrameQueue::default();
        let message = wire::ToProcess { message: Some(message) };
        outbox.push(SocketFrame::new(&message, descriptors).unwrap()).unwrap();
        outbox.flush(&self.socket).unwrap();
    }

    fn hear(&mut self) -> (Said, Vec<OwnedFd>) {
        let frame = self.decoder.recv_frame(&self.socket).unwrap().unwrap();
        let message: wire::FromProcess = frame.decode().unwrap();
        (message.message.unwrap(), frame.descriptors)
    }

    fn call(&mut self, call: u64, x: &'static [u8]) {
        let input = wire::Tensor {
            name: "x".into(),
            datatype: "UINT8".into(),
            shape: vec![x.len() as i64],
            contents: Some(Contents::Inline(x.into())),
            ..Default::default()
        };
        self.tell(Told::Call(wire::Call { call, inputs: vec![input], ..Default::default() }), Vec::new());
    }
}

fn not_stored(why: NotStored) -> wire::Stored {
    wire::Stored { refused: why.into() }
}

fn block(first: u64, count: u64) -> wire::IdBlock {
    wire::IdBlock { home: "w1".into(), epoch: 1, first, count }
}

#[test]
fn stored_data_is_sealed_memory_that_an_output_names() {
    let (mut worker, session) = Worker::greet(FUNCTION_PROTOCOL_VERSION, 10);
    let session = session.unwrap();
    assert!(matches!(worker.hear().0, Said::Ready(_)));
    let function = thread::spawn(move || {
        let call = session.next_call().unwrap().unwrap();
        let x = call.fetch(&call.input("x").unwrap().id).unwrap();
        let mut room = call.create(INLINE_BYTES_MAX + 1).unwrap();
        room[..3].copy_from_slice(x.bytes().unwrap());
        let id = call.unique_id().unwrap();
        call.store(&id, room).unwrap();
        assert!(matches!(call.store(&id, call.create(1).unwrap()), Err(Error::IdAlreadyUsed(_))));
        assert_eq!(call.fetch(&id).unwrap().bytes().unwrap()[..3], *b"abc");
        call.output("y", &id, DataType::Uint8, &[INLINE_BYTES_MAX as i64 + 1]).unwrap();
        assert!(matches!(call.output("y", &id, DataType::Uint8, &[1]), Err(Error::OutputAlreadySet(_))));
        assert!(matches!(session.next_call(), Err(Error::CallUnanswered)));
        call.finish().unwrap();
        assert!(matches!(call.finish(), Err(Error::AlreadyAnswered)));
        assert!(matches!(call.unique_id(), Err(Error::AlreadyAnswered)));
        assert!(matches!(call.fetch(&id), Err(Error::AlreadyAnswered)));
        assert!(matches!(call.store(&id, call.create(1).unwrap()), Err(Error::AlreadyAnswered)));
        assert!(session.next_call().unwrap().is_none(), "the worker closed the socket");
    });
    worker.call(7, b"abc");
    let (Said::Store(store), descriptors) = worker.hear() else { panic!() };
    // The first id went to the input.
    assert_eq!(store.id.unwrap().counter, 2);
    let seals = fcntl_get_seals(&descriptors[0]).unwrap();
    assert!(seals.contains(SealFlags::WRITE | SealFlags::SHRINK));
    assert_eq!(fstat(&descriptors[0]).unwrap().st_size as u64, store.bytes);
    worker.tell(Told::Stored(wire::Stored::default()), Vec::new());
    let (Said::Return(answer), descriptors) = worker.hear() else { panic!() };
    assert!(descriptors.is_empty(), "the data does not travel");
    let Some(Contents::Object(id)) = &answer.outputs[0].contents else { panic!("{answer:?}") };
    assert_eq!((answer.call, id.counter), (7, 2));
    drop(worker);
    function.join().unwrap();
}

#[test]
fn data_without_room_at_the_worker_is_answered_inline_and_ids_of_an_old_registration_are_replaced() {
    let (mut worker, session) = Worker::greet(FUNCTION_PROTOCOL_VERSION, 10);
    let session = session.unwrap();
    worker.hear();
    let function = thread::spawn(move || {
        let call = session.next_call().unwrap().unwrap();
        let id = call.unique_id().unwrap();
        call.store(&id, call.create(4).unwrap()).unwrap();
        let other = call.unique_id().unwrap();
        assert_eq!(other.counter, id.counter + 1);
        call.store(&other, call.create(4).unwrap()).unwrap();
        assert_eq!(call.unique_id().unwrap().counter, 100);
        call.response("y", &id, DataType::Uint8, &[4]).unwrap();
        call.finish().unwrap();
    });
    worker.call(1, b"x");
    assert!(matches!(worker.hear().0, Said::Store(_)));
    worker.tell(Told::Stored(not_stored(NotStored::NoRoom)), Vec::new());
    // The second store is refused because the id's registration is over.
    assert!(matches!(worker.hear().0, Said::Store(_)));
    worker.tell(Told::Stored(not_stored(NotStored::Over)), Vec::new());
    assert!(matches!(worker.hear().0, Said::TakeIds(_)));
    worker.tell(Told::Ids(block(100, 10)), Vec::new());
    let (Said::Return(answer), _) = worker.hear() else { panic!() };
    assert!(answer.outputs[0].response);
    assert_eq!(answer.outputs[0].contents, Some(Contents::Inline(vec![0; 4].into())));
    function.join().unwrap();
}

#[test]
fn a_dropped_call_fails_and_lost_data_is_an_error() {
    let (mut worker, session) = Worker::greet(FUNCTION_PROTOCOL_VERSION, 10);
    let session = session.unwrap();
    worker.hear();
    let function = thread::spawn(move || {
        let call = session.next_call().unwrap().unwrap();
        let nowhere = call.unique_id().unwrap();
        let lost = call.fetch(&nowhere).unwrap_err();
        assert!(matches!(&lost, Error::DataLost { id, .. } if *id == nowhere));
        assert_eq!((lost.reason(), lost.to_string()), ("DATA_LOST", "no worker has the data".to_owned()));
        assert_eq!(call.fetch(&nowhere).unwrap_err().reason(), "UNAVAILABLE");
        assert!(matches!(call.store(&nowhere, call.create(1).unwrap()), Err(Error::IdAlreadyUsed(_))));
        assert!(matches!(call.input("z"), Err(Error::NoInput(_))));
    });
    worker.call(1, b"x");
    for refused in [NotFetched::Lost, NotFetched::Unavailable] {
        assert!(matches!(worker.hear().0, Said::Fetch(_)));
        let message = "no worker has the data".to_owned();
        let fetched = wire::Fetched { refused: refused.into(), message, ..Default::default() };
        worker.tell(Told::Fetched(fetched), Vec::new());
    }
    // Another call of this process may have used the id.
    assert!(matches!(worker.hear().0, Said::Store(_)));
    worker.tell(Told::Stored(not_stored(NotStored::Taken)), Vec::new());
    let (Said::Fail(fail), _) = worker.hear() else { panic!() };
    assert_eq!(fail.message, "the function dropped the call without an answer");
    function.join().unwrap();
}

#[test]
fn a_worker_of_another_version_is_refused_with_advice() {
    let (_worker, session) = Worker::greet(FUNCTION_PROTOCOL_VERSION + 1, 10);
    let refused = session.unwrap_err().to_string();
    assert!(refused.contains("build it against the worker's version"), "{refused}");
}
