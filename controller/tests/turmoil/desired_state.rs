//! Invariant: the desired state of workers follows the log. The stamp (term, index) names
//! the source state in the log, so the newest stamp wins, regardless of the sender and the time of
//! arrival.
//!
//! - A desired state equals, word for word, the placements that the log gives for the node at the
//!   stamp's index.
//! - A term never refers to entries of a later term, nor to a state before a state that an earlier term
//!   referred to. So (term, index) orders states.
//! - On one stream, stamps only grow, and a process never obeys a stamp below an obeyed stamp. (This
//!   process is the stub; the real worker's rule has its own tests.)

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
                return Err(format!("{told:?}: the entry is of a later term ({})", entry.log_id).into());
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

/// Returns the functions that a state places on a node.
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
fn workers_get_the_desired_state_of_the_log_and_never_obey_an_older_one() {
    crate::runs::hold("desired state");
}

mod planted {
    use super::check;
    use crate::history::{History, Told};
    use crate::planted::{applied, blank, commands, init, name};

    fn told(stream: u64, stamp: (u64, u64), obeyed: bool) -> Told {
        let node = name("n1");
        let instance = "a".to_owned();
        Told { node, instance, controller: 1, stream, stamp, functions: [].into(), obeyed }
    }

    fn holds(told: Vec<Told>) -> bool {
        let applied = applied(vec![blank(1, 0), commands(1, 1, vec![init()]), blank(2, 2), blank(2, 3)]);
        check(&History { applied, told, ..History::default() }).is_ok()
    }

    #[test]
    fn obeying_an_outdated_desired_state_is_detected() {
        assert!(holds(vec![told(1, (1, 1), true), told(2, (2, 2), true), told(3, (1, 1), false)]));
        assert!(!holds(vec![told(1, (1, 1), true), told(2, (2, 2), true), told(3, (1, 1), true)]));
    }

    #[test]
    fn a_stream_or_a_term_that_goes_back_is_detected() {
        assert!(!holds(vec![told(1, (2, 2), true), told(1, (2, 1), false)]));
        assert!(holds(vec![told(1, (2, 3), true), told(2, (3, 3), true)]), "no stamp lies between");
        assert!(!holds(vec![told(1, (2, 3), true), told(2, (3, 2), true)]), "an earlier state");
        assert!(!holds(vec![told(1, (1, 2), true)]), "a successor's state");
    }

    #[test]
    fn a_desired_state_that_differs_from_the_log_is_detected() {
        let other = |mut told: Told| {
            told.functions.insert(("f".to_owned(), 1));
            told
        };
        assert!(!holds(vec![other(told(1, (1, 1), true))]));
        assert!(!holds(vec![told(1, (2, 4), true)]), "the entry does not exist");
    }
}
