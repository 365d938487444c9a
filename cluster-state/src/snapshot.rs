//! A state as bytes. The same state gives the same bytes in every build. A caller that writes the
//! bytes to a file adds a checksum.
//!
//! Layout: 4 bytes of magic, then the format version as a little-endian u16. From format 10 on, the
//! version of the [rules](crate::rules) in force follows as a little-endian u64. The rest is the
//! state in MessagePack with field names, so that a later format may add fields with defaults.

use std::io;

use millrace_types::Digest;
use millrace_types::digest::Hasher;

use crate::invariants::InvariantViolation;
use crate::packed;
use crate::rules::{KnownRules, RulesVersion, UnknownRules};
use crate::state::State;

/// The newest format. A build reads this format and the [formats before](FORMAT_READ_MIN), and writes the
/// format of the rules in force. Builds of two versions therefore give the same bytes, and the older build
/// can read them.
///
/// | format | since | change |
/// |---|---|---|
/// | 1 | 0.1.0 | the first format |
/// | 2 | 0.2.0 | placements, checkpoints, scores, bills; a build that reads only 1 would lose them |
/// | 3 | 0.2.0 | idle residence in usage, tenants' caps; a build that reads only 2 rejects such usage |
/// | 4 | 0.2.0 | how functions are served; a build that reads only 3 would lose this |
/// | 5 | 0.2.0 | workflows; a build that reads only 4 would lose them |
/// | 6 | 0.2.0 | scheduling policies, and operations; a build that reads only 5 would lose them |
/// | 7 | 0.2.0 | deadlines of workflows' steps; a build that reads only 6 would lose them |
/// | 8 | 0.2.0 | requests billed to a function's name before it; a build that reads only 7 would lose them |
/// | 9 | 0.2.0 | functions that keep state; a build that reads only 8 would lose this property |
/// | 10 | 0.2.0 | the version of the rules; a build that reads only 9 would apply other rules |
pub const FORMAT: u16 = 10;
/// The oldest format that this build reads. Parts of the state that an old format lacks are empty.
pub const FORMAT_READ_MIN: u16 = 1;

const MAGIC: [u8; 4] = *b"MRCS";
const HEADER_LEN: usize = MAGIC.len() + size_of::<u16>();
/// The format of a state under [`RulesVersion::UNNAMED`], whose header names no rules.
const FORMAT_UNNAMED: u16 = 9;

/// The reason why bytes cannot be decoded as a state.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// The bytes are no snapshot, or end within the header.
    #[error("not a cluster-state snapshot: its header is missing or incomplete")]
    NotASnapshot,
    /// Another version wrote the snapshot.
    #[error(
        "snapshot format {found} is not known to this version, which reads {FORMAT_READ_MIN} to {FORMAT}: run the version that wrote it"
    )]
    Format {
        /// The format in the header.
        found: u16,
    },
    /// The state is under rules that this build does not know.
    #[error(transparent)]
    Rules(#[from] UnknownRules),
    /// The encoded state cannot be decoded.
    #[error("the snapshot is damaged: {0}")]
    Damaged(#[from] rmp_serde::decode::Error),
    /// Further bytes follow the encoded state.
    #[error("the snapshot is damaged: {0} bytes follow its end")]
    Trailing(u64),
    /// The reader failed.
    #[error("the snapshot cannot be read: {0}")]
    Unreadable(#[from] io::Error),
    /// The state is well formed, but results from no log.
    #[error("the snapshot contradicts itself: {0}")]
    Inconsistent(#[from] InvariantViolation),
}

impl State {
    /// Returns the encoded state.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.write_to(&mut bytes).expect("plain data encodes, and writing to memory cannot fail");
        bytes
    }

    /// Writes the [encoded](Self::encode) state in pieces of a few bytes.
    ///
    /// # Errors
    /// The errors of the writer.
    pub fn write_to(&self, out: &mut dyn io::Write) -> io::Result<()> {
        out.write_all(&self.header())?;
        rmp_serde::encode::write_named(out, self).map_err(io::Error::other)
    }

    /// Returns the digest of the [encoded](Self::encode) state, without holding the bytes in
    /// memory.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut buffered = io::BufWriter::with_capacity(DIGEST_BUFFER_BYTES, HashWriter(Hasher::default()));
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

    /// Decodes the bytes of [`Self::encode`], if this build knows the state's rules.
    ///
    /// # Errors
    /// [`DecodeError`]; no partial state is returned.
    pub fn decode(mut bytes: &[u8]) -> Result<Self, DecodeError> {
        Self::read_from(&mut bytes)
    }

    /// Decodes the bytes of [`Self::write_to`], if this build knows the state's rules. Reads in
    /// pieces of a few bytes.
    ///
    /// # Errors
    /// [`DecodeError`]; no partial state is returned.
    pub fn read_from(from: &mut dyn io::Read) -> Result<Self, DecodeError> {
        Self::read_known(from, KnownRules::THIS_BUILD)
    }

    /// Decodes the bytes of [`Self::write_to`] as a build that knows these rules.
    ///
    /// # Errors
    /// [`DecodeError`]; no partial state is returned.
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
        // Check the rules before decoding the state: a later build may have written the rest.
        known.check(rules)?;
        let mut state: Self = packed::from_read(&mut *from)?;
        state.rules = rules;
        let behind = io::copy(from, &mut io::sink())?;
        if behind > 0 {
            return Err(DecodeError::Trailing(behind));
        }
        state.rebuild_index();
        state.check_invariants()?;
        Ok(state)
    }
}

/// Returns the error for a header that ends early or cannot be read.
fn cut_short(error: io::Error) -> DecodeError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => DecodeError::NotASnapshot,
        _ => DecodeError::Unreadable(error),
    }
}

