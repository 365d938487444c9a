//! Invariant: state machine safety (Raft, §5.4.3). No two controllers apply different entries at one
//! index. So controllers that have applied the same entries have the same state, byte for byte.
//! Applying the log again from the beginning gives this state too.

use std::collections::{BTreeMap, BTreeSet};

use crate::history::{History, Seen, Verdict, Violation};
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
    let replayed = replay(history, &at.keys().copied().collect())?;
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

/// Returns the digest of the replayed state after each entry in `seen`.
fn replay(history: &History, seen: &BTreeSet<u64>) -> Result<BTreeMap<u64, u64>, Violation> {
    let mut digests = BTreeMap::new();
    crate::replay::each(history, |index, _, state| {
        if seen.contains(&index) {
            digests.insert(index, digest(&state.encode()));
        }
        Ok(())
    })?;
    Ok(digests)
}

#[test]
fn the_same_entries_give_the_same_state_on_every_controller() {
    crate::runs::hold("state machine safety");
}

mod planted {
    use millrace_cluster_state::ControllerId;

    use super::{check, replay};
    use crate::history::{History, Seen};
    use crate::planted::{applied, blank, commands, init, position, register};

    #[test]
    fn another_state_or_another_entry_at_an_index_is_detected() {
        let entries = || vec![blank(1, 0), commands(1, 1, vec![init()]), register(1, 2, "a")];
        let history = |states| History { applied: applied(entries()), states, ..History::default() };
        let digest = replay(&history(Vec::new()), &[2].into()).unwrap()[&2];
        let seen = |controller, term, digest| Seen {
            controller: ControllerId(controller),
            last: position(term, 2),
            digest,
        };
        let verdict = |second| check(&history(vec![seen(1, 1, digest), second])).is_ok();
        assert!(verdict(seen(2, 1, digest)));
        assert!(!verdict(seen(2, 1, digest + 1)));
        assert!(!verdict(seen(2, 2, digest)));
        assert!(check(&history(vec![seen(1, 1, digest + 1)])).is_err());
    }
}
