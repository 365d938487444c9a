use millrace_types::{FunctionKey, FunctionName, Revision, TenantName};
use proptest::prelude::*;

use super::*;

const NOW: Timestamp = Timestamp(0);

fn digest(model: u8) -> Digest {
    Digest::of(&[model])
}

fn key(name: &str) -> RevisionKey {
    let function = FunctionKey { tenant: TenantName::default(), name: FunctionName::new(name).unwrap() };
    RevisionKey { function, revision: Revision::FIRST }
}

fn wanted(name: &str, model: u8, size: u64) -> DesiredFunction {
    DesiredFunction { key: key(name), digest: digest(model), artifact_bytes: Bytes(size) }
}

fn plan(budget: u64) -> HostTierPlan {
    HostTierPlan::new(Bytes(budget), 1)
}

fn prepare(model: u8, size: u64) -> Action {
    Action::Prepare { digest: digest(model), artifact_bytes: Bytes(size) }
}

fn install(name: &str, model: u8) -> Action {
    Action::Install { key: key(name), digest: digest(model) }
}

fn arrived(model: u8) -> Action {
    Action::Arrived { digest: digest(model) }
}

fn make_room(bytes: u64, asker: RoomPurpose) -> Action {
    Action::MakeRoom { bytes: Bytes(bytes), asker }
}

fn desired<const N: usize>(plan: &mut HostTierPlan, functions: [DesiredFunction; N]) -> Vec<Action> {
    plan.on_event(Event::Desired(functions.into()), NOW)
}

fn prepared(plan: &mut HostTierPlan, model: u8, size: u64) -> Vec<Action> {
    plan.on_event(Event::Prepared { digest: digest(model), bytes: Bytes(size) }, NOW)
}

fn failed(plan: &mut HostTierPlan, model: u8, failure: PrepareFailure) -> Vec<Action> {
    plan.on_event(Event::Failed { digest: digest(model), failure }, NOW)
}

fn installed(plan: &mut HostTierPlan, name: &str, outcome: Result<(), String>) {
    assert_eq!(plan.on_event(Event::Installed { key: key(name), outcome }, NOW), []);
}

#[test]
fn two_functions_of_one_digest_share_one_model() {
    let mut plan = plan(100);
    assert_eq!(desired(&mut plan, [wanted("a", 1, 10), wanted("b", 1, 10)]), [prepare(1, 10)]);
    assert_eq!(prepared(&mut plan, 1, 9), [install("a", 1), install("b", 1), arrived(1)]);
    assert_eq!(plan.resident(), [(digest(1), Bytes(9))]);
    let retire = Action::Retire { key: key("a") };
    assert_eq!(desired(&mut plan, [wanted("b", 1, 10)]), [retire]);
    let last = [Action::Retire { key: key("b") }, Action::Drop { digest: digest(1) }];
    assert_eq!(desired(&mut plan, []), last);
    assert_eq!(plan.resident(), []);
}

#[test]
fn the_same_desired_state_again_does_nothing() {
    let mut plan = plan(100);
    desired(&mut plan, [wanted("a", 1, 10)]);
    assert_eq!(desired(&mut plan, [wanted("a", 1, 10)]), []);
    prepared(&mut plan, 1, 10);
    assert_eq!(desired(&mut plan, [wanted("a", 1, 10)]), []);
}

#[test]
fn a_function_is_ready_once_the_node_has_installed_it() {
    let mut plan = plan(100);
    desired(&mut plan, [wanted("a", 1, 10)]);
    prepared(&mut plan, 1, 10);
    assert_eq!(plan.phases(), [(key("a"), ServingPhase::Preparing(String::new()))]);
    installed(&mut plan, "a", Ok(()));
    assert_eq!(plan.phases(), [(key("a"), ServingPhase::Ready)]);
}

#[test]
fn a_refused_function_fails_alone() {
    let mut plan = plan(100);
    desired(&mut plan, [wanted("a", 1, 10), wanted("b", 1, 10)]);
    prepared(&mut plan, 1, 10);
    installed(&mut plan, "a", Err("larger than any GPU".into()));
    installed(&mut plan, "b", Ok(()));
    let expected =
        [(key("a"), ServingPhase::Failed("larger than any GPU".into())), (key("b"), ServingPhase::Ready)];
    assert_eq!(plan.phases(), expected);
}

