//! A function as its writers and readers see it: the sequential specification against which
//! histories are checked. The generation counts revisions across deletions, so that a write that is
//! carried out twice shows in the next read.

use stateright::semantics::SequentialSpec;

use crate::history::{Op, Ret, Seen};

/// The state of a function, absent at first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Register {
    held: Option<Held>,
    generation: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    value: u64,
    enabled: bool,
}

impl SequentialSpec for Register {
    type Op = Op;
    type Ret = Ret;

    fn invoke(&mut self, op: &Op) -> Ret {
        match (*op, self.held) {
            (Op::Apply(value), None) => {
                self.generation += 1;
                self.held = Some(Held { value, enabled: true });
                Ret::Created
            }
            (Op::Apply(value), Some(held)) if held.value == value => Ret::Unchanged,
            (Op::Apply(value), Some(held)) => {
                self.generation += 1;
                self.held = Some(Held { value, ..held });
                Ret::Configured
            }
            (_, None) => Ret::Absent,
            (Op::Delete, Some(_)) => {
                self.held = None;
                Ret::Deleted
            }
            (Op::Enable(enabled), Some(held)) => {
                self.held = Some(Held { enabled, ..held });
                Ret::Set
            }
            (Op::Read, Some(Held { value, enabled })) => {
                Ret::Found(Seen { value, enabled, generation: self.generation })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_continue_after_a_deletion() {
        let mut register = Register::default();
        let found = |value, enabled, generation| Ret::Found(Seen { value, enabled, generation });
        let steps = [
            (Op::Read, Ret::Absent),
            (Op::Delete, Ret::Absent),
            (Op::Enable(true), Ret::Absent),
            (Op::Apply(1), Ret::Created),
            (Op::Enable(false), Ret::Set),
            (Op::Apply(2), Ret::Configured),
            (Op::Apply(2), Ret::Unchanged),
            (Op::Read, found(2, false, 2)),
            (Op::Delete, Ret::Deleted),
            (Op::Apply(3), Ret::Created),
            (Op::Read, found(3, true, 3)),
        ];
        for (op, ret) in steps {
            assert_eq!(register.invoke(&op), ret, "{op:?}");
        }
    }
}
