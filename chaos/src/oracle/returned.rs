//! Shared memory returns to what it was: what dead executors and ended requests lay in is gone. Files
//! are counted over those that a process of each kind needs: in isolation there are as many executors
//! as there are models at work.

use std::collections::BTreeMap;

use crate::report::Check;

/// The check's name.
pub const NAME: &str = "no shared memory is left behind";

/// The shared memory that some processes hold: how many files there are of each name, and bytes in
/// them.
pub type Files = BTreeMap<String, (u64, u64)>;

/// The names of which there are more files than there were.
#[must_use]
pub fn left_behind(before: &Files, after: &Files) -> Vec<String> {
    let count = |files: &Files, name: &String| files.get(name).map_or(0, |(count, _)| *count);
    let grown = after.keys().filter(|&name| count(after, name) > count(before, name));
    grown
        .map(|name| format!("{name}: {} files, {} before", count(after, name), count(before, name)))
        .collect()
}

/// Judges what is held at the end by what was held at the beginning.
#[must_use]
pub fn check(before: &Files, after: &Files) -> Check {
    let files = |files: &Files| files.values().map(|(count, _)| count).sum::<u64>();
    let detail = format!("{} files before the first fault, {} after the last", files(before), files(after));
    Check::of(NAME, detail, left_behind(before, after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verdict;

    #[test]
    fn a_file_more_of_any_name_is_caught() {
        let files = |gpus, requests| {
            Files::from([("gpu".to_owned(), (gpus, 1)), ("request".to_owned(), (requests, 1))])
        };
        assert_eq!(check(&files(4, 2), &files(4, 0)).verdict, Verdict::Pass);
        let check = check(&files(4, 2), &files(5, 0));
        assert_eq!(
            (check.verdict, check.evidence),
            (Verdict::Fail, vec!["gpu: 5 files, 4 before".to_owned()])
        );
    }
}
