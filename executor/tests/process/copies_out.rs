//! Tests copies to the host that proceed batch by batch, each under its grant (D12, D13).

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use millrace_device::monotonic_now;
use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;
use rustix::process::Signal;

use crate::object_support::{Part, ROWS, Y_BYTES, object, placed, whole};
use crate::support::{Executor, Model, x};

const ANY_TIME: std::ops::Range<u64> = 0..u64::MAX;
/// A window that never opens during a test.
const NEVER: std::ops::Range<u64> = u64::MAX - 1..u64::MAX;
const HALF: u64 = Y_BYTES / 2;

/// Returns an executor that keeps the output of run 1, also as object 5, and the bytes of this output.
fn kept() -> (Executor, Vec<u8>) {
    let model = Model::new(synth::mlp());
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.keep(1, x(&[ROWS, 64]));
    executor.place(placed(5, Y_BYTES, Some(whole(1)))).unwrap();
    let bytes = executor.copy_out(Part::Output(whole(1))).unwrap();
    (executor, bytes)
}

fn freed(event: Event) -> Option<()> {
    (event == Event::ObjectFreed(ObjectFreed { object: 5 })).then_some(())
}

#[test]
fn batches_of_objects_and_outputs_are_copied_to_their_offsets_in_any_order() {
    let (mut executor, bytes) = kept();
    for part in [Part::Object(object(5)), Part::Output(whole(1))] {
        let copying = executor.begin_granted(part);
        let later = executor.grant_out(&copying, HALF..Y_BYTES, ANY_TIME);
        let done = executor.copied(later).unwrap();
        assert_eq!(done.bytes, Y_BYTES - HALF);
        assert!(done.started_ns <= done.finished_ns);
        let so_far = copying.bytes();
        let (none, half) = so_far.split_at(HALF as usize);
        assert_eq!((none.iter().max(), half), (Some(&0), &bytes[HALF as usize..]));
        let first = executor.grant_out(&copying, 0..HALF, ANY_TIME);
        executor.copied(first).unwrap();
        assert_eq!(copying.bytes(), bytes);
        executor.end_copy_out(&copying);
    }
    // A copy of a part of the object.
    let offset = 12;
    let size = 4 * 1000;
    let copying = executor.begin_granted(Part::Object(ObjectPart { offset, bytes: size, ..object(5) }));
    let batch = executor.grant_out(&copying, 0..size, ANY_TIME);
    executor.copied(batch).unwrap();
    assert_eq!(copying.bytes(), bytes[offset as usize..(offset + size) as usize]);
    executor.said_no_more();
}

/// D11: each direction has a stream of its own.
#[test]
fn a_batch_waiting_for_its_window_does_not_delay_the_other_direction() {
    let (mut executor, bytes) = kept();
    let model = Model::new(synth::mlp());
    let copying = executor.begin_granted(Part::Object(object(5)));
    let coming = executor.grant_in(1, 1, &model.all(), NEVER.start, NEVER.end);
    let out = executor.grant_out(&copying, 0..Y_BYTES, ANY_TIME);
    executor.copied(out).unwrap();
    assert_eq!(copying.bytes(), bytes);
    let out = executor.grant_out(&copying, 0..1, NEVER);
    executor.send(Command::Revoke(Revoke { transfer: 1, batch: coming }));
    assert_eq!(executor.copy_failure(coming), CopyFailure::Revoked);
    let coming = executor.grant(1, 1, &model.all());
    executor.copied(coming).unwrap();
    executor.send(Command::Revoke(Revoke { transfer: 1, batch: out }));
    assert_eq!(executor.copy_failure(out), CopyFailure::Revoked);
    executor.said_no_more();
}

#[test]
fn a_batch_begins_within_its_window_or_is_refused() {
    let (mut executor, bytes) = kept();
    let copying = executor.begin_granted(Part::Object(object(5)));
    let late = executor.grant_out(&copying, 0..Y_BYTES, 0..1);
    assert_eq!(executor.copy_failure(late), CopyFailure::Expired);
    assert!(copying.bytes().is_empty());
    let at = (monotonic_now() + Duration::from_millis(20)).as_nanos();
    let early = executor.grant_out(&copying, 0..Y_BYTES, at..u64::MAX);
    assert!(executor.copied(early).unwrap().started_ns >= at);
    assert_eq!(copying.bytes(), bytes);
}

