//! Invariant: no acknowledged write is lost, and no refused write takes effect.
//!
//! A write without an answer may or may not have taken effect, so such a write is not checked.

use std::collections::BTreeMap;

use crate::history::{Call, Created, History, Verdict};

pub(crate) fn check(history: &History) -> Verdict {
    judge(&history.creations, &history.ends, |state, name| {
        state.functions().any(|function| function.key.name.as_str() == name)
    })
}

fn judge<S>(
    creations: &[Call<String, Created>],
    ends: &BTreeMap<u64, S>,
    has: impl Fn(&S, &str) -> bool,
) -> Verdict {
    for Call { asked: name, ended, .. } in creations {
        let answer = ended.map(|(_, answer)| answer);
        for (controller, state) in ends {
            match (answer, has(state, name)) {
                (Some(Created::Acknowledged), false) => {
                    return Err(format!(
                        "function {name} was acknowledged, and controller {controller} ends without it"
                    )
                    .into());
                }
                (Some(Created::Refused), true) => {
                    return Err(format!(
                        "function {name} was refused, and controller {controller} ends with it"
                    )
                    .into());
                }
                _ => {}
            }
        }
    }
    Ok(())
}

#[test]
fn acknowledged_writes_last_to_the_end_and_refused_writes_have_no_effect() {
    crate::runs::hold("no lost write");
}

#[test]
fn a_lost_write_and_an_executed_refused_write_are_detected() {
    let ended = |answer: Option<Created>, there: bool| {
        let call = Call { asked: "f".to_owned(), began: 1, ended: answer.map(|answer| (2, answer)) };
        judge(&[call], &BTreeMap::from([(1, true), (2, there)]), |state, _| *state).is_ok()
    };
    assert!(ended(Some(Created::Acknowledged), true));
    assert!(!ended(Some(Created::Acknowledged), false));
    assert!(!ended(Some(Created::Refused), true));
    assert!(ended(None, true) && ended(None, false));
}
