//! Invariant: linearizability of the admin API's writes and reads. Every function behaves as if each
//! call took effect at a moment between the beginning and the end, on a single copy. A call without an
//! answer stays in flight forever.
//!
//! Functions are independent, so each is checked separately (Herlihy and Wing, theorem 1). The search
//! is exponential in the number of overlapping calls, so histories are kept short: see
//! [`crate::people`].

use std::collections::BTreeMap;

use stateright::semantics::{ConsistencyTester as _, LinearizabilityTester, SequentialSpec};

use crate::history::{Call, History, RegisterAnswer, RegisterAsked, RegisterOp, Verdict};

/// The value of a function; `None` if the function is absent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
struct Register(Option<u64>);

impl SequentialSpec for Register {
    type Op = RegisterOp;
    type Ret = RegisterAnswer;

    fn invoke(&mut self, op: &RegisterOp) -> RegisterAnswer {
        let before = self.0;
        match *op {
            RegisterOp::Put(value) => {
                self.0 = Some(value);
                RegisterAnswer::Done
            }
            RegisterOp::Delete => {
                self.0 = None;
                before.map_or(RegisterAnswer::Absent, |_| RegisterAnswer::Done)
            }
            RegisterOp::Get => before.map_or(RegisterAnswer::Absent, RegisterAnswer::Value),
        }
    }
}

type Calls<'a> = Vec<&'a Call<RegisterAsked, RegisterAnswer>>;

pub(crate) fn check(history: &History) -> Verdict {
    let mut functions: BTreeMap<&str, Calls<'_>> = BTreeMap::new();
    for call in &history.registers {
        functions.entry(&call.asked.function).or_default().push(call);
    }
    for (function, calls) in functions {
        if !linearizable(&calls) {
            let calls: Vec<_> = calls.iter().map(|call| format!("{call:?}")).collect();
            return Err(format!("no order explains function {function}:\n{}", calls.join("\n")).into());
        }
    }
    Ok(())
}

fn linearizable(calls: &Calls<'_>) -> bool {
    enum Moment {
        Began(RegisterOp),
        Ended(RegisterAnswer),
    }
    let mut moments = BTreeMap::new();
    // Each call is a separate thread: a call without an end must not block the client's next call.
    for (thread, call) in calls.iter().enumerate() {
        match call.ended {
            // A refused call did nothing. If the call had taken effect, later reads would have no
            // explanation.
            Some((_, RegisterAnswer::Refused)) => continue,
            // A read without an answer changes nothing and shows nothing.
            None if call.asked.op == RegisterOp::Get => continue,
            Some((at, answer)) => moments.insert(at, (thread, Moment::Ended(answer))),
            None => None,
        };
        moments.insert(call.began, (thread, Moment::Began(call.asked.op)));
    }
    let mut tester = LinearizabilityTester::new(Register::default());
    for (thread, moment) in moments.into_values() {
        let noted = match moment {
            Moment::Began(op) => tester.on_invoke(thread, op),
            Moment::Ended(answer) => tester.on_return(thread, answer),
        };
        noted.expect("each call begins once, and ends after it began");
    }
    tester.is_consistent()
}

#[test]
fn writes_and_reads_of_functions_are_linearizable() {
    crate::runs::hold("linearizability");
}

mod planted {
    use super::{Call, RegisterAnswer, RegisterAsked, RegisterOp, check};
    use crate::history::History;

    use RegisterAnswer::{Absent, Done, Refused, Value};
    use RegisterOp::{Delete, Get, Put};

    /// An operation, the time of the beginning, and the time of the end with the answer.
    type Short = (RegisterOp, u64, Option<(u64, RegisterAnswer)>);

    fn holds(calls: &[Short]) -> bool {
        let call = |&(op, began, ended): &Short| Call {
            asked: RegisterAsked { function: "f".to_owned(), op },
            began,
            ended,
        };
        let registers = calls.iter().map(call).collect();
        check(&History { registers, ..History::default() }).is_ok()
    }

    #[test]
    fn a_stale_read_is_detected() {
        let first = (Put(1), 1, Some((2, Done)));
        let second = (Put(2), 3, Some((4, Done)));
        assert!(holds(&[first, second, (Get, 5, Some((6, Value(2))))]));
        assert!(!holds(&[first, second, (Get, 5, Some((6, Value(1))))]));
        assert!(!holds(&[first, second, (Get, 5, Some((6, Absent)))]));
    }

    #[test]
    fn a_write_without_an_answer_may_take_effect_late_or_never_but_not_twice() {
        let unknown = (Put(1), 1, None);
        let other = (Put(2), 2, Some((3, Done)));
        let read = |began, value| (Get, began, Some((began + 1, Value(value))));
        assert!(holds(&[unknown, other, read(4, 2)]));
        assert!(holds(&[unknown, other, read(4, 2), read(6, 1)]));
        assert!(!holds(&[unknown, other, read(4, 1), read(6, 2)]));
        assert!(!holds(&[unknown, other, read(4, 1), (Put(3), 6, Some((7, Done))), read(8, 1)]));
    }

    #[test]
    fn an_executed_refused_write_and_an_ineffective_delete_are_detected() {
        assert!(holds(&[(Put(1), 1, Some((2, Refused))), (Get, 3, Some((4, Absent)))]));
        assert!(!holds(&[(Put(1), 1, Some((2, Refused))), (Get, 3, Some((4, Value(1))))]));
        let deleted = [(Put(1), 1, Some((2, Done))), (Delete, 3, Some((4, Done)))];
        assert!(!holds(&[deleted[0], deleted[1], (Get, 5, Some((6, Value(1))))]));
    }
}
