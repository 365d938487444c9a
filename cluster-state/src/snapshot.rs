//! A state as bytes. The same state gives the same bytes, whichever build encodes it; whoever writes
//! them to a file adds a checksum.
//!
//! Layout: 4 bytes of magic, a little-endian u16 format version, from format 10 on the version of the
//! [rules](crate::rules) in force as a little-endian u64, then the state in MessagePack with field names,
//! so that a later format may add fields with defaults.

use std::io;

use millrace_types::Digest;
use millrace_types::digest::Hasher;

use crate::invariants::Violation;
use crate::packed;
use crate::rules::{KnownRules, RulesVersion, UnknownRules};
use crate::state::State;

/// The newest format. A build reads this one and [those before](FORMAT_READ_MIN), and writes the format
/// of the rules in force: builds of two versions give the same bytes, and the older can read them.
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
/// | 10 | 0.2.0 | the version of the rules; a build that reads 9 only would apply others |
pub const FORMAT: u16 = 10;
/// The oldest format this build reads. What it lacks is empty.
pub const FORMAT_READ_MIN: u16 = 1;

const MAGIC: [u8; 4] = *b"MRCS";
const HEADER_LEN: usize = MAGIC.len() + size_of::<u16>();
/// The format of a state of [`RulesVersion::UNNAMED`], whose header names no rules.
const FORMAT_UNNAMED: u16 = 9;

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
    /// Of rules that this build does not know.
    #[error(transparent)]
    Rules(#[from] UnknownRules),
    /// Damaged.
    #[error("the snapshot is damaged: {0}")]
    Damaged(#[from] rmp_serde::decode::Error),
    /// More bytes than the state has.
    #[error("the snapshot is damaged: {0} bytes follow its end")]
    Trailing(u64),
    /// The system's.
    #[error("the snapshot cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// Well formed, and not a state that any log gives.
    #[error("the snapshot contradicts itself: {0}")]
    Inconsistent(#[from] Violation),
}

impl State {
    /// The state as bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write_to(&mut bytes).expect("plain data encodes, and writing to memory cannot fail");
        bytes
    }

    /// Writes the [encoded](Self::encode) state, in pieces of a few bytes.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn write_to(&self, out: &mut dyn io::Write) -> io::Result<()> {
        out.write_all(&self.header())?;
        rmp_serde::encode::write_named(out, self).map_err(io::Error::other)
    }

    /// The digest of the [encoded](Self::encode) state, without its bytes in memory.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut buffered = io::BufWriter::with_capacity(DIGEST_BUFFER_BYTES, Hashing(Hasher::default()));
        self.write_to(&mut buffered).expect("plain data encodes, and hashing cannot fail");
        let hashing = buffered.into_inner().expect("hashing cannot fail");
        hashing.0.finish()
    }

    fn header(&self) -> Vec<u8> {
        let mut header = MAGIC.to_vec();
        if self.rules == RulesVersion::UNNAMED {
            header.extend_from_slice(&FORMAT_UNNAMED.to_le_bytes());
        } else {
            header.extend_from_slice(&FORMAT.to_le_bytes());
            header.extend_from_slice(&self.rules.0.to_le_bytes());
        }
        header
    }

    /// Reads what [`Self::encode`] wrote, of rules that this build knows.
    ///
    /// # Errors
    /// [`DecodeError`]; no part of the state is returned then.
    pub fn decode(mut bytes: &[u8]) -> Result<Self, DecodeError> {
        Self::read_from(&mut bytes)
    }

    /// Reads what [`Self::write_to`] wrote, of rules that this build knows. Reads in pieces of a few bytes.
    ///
    /// # Errors
    /// [`DecodeError`]; no part of the state is returned then.
    pub fn read_from(from: &mut dyn io::Read) -> Result<Self, DecodeError> {
        Self::read_known(from, KnownRules::THIS_BUILD)
    }

    /// Reads what [`Self::write_to`] wrote, as a build does that knows these rules.
    ///
    /// # Errors
    /// [`DecodeError`]; no part of the state is returned then.
    pub fn read_known(from: &mut dyn io::Read, known: KnownRules) -> Result<Self, DecodeError> {
        let mut header = [0; HEADER_LEN];
        from.read_exact(&mut header).map_err(cut_short)?;
        if header[..MAGIC.len()] != MAGIC {
            return Err(DecodeError::NotASnapshot);
        }
        let found = u16::from_le_bytes([header[MAGIC.len()], header[MAGIC.len() + 1]]);
        if !(FORMAT_READ_MIN..=FORMAT).contains(&found) {
            return Err(DecodeError::Format { found });
        }
        let mut rules = RulesVersion::UNNAMED;
        if found > FORMAT_UNNAMED {
            let mut named = [0; size_of::<u64>()];
            from.read_exact(&mut named).map_err(cut_short)?;
            rules = RulesVersion(u64::from_le_bytes(named));
        }
        // Before the state: what follows may be of a later build.
        known.check(rules)?;
        let mut state: Self = packed::from_read(&mut *from)?;
        state.rules = rules;
        let behind = io::copy(from, &mut io::sink())?;
        if behind > 0 {
            return Err(DecodeError::Trailing(behind));
        }
        state.rebuild();
        state.check_invariants()?;
        Ok(state)
    }
}

