//! Log matching (Raft, §5.3): if two logs have an entry of the same index and term, they are the
//! same up to there. It holds between any two logs that ever were, also of one controller at two
//! times.

use std::collections::BTreeMap;

use crate::history::{History, Log, Verdict};
use crate::runs::digest;

pub(crate) fn check(history: &History) -> Verdict {
    let mut known: BTreeMap<(u64, u64), (u64, &Log)> = BTreeMap::new();
    for log in &history.logs {
        let mut until_here = 0;
        for entry in &log.entries {
            let (term, index) = (entry.log_id.leader_id.term, entry.log_id.index);
            let payload = rmp_serde::to_vec_named(&entry.payload).unwrap();
            until_here = digest(&(until_here, term, index, payload));
            let (same, other) = *known.entry((index, term)).or_insert((until_here, log));
            if same != until_here {
                return Err(format!(
                    "controllers {} and {} have entry {index} of term {term}, and differ up to it",
                    other.controller.0, log.controller.0
                )
                .into());
            }
        }
    }
    Ok(())
}

#[test]
fn logs_with_a_common_entry_are_the_same_up_to_it() {
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
    fn a_difference_before_a_common_entry_is_noticed() {
        let ours = || vec![blank(1, 0), register(1, 1, "a"), blank(2, 2)];
        let behind = vec![blank(1, 0), register(1, 1, "a")];
        let diverged = vec![blank(1, 0), register(1, 1, "a"), register(1, 2, "b")];
        assert!(check(&logs([ours(), behind])).is_ok());
        assert!(check(&logs([ours(), diverged])).is_ok(), "not committed, of another term");
        let other = vec![blank(1, 0), register(1, 1, "b"), blank(2, 2)];
        assert!(check(&logs([ours(), other])).is_err(), "the same entry, another before it");
    }
}
