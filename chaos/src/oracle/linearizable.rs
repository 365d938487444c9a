//! The check that the operations on each function can be put into one order that respects real time
//! and in which each answer is right (Herlihy and Wing). stateright's tester searches for the
//! order. The search is exponential in the worst case, so clients bound the history of a key, and
//! [`SEARCH_TIMEOUT`] bounds the search.

use std::collections::BTreeMap;
use std::sync::mpsc;
use std::time::Duration;

use stateright::semantics::{ConsistencyTester as _, LinearizabilityTester};

use super::register::Register;
use crate::history::{AdminAnswer, AdminOperation};
use crate::report::PromiseCheck;

const NAME: &str = "reads and writes are linearizable";
/// Maximum time of the search for an order of a key's operations.
const SEARCH_TIMEOUT: Duration = Duration::from_secs(60);

/// Judges every key's history separately, because linearizability is a local property.
#[must_use]
pub fn check(histories: &BTreeMap<String, Vec<AdminOperation>>) -> PromiseCheck {
    let mut total = 0;
    let mut unknown = 0;
    let mut evidence = Vec::new();
    for (key, operations) in histories {
        total += operations.len();
        unknown += operations.iter().filter(|it| matches!(it.answer, AdminAnswer::Unknown(_))).count();
        let why = match search(operations) {
            Some(true) => continue,
            Some(false) => first_unexplained(operations).map_or_else(
                || "no order of these operations explains every answer".to_owned(),
                |it| format!("no order explains this answer and the answers before it: {it}"),
            ),
            None => "the search for an order timed out: undecided".to_owned(),
        };
        evidence.push(format!("function {key}: {why}"));
        evidence.extend(operations.iter().map(ToString::to_string));
    }
    let detail = format!(
        "{total} operations, {unknown} of unknown outcome, on {} functions; times in seconds since the start of the run",
        histories.len()
    );
    PromiseCheck::of(NAME, detail, evidence)
}

/// Returns the first answer, in the order of returns, that no order explains together with the answers before
/// it; `None` if a search timed out. Operations under way at that time count as unknown.
fn first_unexplained(operations: &[AdminOperation]) -> Option<&AdminOperation> {
    let mut answered: Vec<_> = operations.iter().filter(|it| it.is_done()).collect();
    answered.sort_by_key(|it| it.returned);
    let mut timed_out = false;
    // An order of more answers is an order of fewer, so the answers with an order come first.
    let at = answered.partition_point(|last| {
        let begun = operations.iter().filter(|it| it.invoked <= last.returned).cloned();
        let so_far: Vec<_> = begun
            .map(|it| match it.is_done() && it.returned > last.returned {
                true => AdminOperation { answer: AdminAnswer::Unknown("under way".into()), ..it },
                false => it,
            })
            .collect();
        let found = search(&so_far);
        timed_out |= found.is_none();
        found == Some(true)
    });
    answered.get(at).copied().filter(|_| !timed_out)
}

/// Whether the operations have an order as the module describes it; `None` if the search timed out.
fn search(operations: &[AdminOperation]) -> Option<bool> {
    let (found, result) = mpsc::sync_channel(1);
    let tester = tester(operations);
    // A search that times out continues in its thread until the process ends.
    std::thread::spawn(move || found.send(tester.is_consistent()));
    result.recv_timeout(SEARCH_TIMEOUT).ok()
}

