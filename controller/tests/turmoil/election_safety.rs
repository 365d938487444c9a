//! Invariant: election safety (Raft, §5.2). At most one leader is elected in a term.
//!
//! Workers and clients identify a leader by the term, and would obey two leaders of one term.

use crate::history::{History, Verdict};

pub(crate) fn check(history: &History) -> Verdict {
    for (term, leaders) in &history.leaders {
        if leaders.len() > 1 {
            return Err(format!("controllers {leaders:?} all led in term {term}").into());
        }
    }
    Ok(())
}

#[test]
fn at_most_one_controller_leads_in_a_term() {
    crate::runs::hold("election safety");
}

#[test]
fn two_leaders_of_one_term_are_detected() {
    let led = |leaders: &[(u64, u64)]| {
        let mut history = History::default();
        for &(term, leader) in leaders {
            history.leaders.entry(term).or_default().insert(leader);
        }
        check(&history).is_ok()
    };
    assert!(led(&[(1, 1), (2, 2), (3, 1), (3, 1)]));
    assert!(!led(&[(1, 1), (2, 2), (2, 3)]));
}
