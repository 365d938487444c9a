//! Tests failures, and that the executor still works afterwards.

use std::os::unix::process::ExitStatusExt as _;

use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;
use millrace_types::Bytes;
use rustix::process::Signal;

use crate::support::{Executor, MEMORY, Model, PAGE, hello, tensor, x};

fn cnn() -> (Model, Vec<Tensor>) {
    (Model::new(synth::tiny_cnn()), x(&[1, 3, 32, 32]))
}

#[test]
fn after_a_kill_during_a_copy_the_next_incarnation_starts_from_the_host_copy() {
    let padding = Bytes::mib(256).get();
    let model = Model::padded(synth::tiny_cnn(), padding);
    let input = x(&[1, 3, 32, 32]);
    let first = model.bytes() - padding;
    let last = model.bytes() - PAGE;
    let marked = |executor: &Executor, offset| {
        let mut byte = [0];
        executor.memory.read_at(offset, &mut byte).unwrap();
        byte != [0]
    };
    // On a busy machine the copy may finish before the kill, so the test tries again.
    let before = (0..20).find_map(|_| {
        let mut executor = Executor::with(&model, 1);
        executor.bring_in(&model, 1, 1);
        executor.run(1, 1, 1, input.clone());
        let answer = executor.ran(1).unwrap().bytes();
        executor.grant(1, 1, std::slice::from_ref(&(first..model.bytes())));
        while !marked(&executor, first) {
            std::thread::yield_now();
        }
        executor.child.kill().unwrap();
        assert_eq!(executor.child.wait().unwrap().signal(), Some(Signal::KILL.as_raw()));
        (!marked(&executor, last)).then_some(answer)
    });
    let before = before.expect("a kill in the middle of a copy of 256 MiB");

    let mut executor = Executor::with(&model, 1);
    assert!(!marked(&executor, first), "an incarnation has memory of its own");
    executor.bring_in(&model, 1, 1);
    executor.run(1, 1, 1, input);
    assert_eq!(executor.ran(1).unwrap().bytes(), before);
}

#[test]
fn an_input_that_the_model_fails_on_fails_its_run_alone() {
    let (model, input) = cnn();
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    let bytes = |count: usize| vec![0; count * 4];
    for (inputs, says) in [
        (vec![], "\"x\" is missing"),
        (vec![tensor("z", "FP32", &[1], bytes(1))], "\"x\" is missing"),
        ([x(&[1, 3, 32, 32]), vec![tensor("z", "FP32", &[1], bytes(1))]].concat(), "\"z\""),
        ([x(&[1, 3, 32, 32]), x(&[1, 3, 32, 32])].concat(), "twice"),
        (vec![tensor("x", "INT32", &[1, 3, 32, 32], bytes(3072))], "takes FP32"),
        (vec![tensor("x", "FP33", &[1, 3, 32, 32], bytes(3072))], "FP33"),
        (vec![tensor("x", "FP32", &[1, 3, 32, 31], bytes(3 * 32 * 31))], "31"),
        (vec![tensor("x", "FP32", &[3, 32, 32], bytes(3072))], "dims"),
        (x(&[0, 3, 32, 32]), "an operator panicked"),
        (vec![tensor("x", "FP32", &[1, 3, 32, 32], bytes(3071))], "12284 bytes"),
        (vec![tensor("x", "FP32", &[-1, 3, 32, 32], bytes(0))], "negative"),
        (vec![Tensor { contents: None, ..x(&[1, 3, 32, 32]).remove(0) }], "no contents"),
        (
            vec![Tensor { contents: Some(tensor::Contents::ContentsFd(0)), ..x(&[1]).remove(0) }],
            "descriptor 0",
        ),
    ] {
        executor.run(1, 1, 1, inputs);
        let (failure, message) = executor.ran(1).unwrap_err();
        assert_eq!(failure, RunFailure::Model, "{message}");
        assert!(message.contains(says), "{says}: {message}");
    }
    let outputs = vec!["nothing".to_owned()];
    executor.send(Command::Run(Run {
        run: 2,
        program: 1,
        generation: 1,
        inputs: input.clone(),
        outputs,
        ..Run::default()
    }));
    assert_eq!(executor.run_failure(2), RunFailure::Model);
    let outputs = vec!["y".to_owned()];
    executor.send(Command::Run(Run {
        run: 3,
        program: 1,
        generation: 1,
        inputs: input,
        outputs,
        ..Run::default()
    }));
    assert_eq!(executor.ran(3).unwrap().done.outputs[0].name, "y");
}