#[test]
fn a_failed_batch_is_reported_and_can_be_granted_again() {
    let (mut executor, bytes) = kept();
    let copying = executor.begin_granted(Part::Object(object(5)));
    executor.inject(Fault::FailNextCopy, 0);
    let batch = executor.grant_out(&copying, 0..Y_BYTES, ANY_TIME);
    let (failure, message) = executor.copied(batch).unwrap_err();
    assert_eq!(failure, CopyFailure::Device);
    assert!(message.contains("injected"), "{message}");
    let batch = executor.grant_out(&copying, 0..Y_BYTES, ANY_TIME);
    executor.copied(batch).unwrap();
    assert_eq!(copying.bytes(), bytes);
    let past = executor.grant_out(&copying, 1..Y_BYTES + 1, ANY_TIME);
    let (failure, message) = executor.copied(past).unwrap_err();
    assert_eq!(failure, CopyFailure::Device);
    assert!(message.contains("past the end"), "{message}");
    executor.said_no_more();
}

#[test]
fn a_copy_that_cannot_begin_is_refused_with_its_batches() {
    let (mut executor, _) = kept();
    for (part, says) in [
        (Part::Object(object(9)), "object 9 is not there"),
        (Part::Object(ObjectPart { offset: 1, ..object(5) }), "past the end of object 5"),
        (Part::Output(whole(2)), "not kept"),
    ] {
        let copying = executor.begin_granted(part);
        let batch = executor.grant_out(&copying, 0..1, ANY_TIME);
        assert_eq!(executor.copy_failure(batch), CopyFailure::NotMapped);
        let message = executor.copied_out(copying).unwrap_err();
        assert!(message.contains(says), "{says}: {message}");
    }
    let copying = executor.begin_granted(Part::Object(object(5)));
    executor.end_copy_out(&copying);
    executor.end_copy_out(&copying);
    let batch = executor.grant_out(&copying, 0..1, ANY_TIME);
    assert_eq!(executor.copy_failure(batch), CopyFailure::NotMapped);
    executor.said_no_more();
}

#[test]
fn the_source_of_a_copy_stays_until_the_copy_has_ended() {
    let (mut executor, bytes) = kept();
    let of_object = executor.begin_granted(Part::Object(object(5)));
    let of_output = executor.begin_granted(Part::Output(whole(1)));
    executor.send(Command::FreeObject(FreeObject { object: 5 }));
    executor.send(Command::DropOutputs(DropOutputs { run: 1 }));
    for copying in [&of_object, &of_output] {
        let batch = executor.grant_out(copying, 0..Y_BYTES, ANY_TIME);
        executor.copied(batch).unwrap();
        assert_eq!(copying.bytes(), bytes);
    }
    assert_eq!(executor.said(|event| freed(event.clone())), [], "the copy may continue");
    executor.end_copy_out(&of_object);
    executor.end_copy_out(&of_output);
    executor.expect(freed);
    // A waiting batch also keeps the object.
    executor.keep(1, x(&[ROWS, 64]));
    executor.place(placed(5, Y_BYTES, Some(whole(1)))).unwrap();
    let copying = executor.begin_granted(Part::Object(object(5)));
    let never = executor.grant_out(&copying, 0..1, NEVER);
    executor.end_copy_out(&copying);
    executor.send(Command::FreeObject(FreeObject { object: 5 }));
    executor.send(Command::Revoke(Revoke { transfer: 1, batch: never }));
    assert_eq!(executor.copy_failure(never), CopyFailure::Revoked);
    executor.expect(freed);
    executor.said_no_more();
}

#[test]
fn a_lost_gpu_and_a_killed_process_end_granted_copies() {
    let (mut executor, _) = kept();
    let copying = executor.begin_granted(Part::Object(object(5)));
    executor.inject(Fault::OffTheBus, 0);
    let batch = executor.grant_out(&copying, 0..Y_BYTES, ANY_TIME);
    assert_eq!(executor.copy_failure(batch), CopyFailure::Device);
    executor.expect(|event| matches!(event, Event::DeviceFailed(_)).then_some(()));

    let (mut executor, _) = kept();
    let copying = executor.begin_granted(Part::Object(object(5)));
    executor.grant_out(&copying, 0..Y_BYTES, NEVER);
    executor.child.kill().unwrap();
    assert_eq!(executor.child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
}
