//! Lost data that its producer makes again.

use super::*;

const CHAIN: [&str; 3] = ["a: x=input.x", "b: x=a.y", "c: x=b.y, w=d.y"];

/// Returns a run in which only `d` is running and `c` waits for `d`: `a.y` is freed, `b.y` exists.
fn waiting(once: &[&str]) -> TextRun {
    let mut run = TextRun::once(&[CHAIN[0], CHAIN[1], CHAIN[2], "d: x=input.x"], &["c.y"], once);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y", "call 2 d for d.y"];
        run.done(1, &[rows(2)]) => ["call 3 b for b.y"];
        run.done(3, &[rows(2)]) => ["release a.y"];
    }
    run
}

#[test]
fn a_freed_input_of_a_lost_tensor_is_made_again_first() {
    let mut run = waiting(&[]);
    follows! {
        run.lost(&["b.y"]) => ["call 4 a for a.y"];
        run.done(2, &[rows(1)]) => [];
        run.done(4, &[rows(2)]) => ["call 5 b for b.y"];
        run.done(5, &[rows(2)]) => ["release a.y", "call 6 c for c.y"];
        run.done(6, &[rows(1)]) => ["release d.y", "release b.y", "answer c.y"];
    }
}

#[test]
fn a_loss_of_unneeded_data_changes_nothing() {
    let mut run = waiting(&["f-a"]);
    follows! {
        run.lost(&["a.y", "input.x", "c.y"]) => [];
        run.done(2, &[rows(1)]) => ["call 4 c for c.y"];
    }
}

#[test]
fn a_running_call_is_not_repeated_when_its_inputs_are_lost() {
    let mut run = waiting(&["f-a"]);
    follows! {
        run.done(2, &[rows(1)]) => ["call 4 c for c.y"];
        run.lost(&["b.y"]) => [];
        run.done(4, &[rows(1)]) => ["release d.y", "answer c.y"];
    }
}

#[test]
fn a_call_that_failed_for_its_inputs_is_called_again_with_new_ones() {
    let mut run = waiting(&[]);
    follows! {
        run.done(2, &[rows(1)]) => ["call 4 c for c.y"];
        run.failed(4, &["b.y"]) => ["call 5 a for a.y"];
        run.done(5, &[rows(2)]) => ["call 6 b for b.y"];
        run.done(6, &[rows(2)]) => ["release a.y", "call 7 c for c.y"];
    }
}

#[test]
fn a_repeated_call_continues_while_another_call_may_need_its_output() {
    let mut run = TextRun::new(&["a: x=input.x", "b: x=a.y", "c: x=a.y", "d: x=b.y, y=a.y"], &["c.y", "d.y"]);
    run.begin(&[rows(1)]);
    follows! {
        run.done(1, &[rows(1)]) => ["call 2 b for b.y", "call 3 c for c.y"];
        run.lost(&["a.y"]) => ["call 4 a for a.y"];
        run.done(2, &[TensorFacts::EMPTY]) => ["release b.y", "empty d.y"];
        run.failed(3, &["a.y"]) => [];
        run.done(4, &[rows(1)]) => ["call 5 c for c.y"];
        run.done(5, &[rows(1)]) => ["release a.y", "answer c.y d.y"];
    }
}

#[test]
fn a_late_report_of_a_loss_does_not_affect_newer_data() {
    let mut run = TextRun::new(&["a: x=input.x", "b: x=a.y", "c: x=a.y"], &["b.y", "c.y"]);
    run.begin(&[rows(1)]);
    follows! {
        run.done(1, &[rows(1)]) => ["call 2 b for b.y", "call 3 c for c.y"];
        run.failed(2, &["a.y"]) => ["call 4 a for a.y"];
        run.done(4, &[rows(1)]) => ["call 5 b for b.y"];
        run.failed(3, &["a.y"]) => ["call 6 c for c.y"];
        run.done(5, &[rows(1)]) => [];
        run.done(6, &[rows(1)]) => ["release a.y", "answer b.y c.y"];
    }
}