#[test]
fn a_failed_copy_fails_the_waiting_run_and_a_new_copy_is_awaited() {
    let (model, input) = cnn();
    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    executor.run(1, 1, 1, input.clone());
    executor.inject(Fault::FailNextCopy, 0);
    let batch = executor.grant(1, 1, &model.all());
    assert_eq!(executor.copy_failure(batch), CopyFailure::Device);
    assert_eq!(executor.run_failure(1), RunFailure::NotResident);
    executor.run(2, 1, 1, input.clone());
    assert_eq!(executor.run_failure(2), RunFailure::NotResident);
    let batch = executor.grant(1, 1, &model.all());
    executor.run(3, 1, 1, input);
    executor.copied(batch).unwrap();
    executor.ran(3).unwrap();
}

#[test]
fn a_mapping_without_memory_is_refused_and_a_later_generation_can_be_mapped() {
    let (model, input) = cnn();
    let mut executor = Executor::with(&model, 1);
    let map_failure = |executor: &mut Executor| {
        executor.expect(|event| match event {
            Event::MapFailed(failed) => Some(failed.message),
            _ => None,
        })
    };
    executor.inject(Fault::FailNextMap, 0);
    executor.map(&model, 1, 1, 0);
    assert!(map_failure(&mut executor).contains("out of device memory"));
    executor.map(&model, 1, 2, MEMORY.get());
    assert!(map_failure(&mut executor).contains("past the end"));
    executor.map(&model, 9, 1, 0);
    assert!(map_failure(&mut executor).contains("not loaded"));
    executor.run(1, 1, 2, input.clone());
    assert_eq!(executor.run_failure(1), RunFailure::NotResident);
    executor.bring_in(&model, 1, 3);
    executor.map(&model, 1, 4, 0);
    assert!(map_failure(&mut executor).contains("wait for Unmapped"));
    executor.run(2, 1, 3, input);
    executor.ran(2).unwrap();
}

#[test]
fn a_copy_past_the_mapping_or_the_model_is_refused() {
    let (model, _) = cnn();
    let mut executor = Executor::with(&model, 1);
    let extents = vec![Extent { range_offset: 0, device_offset: 0, bytes: 4096 }];
    executor.send(Command::Map(Map { program: 1, generation: 1, extents }));
    for (range, failure) in [
        (0..8192, CopyFailure::NotMapped),
        (model.bytes()..model.bytes() + 1, CopyFailure::Device),
        (0..0, CopyFailure::Unspecified),
    ] {
        let batch = executor.grant(1, 1, std::slice::from_ref(&range));
        let refused =
            executor.copied(batch).map_or_else(|(failure, _)| failure, |_| CopyFailure::Unspecified);
        assert_eq!(refused, failure, "{range:?}");
    }
}

#[test]
fn an_xid_fails_the_device_and_all_waiting_runs() {
    let (model, input) = cnn();
    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    executor.run(1, 1, 1, input.clone());
    executor.inject(Fault::Xid, 0);
    let message = executor.expect(|event| match event {
        Event::DeviceFailed(failed) => Some(failed.message),
        _ => None,
    });
    assert!(message.contains("Xid"), "{message}");
    assert_eq!(executor.run_failure(1), RunFailure::Device);
    let batch = executor.grant(1, 1, &model.all());
    assert_eq!(executor.copy_failure(batch), CopyFailure::Device);
    executor.run(2, 1, 1, input);
    assert_eq!(executor.run_failure(2), RunFailure::Device);
    executor.said_no_more();
}

#[test]
fn the_next_use_of_a_gpu_off_the_bus_reports_the_lost_device() {
    let (model, input) = cnn();
    let failed = |executor: &mut Executor| {
        let message = executor.expect(|event| match event {
            Event::DeviceFailed(failed) => Some(failed.message),
            _ => None,
        });
        assert!(message.contains("off the bus"), "{message}");
    };
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.inject(Fault::OffTheBus, 0);
    executor.run(1, 1, 1, input);
    assert_eq!(executor.run_failure(1), RunFailure::Device);
    failed(&mut executor);
    executor.said_no_more();

    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    executor.inject(Fault::OffTheBus, 0);
    let batch = executor.grant(1, 1, &model.all());
    assert_eq!(executor.copy_failure(batch), CopyFailure::Device);
    failed(&mut executor);
    executor.said_no_more();
}

