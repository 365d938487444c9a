//! The check that every answer of a sequence counts each request of the sequence once: state is
//! neither lost silently nor applied twice. A sequence may be lost with the process that has its
//! state, if its client gets an error. A request that may or may not have been carried out ends its
//! sequence too, because only the client can tell whether that matters (docs/guide/sequences.md, *What is
//! promised*).

use std::collections::{BTreeMap, BTreeSet};

use crate::history::{SequenceRequest, SequenceRequestResult};
use crate::report::PromiseCheck;

const NAME: &str = "every answer counts its sequence";

/// Judges all requests of sequences.
#[must_use]
pub fn check(steps: &[SequenceRequest]) -> PromiseCheck {
    let mut evidence: Vec<String> = steps.iter().filter_map(wrong).collect();
    let counted = |step: &&SequenceRequest| step.how == SequenceRequestResult::Counted;
    // A first answer depends on no state, and proves nothing.
    if !steps.iter().filter(counted).any(|step| step.place > 1) {
        evidence.push("no sequence got as far as a second answer".to_owned());
    }
    let all: BTreeSet<&str> = steps.iter().map(|step| step.sequence.as_str()).collect();
    let whole = steps.iter().filter(counted).filter(|step| step.last).count();
    let unclear = steps.iter().filter(|step| matches!(step.how, SequenceRequestResult::Unclear(_))).count();
    let mut over: BTreeMap<&str, usize> = BTreeMap::new();
    for step in steps {
        if let SequenceRequestResult::Over(why) = &step.how {
            *over.entry(why.split(':').next().unwrap_or_default()).or_default() += 1;
        }
    }
    let over: Vec<_> = over.iter().map(|(reason, count)| format!(" ({reason} {count})")).collect();
    let detail = format!(
        "{} of {} requests answered, in {} sequences: {whole} ended by their clients, {} ended with an error{}, {unclear} left by their clients because a request may have been carried out",
        steps.iter().filter(counted).count(),
        steps.len(),
        all.len(),
        steps.iter().filter(|step| matches!(step.how, SequenceRequestResult::Over(_))).count(),
        over.concat(),
    );
    PromiseCheck::of(NAME, detail, evidence)
}

fn wrong(step: &SequenceRequest) -> Option<String> {
    match &step.how {
        SequenceRequestResult::Counted
        | SequenceRequestResult::Over(_)
        | SequenceRequestResult::Unclear(_) => None,
        SequenceRequestResult::Miscounted(why) => Some(step.line(why)),
        SequenceRequestResult::Refused(why) => Some(step.line(&format!("refused: {why}"))),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::report::CheckVerdict;

    fn step(place: u32, how: SequenceRequestResult) -> SequenceRequest {
        let begun = Duration::from_secs(1);
        let ended = Duration::from_secs(2);
        SequenceRequest { sequence: "s".to_owned(), place, last: place == 3, begun, ended, how }
    }

    fn verdict(how: SequenceRequestResult) -> CheckVerdict {
        check(&[
            step(1, SequenceRequestResult::Counted),
            step(2, SequenceRequestResult::Counted),
            step(3, how),
        ])
        .verdict
    }

    #[test]
    fn a_sequence_may_be_lost_but_not_miscounted() {
        assert_eq!(verdict(SequenceRequestResult::Counted), CheckVerdict::Pass);
        assert_eq!(
            verdict(SequenceRequestResult::Over("SEQUENCE_NOT_FOUND: lost".into())),
            CheckVerdict::Pass
        );
        assert_eq!(verdict(SequenceRequestResult::Unclear("connection lost".into())), CheckVerdict::Pass);
        assert_eq!(
            verdict(SequenceRequestResult::Miscounted("the answer counts 1".into())),
            CheckVerdict::Fail
        );
        assert_eq!(
            verdict(SequenceRequestResult::Refused("MALFORMED_REQUEST: no".into())),
            CheckVerdict::Fail
        );
    }

    #[test]
    fn the_detail_counts_sequences_by_their_end() {
        let over = SequenceRequestResult::Over("SEQUENCE_NOT_FOUND: its state was lost".into());
        let found = check(&[
            step(1, SequenceRequestResult::Counted),
            step(2, SequenceRequestResult::Counted),
            step(3, over),
        ]);
        let expected = "2 of 3 requests answered, in 1 sequences: 0 ended by their clients, 1 ended with an error (SEQUENCE_NOT_FOUND 1), 0 left by their clients because a request may have been carried out";
        assert_eq!(found.detail, expected);
    }

    #[test]
    fn a_run_with_first_answers_alone_fails() {
        assert_eq!(check(&[]).verdict, CheckVerdict::Fail);
        assert_eq!(check(&[step(1, SequenceRequestResult::Counted)]).verdict, CheckVerdict::Fail);
    }
}
