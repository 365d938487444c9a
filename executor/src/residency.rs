//! What mapping a program or object has, who uses it, and which of its bytes will not come. Pure.
//!
//! ```text
//!              map                unmap, in use
//! Unmapped ──────────> Mapped ────────────────────> Draining
//!     ▲                  │ unmap, unused                │ last user leaves
//!     └──────────────────┴──────────────────────────────┘
//! ```
//! Generations only grow. A step of an older one is stale; one of a newer one names a mapping that
//! was refused or never asked for.

use std::ops::Range;

use millrace_device::RangeSet;

/// One program's or object's mapping.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Residency {
    /// The newest that was asked for. 0: none yet.
    generation: u64,
    phase: Phase,
    /// Launches and copies that run.
    users: u32,
    /// Bytes whose copy failed. A new copy of them clears that.
    failed: RangeSet,
    /// The device is gone, and why.
    lost: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Unmapped,
    Mapped,
    /// Unmapped as soon as nobody uses it.
    Draining,
}

/// Why a step cannot be taken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refusal {
    /// Its mapping was replaced or taken away.
    #[error("generation {asked} is stale: {current} is the newest")]
    Stale { asked: u64, current: u64 },
    /// There is no such mapping.
    #[error("generation {0} is not mapped")]
    NotMapped(u64),
    /// The last mapping is still there.
    #[error("generation {0} is still mapped: unmap it and wait for Unmapped")]
    StillMapped(u64),
    /// Bytes that a launch needs are not coming.
    #[error("the copy of bytes {0:?} failed")]
    CopyFailed(Range<u64>),
    /// The object's only mapping has gone, or is to go.
    #[error("object {0} is freed")]
    Freed(u64),
    /// The device is gone.
    #[error("{0}")]
    Lost(String),
}

/// What is to be done about an unmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unmapping {
    /// Take the memory away, then say so.
    Now(u64),
    /// The last user does it.
    Later,
    /// Nothing was mapped: only say so.
    Already(u64),
    /// It is about an older mapping: nothing.
    Ignored,
}

impl Residency {
    /// Begins a mapping. The caller maps; if that fails, it says so with [`Self::map_failed`].
    pub(crate) fn map(&mut self, generation: u64) -> Result<(), Refusal> {
        if generation <= self.generation {
            return Err(Refusal::Stale { asked: generation, current: self.generation });
        }
        if self.phase != Phase::Unmapped {
            return Err(Refusal::StillMapped(self.generation));
        }
        *self = Self { generation, phase: Phase::Mapped, lost: self.lost.take(), ..Self::default() };
        Ok(())
    }

    /// The mapping just begun did not come about.
    pub(crate) fn map_failed(&mut self) {
        self.phase = Phase::Unmapped;
    }

    /// Ends a mapping.
    pub(crate) fn unmap(&mut self, generation: u64) -> Unmapping {
        if generation != self.generation {
            return Unmapping::Ignored;
        }
        match self.phase {
            Phase::Unmapped => Unmapping::Already(generation),
            Phase::Draining => Unmapping::Later,
            Phase::Mapped if self.users > 0 => {
                self.phase = Phase::Draining;
                Unmapping::Later
            }
            Phase::Mapped => {
                self.phase = Phase::Unmapped;
                Unmapping::Now(generation)
            }
        }
    }

    /// Ends whatever mapping there is: the program goes.
    pub(crate) fn retire(&mut self) -> Unmapping {
        match self.phase {
            Phase::Unmapped => Unmapping::Ignored,
            Phase::Mapped | Phase::Draining => self.unmap(self.generation),
        }
    }

    /// Whether a step of this generation may go on.
    pub(crate) fn check(&self, generation: u64) -> Result<(), Refusal> {
        if let Some(message) = &self.lost {
            return Err(Refusal::Lost(message.clone()));
        }
        if generation < self.generation {
            return Err(Refusal::Stale { asked: generation, current: self.generation });
        }
        if generation > self.generation || self.phase != Phase::Mapped {
            return Err(Refusal::NotMapped(generation));
        }
        Ok(())
    }

    /// Whether a launch may go on waiting for these bytes, which are not loaded.
    pub(crate) fn may_come(&self, missing: Range<u64>) -> Result<(), Refusal> {
        if self.failed.intersects(missing.clone()) { Err(Refusal::CopyFailed(missing)) } else { Ok(()) }
    }