#[test]
fn a_lost_context_is_told_apart_from_a_lost_gpu() {
    let (model, input) = cnn();
    for (fault, loss) in [(Fault::OffTheBus, DeviceLoss::Gpu), (Fault::LoseContext, DeviceLoss::Context)] {
        let mut executor = Executor::with(&model, 1);
        executor.bring_in(&model, 1, 1);
        executor.inject(fault, 0);
        executor.run(1, 1, 1, input.clone());
        assert_eq!(executor.run_failure(1), RunFailure::Device);
        let failed = executor.expect(|event| match event {
            Event::DeviceFailed(failed) => Some(failed.loss()),
            _ => None,
        });
        assert_eq!(failed, loss);
        executor.said_no_more();
    }
}

#[test]
fn out_of_memory_fails_a_run_but_not_the_next_one() {
    let (model, input) = cnn();
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.inject(Fault::OutOfMemory, 0);
    executor.run(1, 1, 1, input.clone());
    assert_eq!(executor.run_failure(1), RunFailure::OutOfMemory);
    executor.run(2, 1, 1, input);
    executor.ran(2).unwrap();
    executor.said_no_more();
}

#[test]
fn an_injected_abort_kills_the_process_when_it_next_runs() {
    let (model, input) = cnn();
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.inject(Fault::AbortOnRun, 0);
    executor.run(1, 1, 1, input);
    assert_eq!(executor.child.wait().unwrap().signal(), Some(Signal::ABORT.as_raw()));
}

#[test]
fn faults_are_ignored_if_they_are_not_allowed() {
    let (model, input) = cnn();
    let mut executor = Executor::start_with(Hello { allow_faults: false, ..hello(MEMORY) });
    executor.load(&model, 1);
    for fault in [
        Fault::FailNextMap,
        Fault::FailNextCopy,
        Fault::Xid,
        Fault::AbortOnRun,
        Fault::OffTheBus,
        Fault::LoseContext,
        Fault::OutOfMemory,
    ] {
        executor.inject(fault, 1);
    }
    executor.bring_in(&model, 1, 1);
    executor.inject(Fault::CorruptDevice, 1);
    executor.run(1, 1, 1, input);
    executor.ran(1).unwrap();
    executor.said_no_more();
}

#[test]
fn models_that_cannot_be_loaded_are_refused_with_the_reason() {
    let (model, input) = cnn();
    let mut executor = Executor::start();
    let (Command::LoadProgram(good), _) = model.load(1) else { unreachable!() };
    let both = || vec![model.graph.share().unwrap(), model.weights.share().unwrap()];
    let launch = |args: &[&str], writes: &[&str], offset, bytes| Launch {
        args: args.iter().map(|&name| name.to_owned()).collect(),
        writes: writes.iter().map(|&name| name.to_owned()).collect(),
        reads: vec![ByteRange { offset, bytes }],
    };
    for (load, descriptors, says) in [
        (LoadProgram { weights_fd: 0, graph_fd: 1, ..good.clone() }, both(), "sealed"),
        (LoadProgram { weights_fd: 0, ..good.clone() }, both(), "descriptor 0"),
        (good.clone(), vec![], "descriptor 0"),
        (LoadProgram { graph_bytes: good.graph_bytes + 1, ..good.clone() }, both(), "sealed"),
        (
            LoadProgram { graph_bytes: good.weights_bytes, ..good.clone() },
            vec![model.weights.share().unwrap(), model.weights.share().unwrap()],
            "cannot load the model",
        ),
        (LoadProgram { launches: vec![], ..good.clone() }, both(), "output \"y\""),
        (LoadProgram { launches: vec![launch(&["q"], &["y"], 0, 0)], ..good.clone() }, both(), "\"q\""),
        (LoadProgram { launches: vec![launch(&["x"], &["y", "q"], 0, 0)], ..good.clone() }, both(), "\"q\""),
        (
            LoadProgram { launches: vec![launch(&["x"], &["y"], 0, u64::MAX)], ..good.clone() },
            both(),
            "past the end",
        ),
        (
            LoadProgram { launches: vec![launch(&["x"], &["y"], 1, u64::MAX)], ..good.clone() },
            both(),
            "past the end",
        ),
    ] {
        let message = executor.load_failure(load, descriptors);
        assert!(message.contains(says), "{says}: {message}");
    }
    executor.load(&model, 1);
    assert!(executor.load_failure(good, both()).contains("loaded already"));
    executor.bring_in(&model, 1, 1);
    executor.run(1, 1, 1, input);
    executor.ran(1).unwrap();
}