#[test]
fn a_model_over_the_budget_waits_with_advice_until_memory_is_free() {
    let mut plan = plan(15);
    assert_eq!(desired(&mut plan, [wanted("a", 1, 10), wanted("b", 2, 10)]), [prepare(1, 10)]);
    let ServingPhase::Preparing(message) = plan.phases()[1].1.clone() else { panic!("{:?}", plan.phases()) };
    assert!(message.contains("add a worker"), "{message}");
    assert_eq!(desired(&mut plan, [wanted("b", 2, 10)]), []);
    // The preparation under way cannot be cancelled. Its end frees the memory.
    assert_eq!(prepared(&mut plan, 1, 10), [Action::Drop { digest: digest(1) }, prepare(2, 10)]);
}

#[test]
fn a_model_larger_than_the_budget_fails_at_once_without_evictions() {
    let mut plan = plan(15);
    desired(&mut plan, [wanted("a", 1, 10)]);
    prepared(&mut plan, 1, 10);
    let actions = desired(&mut plan, [wanted("a", 1, 10), wanted("b", 2, 16)]);
    assert!(
        matches!(&actions[..], [Action::Refuse { why, .. }] if why.contains("--host-memory")),
        "{actions:?}"
    );
    assert!(matches!(&plan.phases()[1].1, ServingPhase::Failed(why) if why.contains("15 B in all")));
    assert_eq!(plan.on_event(Event::Tick, NOW), [], "the refusal is reported once");
}

/// Returns a plan in which model 1 (function `a`) was evicted for model 2 (function `b`): the budget has no
/// room for both.
fn a_asleep() -> HostTierPlan {
    let mut plan = plan(15);
    desired(&mut plan, [wanted("a", 1, 10), wanted("b", 2, 10)]);
    let ready = prepared(&mut plan, 1, 9);
    assert_eq!(ready, [install("a", 1), arrived(1), make_room(4, RoomPurpose::Request)]);
    installed(&mut plan, "a", Ok(()));
    let left = plan.on_event(Event::RoomMade(vec![digest(1)]), NOW);
    let retire = Action::Retire { key: key("a") };
    let release = Action::Release { digest: digest(1) };
    assert_eq!(left, [retire, release, prepare(2, 10)]);
    prepared(&mut plan, 2, 10);
    installed(&mut plan, "b", Ok(()));
    plan
}

#[test]
fn the_function_of_an_evicted_model_stays_ready() {
    let mut plan = a_asleep();
    assert_eq!(plan.phases(), [(key("a"), ServingPhase::Ready), (key("b"), ServingPhase::Ready)]);
    assert_eq!(plan.resident(), [(digest(2), Bytes(10))]);
    // Another function of the evicted model is ready at once, and loads the model with its first request.
    let third = [wanted("a", 1, 10), wanted("b", 2, 10), wanted("c", 1, 10)];
    assert_eq!(desired(&mut plan, third), []);
    assert_eq!(plan.phases()[2], (key("c"), ServingPhase::Ready));
}

#[test]
fn a_requested_model_is_loaded_again_with_all_its_functions() {
    let mut plan = a_asleep();
    let asked = plan.on_event(Event::ModelsAwaited(vec![digest(1), digest(2)]), NOW);
    assert_eq!(asked, [make_room(4, RoomPurpose::Request)], "10 of 15 bytes are used, and 9 are needed");
    let made = plan.on_event(Event::RoomMade(vec![digest(2)]), NOW);
    assert_eq!(made[1..], [Action::Release { digest: digest(2) }, prepare(1, 10)]);
    assert_eq!(prepared(&mut plan, 1, 9), [install("a", 1), arrived(1)]);
    assert_eq!(plan.resident(), [(digest(1), Bytes(9))]);
}

#[test]
fn a_hinted_model_is_loaded_only_if_no_other_model_is_to_be_loaded() {
    let mut plan = a_asleep();
    let hint = |plan: &mut HostTierPlan| plan.on_event(Event::Hinted(digest(1)), NOW);
    assert_eq!(hint(&mut plan), [make_room(4, RoomPurpose::Hint)]);
    assert_eq!(plan.on_event(Event::RoomMade(vec![]), NOW), []);
    assert_eq!(plan.on_event(Event::Tick, NOW), [], "the hint is not tried again");
    assert_eq!(plan.phases()[0], (key("a"), ServingPhase::Ready));

    let more = [wanted("a", 1, 10), wanted("b", 2, 10), wanted("c", 3, 4)];
    assert_eq!(desired(&mut plan, more), [prepare(3, 4)]);
    assert_eq!(hint(&mut plan), [], "another model is being loaded");
    prepared(&mut plan, 3, 4);
    assert_eq!(hint(&mut plan), [make_room(8, RoomPurpose::Hint)]);
    let room = plan.on_event(Event::RoomMade(vec![digest(2)]), NOW);
    assert_eq!(room[1..], [Action::Release { digest: digest(2) }, prepare(1, 10)]);
    assert_eq!(prepared(&mut plan, 1, 9), [install("a", 1), arrived(1)]);
    assert_eq!(hint(&mut plan), [], "the model is in host memory");
}

