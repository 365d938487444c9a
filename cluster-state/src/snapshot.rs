//! A state as bytes. The same state gives the same bytes; whoever writes them to a file adds a
//! checksum.
//!
//! Layout: 4 bytes of magic, a little-endian u16 format version, then the state in MessagePack with
//! field names, so that a later format may add fields with defaults.

use crate::invariants::Violation;
use crate::state::State;

/// The format this build writes. It reads this one and [those before](FORMAT_READ_MIN).
///
/// | format | since | what |
/// |---|---|---|
/// | 1 | 0.1.0 | the first |
/// | 2 | 0.2.0 | placements, checkpoints, scores, bills; a build that reads 1 only would lose them |
/// | 3 | 0.2.0 | idle residence in usage, tenants' caps; a build that reads 2 only takes no such usage |
/// | 4 | 0.2.0 | how functions are served; a build that reads 3 only would lose it |
/// | 5 | 0.2.0 | workflows; a build that reads 4 only would lose them |
/// | 6 | 0.2.0 | how nodes schedule, and operations; a build that reads 5 only would lose them |
/// | 7 | 0.2.0 | deadlines of workflows' steps; a build that reads 6 only would lose them |
/// | 8 | 0.2.0 | what a function's name was billed before it; a build that reads 7 only would lose it |
/// | 9 | 0.2.0 | functions that keep state; a build that reads 8 only would lose that they do |
pub const FORMAT: u16 = 9;
/// The oldest format this build reads. What it lacks is empty.
pub const FORMAT_READ_MIN: u16 = 1;

const MAGIC: [u8; 4] = *b"MRCS";
const HEADER_LEN: usize = MAGIC.len() + size_of::<u16>();

