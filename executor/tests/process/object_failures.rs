//! Tests objects that do not exist, do not fit or fail, and the state that they leave.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use millrace_device::monotonic_now;
use millrace_executor::RUNS_KEPT_MAX;
use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;
use rustix::process::Signal;

use crate::object_support::{AT, Part, ROWS, Y_BYTES, file, object, on, placed, whole};
use crate::support::{Executor, MEMORY, Model, PAGE, tensor, x};

/// Returns an executor that keeps the output of run 1.
fn kept() -> Executor {
    let model = Model::new(synth::mlp());
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.keep(1, x(&[ROWS, 64]));
    executor
}

#[test]
fn an_object_that_cannot_be_placed_is_refused_and_leaves_no_state() {
    let mut executor = kept();
    let fits = || placed(5, Y_BYTES, Some(whole(1)));
    let extent = |range_offset, device_offset, bytes| vec![Extent { range_offset, device_offset, bytes }];
    let pages = Y_BYTES.next_multiple_of(PAGE);
    let output = |part: OutputPart| PlaceObject { output: Some(part), ..fits() };
    for (place, says) in [
        (PlaceObject { extents: vec![], ..fits() }, "do not cover"),
        (PlaceObject { extents: extent(0, AT, pages - PAGE), ..fits() }, "do not cover"),
        (PlaceObject { extents: extent(PAGE, AT, pages), ..fits() }, "do not cover bytes 0..4096"),
        (PlaceObject { extents: extent(0, AT + 1, pages), ..fits() }, "not whole pages"),
        (PlaceObject { extents: extent(0, MEMORY.get() - PAGE, pages), ..fits() }, "past the end"),
        (
            PlaceObject { extents: [extent(0, AT, pages), extent(PAGE, 0, PAGE)].concat(), ..fits() },
            "overlaps",
        ),
        (output(whole(2)), "output \"y\" of run 2 is not kept"),
        (output(OutputPart { output: "z".to_owned(), ..whole(1) }), "output \"z\" of run 1 is not kept"),
        (output(OutputPart { offset: 1, ..whole(1) }), "past the end of output \"y\""),
        (output(OutputPart { offset: u64::MAX, ..whole(1) }), "past the end of output \"y\""),
        (output(OutputPart { bytes: 8, ..whole(1) }), "8 bytes of an output are to fill it"),
        (PlaceObject { has_host: true, host_fd: 0, ..placed(5, Y_BYTES, None) }, "descriptor 0"),
    ] {
        let message = executor.place(place).unwrap_err();
        assert!(message.contains(says), "{says}: {message}");
    }
    for fault in [Fault::FailNextMap, Fault::FailNextCopy] {
        executor.inject(fault, 0);
        assert!(executor.place(fits()).unwrap_err().contains("injected"));
    }
    executor.run(2, 1, 1, on(object(5)));
    assert_eq!(executor.run_failure(2), RunFailure::NotResident);
    // None of the failed attempts prevents a new one.
    executor.place(fits()).unwrap();
    assert!(executor.place(fits()).unwrap_err().contains("there already"));
    executor.run(3, 1, 1, on(object(5)));
    executor.ran(3).unwrap();
    executor.said_no_more();
}

#[test]
fn freeing_an_object_while_its_filling_fails_reports_both_events() {
    let mut executor = kept();
    // The free arrives before, during or after the failure of the filling.
    for _ in 0..100 {
        executor.inject(Fault::FailNextCopy, 0);
        executor.send(Command::PlaceObject(placed(5, Y_BYTES, Some(whole(1)))));
        executor.send(Command::FreeObject(FreeObject { object: 5 }));
        let of_both = |event| match event {
            Event::PlaceFailed(_) => Some("failed"),
            Event::ObjectFreed(ObjectFreed { object: 5 }) => Some("freed"),
            _ => None,
        };
        assert_eq!([executor.expect(of_both), executor.expect(of_both)], ["failed", "freed"]);
    }
    executor.said_no_more();
}