/// What a header is that ends early.
fn cut_short(error: io::Error) -> DecodeError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => DecodeError::NotASnapshot,
        _ => DecodeError::Unreadable(error),
    }
}

/// Bytes of an encoded state that are hashed at once.
const DIGEST_BUFFER_BYTES: usize = 64 << 10;

#[derive(Debug)]
struct Hashing(Hasher);

impl io::Write for Hashing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use millrace_types::{Serving, Usage};

    use super::*;
    use crate::commands::testing::{Log, key};
    use crate::record::Scheduling;

    #[test]
    fn refuses_what_is_not_a_snapshot_of_this_format() {
        let good = State::default().encode();
        assert_eq!(State::decode(&good).unwrap(), State::default());
        assert!(matches!(State::decode(b""), Err(DecodeError::NotASnapshot)));
        assert!(matches!(State::decode(b"PNG\0\0\0\0"), Err(DecodeError::NotASnapshot)));
        assert!(matches!(State::decode(&good[..good.len() - 1]), Err(DecodeError::Damaged(_))));
        let mut newer = good.clone();
        newer[4] = 11;
        assert!(matches!(State::decode(&newer), Err(DecodeError::Format { found: 11 })));
        let mut longer = good;
        longer.push(0);
        assert!(matches!(State::decode(&longer), Err(DecodeError::Trailing(1))));
    }

    #[test]
    fn a_state_of_rules_that_a_build_does_not_know_is_refused_with_the_build_to_start() {
        let newest = Log::with_two_nodes().state.encode();
        let decode =
            |mut bytes: &[u8], newest| State::read_known(&mut bytes, KnownRules::up_to(RulesVersion(newest)));
        assert_eq!(decode(&newest, 10).unwrap().rules(), RulesVersion(10));
        assert_eq!(decode(&newest, 11).unwrap().rules(), RulesVersion(10));
        let refused = decode(&newest, 9).unwrap_err();
        assert!(matches!(refused, DecodeError::Rules(_)));
        assert!(refused.to_string().ends_with("start a build that knows version 10"), "{refused}");
        let refused = decode(&newest, 12).unwrap_err().to_string();
        assert!(refused.contains("one version at a time: start a build that knows version 11"), "{refused}");
        let unnamed = Log::of_rules(RulesVersion(9)).state.encode();
        assert!(decode(&unnamed, 9).is_ok() && decode(&unnamed, 10).is_ok());
        assert!(matches!(decode(&unnamed, 11), Err(DecodeError::Rules(_))));
    }

    /// Before the switch a build of rules 9 must still open what this one wrote.
    #[test]
    fn a_state_of_rules_9_is_written_in_format_9_and_a_later_one_names_its_rules() {
        let mut log = Log::of_rules(RulesVersion(9));
        assert_eq!(log.state.encode()[4..6], [9, 0]);
        log.apply(crate::Command::SetClusterVersion { version: RulesVersion(10) }).unwrap();
        assert_eq!(log.state.encode()[4..14], [10, 0, 10, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn the_digest_is_that_of_the_encoded_state() {
        for state in [State::default(), Log::with_two_nodes().state] {
            assert_eq!(state.digest(), Digest::of(&state.encode()));
        }
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
