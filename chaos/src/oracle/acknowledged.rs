//! The check that no acknowledged write is lost. If one write was certainly the last on a function,
//! the function has to be as that write left it. The linearizability check judges writes that
//! overlapped, or that an unknown write may follow. A reader can verify this check by
//! eye.

use std::collections::BTreeMap;

use crate::history::{AdminAnswer, AdminOp, AdminOperation, AdminResult, FunctionReading};
use crate::report::PromiseCheck;

const NAME: &str = "no acknowledged write is lost";

/// Compares the final state of every function with its writes. A function without an entry in
/// `last` is absent.
#[must_use]
pub fn check(
    histories: &BTreeMap<String, Vec<AdminOperation>>,
    last: &BTreeMap<String, FunctionReading>,
) -> PromiseCheck {
    let acknowledged =
        |operations: &[AdminOperation]| operations.iter().filter(|it| it.is_write() && it.is_done()).count();
    let total: usize = histories.values().map(|operations| acknowledged(operations)).sum();
    let mut decided = 0;
    let mut evidence = Vec::new();
    for (key, operations) in histories {
        let seen = last.get(key);
        let Some(write) = certainly_last(operations) else { continue };
        decided += 1;
        if !left_so(write, seen) {
            evidence.push(format!("function {key} is {seen:?} after {write}"));
            evidence.extend(operations.iter().filter(|it| it.is_write()).map(ToString::to_string));
        }
    }
    for key in last.keys().filter(|key| !histories.contains_key(*key)) {
        evidence.push(format!("function {key} exists, although no client created it"));
    }
    let detail =
        format!("{total} acknowledged; the last on {decided} of {} functions is certain", histories.len());
    PromiseCheck::of(NAME, detail, evidence)
}

/// Returns the acknowledged write after which no other write can have taken effect.
fn certainly_last(operations: &[AdminOperation]) -> Option<&AdminOperation> {
    // A write that found no function changed nothing.
    let changes = |it: &&AdminOperation| it.is_write() && it.answer != AdminAnswer::Done(AdminResult::Absent);
    let last = operations.iter().filter(changes).filter(|it| it.is_done()).max_by_key(|it| it.invoked)?;
    let others = operations.iter().filter(changes).filter(|other| !std::ptr::eq(*other, last));
    let mut overtakes = others.filter_map(AdminOperation::took_effect_by).filter(|&by| by >= last.invoked);
    overtakes.next().is_none().then_some(last)
}

fn left_so(write: &AdminOperation, seen: Option<&FunctionReading>) -> bool {
    match (write.op, seen) {
        (AdminOp::Apply(value), Some(seen)) => seen.value == value,
        (AdminOp::Enable(enabled), Some(seen)) => seen.enabled == enabled,
        (AdminOp::Delete, None) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::report::CheckVerdict;

    fn write(from: u64, to: u64, op: AdminOp, answer: AdminAnswer) -> AdminOperation {
        let at = Duration::from_millis;
        AdminOperation { key: "f".into(), client: 1, op, invoked: at(from), returned: at(to), answer }
    }

    fn done(from: u64, to: u64, op: AdminOp, ret: AdminResult) -> AdminOperation {
        write(from, to, op, AdminAnswer::Done(ret))
    }

    fn seen(value: u64) -> Option<FunctionReading> {
        Some(FunctionReading { value, enabled: true, generation: 1 })
    }

    fn verdict(operations: Vec<AdminOperation>, last: Option<FunctionReading>) -> CheckVerdict {
        let last = last.map(|seen| ("f".to_owned(), seen)).into_iter().collect();
        check(&BTreeMap::from([("f".to_owned(), operations)]), &last).verdict
    }

    #[test]
    fn a_function_that_differs_from_its_last_write_is_caught() {
        let history = || {
            vec![
                done(0, 10, AdminOp::Apply(1), AdminResult::Created),
                done(20, 30, AdminOp::Apply(2), AdminResult::Configured),
            ]
        };
        assert_eq!(verdict(history(), seen(2)), CheckVerdict::Pass);
        assert_eq!(verdict(history(), seen(1)), CheckVerdict::Fail);
        assert_eq!(verdict(history(), None), CheckVerdict::Fail);
        let deleted = || [history(), vec![done(40, 50, AdminOp::Delete, AdminResult::Deleted)]].concat();
        assert_eq!(verdict(deleted(), None), CheckVerdict::Pass);
        assert_eq!(verdict(deleted(), seen(2)), CheckVerdict::Fail);
    }

    #[test]
    fn a_function_that_another_write_may_have_changed_is_not_judged() {
        let unknown = write(5, 6, AdminOp::Apply(2), AdminAnswer::Unknown("cut".into()));
        let overlap = done(5, 15, AdminOp::Apply(2), AdminResult::Configured);
        for other in [unknown, overlap] {
            let history = vec![done(0, 10, AdminOp::Apply(1), AdminResult::Created), other];
            assert_eq!(verdict(history.clone(), seen(1)), CheckVerdict::Pass);
            assert_eq!(verdict(history, seen(2)), CheckVerdict::Pass);
        }
    }

    #[test]
    fn a_refused_write_cannot_be_the_last() {
        let refused = write(20, 30, AdminOp::Apply(2), AdminAnswer::Refused("no leader".into()));
        let history = || vec![done(0, 10, AdminOp::Apply(1), AdminResult::Created), refused.clone()];
        assert_eq!(verdict(history(), seen(1)), CheckVerdict::Pass);
        assert_eq!(verdict(history(), seen(2)), CheckVerdict::Fail);
    }

    #[test]
    fn a_function_without_a_write_is_caught() {
        let last = BTreeMap::from([("ghost".to_owned(), seen(1).unwrap())]);
        assert_eq!(check(&BTreeMap::new(), &last).verdict, CheckVerdict::Fail);
    }
}
