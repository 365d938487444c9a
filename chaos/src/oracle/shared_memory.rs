//! The check that shared memory returns to its old amount: the memory of dead executors and ended
//! requests is freed. Only files beyond the needs of each kind of process are counted: with
//! isolation, there are as many executors as active models.

use std::collections::BTreeMap;

use crate::report::PromiseCheck;

pub const NAME: &str = "no shared memory is left behind";

/// The shared memory that some processes hold: for each name, the number of files and their bytes.
pub type Files = BTreeMap<String, (u64, u64)>;

/// Returns the names with more files than before.
#[must_use]
pub fn left_behind(before: &Files, after: &Files) -> Vec<String> {
    let count = |files: &Files, name: &String| files.get(name).map_or(0, |(count, _)| *count);
    let grown = after.keys().filter(|&name| count(after, name) > count(before, name));
    grown
        .map(|name| format!("{name}: {} files, {} before", count(after, name), count(before, name)))
        .collect()
}

/// Compares the files at the end with the files at the start.
#[must_use]
pub fn check(before: &Files, after: &Files) -> PromiseCheck {
    let files = |files: &Files| files.values().map(|(count, _)| count).sum::<u64>();
    let detail = format!("{} files before the first fault, {} after the last", files(before), files(after));
    PromiseCheck::of(NAME, detail, left_behind(before, after))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::CheckVerdict;

    #[test]
    fn an_additional_file_of_any_name_is_caught() {
        let files = |gpus, requests| {
            Files::from([("gpu".to_owned(), (gpus, 1)), ("request".to_owned(), (requests, 1))])
        };
        assert_eq!(check(&files(4, 2), &files(4, 0)).verdict, CheckVerdict::Pass);
        let check = check(&files(4, 2), &files(5, 0));
        assert_eq!(
            (check.verdict, check.evidence),
            (CheckVerdict::Fail, vec!["gpu: 5 files, 4 before".to_owned()])
        );
    }
}
