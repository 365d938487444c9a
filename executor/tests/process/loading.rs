//! Tests models that are loaded, run during their copy, unmapped, and mapped again elsewhere.

use std::num::NonZeroUsize;
use std::time::Duration;

use millrace_device::monotonic_now;
use millrace_model::{Grouping, synth};
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;

use crate::support::{Executor, Model, PAGE, x};

/// Returns a convolutional and a transformer network, with an input for each.
fn models() -> Vec<(Model, Vec<Tensor>)> {
    vec![
        (Model::new(synth::tiny_cnn()), x(&[2, 3, 32, 32])),
        (Model::new(synth::transformer_block()), x(&[1, 9, 384])),
    ]
}

#[test]
fn a_run_in_launches_gives_the_same_bits_as_a_whole_run() {
    for (model, input) in models() {
        let mut executor = Executor::with(&model, 1);
        let steps: Vec<_> = model.compiled.launches.iter().map(|launch| launch.reads.clone()).collect();
        assert!(steps.len() > 1, "the model is cut");
        // On a busy machine all copies may finish before the run begins, and then the model runs as a
        // whole. In that case the test tries again.
        let (generation, segmented) = (1..50)
            .find_map(|generation| {
                executor.map(&model, 1, generation, 0);
                executor.run(1, 1, generation, input.clone());
                for reads in &steps {
                    let batch = executor.grant(1, generation, reads);
                    executor.copied(batch).unwrap();
                }
                let answer = executor.ran(1).unwrap();
                if answer.done.launches as usize == steps.len() {
                    return Some((generation, answer));
                }
                executor.unmap(1, generation);
                None
            })
            .expect("a run that begins before its copies are done");
        executor.run(2, 1, generation, input);
        let whole = executor.ran(2).unwrap();
        assert_eq!(segmented.bytes(), whole.bytes());
        assert_eq!((whole.done.launches, whole.done.waited_ns), (1, 0));
        let RunDone { started_ns, finished_ns, waited_ns, .. } = segmented.done;
        assert!(waited_ns > 0 && started_ns + waited_ns < finished_ns && finished_ns < monotonic_now().0);
    }
}

#[test]
fn runs_read_the_device_copy_and_a_new_copy_repairs_it() {
    for (model, input) in models() {
        let mut executor = Executor::with(&model, 1);
        executor.bring_in(&model, 1, 1);
        executor.run(1, 1, 1, input.clone());
        let before = executor.ran(1).unwrap().bytes();
        executor.inject(Fault::CorruptDevice, 1);
        executor.run(2, 1, 1, input.clone());
        assert_ne!(executor.ran(2).unwrap().bytes(), before);
        executor.unmap(1, 1);
        executor.bring_in(&model, 1, 2);
        executor.run(3, 1, 2, input);
        assert_eq!(executor.ran(3).unwrap().bytes(), before);
    }
}

#[test]
fn a_model_gives_the_same_outputs_with_any_grouping() {
    let onnx = bytes::Bytes::from(synth::tiny_cnn());
    let one = Grouping { bytes: u64::MAX, launches_max: NonZeroUsize::MIN };
    let [whole, fine] = [one, Grouping::PER_PARAMETER].map(|grouping| {
        let model = Model::grouped(&onnx, grouping);
        let mut executor = Executor::with(&model, 1);
        executor.map(&model, 1, 1, 0);
        executor.run(1, 1, 1, x(&[2, 3, 32, 32]));
        let grants = model.compiled.weights.iter().map(|weight| weight.offset..weight.offset + weight.bytes);
        for range in grants.collect::<Vec<_>>() {
            let batch = executor.grant(1, 1, &[range]);
            executor.copied(batch).unwrap();
        }
        (model.compiled.launches.len(), executor.ran(1).unwrap().bytes())
    });
    assert_eq!(whole.0, 1);
    assert!(fine.0 > 4, "{} launches", fine.0);
    assert_eq!(whole.1, fine.1);
}

#[test]
fn a_model_in_pageable_memory_gives_the_same_outputs_as_in_pinned_memory() {
    for (mut model, input) in models() {
        let answers = [false, true].map(|pageable| {
            model.pageable = pageable;
            let mut executor = Executor::with(&model, 1);
            executor.bring_in(&model, 1, 1);
            executor.run(1, 1, 1, input.clone());
            executor.ran(1).unwrap().bytes()
        });
        assert_eq!(answers[0], answers[1]);
    }
}