/// Bytes of an encoded state that are hashed at a time.
const DIGEST_BUFFER_BYTES: usize = 64 << 10;

#[derive(Debug)]
struct HashWriter(Hasher);

impl io::Write for HashWriter {
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

    use millrace_types::{SchedulingOptions, Usage};

    use super::*;
    use crate::commands::testing::{TestLog, key};
    use crate::record::SchedulingState;

    #[test]
    fn damaged_and_foreign_snapshots_are_refused() {
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
        let newest = TestLog::with_two_nodes().state.encode();
        let decode =
            |mut bytes: &[u8], newest| State::read_known(&mut bytes, KnownRules::up_to(RulesVersion(newest)));
        assert_eq!(decode(&newest, 10).unwrap().rules(), RulesVersion(10));
        assert_eq!(decode(&newest, 11).unwrap().rules(), RulesVersion(10));
        let refused = decode(&newest, 9).unwrap_err();
        assert!(matches!(refused, DecodeError::Rules(_)));
        assert!(refused.to_string().ends_with("start a build that knows version 10"), "{refused}");
        let refused = decode(&newest, 12).unwrap_err().to_string();
        assert!(refused.contains("one version at a time: start a build that knows version 11"), "{refused}");
        let unnamed = TestLog::of_rules(RulesVersion(9)).state.encode();
        assert!(decode(&unnamed, 9).is_ok() && decode(&unnamed, 10).is_ok());
        assert!(matches!(decode(&unnamed, 11), Err(DecodeError::Rules(_))));
    }