#[test]
fn inputs_without_valid_object_bytes_fail_only_their_run() {
    let mut executor = kept();
    executor.place(placed(5, Y_BYTES, Some(whole(1)))).unwrap();
    executor
        .place(PlaceObject {
            extents: vec![Extent { range_offset: 0, device_offset: 128 << 20, bytes: 2 << 20 }],
            ..placed(6, Y_BYTES, None)
        })
        .unwrap();
    let kept_bytes = Some(tensor::Contents::KeptBytes(Y_BYTES));
    let kept_input = Tensor { contents: kept_bytes, ..tensor("x", "FP32", &[ROWS, 64], vec![]) };
    for (inputs, failure, says) in [
        (on(object(9)), RunFailure::NotResident, "object 9 is not there"),
        (on(object(6)), RunFailure::NotResident, "object 6 is not all loaded"),
        (on(ObjectPart { offset: 1, ..object(5) }), RunFailure::Model, "past the end of object 5"),
        (on(ObjectPart { offset: u64::MAX, ..object(5) }), RunFailure::Model, "past the end of object 5"),
        (on(ObjectPart { bytes: Y_BYTES - 4, ..object(5) }), RunFailure::Model, "are not a tensor of shape"),
        (vec![kept_input], RunFailure::Model, "contents of a response"),
    ] {
        executor.run(2, 1, 1, inputs);
        let (found, message) = executor.ran(2).unwrap_err();
        assert_eq!(found, failure, "{message}");
        assert!(message.contains(says), "{says}: {message}");
    }
    executor.run(3, 1, 1, on(object(5)));
    executor.ran(3).unwrap();
    // The failed runs no longer use the objects.
    executor.free(5);
    executor.free(6);
    executor.said_no_more();
}

#[test]
fn invalid_copies_are_refused() {
    let mut executor = kept();
    executor.place(placed(5, Y_BYTES, None)).unwrap();
    for (part, says) in [
        (Part::Object(object(9)), "object 9 is not there"),
        (Part::Object(object(5)), "not loaded"),
        (Part::Object(ObjectPart { offset: 1, ..object(5) }), "past the end of object 5"),
        (Part::Output(whole(2)), "not kept"),
        (Part::Output(OutputPart { offset: 1, ..whole(1) }), "past the end of output"),
    ] {
        let message = executor.copy_out(part).unwrap_err();
        assert!(message.contains(says), "{says}: {message}");
    }
    executor.inject(Fault::FailNextCopy, 0);
    assert!(executor.copy_out(Part::Output(whole(1))).unwrap_err().contains("injected"));
    executor.copy_out(Part::Output(whole(1))).unwrap();

    let batch = executor.grant_object(9, 0..PAGE, None);
    assert_eq!(executor.copy_failure(batch), CopyFailure::NotMapped);
    let batch = executor.grant_object(5, 0..PAGE, None);
    let (failure, message) = executor.copied(batch).unwrap_err();
    assert_eq!(failure, CopyFailure::Device);
    assert!(message.contains("no host memory"), "{message}");
    executor.free(5);
    executor.place_with_host(placed(5, Y_BYTES, None), file(&vec![0; Y_BYTES as usize])).unwrap();
    let batch = executor.grant_object(5, 0..Y_BYTES + 1, None);
    let (failure, message) = executor.copied(batch).unwrap_err();
    assert_eq!(failure, CopyFailure::Device);
    assert!(message.contains("past the end of the object or output"), "{message}");
    // Like grants for programs, these grants expire with their windows and can be revoked.
    let late = Copy { object: 5, not_after_ns: 1, ..Copy::default() };
    let batch = executor.grant_copy(late);
    assert_eq!(executor.copy_failure(batch), CopyFailure::Expired);
    let hour = monotonic_now() + Duration::from_secs(3600);
    let early = Copy { object: 5, not_before_ns: hour.as_nanos(), not_after_ns: u64::MAX, ..Copy::default() };
    let batch = executor.grant_copy(early.clone());
    executor.send(Command::Revoke(Revoke { transfer: 1, batch }));
    assert_eq!(executor.copy_failure(batch), CopyFailure::Revoked);
    // A grant that waits for its window does not keep its object alive.
    let batch = executor.grant_copy(early);
    executor.free(5);
    assert_eq!(executor.copy_failure(batch), CopyFailure::NotMapped);
    executor.said_no_more();
}

#[test]
fn dropped_outputs_remain_only_for_earlier_commands() {
    let mut executor = kept();
    let copying = executor.begin_copy_out(Part::Output(whole(1)));
    executor.send(Command::PlaceObject(placed(5, Y_BYTES, Some(whole(1)))));
    executor.send(Command::DropOutputs(DropOutputs { run: 1 }));
    let copied = executor.copied_out(copying).unwrap();
    executor.expect(|event| (event == Event::ObjectPlaced(ObjectPlaced { object: 5 })).then_some(()));
    assert_eq!(executor.copy_out(Part::Object(object(5))), Ok(copied));
    assert!(executor.copy_out(Part::Output(whole(1))).unwrap_err().contains("dropped"));
    executor.send(Command::DropOutputs(DropOutputs { run: 1 }));
    // The name of the run is free again.
    executor.keep(1, x(&[ROWS, 64]));
}