/// Converts the history to the tester's input. Every operation is its own thread, so two operations
/// are ordered only if the first returned before the second was invoked. An unknown write never returns.
/// Unknown reads are omitted, because they prove nothing. Refused operations are omitted, because they have no
/// effect: an answer that shows their effect has no order.
fn tester(operations: &[AdminOperation]) -> LinearizabilityTester<usize, Register> {
    #[derive(PartialEq, Eq, PartialOrd, Ord)]
    enum Step {
        // Two operations that meet at one instant overlap, so invocations sort before returns.
        Invoke,
        Return,
    }
    let mut ordered: Vec<&AdminOperation> = operations
        .iter()
        .filter(|it| it.is_done() || it.is_write() && it.took_effect_by().is_some())
        .collect();
    // The tester tries threads in order, and the order of the answers explains most histories.
    ordered.sort_by_key(|it| it.took_effect_by());
    let mut steps = Vec::new();
    for (thread, operation) in ordered.iter().enumerate() {
        steps.push((operation.invoked, Step::Invoke, thread));
        if operation.is_done() {
            steps.push((operation.returned, Step::Return, thread));
        }
    }
    steps.sort();
    let mut tester = LinearizabilityTester::new(Register::default());
    for (_, step, thread) in steps {
        let taken = match (step, &ordered[thread].answer) {
            (Step::Return, AdminAnswer::Done(ret)) => tester.on_return(thread, *ret).map(|_| ()),
            _ => tester.on_invoke(thread, ordered[thread].op).map(|_| ()),
        };
        taken.expect("each thread invokes once, and returns once after that");
    }
    tester
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::{AdminOp, AdminResult, FunctionReading};
    use crate::report::CheckVerdict;

    fn operation(client: u32, from: u64, to: u64, op: AdminOp, answer: AdminAnswer) -> AdminOperation {
        let at = Duration::from_millis;
        AdminOperation { key: "f".into(), client, op, invoked: at(from), returned: at(to), answer }
    }

    fn done(client: u32, from: u64, to: u64, op: AdminOp, ret: AdminResult) -> AdminOperation {
        operation(client, from, to, op, AdminAnswer::Done(ret))
    }

    fn unknown(from: u64, op: AdminOp) -> AdminOperation {
        operation(9, from, from + 1, op, AdminAnswer::Unknown("cut".into()))
    }

    fn found(value: u64, generation: u64) -> AdminResult {
        AdminResult::Found(FunctionReading { value, enabled: true, generation })
    }

    fn verdict(operations: Vec<AdminOperation>) -> CheckVerdict {
        check(&BTreeMap::from([("f".to_owned(), operations)])).verdict
    }

    #[test]
    fn operations_that_overlap_may_be_in_either_order() {
        for first in [1, 2] {
            let history = vec![
                done(
                    1,
                    0,
                    10,
                    AdminOp::Apply(1),
                    if first == 1 { AdminResult::Created } else { AdminResult::Configured },
                ),
                done(
                    2,
                    5,
                    15,
                    AdminOp::Apply(2),
                    if first == 2 { AdminResult::Created } else { AdminResult::Configured },
                ),
                done(1, 20, 30, AdminOp::Read, found(3 - first, 2)),
            ];
            assert_eq!(verdict(history), CheckVerdict::Pass, "{first} first");
        }
    }

    #[test]
    fn a_stale_read_is_caught() {
        let history = vec![
            done(1, 0, 10, AdminOp::Apply(1), AdminResult::Created),
            done(1, 20, 30, AdminOp::Apply(2), AdminResult::Configured),
            done(2, 40, 50, AdminOp::Read, found(1, 1)),
        ];
        assert_eq!(verdict(history), CheckVerdict::Fail);
    }

    #[test]
    fn a_lost_write_is_caught() {
        let history = vec![
            done(1, 0, 10, AdminOp::Apply(1), AdminResult::Created),
            done(2, 20, 30, AdminOp::Read, AdminResult::Absent),
        ];
        assert_eq!(verdict(history), CheckVerdict::Fail);
    }

    #[test]
    fn a_write_that_was_carried_out_twice_is_caught() {
        let history = vec![
            done(1, 0, 10, AdminOp::Apply(1), AdminResult::Created),
            done(2, 20, 30, AdminOp::Apply(2), AdminResult::Configured),
            done(2, 40, 50, AdminOp::Read, found(1, 3)),
        ];
        assert_eq!(verdict(history), CheckVerdict::Fail);
    }

    #[test]
    fn a_read_that_goes_back_in_time_is_caught() {
        let history = vec![
            done(1, 0, 10, AdminOp::Apply(1), AdminResult::Created),
            done(1, 20, 90, AdminOp::Apply(2), AdminResult::Configured),
            done(2, 30, 40, AdminOp::Read, found(2, 2)),
            done(3, 50, 60, AdminOp::Read, found(1, 1)),
        ];
        assert_eq!(verdict(history), CheckVerdict::Fail);
    }

    #[test]
    fn the_evidence_names_the_first_answer_that_no_order_explains() {
        let history = vec![
            done(1, 0, 10, AdminOp::Apply(1), AdminResult::Created),
            done(1, 20, 30, AdminOp::Apply(2), AdminResult::Configured),
            done(2, 40, 50, AdminOp::Read, found(1, 1)),
            done(3, 60, 70, AdminOp::Read, found(2, 2)),
        ];
        let stale = history[2].to_string();
        let check = check(&BTreeMap::from([("f".to_owned(), history)]));
        let because = "function f: no order explains this answer and the answers before it: ";
        assert_eq!(check.evidence[0], format!("{because}{stale}"));
    }

    #[test]
    fn an_unanswered_write_may_take_effect_late_or_never_but_once() {
        let read = |from, ret| done(2, from, from + 5, AdminOp::Read, ret);
        let first = || done(1, 0, 10, AdminOp::Apply(1), AdminResult::Created);
        let late =
            vec![first(), unknown(11, AdminOp::Apply(2)), read(20, found(1, 1)), read(50, found(2, 2))];
        assert_eq!(verdict(late), CheckVerdict::Pass);
        let never =
            vec![first(), unknown(11, AdminOp::Apply(2)), read(20, found(1, 1)), read(50, found(1, 1))];
        assert_eq!(verdict(never), CheckVerdict::Pass);
        let undone =
            vec![first(), unknown(11, AdminOp::Apply(2)), read(20, found(2, 2)), read(50, found(1, 1))];
        assert_eq!(verdict(undone), CheckVerdict::Fail);
        let before = vec![read(0, found(2, 1)), unknown(11, AdminOp::Apply(2))];
        assert_eq!(verdict(before), CheckVerdict::Fail);
    }

    #[test]
    fn a_refused_write_that_took_effect_is_caught() {
        let refused = operation(1, 0, 10, AdminOp::Apply(1), AdminAnswer::Refused("no leader".into()));
        assert_eq!(
            verdict(vec![refused.clone(), done(2, 20, 30, AdminOp::Read, AdminResult::Absent)]),
            CheckVerdict::Pass
        );
        assert_eq!(verdict(vec![refused, done(2, 20, 30, AdminOp::Read, found(1, 1))]), CheckVerdict::Fail);
    }

    #[test]
    fn the_evidence_of_a_violation_is_the_history_of_its_function() {
        let wrong = vec![
            done(1, 0, 10, AdminOp::Apply(1), AdminResult::Created),
            done(2, 20, 30, AdminOp::Read, AdminResult::Absent),
        ];
        let right = vec![done(1, 0, 10, AdminOp::Apply(3), AdminResult::Created)];
        let check = check(&BTreeMap::from([("f".to_owned(), wrong), ("g".to_owned(), right)]));
        assert_eq!(check.evidence.len(), 3, "{:?}", check.evidence);
        assert!(check.evidence[2].ends_with("client 2  Read -> Absent"), "{:?}", check.evidence);
    }
}
