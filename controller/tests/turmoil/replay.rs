//! Applies the log of a run again, from the beginning.

use millrace_cluster_state::{CommandOutcome, Proposal, State};
use millrace_raft_store::ClusterConfig;
use openraft::{Entry, EntryPayload};

use crate::history::{History, Verdict};

/// The commands of an entry with the outcomes of the second application.
pub(crate) type Outcomes<'a> = &'a [(&'a Proposal, CommandOutcome)];

/// Calls `see` with every entry, the outcomes of the commands, and the resulting state.
///
/// # Errors
/// An entry was never observed; or the error of `see`.
pub(crate) fn each(
    history: &History,
    mut see: impl FnMut(u64, (&Entry<ClusterConfig>, Outcomes<'_>), &State) -> Verdict,
) -> Verdict {
    let mut state = State::default();
    for (expected, (&index, (_, entry))) in (0..).zip(&history.applied) {
        if index != expected {
            return Err(
                format!("no controller applied entry {expected}, but one applied entry {index}").into()
            );
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
