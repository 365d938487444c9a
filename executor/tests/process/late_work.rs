//! Tests an executor on a GPU that finishes copies late. The tests fail if the executor does not wait
//! for the events of the copies.

use millrace_model::synth;
use millrace_proto::executor::*;

use crate::object_support::{Part, ROWS, Y_BYTES, file, object, on, placed, whole};
use crate::support::{Executor, MEMORY, Model, hello, x};

/// Returns an executor with a model, on a GPU that delays copies by this seed.
fn late(model: &Model, seed: u64) -> Executor {
    eprintln!("late_seed={seed}");
    let mut executor = Executor::start_with(Hello { late_seed: seed, ..hello(MEMORY) });
    executor.load(model, 1);
    executor
}

#[test]
fn a_run_during_the_copies_reads_loaded_weights_alone() {
    for (model, input) in
        [(Model::new(synth::tiny_cnn()), x(&[2, 3, 32, 32])), (Model::new(synth::mlp()), x(&[1, 64]))]
    {
        let mut executor = late(&model, 3);
        executor.bring_in(&model, 1, 1);
        executor.run(1, 1, 1, input.clone());
        let resident = executor.ran(1).unwrap().bytes();
        executor.unmap(1, 1);
        for generation in 2..12 {
            executor.map(&model, 1, generation, 0);
            executor.run(generation, 1, generation, input.clone());
            // A grant for each launch, so that a launch begins while the copies of others are issued.
            let steps = model.compiled.launches.iter();
            let batches: Vec<_> =
                steps.map(|launch| executor.grant(1, generation, &launch.reads.clone())).collect();
            assert_eq!(executor.ran(generation).unwrap().bytes(), resident);
            for batch in batches {
                executor.copied(batch).unwrap();
            }
            // The memory is unmapped, so no copy into it may still be running.
            executor.unmap(1, generation);
        }
    }
}

#[test]
fn a_late_copy_that_fails_is_made_again() {
    let model = Model::new(synth::mlp());
    let mut executor = late(&model, 5);
    executor.map(&model, 1, 1, 0);
    executor.inject(Fault::FailNextCopy, 1);
    let batch = executor.grant(1, 1, &model.all());
    assert_eq!(executor.copy_failure(batch), CopyFailure::Device);
    // Granted before the run is sent: a run that begins earlier fails, because its copy has failed.
    let batch = executor.grant(1, 1, &model.all());
    executor.run(1, 1, 1, x(&[1, 64]));
    executor.copied(batch).unwrap();
    executor.ran(1).unwrap();
    executor.unmap(1, 1);
}

#[test]
fn objects_are_loaded_when_they_are_reported() {
    let model = Model::new(synth::mlp());
    let mut executor = late(&model, 7);
    executor.bring_in(&model, 1, 1);
    for run in (1..20).step_by(3) {
        executor.keep(run, x(&[ROWS, 64]));
        let kept = executor.copy_out(Part::Output(whole(run))).unwrap();
        executor.place(placed(run, Y_BYTES, Some(whole(run)))).unwrap();
        executor.keep(run + 1, on(object(run)));
        let second = executor.copy_out(Part::Output(whole(run + 1))).unwrap();
        // The same bytes, by way of a file.
        executor.free(run);
        executor.place_with_host(placed(run + 2, Y_BYTES, None), file(&kept)).unwrap();
        let batch = executor.grant_object(run + 2, 0..Y_BYTES, None);
        executor.copied(batch).unwrap();
        executor.keep(run + 2, on(object(run + 2)));
        assert_eq!(executor.copy_out(Part::Output(whole(run + 2))).unwrap(), second);
        executor.free(run + 2);
    }
}