#[test]
fn only_the_lost_rows_run_again() {
    let mut run = TextRun::new(&["a: x=input.x each x", "b: x=a.y, w=d.y", "d: x=input.x"], &["b.y"]);
    run.begin(&[rows(3)]);
    for call in 1..=3 {
        follows! { run.done(call, &[rows(2)]) => []; }
    }
    follows! {
        run.lost(&["a.y[1]", "a.y[7]"]) => ["call 5 a[1] for a.y"];
        run.done(4, &[rows(1)]) => [];
        run.done(5, &[rows(2)]) => ["call 6 b for b.y"];
        run.failed(6, &["a.y"]) => ["call 7 a[0] for a.y", "call 8 a[1] for a.y", "call 9 a[2] for a.y"];
    }
}

#[test]
fn only_the_lost_output_is_requested_again() {
    let mut run = TextRun::new(&["a: x=input.x", "b: y=a.y, z=a.z, w=d.y", "d: x=input.x"], &["b.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y a.z", "call 2 d for d.y"];
        run.done(1, &[rows(1), rows(1)]) => [];
        run.lost(&["a.z"]) => ["call 3 a for a.z"];
        run.done(3, &[rows(1)]) => [];
        run.done(2, &[rows(1)]) => ["call 4 b for b.y"];
    }
}

#[test]
fn a_decided_condition_stays_decided() {
    let mut run = TextRun::new(
        &["a: x=input.x", "b: x=d.y when a.y", "c: x=a.y, w=d.y", "d: x=input.x"],
        &["b.y", "c.y"],
    );
    run.begin(&[rows(1)]);
    follows! {
        run.done(1, &[rows(1)]) => [];
        run.lost(&["a.y"]) => ["call 3 a for a.y"];
        run.done(3, &[zeros(1)]) => [];
        run.done(2, &[rows(1)]) => ["call 4 b for b.y", "call 5 c for c.y"];
    }
}

#[test]
fn a_tensor_made_again_with_other_rows_ends_the_run() {
    let mut run = waiting(&[]);
    follows! {
        run.lost(&["b.y"]) => ["call 4 a for a.y"];
        run.done(4, &[rows(3)]) => [
            "fail a: the step's data was lost and its next run made 3 rows instead of 2",
            "abandon 2", "release a.y"
        ];
    }
}

#[test]
fn losing_the_output_of_a_step_that_is_not_idempotent_ends_the_run() {
    let cannot = "the step's data was lost and cannot be made again";
    let mut run = waiting(&["f-b"]);
    assert_eq!(run.lost(&["b.y"]), [format!("fail b: {cannot}"), "abandon 2".into()]);
    // The distance of the step from the lost tensor makes no difference.
    let mut run = waiting(&["f-a"]);
    assert_eq!(run.lost(&["b.y"]), [format!("fail a: {cannot}"), "abandon 2".into()]);
    // But a call that could not run may be repeated.
    let mut run = waiting(&["f-c"]);
    run.done(2, &[rows(1)]);
    follows! {
        run.failed(4, &["d.y"]) => ["call 5 d for d.y"];
        run.done(5, &[rows(1)]) => ["call 6 c for c.y"];
    }
}

#[test]
fn a_step_is_called_at_most_runs_max_times() {
    let mut run = waiting(&[]);
    run.lost(&["b.y"]);
    run.done(4, &[rows(2)]);
    run.done(5, &[rows(2)]);
    run.lost(&["b.y"]);
    run.done(6, &[rows(2)]);
    follows! {
        run.done(7, &[rows(2)]) => ["release a.y"];
        run.lost(&["b.y"]) => ["fail b: the step's data was lost and cannot be made again", "abandon 2"];
    }
    let mut run = waiting(&[]);
    run.done(2, &[rows(1)]);
    follows! {
        run.failed(4, &["input.x"]) => ["call 5 c for c.y"];
        run.failed(5, &["input.x"]) => ["call 6 c for c.y"];
        run.failed(6, &["input.x"]) =>
            ["fail c: the step's data was lost and cannot be made again", "release d.y", "release b.y"];
    }
}

#[test]
fn an_output_that_is_lost_before_the_answer_is_made_again() {
    let mut run = TextRun::new(&["a: x=input.x", "b: x=input.x", "c: x=b.z when b.y"], &["a.y", "c.y"]);
    follows! {
        run.begin(&[rows(1)]) => ["call 1 a for a.y", "call 2 b for b.y b.z"];
        run.done(2, &[zeros(1), rows(1)]) => ["release b.y", "release b.z", "empty c.y"];
        run.lost(&["c.y"]) => ["empty c.y"];
        run.done(1, &[rows(1)]) => ["answer a.y c.y"];
        run.lost(&["a.y"]) => [];
    }
}
