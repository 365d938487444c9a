//! A function as its writers and readers see it: the sequential specification against which
//! histories are checked. The generation counts revisions across deletions, so that a write that is
//! carried out twice shows in the next read.

use stateright::semantics::SequentialSpec;

use crate::history::{AdminOp, AdminResult, FunctionReading};

/// The state of a function, absent at first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Register {
    held: Option<RegisterValue>,
    generation: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct RegisterValue {
    value: u64,
    enabled: bool,
}

impl SequentialSpec for Register {
    type Op = AdminOp;
    type Ret = AdminResult;

    fn invoke(&mut self, op: &AdminOp) -> AdminResult {
        match (*op, self.held) {
            (AdminOp::Apply(value), None) => {
                self.generation += 1;
                self.held = Some(RegisterValue { value, enabled: true });
                AdminResult::Created
            }
            (AdminOp::Apply(value), Some(held)) if held.value == value => AdminResult::Unchanged,
            (AdminOp::Apply(value), Some(held)) => {
                self.generation += 1;
                self.held = Some(RegisterValue { value, ..held });
                AdminResult::Configured
            }
            (_, None) => AdminResult::Absent,
            (AdminOp::Delete, Some(_)) => {
                self.held = None;
                AdminResult::Deleted
            }
            (AdminOp::Enable(enabled), Some(held)) => {
                self.held = Some(RegisterValue { enabled, ..held });
                AdminResult::Set
            }
            (AdminOp::Read, Some(RegisterValue { value, enabled })) => {
                AdminResult::Found(FunctionReading { value, enabled, generation: self.generation })
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
        let found =
            |value, enabled, generation| AdminResult::Found(FunctionReading { value, enabled, generation });
        let steps = [
            (AdminOp::Read, AdminResult::Absent),
            (AdminOp::Delete, AdminResult::Absent),
            (AdminOp::Enable(true), AdminResult::Absent),
            (AdminOp::Apply(1), AdminResult::Created),
            (AdminOp::Enable(false), AdminResult::Set),
            (AdminOp::Apply(2), AdminResult::Configured),
            (AdminOp::Apply(2), AdminResult::Unchanged),
            (AdminOp::Read, found(2, false, 2)),
            (AdminOp::Delete, AdminResult::Deleted),
            (AdminOp::Apply(3), AdminResult::Created),
            (AdminOp::Read, found(3, true, 3)),
        ];
        for (op, ret) in steps {
            assert_eq!(register.invoke(&op), ret, "{op:?}");
        }
    }
}
