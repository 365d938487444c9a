//! Tests of runs on a shared GPU: launches begin only under tokens, and on the SMs of the tokens.

use millrace_executor::SEATS_MAX;
use millrace_model::synth;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::*;

use crate::support::{Executor, Model, x};

const INPUT: [i64; 4] = [2, 3, 32, 32];

fn token(token: u64, first: u32, width: u32, busy_ns: u64) -> Token {
    Token { token, period: 1, on: Some(token::On::Block(UnitBlock { first, width })), busy_ns }
}

fn run(executor: &Executor, run: u64, seat: u32, tokens: Option<SeatTokens>) {
    let inputs = x(&INPUT);
    executor.send(Command::Run(Run {
        run,
        program: 1,
        generation: 1,
        inputs,
        seat,
        tokens,
        times: true,
        ..Run::default()
    }));
}

fn anew(first: Option<Token>) -> Option<SeatTokens> {
    Some(SeatTokens { anew: true, first })
}

fn grant(executor: &Executor, seat: u32, token: Token) {
    executor.send(Command::Grant(Grant { seat, token: Some(token) }));
}

/// Waits until the executor has handled all commands sent so far.
fn settle(executor: &mut Executor) {
    executor.send(Command::Unmap(Unmap { program: 1, generation: 99 }));
    executor.send(Command::UnloadProgram(UnloadProgram { program: 77 }));
    executor.send(Command::FreeObject(FreeObject { object: 5 }));
    executor.expect(|event| (event == Event::ObjectFreed(ObjectFreed { object: 5 })).then_some(()));
}

fn spent(executor: &mut Executor, token: u64) -> TokenSpent {
    executor.expect(|event| match event {
        Event::TokenSpent(spent) if spent.token == token => Some(spent),
        _ => None,
    })
}

/// Returns an executor with a model on the GPU, and the outputs of a run that has the whole GPU.
fn ready() -> (Executor, Model, Vec<u8>) {
    let model = Model::new(synth::tiny_cnn());
    assert!(model.compiled.launches.len() > 2, "the model is cut");
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    run(&executor, 1, 0, None);
    let whole = executor.ran(1).unwrap().bytes();
    (executor, model, whole)
}

#[test]
fn a_run_without_a_token_launches_nothing_until_the_grant() {
    let (mut executor, model, whole) = ready();
    let before = executor.sms.figures().launches;
    run(&executor, 2, 3, anew(None));
    settle(&mut executor);
    assert_eq!(executor.sms.figures().launches, before);
    executor.said_no_more();
    grant(&executor, 3, token(1, 0, 16, 0));
    let answer = executor.ran(2).unwrap();
    // On a busy machine the first run took too long for a whole run.
    let launches = answer.done.launches;
    assert!(launches == 1 || launches as usize == model.compiled.launches.len(), "{launches}");
    assert_eq!(answer.bytes(), whole);
    assert_eq!((answer.done.token, executor.sms.figures().launches), (Some(1), before + u64::from(launches)));
    assert!(answer.done.token_busy_ns > 0 && answer.done.token_wait_ns > 0);
}

/// The time of the run is unknown, and a launch cannot be interrupted.
#[test]
fn the_first_run_of_a_program_is_not_launched_whole() {
    let model = Model::new(synth::tiny_cnn());
    let mut executor = Executor::with(&model, 1);
    executor.bring_in(&model, 1, 1);
    run(&executor, 1, 0, anew(Some(token(1, 0, 16, 0))));
    assert_eq!(executor.ran(1).unwrap().done.launches as usize, model.compiled.launches.len());
}

