//! Tests of each pattern, and of each way a run ends without lost data.

use super::*;

#[test]
fn a_sequence_runs_in_order_and_frees_as_it_goes() {
    let mut run = TextRun::new(&["a: x=input.x", "b: x=a.y", "c: x=b.y"], &["c.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y"];
        run.done(1, &[rows(1)]) => ["call 2 b for b.y"];
        run.done(2, &[rows(1)]) => ["release a.y", "call 3 c for c.y"];
        run.done(3, &[rows(1)]) => ["release b.y", "answer c.y"];
    }
    assert!(run.engine.is_over());
    assert_eq!(run.engine.progress(), Progress { total: 3, done: 3, skipped: 0, calls_out: 0 });
}

#[test]
fn a_condition_decides_and_its_tensor_is_freed_at_once() {
    let workflow = ["a: x=input.x", "b: x=a.y when a.z"];
    let mut run = TextRun::new(&workflow, &["b.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y a.z"];
        run.done(1, &[rows(1), rows(1)]) => ["release a.z", "call 2 b for b.y"];
        run.done(2, &[rows(1)]) => ["release a.y", "answer b.y"];
    }
    for nothing in [zeros(1), TensorFacts::EMPTY] {
        let mut run = TextRun::new(&workflow, &["b.y"]);
        follows! {
            run.begin(&[rows(1)]) => ["call 1 a for a.y a.z"];
            run.done(1, &[rows(1), nothing]) => ["release a.y", "release a.z", "empty b.y", "answer b.y"];
        }
        assert_eq!(run.engine.progress(), Progress { total: 2, done: 1, skipped: 1, calls_out: 0 });
    }
}

#[test]
fn a_condition_that_cannot_be_evaluated_ends_the_run() {
    let mut run = TextRun::new(&["a: x=input.x", "b: x=input.x when a.y"], &["b.y"]);
    let unread = TensorFacts { holds: None, ..rows(1) };
    follows! {
        run.begin(&[unread]) => ["call 1 a for a.y"];
        run.done(1, &[unread]) => ["fail b: the step's condition is on a tensor of a type without a zero: use a tensor of numbers or booleans", "release a.y"];
    }
}

#[test]
fn each_row_is_a_call_and_the_parts_are_joined() {
    let workflow = ["a: x=input.x each x", "b: x=a.y"];
    let mut run = TextRun::new(&workflow, &["b.y"]);
    follows! {
        run.begin(&[rows(3)]) => ["call 1 a[0] for a.y", "call 2 a[1] for a.y", "call 3 a[2] for a.y"];
        run.done(3, &[rows(2)]) => [];
        run.done(1, &[rows(0)]) => [];
        run.done(2, &[rows(1)]) => ["call 4 b for b.y"];
        run.done(4, &[rows(1)]) => ["release a.y", "answer b.y"];
    }
    let mut run = TextRun::new(&workflow, &["b.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a[0] for a.y"];
        run.done(1, &[rows(1)]) => ["call 2 b for b.y"];
    }
    let mut run = TextRun::new(&workflow, &["b.y"]);
    follows! {
        run.begin(&[rows(0)]) => ["empty b.y", "answer b.y"];
    }
    assert_eq!(run.engine.progress(), Progress { total: 2, done: 0, skipped: 2, calls_out: 0 });
}

#[test]
fn the_rows_of_joined_parts_are_counted_together() {
    let mut run = TextRun::new(&["a: x=input.x each x", "b: x=a.y each x when a.z"], &["b.y"]);
    follows! {
        run.begin(&[rows(2)]) => ["call 1 a[0] for a.y a.z", "call 2 a[1] for a.y a.z"];
        run.done(1, &[rows(2), zeros(1)]) => [];
        run.done(2, &[rows(1), rows(1)]) =>
            ["release a.z", "call 3 b[0] for b.y", "call 4 b[1] for b.y", "call 5 b[2] for b.y"];
    }
}

#[test]
fn a_condition_looks_at_every_part() {
    // An empty tensor decides its condition without `holds`.
    let unread = TensorFacts { holds: None, ..TensorFacts::EMPTY };
    for (parts, runs) in [
        ([zeros(1), unread], vec!["release a.y", "empty b.y", "answer b.y"]),
        ([zeros(1), rows(1)], vec!["release a.y", "call 3 b for b.y"]),
    ] {
        let mut run = TextRun::new(&["a: x=input.x each x", "b: x=input.x when a.y"], &["b.y"]);
        run.begin(&[rows(2)]);
        run.done(1, &[parts[0]]);
        assert_eq!(run.done(2, &[parts[1]]), runs);
    }
}

#[test]
fn too_many_rows_end_the_run() {
    let mut run = TextRun::new(&["a: x=input.x", "b: x=a.y each x"], &["b.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y"];
        run.done(1, &[rows(1025)]) => ["fail b: the step would run for 1025 rows: at most 1024 are allowed", "release a.y"];
    }
    let mut run = TextRun::new(&["a: x=input.x", "b: x=a.y each x"], &["b.y"]);
    run.begin(&[rows(1)]);
    assert_eq!(run.done(1, &[rows(1024)]).len(), CALLS_MAX);
}

