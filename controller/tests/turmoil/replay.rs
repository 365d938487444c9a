//! Applies the log of a run again, from its beginning.

use millrace_cluster_state::{Outcome, Proposal, State};
use millrace_raft_store::ClusterConfig;
use openraft::{Entry, EntryPayload};

use crate::history::{History, Verdict};

/// What each command of an entry came to, when they were applied again.
pub(crate) type Outcomes<'a> = &'a [(&'a Proposal, Outcome)];

/// Shows every entry with what its commands came to, and the state after it.
///
/// # Errors
/// When an entry was never seen; or as `see`.
pub(crate) fn each(
    history: &History,
    mut see: impl FnMut(u64, (&Entry<ClusterConfig>, Outcomes<'_>), &State) -> Verdict,
) -> Verdict {
    let mut state = State::default();
    for (expected, (&index, (_, entry))) in (0..).zip(&history.applied) {
        if index != expected {
            return Err(format!("entry {expected} was applied by nobody, and entry {index} was").into());
        }
        let mut outcomes = Vec::new();
        if let EntryPayload::Normal(proposals) = &entry.payload {
            for proposal in proposals {
                outcomes.push((proposal, state.apply(index, proposal)));
            }
        }
        see(index, (entry, &outcomes), &state)?;
    }
    Ok(())
}
