//! The check that no process outlives its parent: executors end with their worker, however the
//! worker ends.

use crate::report::PromiseCheck;

pub const NAME: &str = "no process outlives its parent";

/// Judges the processes of the run that are still there.
#[must_use]
pub fn check(ran: &[u32], left: &[u32]) -> PromiseCheck {
    let evidence = left.iter().map(|pid| format!("process {pid} is still there")).collect();
    PromiseCheck::of(NAME, format!("{} processes, executors included", ran.len()), evidence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CheckVerdict;

    #[test]
    fn a_process_that_outlives_its_parent_is_caught() {
        assert_eq!(check(&[1, 2], &[]).verdict, CheckVerdict::Pass);
        assert_eq!(check(&[1, 2], &[2]).verdict, CheckVerdict::Fail);
    }
}
