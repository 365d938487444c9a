//! Every answer of a sequence counts each of the sequence's requests once: state is neither lost silently
//! nor applied twice. A sequence may be lost with whoever has its state, if its client is told; a request
//! of which nobody knows whether it was carried out ends its sequence too, since only the client can say
//! whether that matters (docs/sequences.md, *What is promised*).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::report::Check;

const NAME: &str = "every answer counts its sequence";

/// How a request of a sequence ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// Answered with the count that it has to have.
    Counted,
    /// Answered otherwise.
    Miscounted(String),
    /// Refused by an error that says that there is no such sequence, or not any more.
    Over(String),
    /// Not answered, and it may have been carried out.
    Unclear(String),
    /// Refused for good for another reason, or still refused when its client gave up.
    Refused(String),
}

/// One request of a sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Its sequence, from one beginning to the next.
    pub sequence: String,
    /// Its place there, from 1.
    pub place: u32,
    /// Whether it was to end the sequence.
    pub last: bool,
    /// When it was first sent.
    pub begun: Duration,
    /// When it ended.
    pub ended: Duration,
    /// How.
    pub how: Ended,
}

impl Step {
    fn line(&self, why: &str) -> String {
        let (from, to) = (self.begun.as_secs_f64(), self.ended.as_secs_f64());
        format!("{from:>9.3} .. {to:>9.3}  request {} of {}: {why}", self.place, self.sequence)
    }
}

/// Judges all requests of sequences.
#[must_use]
pub fn check(steps: &[Step]) -> Check {
    let mut evidence: Vec<String> = steps.iter().filter_map(wrong).collect();
    let counted = |step: &&Step| step.how == Ended::Counted;
    // A first answer says nothing of any state.
    if !steps.iter().filter(counted).any(|step| step.place > 1) {
        evidence.push("no sequence got as far as a second answer".to_owned());
    }
    let all: BTreeSet<&str> = steps.iter().map(|step| step.sequence.as_str()).collect();
    let whole = steps.iter().filter(counted).filter(|step| step.last).count();
    let unclear = steps.iter().filter(|step| matches!(step.how, Ended::Unclear(_))).count();
    let mut over: BTreeMap<&str, usize> = BTreeMap::new();
    for step in steps {
        if let Ended::Over(why) = &step.how {
            *over.entry(why.split(':').next().unwrap_or_default()).or_default() += 1;
        }
    }
    let over: Vec<_> = over.iter().map(|(reason, count)| format!(" ({reason} {count})")).collect();
    let detail = format!(
        "{} of {} requests answered, in {} sequences: {whole} ended by their clients, {} told to be over{}, {unclear} left by their clients as a request may have been carried out",
        steps.iter().filter(counted).count(),
        steps.len(),
        all.len(),
        steps.iter().filter(|step| matches!(step.how, Ended::Over(_))).count(),
        over.concat(),
    );
    Check::of(NAME, detail, evidence)
}

fn wrong(step: &Step) -> Option<String> {
    match &step.how {
        Ended::Counted | Ended::Over(_) | Ended::Unclear(_) => None,
        Ended::Miscounted(why) => Some(step.line(why)),
        Ended::Refused(why) => Some(step.line(&format!("refused: {why}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verdict;

    fn step(place: u32, how: Ended) -> Step {
        let (begun, ended) = (Duration::from_secs(1), Duration::from_secs(2));
        Step { sequence: "s".to_owned(), place, last: place == 3, begun, ended, how }
    }

    fn verdict(how: Ended) -> Verdict {
        check(&[step(1, Ended::Counted), step(2, Ended::Counted), step(3, how)]).verdict
    }

    #[test]
    fn a_sequence_may_end_but_not_miscount() {
        assert_eq!(verdict(Ended::Counted), Verdict::Pass);
        assert_eq!(verdict(Ended::Over("SEQUENCE_NOT_FOUND: lost".into())), Verdict::Pass);
        assert_eq!(verdict(Ended::Unclear("connection lost".into())), Verdict::Pass);
        assert_eq!(verdict(Ended::Miscounted("it counts 1".into())), Verdict::Fail);
        assert_eq!(verdict(Ended::Refused("MALFORMED_REQUEST: no".into())), Verdict::Fail);
    }

    #[test]
    fn what_became_of_sequences_is_told() {
        let over = Ended::Over("SEQUENCE_NOT_FOUND: its state was lost".into());
        let found = check(&[step(1, Ended::Counted), step(2, Ended::Counted), step(3, over)]);
        let expected = "2 of 3 requests answered, in 1 sequences: 0 ended by their clients, 1 told to be over (SEQUENCE_NOT_FOUND 1), 0 left by their clients as a request may have been carried out";
        assert_eq!(found.detail, expected);
    }

    #[test]
    fn first_answers_alone_prove_nothing() {
        assert_eq!(check(&[]).verdict, Verdict::Fail);
        assert_eq!(check(&[step(1, Ended::Counted)]).verdict, Verdict::Fail);
    }
}