    /// Begins to use the mapping: it stays until [`Self::leave`].
    pub(crate) fn enter(&mut self) {
        self.users += 1;
    }

    /// Ends a use; returns the generation to unmap if this was the last of a draining mapping.
    pub(crate) fn leave(&mut self) -> Option<u64> {
        self.users = self.users.checked_sub(1).expect("every leave follows an enter");
        if self.phase == Phase::Draining && self.users == 0 {
            self.phase = Phase::Unmapped;
            return Some(self.generation);
        }
        None
    }

    /// A copy of these bytes was asked for: they may come after all.
    pub(crate) fn expect(&mut self, bytes: Range<u64>) {
        self.failed.remove(bytes);
    }

    /// A copy of these bytes failed.
    pub(crate) fn fail(&mut self, bytes: Range<u64>) {
        self.failed.insert(bytes);
    }

    /// The device is gone.
    pub(crate) fn lose(&mut self, message: &str) {
        self.lost.get_or_insert_with(|| message.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unused_mapping_is_unmapped_at_once_and_a_used_one_by_its_last_user() {
        let mut residency = Residency::default();
        residency.map(1).unwrap();
        assert_eq!(residency.unmap(1), Unmapping::Now(1));
        assert_eq!(residency.unmap(1), Unmapping::Already(1));
        residency.map(2).unwrap();
        residency.enter();
        residency.enter();
        assert_eq!(residency.unmap(2), Unmapping::Later);
        assert_eq!(residency.check(2), Err(Refusal::NotMapped(2)));
        assert_eq!(residency.map(3), Err(Refusal::StillMapped(2)));
        assert_eq!(residency.leave(), None);
        assert_eq!(residency.leave(), Some(2));
        residency.map(3).unwrap();
        assert_eq!(residency.check(3), Ok(()));
    }

    #[test]
    fn steps_of_older_generations_are_stale_and_of_newer_ones_not_mapped() {
        let mut residency = Residency::default();
        assert_eq!(residency.check(1), Err(Refusal::NotMapped(1)));
        assert_eq!(residency.unmap(1), Unmapping::Ignored);
        residency.map(5).unwrap();
        assert_eq!(residency.map(5), Err(Refusal::Stale { asked: 5, current: 5 }));
        assert_eq!(residency.check(4), Err(Refusal::Stale { asked: 4, current: 5 }));
        assert_eq!(residency.check(6), Err(Refusal::NotMapped(6)));
        assert_eq!(residency.unmap(4), Unmapping::Ignored);
        assert_eq!(residency.check(5), Ok(()));
    }

    #[test]
    fn a_refused_mapping_leaves_its_generation_used_up() {
        let mut residency = Residency::default();
        residency.map(1).unwrap();
        residency.map_failed();
        assert_eq!(residency.check(1), Err(Refusal::NotMapped(1)));
        assert_eq!(residency.unmap(1), Unmapping::Already(1));
        assert_eq!(residency.map(1), Err(Refusal::Stale { asked: 1, current: 1 }));
        residency.map(2).unwrap();
    }

    #[test]
    fn bytes_whose_copy_failed_are_not_waited_for_until_they_are_copied_again() {
        let mut residency = Residency::default();
        residency.map(1).unwrap();
        residency.fail(10..20);
        assert_eq!(residency.may_come(0..10), Ok(()));
        assert_eq!(residency.may_come(15..30), Err(Refusal::CopyFailed(15..30)));
        residency.expect(10..20);
        assert_eq!(residency.may_come(15..30), Ok(()));
        residency.fail(10..20);
        residency.unmap(1);
        residency.map(2).unwrap();
        assert_eq!(residency.may_come(15..30), Ok(()));
    }

    #[test]
    fn a_lost_device_stays_lost_over_mappings() {
        let mut residency = Residency::default();
        residency.map(1).unwrap();
        residency.lose("gone");
        assert_eq!(residency.check(1), Err(Refusal::Lost("gone".to_owned())));
        residency.unmap(1);
        residency.map(2).unwrap();
        assert_eq!(residency.check(2), Err(Refusal::Lost("gone".to_owned())));
    }

    #[test]
    fn a_program_that_goes_unmaps_what_it_has() {
        let mut residency = Residency::default();
        assert_eq!(residency.retire(), Unmapping::Ignored);
        residency.map(1).unwrap();
        assert_eq!(residency.retire(), Unmapping::Now(1));
    }
}