#[test]
fn a_model_can_be_mapped_to_scattered_pages_without_a_new_load() {
    let (model, input) = models().remove(0);
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.run(1, 1, 1, input.clone());
    let before = executor.ran(1).unwrap().bytes();
    executor.unmap(1, 1);
    // Single pages in the reverse order of memory.
    let pages = model.pages() / PAGE;
    let place =
        |page| Extent { range_offset: page * PAGE, device_offset: (pages - page) * PAGE, bytes: PAGE };
    executor.send(Command::Map(Map { program: 1, generation: 2, extents: (0..pages).map(place).collect() }));
    let batch = executor.grant(1, 2, &model.all());
    assert_eq!(executor.copied(batch).unwrap().bytes, model.bytes());
    executor.run(2, 1, 2, input);
    assert_eq!(executor.ran(2).unwrap().bytes(), before);
}

#[test]
fn two_models_alternate_in_the_same_memory() {
    let models = models();
    let mut executor = Executor::start();
    let mut answers = vec![Vec::new(); models.len()];
    for (program, (model, _)) in (1..).zip(&models) {
        executor.load(model, program);
    }
    for generation in 1..=3 {
        for ((program, (model, input)), answers) in (1..).zip(&models).zip(&mut answers) {
            executor.bring_in(model, program, generation);
            executor.run(generation, program, generation, input.clone());
            answers.push(executor.ran(generation).unwrap().bytes());
            executor.unmap(program, generation);
        }
    }
    for answers in answers {
        assert!(answers.iter().all(|answer| *answer == answers[0]));
    }
}

#[test]
fn a_copy_waits_for_its_window_and_is_refused_after_it() {
    let (model, input) = models().remove(0);
    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    executor.run(1, 1, 1, input);
    let now = monotonic_now();
    let batch = executor.grant_in(1, 1, &model.all(), 0, now.0 - 1);
    let (failure, message) = executor.copied(batch).unwrap_err();
    assert_eq!(failure, CopyFailure::Expired);
    assert!(message.contains("window closed"), "{message}");
    // The run still waits, because the bytes may be granted again.
    let opens = monotonic_now() + Duration::from_millis(30);
    let batch = executor.grant_in(1, 1, &model.all(), opens.0, u64::MAX);
    let done = executor.copied(batch).unwrap();
    assert!(done.started_ns >= opens.0 && done.finished_ns > done.started_ns);
    executor.ran(1).unwrap();
}

#[test]
fn a_grant_can_be_revoked_until_it_begins() {
    let (model, input) = models().remove(0);
    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    let far = (monotonic_now() + Duration::from_secs(3600)).0;
    let waiting = executor.grant_in(1, 1, &model.all(), far, u64::MAX);
    let behind = executor.grant_in(1, 1, &model.all(), far, u64::MAX);
    for batch in [behind, waiting] {
        executor.send(Command::Revoke(Revoke { transfer: 1, batch }));
        assert_eq!(executor.copy_failure(batch), CopyFailure::Revoked);
    }
    let batch = executor.grant(1, 1, &model.all());
    executor.copied(batch).unwrap();
    executor.send(Command::Revoke(Revoke { transfer: 1, batch }));
    executor.run(1, 1, 1, input);
    executor.ran(1).unwrap();
    executor.said_no_more();
}

#[test]
fn unmapping_fails_the_runs_and_copies_that_wait() {
    let (model, input) = models().remove(0);
    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    let far = (monotonic_now() + Duration::from_secs(3600)).0;
    executor.run(1, 1, 1, input.clone());
    executor.run(2, 1, 1, input.clone());
    let batch = executor.grant_in(1, 1, &model.all(), far, u64::MAX);
    executor.unmap(1, 1);
    assert_eq!(executor.run_failure(1), RunFailure::NotResident);
    assert_eq!(executor.run_failure(2), RunFailure::NotResident);
    assert_eq!(executor.copy_failure(batch), CopyFailure::NotMapped);
    // A second unmap is confirmed again, and a new run reports that the program is not mapped.
    executor.unmap(1, 1);
    executor.run(3, 1, 1, input);
    assert_eq!(executor.run_failure(3), RunFailure::NotResident);
}