    /// Before the switch, a build of rules 9 must still read the snapshots of this build.
    #[test]
    fn a_state_of_rules_9_is_written_in_format_9_and_a_later_one_names_its_rules() {
        let mut log = TestLog::of_rules(RulesVersion(9));
        assert_eq!(log.state.encode()[4..6], [9, 0]);
        log.apply(crate::StateCommand::SetClusterVersion { version: RulesVersion(10) }).unwrap();
        assert_eq!(log.state.encode()[4..14], [10, 0, 10, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn the_digest_is_that_of_the_encoded_state() {
        for state in [State::default(), TestLog::with_two_nodes().state] {
            assert_eq!(state.digest(), Digest::of(&state.encode()));
        }
    }

    #[test]
    fn a_state_that_no_log_gives_is_refused() {
        let impossible = State { version: 7, ..State::default() };
        let refused = State::decode(&impossible.encode());
        assert!(matches!(refused, Err(DecodeError::Inconsistent(InvariantViolation::Unnamed))));
    }

    /// The last build of format 1 wrote `format-1.state`: a function, a deleted function, a live
    /// node and a lost node.
    #[test]
    fn format_1_is_read_with_the_newer_parts_empty() {
        let old = State::decode(include_bytes!("../tests/data/format-1.state")).unwrap();
        assert_eq!((old.functions_len(), old.retired.len(), old.nodes().count()), (1, 1, 2));
        assert!(old.functions().all(|function| function.latest().spec.replicas == 1));
        assert!(old.nodes().all(|node| node.scheduling == SchedulingState::Schedulable));
        assert_eq!((old.placements_len(), old.checkpoints().count()), (0, 0));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// The last build of format 4 wrote `format-4.state`: a function that is placed on a live node,
    /// a deleted function, and a tenant's caps.
    #[test]
    fn format_4_is_read_without_workflows() {
        let old = State::decode(include_bytes!("../tests/data/format-4.state")).unwrap();
        assert_eq!((old.functions_len(), old.retired.len(), old.placements_len()), (1, 1, 1));
        let batching = old.functions().map(|function| function.latest().spec.serving.batching);
        assert_eq!(batching.flatten().map(|it| it.max_size).collect::<Vec<_>>(), [8]);
        assert_eq!((old.workflows().count(), old.tenants().count()), (0, 1));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// The last build of format 5 wrote `format-5.state`: a function placed on a draining node, and
    /// a workflow.
    #[test]
    fn format_5_is_read_without_policies_and_operations() {
        let old = State::decode(include_bytes!("../tests/data/format-5.state")).unwrap();
        assert_eq!((old.functions_len(), old.workflows().count(), old.placements_len()), (1, 1, 1));
        assert!(old.nodes().all(|node| node.scheduling == SchedulingState::Draining));
        assert_eq!((old.policy(), old.operations().count()), (None, 0));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// The last build of format 6 wrote `format-6.state`: a function placed on a draining node, a
    /// workflow of two steps, and a policy.
    #[test]
    fn format_6_is_read_with_steps_without_deadlines() {
        let old = State::decode(include_bytes!("../tests/data/format-6.state")).unwrap();
        let steps: Vec<_> = old.workflows().flat_map(|workflow| &workflow.spec.steps).collect();
        assert_eq!(steps.iter().map(|step| step.deadline).collect::<Vec<_>>(), [None, None]);
        assert_eq!((old.policy().is_some(), old.operations().count()), (true, 1));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// `format-7.state` is `format-6.state` as the last build of format 7 would write it, with
    /// usage of the function and a deadline of the second step.
    #[test]
    fn format_7_is_read_with_no_requests_billed_before_the_function() {
        let old = State::decode(include_bytes!("../tests/data/format-7.state")).unwrap();
        let steps: Vec<_> = old.workflows().flat_map(|workflow| &workflow.spec.steps).collect();
        let deadlines: Vec<_> = steps.iter().map(|step| step.deadline).collect();
        assert_eq!(deadlines, [None, Some(Duration::from_millis(2_500))]);
        assert_eq!(old.usage(&key("f")).requests, 3);
        assert!(
            old.functions().all(|function| old.has_answered_requests(function)),
            "no request was billed to the name before"
        );
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }

    /// The last build of format 2 wrote `format-2.state`: a function with a placement and usage,
    /// and a deleted function with usage.
    #[test]
    fn format_2_is_read_with_bills_without_idle_residence() {
        let old = State::decode(include_bytes!("../tests/data/format-2.state")).unwrap();
        let usage = |gpu_ns, requests| Usage { gpu_ns, requests, idle_ms: 0 };
        assert_eq!(
            (old.usage(&key("f")), old.usage(&key("gone"))),
            (usage(7_000_000, 3), usage(5_000_000, 2))
        );
        assert_eq!((old.placements_len(), old.checkpoints().count()), (1, 1));
        // The format also has no serving options of functions.
        assert!(
            old.functions().all(|function| function.latest().spec.serving == SchedulingOptions::default())
        );
        assert!(old.functions().all(|function| function.latest().spec.sequences.is_none()));
        assert_eq!(State::decode(&old.encode()).unwrap(), old);
    }
}