#[test]
fn a_request_for_a_hinted_model_waits_like_any_other_request() {
    let mut plan = a_asleep();
    plan.on_event(Event::Hinted(digest(1)), NOW);
    plan.on_event(Event::ModelsAwaited(vec![digest(1)]), NOW);
    assert_eq!(plan.on_event(Event::RoomMade(vec![]), NOW), []);
    assert_eq!(
        plan.on_event(Event::ModelsAwaited(vec![digest(1)]), NOW),
        [make_room(4, RoomPurpose::Request)]
    );
}

#[test]
fn a_model_without_room_waits_and_does_not_delay_smaller_models() {
    let mut plan = a_asleep();
    let more = [wanted("a", 1, 10), wanted("b", 2, 10), wanted("c", 3, 4)];
    assert_eq!(plan.on_event(Event::ModelsAwaited(vec![digest(1)]), NOW).len(), 1);
    assert_eq!(plan.on_event(Event::RoomMade(vec![]), NOW), []);
    assert_eq!(plan.phases()[0], (key("a"), ServingPhase::Ready));
    // Model 1 asks for room again. Model 3 behind it waits only until that request has failed.
    assert_eq!(desired(&mut plan, more), [make_room(4, RoomPurpose::Request)]);
    assert_eq!(plan.on_event(Event::RoomMade(vec![]), NOW), [prepare(3, 4)]);
    assert_eq!(plan.on_event(Event::Tick, NOW), [make_room(8, RoomPurpose::Request)]);
}

#[test]
fn requests_that_wait_for_a_broken_model_are_refused() {
    let mut plan = a_asleep();
    plan.on_event(Event::ModelsAwaited(vec![digest(1)]), NOW);
    plan.on_event(Event::RoomMade(vec![digest(2)]), NOW);
    let refuse = Action::Refuse { digest: digest(1), why: "damaged".into() };
    assert_eq!(failed(&mut plan, 1, PrepareFailure::Permanent("damaged".into())), [refuse]);
    assert_eq!(plan.phases()[0], (key("a"), ServingPhase::Failed("damaged".into())));
    // A transient failure is retried, and its function stays ready.
    plan.on_event(Event::ModelsAwaited(vec![digest(2)]), NOW);
    assert_eq!(failed(&mut plan, 2, PrepareFailure::Transient("no disk".into())), []);
    assert_eq!(plan.phases()[1], (key("b"), ServingPhase::Ready));
    assert_eq!(plan.on_event(Event::Tick, Timestamp::MAX), [prepare(2, 10)]);
}

#[test]
fn a_model_larger_than_its_file_is_released_when_it_does_not_fit() {
    let mut plan = plan(15);
    desired(&mut plan, [wanted("a", 1, 10)]);
    let actions = prepared(&mut plan, 1, 20);
    assert_eq!(actions[0], Action::Release { digest: digest(1) });
    assert!(matches!(&actions[1..], [Action::Refuse { .. }]), "{actions:?}");
    assert!(matches!(&plan.phases()[0].1, ServingPhase::Failed(_)));
    assert_eq!(plan.resident(), []);
}

#[test]
fn at_most_two_preparations_at_a_time_in_order_of_arrival() {
    let mut plan = plan(100);
    let functions = [wanted("a", 3, 1), wanted("b", 2, 1), wanted("c", 1, 1)];
    assert_eq!(desired(&mut plan, functions), [prepare(3, 1), prepare(2, 1)]);
    assert_eq!(prepared(&mut plan, 2, 1), [install("b", 2), arrived(2), prepare(1, 1)]);
}

#[test]
fn a_failed_fetch_is_retried_with_growing_waits() {
    let mut plan = plan(100);
    desired(&mut plan, [wanted("a", 1, 10)]);
    let mut last = NOW;
    for _ in 0..3 {
        assert_eq!(failed(&mut plan, 1, PrepareFailure::Unavailable("no controller".into())), []);
        assert_eq!(plan.phases()[0].1, ServingPhase::Preparing("no controller".into()));
        let until = plan.wake_at().unwrap();
        assert!(until > last);
        last = until;
        assert_eq!(plan.on_event(Event::Tick, Timestamp(until.0 - 1)), []);
        assert_eq!(plan.on_event(Event::Tick, until), [prepare(1, 10)]);
    }
}