/// Each token is worth less than a launch.
#[test]
fn a_run_under_short_tokens_asks_before_each_launch_and_stays_on_their_sms() {
    let (mut executor, model, whole) = ready();
    let busy = executor.sms.figures().busy;
    run(&executor, 2, 0, anew(Some(token(1, 8, 4, 1))));
    let launches = model.compiled.launches.len() as u64;
    for number in 2..=launches {
        let TokenSpent { seat, busy_ns, more, .. } = spent(&mut executor, number - 1);
        assert_eq!((seat, more), (0, true));
        assert!(busy_ns > 0);
        grant(&executor, 0, token(number, 8, 4, 1));
    }
    let answer = executor.ran(2).unwrap();
    assert_eq!(u64::from(answer.done.launches), launches);
    assert_eq!(answer.bytes(), whole);
    let times = &answer.done.launch_times;
    assert!(times.iter().all(|launch| launch.sm_units == 4));
    assert!(times[1..].iter().all(|launch| launch.token_wait_ns > 0), "each launch waits for its grant");
    assert_eq!(times.iter().map(|launch| launch.token_wait_ns).sum::<u64>(), answer.done.token_wait_ns);
    let after = executor.sms.figures();
    let used: Vec<usize> = (0..16).filter(|&unit| after.busy[unit] > busy[unit]).collect();
    assert_eq!((used, after.violations), (vec![8, 9, 10, 11], 0));
}

#[test]
fn a_long_token_is_asked_for_ahead_and_a_withdrawn_one_is_given_back() {
    let (mut executor, _model, _) = ready();
    run(&executor, 2, 0, anew(Some(token(1, 0, 8, u64::MAX / 2))));
    assert_eq!(executor.ran(2).unwrap().done.token, Some(1));
    grant(&executor, 0, token(2, 0, 8, 5_000_000));
    executor.send(Command::Withdraw(Withdraw { seat: 0, token: 2 }));
    assert_eq!(spent(&mut executor, 2), TokenSpent { seat: 0, token: 2, busy_ns: 0, more: true });
    // The token is shortened to less than was used, so the next run begins with another.
    executor.send(Command::Shorten(Shorten { seat: 0, token: 1, busy_ns: 1 }));
    run(&executor, 3, 0, Some(SeatTokens::default()));
    assert!(spent(&mut executor, 1).busy_ns > 1);
    grant(&executor, 0, token(3, 0, 16, 0));
    assert_eq!(executor.ran(3).unwrap().done.token, Some(3));
}

#[test]
fn a_run_that_waits_for_weights_gives_its_token_back() {
    let model = Model::new(synth::tiny_cnn());
    let mut executor = Executor::with(&model, 1);
    executor.map(&model, 1, 1, 0);
    run(&executor, 1, 0, anew(Some(token(1, 0, 8, 5_000_000))));
    assert_eq!(spent(&mut executor, 1), TokenSpent { seat: 0, token: 1, busy_ns: 0, more: false });
    let batch = executor.grant(1, 1, &model.all());
    executor.copied(batch).unwrap();
    executor.expect(|event| (event == Event::TokenAsked(TokenAsked { seat: 0 })).then_some(()));
    grant(&executor, 0, token(2, 0, 8, 5_000_000));
    settle(&mut executor);
    executor.said_no_more();
    grant(&executor, 0, Token { period: 2, ..token(3, 0, 16, 0) });
    assert_eq!(executor.ran(1).unwrap().done.token, Some(3), "the token of the ended period is void");
}

#[test]
fn runs_of_different_seats_execute_at_the_same_time() {
    let (mut executor, _model, whole) = ready();
    run(&executor, 2, 1, anew(None));
    run(&executor, 3, 2, anew(Some(token(7, 8, 8, 0))));
    assert_eq!(executor.ran(3).unwrap().bytes(), whole, "the run of another seat does not wait");
    grant(&executor, 1, token(8, 0, 8, 0));
    assert_eq!(executor.ran(2).unwrap().bytes(), whole);
    assert_eq!(executor.sms.figures().violations, 0);
}

#[test]
fn tokens_for_sms_that_no_gpu_has_end_the_executor_and_seats_beyond_the_last_fail_the_run() {
    let (mut executor, _model, _) = ready();
    run(&executor, 2, SEATS_MAX as u32, None);
    let (failure, message) = executor.ran(2).unwrap_err();
    assert_eq!(failure, RunFailure::Device);
    let says = format!("seat {SEATS_MAX} is past the last seat, which is {}", SEATS_MAX - 1);
    assert!(message.contains(&says), "{message}");
    grant(&executor, 0, token(1, 3, 4, 0));
    assert!(!executor.child.wait().unwrap().success(), "a block that is not aligned");
}