#[test]
fn runs_keep_their_own_outputs_up_to_the_bound() {
    let mut executor = kept();
    let keep = |executor: &mut Executor, run, kept: &str| {
        let inputs = x(&[ROWS, 64]);
        let kept = vec![kept.to_owned()];
        executor.send(Command::Run(Run { run, program: 1, generation: 1, inputs, kept, ..Run::default() }));
        executor.ran(run).map(|answer| answer.done.run).map_err(|(failure, message)| {
            assert_ne!(failure, RunFailure::NotResident);
            message
        })
    };
    assert!(keep(&mut executor, 1, "y").unwrap_err().contains("kept already"));
    assert!(keep(&mut executor, 2, "z").unwrap_err().contains("\"z\" is to be kept"));
    for run in 2..=RUNS_KEPT_MAX as u64 {
        assert_eq!(keep(&mut executor, run, "y"), Ok(run));
    }
    assert!(keep(&mut executor, 1000, "y").unwrap_err().contains(&RUNS_KEPT_MAX.to_string()));
    executor.run(1000, 1, 1, x(&[ROWS, 64]));
    executor.ran(1000).unwrap();
    executor.send(Command::DropOutputs(DropOutputs { run: 7 }));
    assert_eq!(keep(&mut executor, 1000, "y"), Ok(1000));
}

#[test]
fn a_killed_executor_leaves_neither_objects_nor_outputs() {
    let mut executor = kept();
    executor.place(placed(5, Y_BYTES, Some(whole(1)))).unwrap();
    executor.begin_copy_out(Part::Object(object(5)));
    executor.child.kill().unwrap();
    assert_eq!(executor.child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
    let model = Model::new(synth::mlp());
    let mut next = Executor::with(&model, 1);
    next.bring_in(&model, 1, 1);
    next.run(2, 1, 1, on(object(5)));
    assert_eq!(next.run_failure(2), RunFailure::NotResident);
    assert!(next.copy_out(Part::Output(whole(1))).unwrap_err().contains("not kept"));
    // The same names are free in the new process.
    next.keep(1, x(&[ROWS, 64]));
    next.place(placed(5, Y_BYTES, Some(whole(1)))).unwrap();
}

#[test]
fn a_lost_device_fails_every_command_with_an_error() {
    let mut executor = kept();
    executor.place(placed(5, Y_BYTES, Some(whole(1)))).unwrap();
    executor.inject(Fault::Xid, 0);
    executor.expect(|event| matches!(event, Event::DeviceFailed(_)).then_some(()));
    executor.run(2, 1, 1, on(object(5)));
    assert_eq!(executor.run_failure(2), RunFailure::Device);
    executor.copy_out(Part::Object(object(5))).unwrap_err();
    executor.copy_out(Part::Output(whole(1))).unwrap_err();
    executor.place(placed(6, Y_BYTES, Some(whole(1)))).unwrap_err();
    executor.said_no_more();
}

/// Returns a process's open descriptors and mappings.
fn footprint(pid: u32) -> (usize, usize) {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    (descriptors, fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count())
}

#[test]
fn placing_and_freeing_a_hundred_objects_leaks_nothing() {
    let mut executor = kept();
    let pid = executor.child.id();
    let mut cycle = |run| {
        executor.keep(run, x(&[ROWS, 64]));
        executor.place(placed(run, Y_BYTES, Some(whole(run)))).unwrap();
        let bytes = executor.copy_out(Part::Object(object(run))).unwrap();
        let granted = executor.begin_granted(Part::Output(whole(run)));
        let batch = executor.grant_out(&granted, 0..Y_BYTES, 0..u64::MAX);
        executor.copied(batch).unwrap();
        executor.end_copy_out(&granted);
        assert_eq!(granted.bytes(), bytes);
        executor.run(run, 1, 1, on(object(run)));
        executor.ran(run).unwrap();
        executor.free(run);
        executor.place_with_host(placed(run, Y_BYTES, None), file(&bytes)).unwrap();
        let batch = executor.grant_object(run, 0..Y_BYTES, None);
        executor.copied(batch).unwrap();
        executor.free(run);
        executor.send(Command::DropOutputs(DropOutputs { run }));
        // The copy thread has finished its last batch once it answers the next one.
        let batch = executor.grant(1, 1, &[]);
        executor.copied(batch).unwrap();
    };
    (10..20).for_each(&mut cycle);
    let before = footprint(pid);
    (20..120).for_each(&mut cycle);
    let after = footprint(pid);
    assert_eq!(after.0, before.0, "descriptors");
    // The allocator may shift its boundaries, but a hundred leaked objects would add hundreds of mappings.
    assert!(after.1 <= before.1 + 8, "mappings: {} then {}", before.1, after.1);
}