#[test]
fn at_most_calls_max_calls_run_at_a_time() {
    let mut run = TextRun::new(&["a: x=input.x each x"], &["a.y"]);
    assert_eq!(run.begin(&[rows(20)]).len(), CALLS_MAX);
    follows! {
        run.done(5, &[rows(1)]) => ["call 17 a[16] for a.y"];
        run.done(1, &[rows(1)]) => ["call 18 a[17] for a.y"];
    }
    assert_eq!(run.engine.calls.keys().last(), Some(&CallId(18)));
    assert_eq!(run.engine.progress(), Progress { total: 1, done: 0, skipped: 0, calls_out: 16 });
}

#[test]
fn branches_run_concurrently_and_join_in_one_step() {
    let mut run = TextRun::new(&["a: x=input.x", "b: x=a.y", "c: x=a.y", "d: l=b.y, r=c.y"], &["d.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y"];
        run.done(1, &[rows(1)]) => ["call 2 b for b.y", "call 3 c for c.y"];
        run.done(3, &[rows(1)]) => [];
        run.done(2, &[rows(1)]) => ["release a.y", "call 4 d for d.y"];
        run.done(4, &[rows(1)]) => ["release b.y", "release c.y", "answer d.y"];
    }
}

#[test]
fn a_skip_travels_to_the_end() {
    let mut run = TextRun::new(
        &["a: x=input.x", "b: x=input.x when a.y", "c: x=b.y", "d: x=c.y, w=input.x each x", "e: x=input.x"],
        &["d.y", "e.y"],
    );
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y", "call 2 e for e.y"];
        run.done(1, &[zeros(1)]) => ["release a.y", "empty d.y"];
        run.done(2, &[rows(1)]) => ["answer d.y e.y"];
    }
    assert_eq!(run.engine.progress(), Progress { total: 5, done: 2, skipped: 3, calls_out: 0 });
}

#[test]
fn an_empty_output_is_made_by_its_step_and_skips_later_steps() {
    let mut run = TextRun::new(&["a: x=input.x", "b: x=a.y"], &["a.y", "b.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y"];
        run.done(1, &[TensorFacts::EMPTY]) => ["empty b.y", "answer a.y b.y"];
    }
}

#[test]
fn a_step_made_useless_by_a_skip_does_not_run() {
    // Only `c` consumes the outputs of `a` and `p`, and its condition is decided first.
    let workflow = ["a: x=input.x", "b: x=input.x", "p: x=a.y", "c: x=p.y when b.y"];
    let mut run = TextRun::new(&workflow, &["c.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y", "call 2 b for b.y"];
        run.done(2, &[zeros(1)]) => ["abandon 1", "release b.y", "empty c.y", "answer c.y"];
        run.done(1, &[rows(1)]) => [];
    }
    assert_eq!(run.engine.progress(), Progress { total: 4, done: 1, skipped: 1, calls_out: 0 });
    let mut run = TextRun::new(&workflow, &["c.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y", "call 2 b for b.y"];
        run.done(1, &[rows(1)]) => ["call 3 p for p.y"];
        run.done(2, &[zeros(1)]) => ["abandon 3", "release a.y", "release b.y", "empty c.y", "answer c.y"];
    }
}

#[test]
fn an_output_without_a_remaining_consumer_is_not_requested() {
    let mut run = TextRun::new(
        &["b: x=input.x", "a: x=input.x when b.z", "c: x=a.y when b.y", "d: x=a.z"],
        &["c.y", "d.y"],
    );
    follows! {
        run.begin(&[rows(1)]) => ["call 1 b for b.y b.z"];
        run.done(1, &[zeros(1), rows(1)]) => ["release b.y", "release b.z", "empty c.y", "call 2 a for a.z"];
    }
}

#[test]
fn a_failure_anywhere_ends_the_run_once() {
    let workflow = ["a: x=input.x", "b: x=a.y each x", "c: x=b.y", "d: x=input.x"];
    let mut run = TextRun::new(&workflow, &["c.y", "d.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y", "call 2 d for d.y"];
        run.failed(1, &[]) => ["fail a: the step's call failed", "abandon 2"];
        run.done(2, &[rows(1)]) => [];
        run.failed(2, &[]) => [];
    }
    let mut run = TextRun::new(&workflow, &["c.y", "d.y"]);
    run.begin(&[rows(1)]);
    follows! {
        run.done(2, &[rows(1)]) => [];
        run.done(1, &[rows(2)]) => ["call 3 b[0] for b.y", "call 4 b[1] for b.y"];
        run.done(3, &[rows(1)]) => [];
        run.failed(4, &[]) => ["fail b[1]: the step's call failed", "release a.y", "release d.y", "release b.y"];
    }
    assert!(run.engine.is_over());
    let mut run = TextRun::new(&workflow, &["c.y", "d.y"]);
    run.begin(&[rows(1)]);
    run.done(1, &[rows(1)]);
    follows! {
        run.done(3, &[rows(1)]) => ["release a.y", "call 4 c for c.y"];
        run.failed(4, &[]) => ["fail c: the step's call failed", "abandon 2", "release b.y"];
    }
}
