//! Invariant: log matching (Raft, §5.3). If two logs have an entry with the same index and term, both
//! logs are equal up to this entry. This holds between any two logs that ever existed, including two
//! logs of one controller at different times.

use std::collections::BTreeMap;

use crate::history::{History, Log, Verdict};
use crate::runs::digest;

/// The index and term of an entry.
type Position = (u64, u64);

pub(crate) fn check(history: &History) -> Verdict {
    // If equal entries have equal predecessors, the logs are equal up to these entries by induction. So
    // logs without the beginning, which a snapshot replaced, can be checked too.
    let mut known: BTreeMap<Position, (u64, &Log)> = BTreeMap::new();
    let mut before: BTreeMap<Position, (Position, &Log)> = BTreeMap::new();
    for log in &history.logs {
        let mut last = None;
        for entry in &log.entries {
            let position = (entry.log_id.index, entry.log_id.leader_id.term);
            let payload = digest(&rmp_serde::to_vec_named(&entry.payload).unwrap());
            let (same, other) = *known.entry(position).or_insert((payload, log));
            let (predecessor, another) = match last {
                Some(last) => *before.entry(position).or_insert((last, log)),
                None => (position, log),
            };
            let differs = if same == payload { another } else { other };
            if same != payload || last.is_some_and(|last| last != predecessor) {
                let (index, term) = position;
                return Err(format!(
                    "controllers {} and {} have entry {index} of term {term}, and differ up to it",
                    differs.controller.0, log.controller.0
                )
                .into());
            }
            last = Some(position);
        }
    }
    Ok(())
}

#[test]
fn logs_with_a_common_entry_are_equal_up_to_it() {
    crate::runs::hold("log matching");
}

mod planted {
    use super::check;
    use crate::history::{History, Log};
    use crate::planted::{blank, register};

    fn logs(logs: [Vec<millrace_raft_store::Entry<millrace_cluster_state::State>>; 2]) -> History {
        let logs = (1..).map(millrace_cluster_state::ControllerId).zip(logs);
        let logs = logs.map(|(controller, entries)| Log { controller, entries });
        History { logs: logs.collect(), ..History::default() }
    }

    #[test]
    fn a_difference_before_a_common_entry_is_detected() {
        let ours = || vec![blank(1, 0), register(1, 1, "a"), blank(2, 2)];
        let behind = vec![blank(1, 0), register(1, 1, "a")];
        let diverged = vec![blank(1, 0), register(1, 1, "a"), register(1, 2, "b")];
        assert!(check(&logs([ours(), behind])).is_ok());
        assert!(check(&logs([ours(), diverged])).is_ok(), "not committed, of another term");
        let other = vec![blank(1, 0), register(1, 1, "b"), blank(2, 2)];
        assert!(check(&logs([ours(), other])).is_err(), "the same entry after a different one");
    }
}
