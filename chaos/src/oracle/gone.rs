//! No process outlives its parent: executors end with their worker, however that ends.

use crate::report::Check;

/// The check's name.
pub const NAME: &str = "no process outlives its parent";

/// Judges who is still there of those that ran.
#[must_use]
pub fn check(ran: &[u32], left: &[u32]) -> Check {
    let evidence = left.iter().map(|pid| format!("process {pid} is still there")).collect();
    Check::of(NAME, format!("{} processes, executors included", ran.len()), evidence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verdict;

    #[test]
    fn a_process_that_stays_is_caught() {
        assert_eq!(check(&[1, 2], &[]).verdict, Verdict::Pass);
        assert_eq!(check(&[1, 2], &[2]).verdict, Verdict::Fail);
    }
}
