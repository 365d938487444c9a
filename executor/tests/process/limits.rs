//! Tests many runs, large tensors and repeated loading.

use std::fs;

use millrace_device::HostRegion;
use millrace_executor::{INLINE_BYTES_MAX, RUNS_QUEUED_MAX};
use millrace_model::synth::{self, Encoder};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;

use crate::support::{Executor, Model, numbers, send, tensor, x};

#[test]
fn tensors_of_more_than_64_mib_are_sent_in_both_directions() {
    let model = Model::new(synth::mlp());
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    let rows = 70 * (1 << 20) / (64 * 4);
    let bytes = numbers(rows * 64);
    let file = HostRegion::from_bytes("input", &bytes).unwrap().share().unwrap();
    let contents = Some(tensor::Contents::ContentsFd(0));
    let input = Tensor { contents, ..tensor("x", "FP32", &[rows as i64, 64], vec![]) };
    let run = Run { run: 1, program: 1, generation: 1, inputs: vec![input], ..Run::default() };
    send(&executor.socket, Command::Run(run), vec![file]);
    let large = executor.ran(1).unwrap();
    assert_eq!(large.done.outputs[0].shape, [rows as i64, 64]);
    let large = large.bytes();
    assert_eq!(large.len(), bytes.len());
    // Each row on its own, and sent inline, gives the same numbers as within the large tensor.
    for row in [0, rows / 2, rows - 1] {
        let own = row * 256..(row + 1) * 256;
        executor.run(2, 1, 1, vec![tensor("x", "FP32", &[1, 64], bytes[own.clone()].to_vec())]);
        let small = executor.ran(2).unwrap().bytes();
        let float = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap());
        for (one, many) in small.chunks(4).map(float).zip(large[own].chunks(4).map(float)) {
            assert!((one - many).abs() < 1e-5, "row {row}: {one} and {many}");
        }
    }
}

#[test]
fn an_output_is_inline_up_to_the_limit_and_a_file_above() {
    let model = Model::new(synth::mlp());
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    let rows = (INLINE_BYTES_MAX / 256) as i64;
    for (rows, inline) in [(rows, true), (rows + 1, false)] {
        executor.run(1, 1, 1, x(&[rows, 64]));
        let answer = executor.ran(1).unwrap();
        let contents = answer.done.outputs[0].contents.as_ref().unwrap();
        assert_eq!(matches!(contents, tensor::Contents::Inline(_)), inline, "{rows} rows");
        assert_eq!(answer.bytes().len() as i64, rows * 256);
    }
}

#[test]
fn int64_inputs_run_and_values_outside_32_bits_are_refused() {
    let tiny = Encoder { layers: 1, hidden: 32, heads: 2, vocabulary: 100, positions: 16, ..Encoder::BASE };
    let model = Model::new(synth::bert_like(tiny));
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    let ids = |ids: &[i64]| {
        let bytes = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        vec![tensor("input_ids", "INT64", &[1, ids.len() as i64], bytes)]
    };
    executor.run(1, 1, 1, ids(&[1, 2, 99]));
    assert_eq!(executor.ran(1).unwrap().done.outputs[0].shape, [1, 32]);
    for (bad, says) in [(&[1, 1 << 40][..], "element 1 is 1099511627776"), (&[1, 100], "")] {
        executor.run(2, 1, 1, ids(bad));
        let (failure, message) = executor.ran(2).unwrap_err();
        assert_eq!(failure, RunFailure::Model);
        assert!(message.contains(says), "{message}");
    }
    executor.run(3, 1, 1, ids(&[1]));
    executor.ran(3).unwrap();
}

#[test]
fn runs_wait_in_order_up_to_the_bound_and_can_be_cancelled() {
    let model = Model::new(synth::mlp());
    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    // One run begins and waits for its copies, the bound of runs waits behind it, and one run is too
    // many. A second run is too many if the first had not begun when the queue was full.
    let runs = 1..=RUNS_QUEUED_MAX as u64 + 2;
    for run in runs.clone() {
        executor.run(run, 1, 1, x(&[1, 64]));
    }
    executor.run(0, 9, 1, vec![]);
    assert_eq!(executor.run_failure(0), RunFailure::UnknownProgram);
    let refused = executor.said(|event| match event {
        Event::RunFailed(failed) => Some((failed.run, failed.failure(), failed.message.clone())),
        _ => None,
    });
    assert!((1..=2).contains(&refused.len()), "{refused:?}");
    for (_, failure, message) in &refused {
        assert_eq!(*failure, RunFailure::Device);
        assert!(message.contains(&RUNS_QUEUED_MAX.to_string()), "{message}");
    }
    executor.send(Command::Cancel(Cancel { run: 3 }));
    executor.expect(|event| (event == Event::RunCancelled(RunCancelled { run: 3 })).then_some(()));
    executor.send(Command::Cancel(Cancel { run: 1000 }));
    let batch = executor.grant(1, 1, &model.all());
    executor.copied(batch).unwrap();
    for run in runs.filter(|run| *run != 3 && refused.iter().all(|refused| refused.0 != *run)) {
        let done = executor.expect(|event| match event {
            Event::RunDone(done) => Some(done.run),
            _ => None,
        });
        assert_eq!(done, run);
    }
    executor.said_no_more();
}

/// Returns a process's open descriptors, mappings, and resident bytes that are not shared with other
/// processes.
fn footprint(pid: u32) -> (usize, usize, u64) {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let mappings = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap().lines().count();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let anonymous = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
    let kilobytes: u64 = anonymous.trim().trim_end_matches(" kB").parse().unwrap();
    (descriptors, mappings, kilobytes * 1024)
}

#[test]
fn loading_and_unloading_a_hundred_models_leaks_nothing() {
    let model = Model::new(synth::tiny_cnn());
    let mut executor = Executor::start();
    let pid = executor.child.id();
    let mut cycle = |program| {
        executor.load(&model, program);
        executor.bring_in(&model, program, 1);
        executor.run(program, program, 1, x(&[1, 3, 32, 32]));
        executor.ran(program).unwrap();
        executor.send(Command::UnloadProgram(UnloadProgram { program }));
        executor.expect_unmapped(program, 1);
        // The control thread has finished the unloading once it answers the next command.
        executor.run(0, program, 1, vec![]);
        assert_eq!(executor.run_failure(0), RunFailure::UnknownProgram);
    };
    // The first cycles fill the caches of the allocator and of the thread pool.
    (0..10).for_each(&mut cycle);
    let before = footprint(pid);
    (10..110).for_each(&mut cycle);
    let after = footprint(pid);
    assert_eq!(after.0, before.0, "descriptors");
    // The allocator may shift its boundaries, but a hundred leaked models would add hundreds of mappings.
    assert!(after.1 <= before.1 + 8, "mappings: {} then {}", before.1, after.1);
    let one = model.bytes();
    assert!(after.2 < before.2 + 2 * one, "{} then {} bytes, a model has {one}", before.2, after.2);
}