#[test]
fn steps_of_an_old_generation_are_refused_without_effect() {
    let (model, input) = models().remove(0);
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 4);
    executor.unmap(1, 4);
    executor.bring_in(&model, 1, 5);
    executor.map(&model, 1, 4, 0);
    let failed = executor.expect(|event| match event {
        Event::MapFailed(failed) => Some(failed),
        _ => None,
    });
    assert_eq!((failed.program, failed.generation), (1, 4));
    assert!(failed.message.contains("stale"), "{}", failed.message);
    let batch = executor.grant(1, 4, &model.all());
    assert_eq!(executor.copy_failure(batch), CopyFailure::StaleGeneration);
    executor.run(1, 1, 4, input.clone());
    assert_eq!(executor.run_failure(1), RunFailure::StaleGeneration);
    executor.send(Command::Unmap(Unmap { program: 1, generation: 4 }));
    executor.run(2, 1, 5, input.clone());
    executor.ran(2).unwrap();
    executor.run(3, 1, 6, input);
    assert_eq!(executor.run_failure(3), RunFailure::NotResident);
    executor.said_no_more();
}

#[test]
fn unloading_unmaps_and_forgets_the_program() {
    let (model, input) = models().remove(0);
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.send(Command::UnloadProgram(UnloadProgram { program: 1 }));
    executor.expect_unmapped(1, 1);
    executor.run(1, 1, 1, input.clone());
    assert_eq!(executor.run_failure(1), RunFailure::UnknownProgram);
    let batch = executor.grant(1, 1, &model.all());
    assert_eq!(executor.copy_failure(batch), CopyFailure::NotMapped);
    executor.load(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.run(2, 1, 1, input);
    executor.ran(2).unwrap();
    executor.said_no_more();
}

#[test]
fn batched_requests_give_the_same_outputs_as_single_requests() {
    for (model, _) in models() {
        let mut executor = Executor::with(&model, 1);
        executor.bring_in(&model, 1, 1);
        let dims = &model.compiled.summary.inputs[0].shape;
        let rest = if dims.len() == 4 { &[3, 32, 32][..] } else { &[9, 384][..] };
        let inputs: Vec<Tensor> = [1i64, 2, 1]
            .iter()
            .enumerate()
            .map(|(place, &rows)| {
                let shape: Vec<i64> = [&[rows][..], rest].concat();
                let mut input = x(&shape).remove(0);
                // Makes every request different.
                if let Some(tensor::Contents::Inline(bytes)) = &mut input.contents {
                    let mut changed = bytes.to_vec();
                    changed[..4].copy_from_slice(&(place as f32).to_le_bytes());
                    *bytes = changed.into();
                }
                input
            })
            .collect();
        let mut alone = Vec::new();
        for (run, input) in (1..).zip(&inputs) {
            executor.run(run, 1, 1, vec![input.clone()]);
            alone.push(executor.ran(run).unwrap().bytes());
        }
        let members = inputs.len() as u32;
        let run = Run { run: 9, program: 1, generation: 1, inputs, members, ..Run::default() };
        executor.send(Command::Run(run));
        let together = executor.ran(9).unwrap();
        assert_eq!(together.done.outputs[0].shape[0], 4);
        let close = |one: &[u8], other: &[u8]| {
            let floats = |bytes: &[u8]| -> Vec<f32> {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            };
            let one = floats(one);
            let other = floats(other);
            one.len() == other.len()
                && one.iter().zip(&other).all(|(a, b)| (a - b).abs() <= 1e-4 * (1.0 + b.abs()))
        };
        assert!(close(&together.bytes(), &alone.concat()), "{}", model.compiled.summary.inputs[0].name);
    }
}

#[test]
fn mismatched_requests_fail_without_effect_on_the_program() {
    let (model, input) = models().remove(0);
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    let other = x(&[1, 3, 16, 16]);
    let inputs = [input.clone(), other].concat();
    let run = Run { run: 1, program: 1, generation: 1, inputs, members: 2, ..Run::default() };
    executor.send(Command::Run(run));
    assert_eq!(executor.run_failure(1), RunFailure::Model);
    executor.run(2, 1, 1, input);
    executor.ran(2).unwrap();
}
