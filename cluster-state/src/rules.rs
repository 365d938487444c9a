//! The versions of the rules by which commands change the state, and the versions that a build
//! knows.
//!
//! Controllers take snapshots at different entries, so after an upgrade they apply different
//! stretches of one log again. The version in force is therefore part of the state. A
//! [`SetClusterVersion`](crate::StateCommand::SetClusterVersion) entry switches it, and every build
//! applies an entry by the rules that were in force at that entry.
//!
//! ```text
//!   log       … │ 41: rules 9 │ 42: SetClusterVersion(10) │ 43: rules 10 │ …
//!   build of 9  │   applies   │        refuses            │
//!   build of 10 │   applies   │        switches           │   applies    │
//! ```
//!
//! A build knows two versions, its own and the one before ([`KnownRules`]). Controllers may
//! therefore be upgraded one at a time and one version at a time: the leader switches once all
//! voters know the newer version.
//!
//! To change the effect of a command, its answer, or the encoding of the state:
//! 1. Add a version to [`RulesVersion`] and raise [`RulesVersion::NEWEST`], unless the newest is
//!    unreleased; add a row to the table there. Drop the code that only the version before the last
//!    needed.
//! 2. Add a method to [`RulesVersion`] named after the change (`limits_state_bytes`), and call it
//!    where the two versions differ: `if state.rules().limits_state_bytes() { … }`.
//! 3. Skip a new field of the state in its encoding while it is empty, and leave it empty under
//!    older rules: builds of both versions must encode a state alike, because controllers compare
//!    digests.
//! 4. Write `raft-store/tests/data/rules-N.*` (see `raft-store/src/tests/golden.rs`).
//!
//! The text of a refusal is part of the state, because a session stores the answer of its last write.
//! So a new text for a refused spec or for a failed operation is such a change too.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The version of the rules: the *cluster version* of interfaces and messages.
///
/// | version | since | change |
/// |---|---|---|
/// | 9 | 0.2.0 | the last without a version in the log; a log or snapshot without a version has this version |
/// | 10 | 0.2.0 | the log and snapshots name the version; commands are held to the quota of the state; nodes keep their alphas; functions have slices of GPUs; models have profiles |
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RulesVersion(pub u64);

impl RulesVersion {
    /// The rules of a log that names no version.
    pub const UNNAMED: Self = Self(9);
    /// The newest rules that this build knows.
    pub const NEWEST: Self = Self(10);

    /// Whether commands are checked against the bounds of [`millrace_types::limits`] when they are
    /// applied.
    pub(crate) const fn has_state_bounds(self) -> bool {
        self.0 >= 10
    }

    /// Whether functions may have slices of GPUs.
    pub(crate) const fn has_slices(self) -> bool {
        self.0 >= 10
    }

    /// Whether nodes keep reported alphas.
    pub(crate) const fn has_alphas(self) -> bool {
        self.0 >= 10
    }

    /// Returns the version after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl Default for RulesVersion {
    fn default() -> Self {
        Self::UNNAMED
    }
}

impl fmt::Display for RulesVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// The rules that a build knows: its newest version and the version before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KnownRules {
    newest: RulesVersion,
}

impl KnownRules {
    /// The rules of this build.
    pub const THIS_BUILD: Self = Self { newest: RulesVersion::NEWEST };

    /// Returns the rules of a build with this newest version.
    #[must_use]
    pub const fn up_to(newest: RulesVersion) -> Self {
        Self { newest }
    }

    /// Returns the oldest version that the build knows.
    #[must_use]
    pub const fn oldest(self) -> RulesVersion {
        RulesVersion(self.newest.0.saturating_sub(1))
    }

    /// Returns the newest version that the build knows.
    #[must_use]
    pub const fn newest(self) -> RulesVersion {
        self.newest
    }

    /// Refuses a version that the build does not know.
    ///
    /// # Errors
    /// [`UnknownRules`], with the build to start instead.
    pub fn check(self, found: RulesVersion) -> Result<(), UnknownRules> {
        if (self.oldest()..=self.newest).contains(&found) {
            return Ok(());
        }
        Err(UnknownRules { found, oldest: self.oldest(), newest: self.newest })
    }

    /// Whether two builds share a version, so that controllers of both may form a group.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.oldest() <= other.newest && other.oldest() <= self.newest
    }
}

/// A version of the rules that a build does not know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("cluster version {found} is not one of {oldest} and {newest}, which this build knows: {}", self.next_step())]
pub struct UnknownRules {
    /// The version of the log or snapshot.
    pub found: RulesVersion,
    /// The oldest version that the build knows.
    pub oldest: RulesVersion,
    /// The newest version that the build knows.
    pub newest: RulesVersion,
}

impl UnknownRules {
    fn next_step(&self) -> String {
        let Self { found, newest, .. } = self;
        if found > newest {
            return format!("start a build that knows version {found}");
        }
        format!(
            "upgrade one version at a time: start a build that knows version {}, wait until 'millrace version' shows that version, and go on from there",
            found.next()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(newest: u64) -> KnownRules {
        KnownRules::up_to(RulesVersion(newest))
    }

    #[test]
    fn a_build_knows_its_version_and_the_one_before() {
        let verdicts = (8..=12).map(|found| known(11).check(RulesVersion(found)).is_ok());
        assert_eq!(verdicts.collect::<Vec<_>>(), [false, false, true, true, false]);
        let newer = known(10).check(RulesVersion(11)).unwrap_err().to_string();
        assert_eq!(
            newer,
            "cluster version 11 is not one of 9 and 10, which this build knows: start a build that knows version 11"
        );
        let older = known(12).check(RulesVersion(9)).unwrap_err().to_string();
        assert!(
            older.contains("upgrade one version at a time: start a build that knows version 10"),
            "{older}"
        );
    }

    #[test]
    fn builds_one_version_apart_share_a_version() {
        let of_ten = (7..=13).map(|other| known(10).overlaps(known(other)));
        assert_eq!(of_ten.collect::<Vec<_>>(), [false, false, true, true, true, false, false]);
        assert!(!known(10).overlaps(known(0)), "a build from before versions were exchanged reports 0");
    }
}
