//! Programs that move to other physical memory (T13).

use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;

use crate::support::{Executor, Model, PAGE, x};

/// Where it moves: its first page stays, the rest goes.
fn elsewhere(model: &Model) -> Vec<Extent> {
    let stays = Extent { range_offset: 0, device_offset: 0, bytes: PAGE };
    let goes = Extent { range_offset: PAGE, device_offset: 64 << 20, bytes: model.pages() - PAGE };
    vec![stays, goes]
}

fn relocate(executor: &mut Executor, was: u64, generation: u64, extents: Vec<Extent>) -> Result<(), String> {
    executor.send(Command::Relocate(Relocate { program: 1, was, generation, extents }));
    let expected = Relocated { program: 1, generation };
    executor.expect(|event| match event {
        Event::Relocated(relocated) => {
            assert_eq!(relocated, expected);
            Some(Ok(()))
        }
        Event::MapFailed(failed) if failed.generation == generation => Some(Err(failed.message)),
        _ => None,
    })
}

#[test]
fn a_program_that_moved_answers_as_before_whatever_is_put_where_it_was() {
    let (model, input) = (Model::new(synth::tiny_cnn()), x(&[1, 3, 32, 32]));
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.run(1, 1, 1, input.clone());
    let answer = executor.ran(1).unwrap().bytes();
    relocate(&mut executor, 1, 2, elsewhere(&model)).unwrap();
    // Another model takes what it left.
    let other = Model::padded(synth::tiny_cnn(), model.pages());
    executor.load(&other, 2);
    let extents = vec![Extent { range_offset: 0, device_offset: PAGE, bytes: other.pages() }];
    executor.send(Command::Map(Map { program: 2, generation: 3, extents }));
    let batch = executor.grant(2, 3, &other.all());
    executor.copied(batch).unwrap();
    executor.run(2, 1, 2, input.clone());
    assert_eq!(executor.ran(2).unwrap().bytes(), answer);
    executor.run(3, 1, 1, input);
    assert_eq!(executor.run_failure(3), RunFailure::StaleGeneration);
    executor.said_no_more();
}

#[test]
fn a_half_loaded_program_moves_with_what_it_has() {
    let (model, input) = (Model::new(synth::tiny_cnn()), x(&[1, 3, 32, 32]));
    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    let batch = executor.grant(1, 1, std::slice::from_ref(&(0..2 * PAGE)));
    executor.copied(batch).unwrap();
    relocate(&mut executor, 1, 2, elsewhere(&model)).unwrap();
    executor.run(1, 1, 2, input.clone());
    let all = model.all()[0].end;
    let batch = executor.grant(1, 2, std::slice::from_ref(&(2 * PAGE..all)));
    executor.copied(batch).unwrap();
    let moved = executor.ran(1).unwrap().bytes();
    let mut fresh = Executor::with(&model, 1);
    fresh.bring_in(&model, 1, 1);
    fresh.run(1, 1, 1, input);
    assert_eq!(moved, fresh.ran(1).unwrap().bytes());
}

#[test]
fn a_move_that_fails_leaves_nothing_mapped_and_the_next_mapping_works() {
    let (model, input) = (Model::new(synth::tiny_cnn()), x(&[1, 3, 32, 32]));
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    executor.inject(Fault::FailNextCopy, 0);
    relocate(&mut executor, 1, 2, elsewhere(&model)).unwrap_err();
    executor.expect_unmapped(1, 1);
    executor.run(1, 1, 2, input.clone());
    assert_eq!(executor.run_failure(1), RunFailure::NotResident);
    executor.bring_in(&model, 1, 3);
    executor.run(2, 1, 3, input);
    executor.ran(2).unwrap();
    assert!(relocate(&mut executor, 1, 4, elsewhere(&model)).unwrap_err().contains("stale"));
}
