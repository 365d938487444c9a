//! State machine safety (Raft, §5.4.3): no two controllers apply different entries at one index. So
//! whoever has applied the same entries has the same state, byte for byte; and so has whoever
//! applies the log again from its beginning.

use std::collections::BTreeMap;

use millrace_cluster_state::State;
use openraft::EntryPayload;

use crate::history::{History, Log, Seen, Verdict};
use crate::runs::digest;

pub(crate) fn check(history: &History) -> Verdict {
    let mut at: BTreeMap<u64, &Seen> = BTreeMap::new();
    for seen in &history.states {
        let first = *at.entry(seen.last.index).or_insert(seen);
        if (first.last, first.digest) != (seen.last, seen.digest) {
            return Err(format!(
                "controllers {} and {} differ after entry {} ({} there, {} here)",
                first.controller.0, seen.controller.0, seen.last.index, first.last, seen.last
            )
            .into());
        }
    }
    let replayed = history.logs.iter().max_by_key(|log| log.entries.len()).map(replay).unwrap_or_default();
    for (index, state) in replayed {
        if let Some(seen) = at.get(&index)
            && seen.digest != state
        {
            return Err(format!(
                "controller {} had another state after entry {index} than its log gives",
                seen.controller.0
            )
            .into());
        }
    }
    Ok(())
}

/// The digest of the state after each entry of a log.
fn replay(log: &Log) -> BTreeMap<u64, u64> {
    let mut state = State::default();
    let apply = |entry: &openraft::Entry<millrace_raft_store::ClusterConfig>| {
        if let EntryPayload::Normal(proposals) = &entry.payload {
            for proposal in proposals {
                // Its outcome is part of what the state remembers, where that matters.
                drop(state.apply(entry.log_id.index, proposal));
            }
        }
        (entry.log_id.index, digest(&state.encode()))
    };
    log.entries.iter().map(apply).collect()
}

#[test]
fn the_same_entries_give_the_same_state_everywhere() {
    crate::runs::hold("state machine safety");
}

mod planted {
    use millrace_cluster_state::ControllerId;

    use super::{check, replay};
    use crate::history::{History, Log, Seen};
    use crate::planted::{blank, commands, init, position, register};

    #[test]
    fn another_state_or_another_entry_at_an_index_is_noticed() {
        let entries = vec![blank(1, 0), commands(1, 1, vec![init()]), register(1, 2, "a")];
        let log = Log { controller: ControllerId(1), entries };
        let digest = replay(&log)[&2];
        let seen = |controller, term, digest| Seen {
            controller: ControllerId(controller),
            last: position(term, 2),
            digest,
        };
        let verdict = |second| {
            let logs = vec![Log { controller: ControllerId(1), entries: log.entries.clone() }];
            check(&History { logs, states: vec![seen(1, 1, digest), second], ..History::default() }).is_ok()
        };
        assert!(verdict(seen(2, 1, digest)));
        assert!(!verdict(seen(2, 1, digest + 1)));
        assert!(!verdict(seen(2, 2, digest)));
        let alone = vec![seen(1, 1, digest + 1)];
        assert!(check(&History { logs: vec![log], states: alone, ..History::default() }).is_err());
    }
}