#[test]
fn a_bad_model_is_never_retried_but_bad_bytes_are() {
    let mut plan = plan(100);
    desired(&mut plan, [wanted("a", 1, 10), wanted("b", 2, 10)]);
    failed(&mut plan, 1, PrepareFailure::Permanent("not onnx".into()));
    failed(&mut plan, 2, PrepareFailure::Transient("wrong bytes".into()));
    let expected = [
        (key("a"), ServingPhase::Failed("not onnx".into())),
        (key("b"), ServingPhase::Failed("wrong bytes".into())),
    ];
    assert_eq!(plan.phases(), expected);
    assert_eq!(plan.on_event(Event::Tick, Timestamp::MAX), [prepare(2, 10)]);
}

#[test]
fn a_late_answer_about_a_retired_function_is_ignored() {
    let mut plan = plan(100);
    desired(&mut plan, [wanted("a", 1, 10)]);
    prepared(&mut plan, 1, 10);
    desired(&mut plan, []);
    installed(&mut plan, "a", Ok(()));
    assert_eq!(plan.phases(), []);
    assert_eq!(prepared(&mut plan, 1, 10), []);
}

proptest! {
    /// After any sequence of events, reserved memory stays within the budget, no model is held that no
    /// function uses, and no model is prepared twice at once.
    #[test]
    fn the_budget_holds_and_nothing_leaks(steps in prop::collection::vec(step(), 1..80)) {
        let mut plan = plan(30);
        let mut preparing: Vec<Digest> = Vec::new();
        let mut held: std::collections::BTreeSet<Digest> = Default::default();
        let mut now = NOW;
        let mut lacking = None;
        for step in steps {
            let event = match step {
                Step::Want(functions) => Event::Desired(
                    functions.into_iter().map(|(name, model)| wanted(&format!("f{name}"), model, 3 * u64::from(model) + 3)).collect(),
                ),
                Step::Finish(size) if !preparing.is_empty() => {
                    let digest = preparing.remove(0);
                    held.insert(digest);
                    Event::Prepared { digest, bytes: Bytes(size) }
                }
                Step::Fail if !preparing.is_empty() => {
                    Event::Failed { digest: preparing.remove(0), failure: PrepareFailure::Unavailable("x".into()) }
                }
                Step::MakeRoom(ask) if lacking.is_some() => {
                    let bytes: Bytes = lacking.take().unwrap();
                    let mut gone = Vec::new();
                    let mut freed = Bytes::ZERO;
                    for (digest, size) in plan.resident() {
                        if ask && freed < bytes {
                            freed += size;
                            gone.push(digest);
                        }
                    }
                    Event::RoomMade(gone)
                }
                Step::Hint(model) => Event::Hinted(digest(model)),
                Step::Ask => Event::ModelsAwaited(plan.models.keys().copied().collect()),
                _ => {
                    now = plan.wake_at().unwrap_or(now).max(now);
                    Event::Tick
                }
            };
            for action in plan.on_event(event, now) {
                match action {
                    Action::Prepare { digest, .. } => {
                        prop_assert!(!preparing.contains(&digest));
                        preparing.push(digest);
                    }
                    Action::Drop { digest } | Action::Release { digest } => { held.remove(&digest); }
                    Action::Install { digest, .. } | Action::Arrived { digest } => {
                        prop_assert!(held.contains(&digest));
                    }
                    Action::MakeRoom { bytes, .. } => {
                        prop_assert!(lacking.replace(bytes).is_none(), "room is made for one model at a time");
                        prop_assert!(bytes <= plan.resident().iter().map(|(_, size)| *size).sum::<Bytes>());
                    }
                    Action::Refuse { digest, .. } => prop_assert!(plan.models[&digest].needs > Bytes(30)),
                    Action::Retire { .. } => {}
                }
            }
            prop_assert!(plan.used() <= Bytes(30));
            prop_assert!(preparing.len() <= PREPARATIONS_MAX);
            let resident: std::collections::BTreeSet<_> = plan.resident().into_iter().map(|(digest, _)| digest).collect();
            prop_assert_eq!(&resident, &held);
            for digest in &resident {
                prop_assert!(plan.functions.values().any(|function| function.digest == *digest));
            }
        }
    }
}

#[derive(Debug, Clone)]
enum Step {
    Want(Vec<(u8, u8)>),
    Finish(u64),
    Fail,
    MakeRoom(bool),
    Ask,
    Hint(u8),
    Tick,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        prop::collection::vec((0u8..6, 0u8..5), 0..6).prop_map(Step::Want),
        (1u64..40).prop_map(Step::Finish),
        Just(Step::Fail),
        any::<bool>().prop_map(Step::MakeRoom),
        Just(Step::Ask),
        (0u8..5).prop_map(Step::Hint),
        Just(Step::Tick),
    ]
}
