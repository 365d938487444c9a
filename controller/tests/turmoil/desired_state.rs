//! What workers are told to serve (DESIGN §5): a stamp (term, index) says which state of the log it
//! was, so that the newest holds whoever says it and however late it comes.
//!
//! - What carries a stamp is what the log gives at its index, word for word, for that node.
//! - A term never speaks of a later term's entries, nor of a state before one that an earlier term
//!   spoke of, so that (term, index) orders states.
//! - On one stream stamps only grow; and a process obeys none below one it obeyed. (Here that is the
//!   stub's; the real worker's rule has its own tests.)

use std::collections::{BTreeMap, BTreeSet};

use millrace_cluster_state::State;
use millrace_types::NodeName;

use crate::history::{History, Served, Told, Verdict};
use crate::replay;

pub(crate) fn check(history: &History) -> Verdict {
    let mut by_index: BTreeMap<u64, Vec<&Told>> = BTreeMap::new();
    for told in &history.told {
        by_index.entry(told.stamp.1).or_default().push(told);
    }
    replay::each(history, |index, (entry, _), state| {
        for told in by_index.remove(&index).unwrap_or_default() {
            if entry.log_id.leader_id.term > told.stamp.0 {
                return Err(format!("{told:?}: that entry is of a later term ({})", entry.log_id).into());
            }
            let placed = placed(state, &told.node);
            if placed != told.functions {
                return Err(format!("{told:?}: the log places {placed:?} there").into());
            }
        }
        Ok(())
    })?;
    match by_index.values().flatten().next() {
        Some(told) => Err(format!("{told:?}: there is no such entry").into()),
        None => in_order(&history.told),
    }
}

/// What a state wants served on a node.
pub(crate) fn placed(state: &State, node: &NodeName) -> BTreeSet<Served> {
    let functions = state.placements_on(node).filter_map(|key| state.function(key));
    let functions = functions.filter(|function| function.enabled);
    let served = functions.flat_map(|function| {
        function.served().iter().map(|revision| (function.key.name.to_string(), revision.number.get()))
    });
    served.collect()
}

fn in_order(told: &[Told]) -> Verdict {
    let mut streams = BTreeMap::new();
    let mut obeyed = BTreeMap::new();
    for told in told {
        let last = streams.insert((&told.instance, told.stream), told);
        if let Some(last) = last.filter(|last| last.stamp >= told.stamp) {
            return Err(format!("{last:?}, and then on the same stream {told:?}").into());
        }
        if told.obeyed {
            let last = obeyed.insert(&told.instance, told);
            if let Some(last) = last.filter(|last| last.stamp >= told.stamp) {
                return Err(format!("{last:?} was obeyed, and then {told:?}").into());
            }
        }
    }
    let mut by_stamp: Vec<&Told> = told.iter().collect();
    by_stamp.sort_by_key(|told| told.stamp);
    for (one, next) in by_stamp.iter().zip(by_stamp.iter().skip(1)) {
        if one.stamp.1 > next.stamp.1 {
            return Err(format!("{next:?} is of a later term and an earlier state than {one:?}").into());
        }
    }
    Ok(())
}

#[test]
fn workers_are_told_what_the_log_says_and_never_obey_what_is_older() {
    crate::runs::hold("desired state");
}

mod planted {
    use super::check;
    use crate::history::{History, Told};
    use crate::planted::{applied, blank, commands, init, name};

    fn told(stream: u64, stamp: (u64, u64), obeyed: bool) -> Told {
        let (node, instance) = (name("n1"), "a".to_owned());
        Told { node, instance, controller: 1, stream, stamp, functions: [].into(), obeyed }
    }

    fn holds(told: Vec<Told>) -> bool {
        let applied = applied(vec![blank(1, 0), commands(1, 1, vec![init()]), blank(2, 2), blank(2, 3)]);
        check(&History { applied, told, ..History::default() }).is_ok()
    }

    #[test]
    fn old_news_that_is_obeyed_is_noticed() {
        assert!(holds(vec![told(1, (1, 1), true), told(2, (2, 2), true), told(3, (1, 1), false)]));
        assert!(!holds(vec![told(1, (1, 1), true), told(2, (2, 2), true), told(3, (1, 1), true)]));
    }

    #[test]
    fn a_stream_or_a_term_that_goes_back_is_noticed() {
        assert!(!holds(vec![told(1, (2, 2), true), told(1, (2, 1), false)]));
        assert!(holds(vec![told(1, (2, 3), true), told(2, (3, 3), true)]), "nothing came between");
        assert!(!holds(vec![told(1, (2, 3), true), told(2, (3, 2), true)]), "an earlier state");
        assert!(!holds(vec![told(1, (1, 2), true)]), "a successor's state");
    }

    #[test]
    fn what_the_log_does_not_say_is_noticed() {
        let other = |mut told: Told| {
            told.functions.insert(("f".to_owned(), 1));
            told
        };
        assert!(!holds(vec![other(told(1, (1, 1), true))]));
        assert!(!holds(vec![told(1, (2, 4), true)]), "there is no such entry");
    }
}
