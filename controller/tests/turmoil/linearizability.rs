//! Linearizability of the admin API's writes and reads: every function behaves as if each call took
//! effect at one moment between its beginning and its end, on one copy. A call without an answer
//! is in flight for ever.
//!
//! Functions are independent, so that each is checked by itself (Herlihy and Wing, theorem 1); the
//! search is exponential in what overlaps, and histories are kept short for it: see [`crate::people`].

use std::collections::BTreeMap;

use stateright::semantics::{ConsistencyTester as _, LinearizabilityTester, SequentialSpec};

use crate::history::{Call, History, RegisterAnswer, RegisterAsked, RegisterOp, Verdict};

/// One function: absent, or with a value.
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
    // Each call is a thread of its own: one that never ends must not hold its client's next back.
    for (thread, call) in calls.iter().enumerate() {
        match call.ended {
            // Nothing was done or read. Had it been, what was read later would not be explained.
            Some((_, RegisterAnswer::Refused)) => continue,
            // It changes nothing and says nothing.
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

    /// What is asked, when it began, and when and how it ended.
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
    fn a_stale_read_is_noticed() {
        let (first, second) = ((Put(1), 1, Some((2, Done))), (Put(2), 3, Some((4, Done))));
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
    fn a_refused_write_that_took_effect_and_a_delete_that_did_not_are_noticed() {
        assert!(holds(&[(Put(1), 1, Some((2, Refused))), (Get, 3, Some((4, Absent)))]));
        assert!(!holds(&[(Put(1), 1, Some((2, Refused))), (Get, 3, Some((4, Value(1))))]));
        let deleted = [(Put(1), 1, Some((2, Done))), (Delete, 3, Some((4, Done)))];
        assert!(!holds(&[deleted[0], deleted[1], (Get, 5, Some((6, Value(1))))]));
    }
}