/// Bytes that are not a state this build can take.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Something else, or cut off.
    #[error("not a cluster-state snapshot: it begins with other bytes")]
    NotASnapshot,
    /// Written by another version.
    #[error(
        "snapshot format {found} is not known to this version, which reads {FORMAT_READ_MIN} to {FORMAT}: run the version that wrote it"
    )]
    Format {
        /// The version found.
        found: u16,
    },
    /// Damaged.
    #[error("the snapshot is damaged: {0}")]
    Damaged(#[from] rmp_serde::decode::Error),
    /// More bytes than the state has.
    #[error("the snapshot is damaged: {0} bytes follow its end")]
    Trailing(usize),
    /// Well formed, and not a state that any log gives.
    #[error("the snapshot contradicts itself: {0}")]
    Inconsistent(#[from] Violation),
}

impl State {
    /// The state as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&FORMAT.to_le_bytes());
        rmp_serde::encode::write_named(&mut bytes, self)
            .expect("plain data encodes, and writing to memory cannot fail");
        bytes
    }

    /// Reads what [`Self::encode`] wrote.
    ///
    /// # Errors
    /// [`DecodeError`]; no part of the state is returned then.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let header = bytes.get(..HEADER_LEN).ok_or(DecodeError::NotASnapshot)?;
        if header[..MAGIC.len()] != MAGIC {
            return Err(DecodeError::NotASnapshot);
        }
        let found = u16::from_le_bytes([header[MAGIC.len()], header[MAGIC.len() + 1]]);
        if !(FORMAT_READ_MIN..=FORMAT).contains(&found) {
            return Err(DecodeError::Format { found });
        }
        let mut rest = &bytes[HEADER_LEN..];
        let mut state: Self = rmp_serde::from_read(&mut rest)?;
        if !rest.is_empty() {
            return Err(DecodeError::Trailing(rest.len()));
        }
        state.rebuild();
        state.check_invariants()?;
        Ok(state)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::{Serving, Usage};

    use super::*;
    use crate::commands::testing::key;
    use crate::record::Scheduling;

    #[test]
    fn refuses_what_is_not_a_snapshot_of_this_format() {
        let good = State::default().encode();
        assert_eq!(State::decode(&good).unwrap(), State::default());
        assert!(matches!(State::decode(b""), Err(DecodeError::NotASnapshot)));
        assert!(matches!(State::decode(b"PNG\0\0\0\0"), Err(DecodeError::NotASnapshot)));
        assert!(matches!(State::decode(&good[..good.len() - 1]), Err(DecodeError::Damaged(_))));
        let mut newer = good.clone();
        newer[4] = 10;
        assert!(matches!(State::decode(&newer), Err(DecodeError::Format { found: 10 })));
        let mut longer = good;
        longer.push(0);
        assert!(matches!(State::decode(&longer), Err(DecodeError::Trailing(1))));
    }

    #[test]
    fn refuses_a_state_that_no_log_gives() {
        let impossible = State { version: 7, ..State::default() };
        let refused = State::decode(&impossible.encode());
        assert!(matches!(refused, Err(DecodeError::Inconsistent(Violation::Unnamed))));
    }

    /// `format-1.state` was written by the last build of that format: a function, a deleted one, a
    /// live node and a lost one.
    #[test]
    fn reads_the_format_before_and_finds_empty_what_it_lacks() {
        let old = State::decode(include_bytes!("../tests/data/format-1.state")).unwrap();
        assert_eq!((old.functions_len(), old.retired.len(), old.nodes().count()), (1, 1, 2));
        assert!(old.functions().all(|function| function.latest().spec.replicas == 1));
        assert!(old.nodes().all(|node| node.scheduling == Scheduling::Schedulable));
        assert_eq!((old.placements_len(), old.checkpoints().count()), (0, 0));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// `format-4.state` was written by the last build of that format: a function that is placed on a
    /// live node, one that was deleted, and a tenant's caps.
    #[test]
    fn reads_what_was_written_before_there_were_workflows() {
        let old = State::decode(include_bytes!("../tests/data/format-4.state")).unwrap();
        assert_eq!((old.functions_len(), old.retired.len(), old.placements_len()), (1, 1, 1));
        let batching = old.functions().map(|function| function.latest().spec.serving.batching);
        assert_eq!(batching.flatten().map(|it| it.max_size).collect::<Vec<_>>(), [8]);
        assert_eq!((old.workflows().count(), old.tenants().count()), (0, 1));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// `format-5.state` was written by the last build of that format: a function placed on a node that
    /// is being drained, and a workflow.
    #[test]
    fn reads_what_was_written_before_policies_and_operations() {
        let old = State::decode(include_bytes!("../tests/data/format-5.state")).unwrap();
        assert_eq!((old.functions_len(), old.workflows().count(), old.placements_len()), (1, 1, 1));
        assert!(old.nodes().all(|node| node.scheduling == Scheduling::Draining));
        assert_eq!((old.policy(), old.operations().count()), (None, 0));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// `format-6.state` was written by the last build of that format: a function placed on a node that
    /// is being drained, a workflow of two steps, and a policy.
    #[test]
    fn reads_what_was_written_before_steps_had_deadlines() {
        let old = State::decode(include_bytes!("../tests/data/format-6.state")).unwrap();
        let steps: Vec<_> = old.workflows().flat_map(|workflow| &workflow.spec.steps).collect();
        assert_eq!(steps.iter().map(|step| step.deadline).collect::<Vec<_>>(), [None, None]);
        assert_eq!((old.policy().is_some(), old.operations().count()), (true, 1));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// `format-7.state` is `format-6.state` as the last build of format 7 would write it, where the function
    /// was used and the second step has a deadline.
    #[test]
    fn reads_what_was_written_before_functions_knew_what_their_names_were_billed() {
        let old = State::decode(include_bytes!("../tests/data/format-7.state")).unwrap();
        let steps: Vec<_> = old.workflows().flat_map(|workflow| &workflow.spec.steps).collect();
        let deadlines: Vec<_> = steps.iter().map(|step| step.deadline).collect();
        assert_eq!(deadlines, [None, Some(Duration::from_millis(2_500))]);
        assert_eq!(old.usage(&key("f")).requests, 3);
        assert!(old.functions().all(|function| old.ran(function)), "nothing is known of another of its name");
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// `format-2.state` was written by the last build of that format: a function that is placed and
    /// was used, and a deleted one that was.
    #[test]
    fn reads_bills_from_before_idle_residence_and_finds_none() {
        let old = State::decode(include_bytes!("../tests/data/format-2.state")).unwrap();
        let usage = |gpu_ns, requests| Usage { gpu_ns, requests, idle_ms: 0 };
        assert_eq!(
            (old.usage(&key("f")), old.usage(&key("gone"))),
            (usage(7_000_000, 3), usage(5_000_000, 2))
        );
        assert_eq!((old.placements_len(), old.checkpoints().count()), (1, 1));
        // Nor did functions say how they are served.
        assert!(old.functions().all(|function| function.latest().spec.serving == Serving::default()));
        assert!(old.functions().all(|function| function.latest().spec.sequences.is_none()));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }
}
