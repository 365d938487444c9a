//! The mapping of a program or object, its users, and its bytes with a failed copy. Pure code.
//!
//! ```text
//!              map                unmap, in use
//! Unmapped ──────────> Mapped ────────────────────> Draining
//!     ▲                  │ unmap, unused                │ last user leaves
//!     └──────────────────┴──────────────────────────────┘
//! ```
//! Generations only grow. A step for an older generation is stale. A step for a newer generation
//! refers to a mapping that was refused or never requested.

use std::ops::Range;

use millrace_device::RangeSet;

/// The state of a program's or object's mapping.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct MappingState {
    /// Newest requested generation; 0 if there is none.
    generation: u64,
    phase: MappingPhase,
    /// Number of launches and copies that use the mapping.
    users: u32,
    /// Bytes with a failed copy. A new copy of the bytes clears this mark.
    failed: RangeSet,
    /// Message of the device's loss, if the device is gone.
    lost: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum MappingPhase {
    #[default]
    Unmapped,
    Mapped,
    /// To be unmapped as soon as the last user leaves.
    Draining,
}

/// Reason why a step is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum StepRefusal {
    /// The step's mapping was replaced or unmapped.
    #[error("generation {asked} is stale: {current} is the newest")]
    Stale { asked: u64, current: u64 },
    /// The step's mapping does not exist.
    #[error("generation {0} is not mapped")]
    NotMapped(u64),
    /// The previous mapping still exists.
    #[error("generation {0} is still mapped: unmap it and wait for Unmapped")]
    StillMapped(u64),
    /// The copy of bytes that a launch needs has failed.
    #[error("the copy of bytes {0:?} failed")]
    CopyFailed(Range<u64>),
    /// The object's only mapping is unmapped, or is about to be.
    #[error("object {0} is freed")]
    Freed(u64),
    /// The device is gone.
    #[error("{0}")]
    Lost(String),
}

/// Action that an unmap requires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnmapAction {
    /// Unmap the memory, then report the unmapping.
    Now(u64),
    /// Do nothing: the last user unmaps the memory.
    Later,
    /// Only report the unmapping: nothing was mapped.
    Already(u64),
    /// Do nothing: the unmap refers to another mapping, or an unloaded program has none.
    Ignored,
}

impl MappingState {
    /// Begins a mapping. The caller then maps the memory, and calls [`Self::map_failed`] if that fails.
    pub(crate) fn map(&mut self, generation: u64) -> Result<(), StepRefusal> {
        if generation <= self.generation {
            return Err(StepRefusal::Stale { asked: generation, current: self.generation });
        }
        if self.phase != MappingPhase::Unmapped {
            return Err(StepRefusal::StillMapped(self.generation));
        }
        *self = Self { generation, phase: MappingPhase::Mapped, lost: self.lost.take(), ..Self::default() };
        Ok(())
    }

    /// Reverts the mapping that was just begun.
    pub(crate) fn map_failed(&mut self) {
        self.phase = MappingPhase::Unmapped;
    }

    /// Ends the mapping of this generation.
    pub(crate) fn unmap(&mut self, generation: u64) -> UnmapAction {
        if generation != self.generation {
            return UnmapAction::Ignored;
        }
        match self.phase {
            MappingPhase::Unmapped => UnmapAction::Already(generation),
            MappingPhase::Draining => UnmapAction::Later,
            MappingPhase::Mapped if self.users > 0 => {
                self.phase = MappingPhase::Draining;
                UnmapAction::Later
            }
            MappingPhase::Mapped => {
                self.phase = MappingPhase::Unmapped;
                UnmapAction::Now(generation)
            }
        }
    }

    /// Ends any mapping, because the program is unloaded.
    pub(crate) fn retire(&mut self) -> UnmapAction {
        match self.phase {
            MappingPhase::Unmapped => UnmapAction::Ignored,
            MappingPhase::Mapped | MappingPhase::Draining => self.unmap(self.generation),
        }
    }

    /// Checks that a step of this generation may continue.
    pub(crate) fn check(&self, generation: u64) -> Result<(), StepRefusal> {
        if let Some(message) = &self.lost {
            return Err(StepRefusal::Lost(message.clone()));
        }
        if generation < self.generation {
            return Err(StepRefusal::Stale { asked: generation, current: self.generation });
        }
        if generation > self.generation || self.phase != MappingPhase::Mapped {
            return Err(StepRefusal::NotMapped(generation));
        }
        Ok(())
    }

    /// Checks that a launch may continue to wait for these bytes, which are not loaded.
    pub(crate) fn check_awaitable(&self, missing: Range<u64>) -> Result<(), StepRefusal> {
        if self.failed.intersects(missing.clone()) { Err(StepRefusal::CopyFailed(missing)) } else { Ok(()) }
    }

    /// Begins a use of the mapping, which stays until [`Self::leave`].
    pub(crate) fn enter(&mut self) {
        self.users += 1;
    }

    /// Ends a use. Returns the generation to unmap if this was the last use of a draining mapping.
    pub(crate) fn leave(&mut self) -> Option<u64> {
        self.users = self.users.checked_sub(1).expect("every leave follows an enter");
        if self.phase == MappingPhase::Draining && self.users == 0 {
            self.phase = MappingPhase::Unmapped;
            return Some(self.generation);
        }
        None
    }

    /// Records that a copy of these bytes was requested, so launches may wait for the bytes again.
    pub(crate) fn expect(&mut self, bytes: Range<u64>) {
        self.failed.remove(bytes);
    }

    /// Records that a copy of these bytes failed.
    pub(crate) fn fail(&mut self, bytes: Range<u64>) {
        self.failed.insert(bytes);
    }

    /// Records that the device is gone.
    pub(crate) fn lose(&mut self, message: &str) {
        self.lost.get_or_insert_with(|| message.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unused_mapping_is_unmapped_at_once_and_a_used_one_by_its_last_user() {
        let mut mapping = MappingState::default();
        mapping.map(1).unwrap();
        assert_eq!(mapping.unmap(1), UnmapAction::Now(1));
        assert_eq!(mapping.unmap(1), UnmapAction::Already(1));
        mapping.map(2).unwrap();
        mapping.enter();
        mapping.enter();
        assert_eq!(mapping.unmap(2), UnmapAction::Later);
        assert_eq!(mapping.check(2), Err(StepRefusal::NotMapped(2)));
        assert_eq!(mapping.map(3), Err(StepRefusal::StillMapped(2)));
        assert_eq!(mapping.leave(), None);
        assert_eq!(mapping.leave(), Some(2));
        mapping.map(3).unwrap();
        assert_eq!(mapping.check(3), Ok(()));
    }

    #[test]
    fn steps_of_older_generations_are_stale_and_of_newer_ones_not_mapped() {
        let mut mapping = MappingState::default();
        assert_eq!(mapping.check(1), Err(StepRefusal::NotMapped(1)));
        assert_eq!(mapping.unmap(1), UnmapAction::Ignored);
        mapping.map(5).unwrap();
        assert_eq!(mapping.map(5), Err(StepRefusal::Stale { asked: 5, current: 5 }));
        assert_eq!(mapping.check(4), Err(StepRefusal::Stale { asked: 4, current: 5 }));
        assert_eq!(mapping.check(6), Err(StepRefusal::NotMapped(6)));
        assert_eq!(mapping.unmap(4), UnmapAction::Ignored);
        assert_eq!(mapping.check(5), Ok(()));
    }

    #[test]
    fn a_failed_mapping_uses_up_its_generation() {
        let mut mapping = MappingState::default();
        mapping.map(1).unwrap();
        mapping.map_failed();
        assert_eq!(mapping.check(1), Err(StepRefusal::NotMapped(1)));
        assert_eq!(mapping.unmap(1), UnmapAction::Already(1));
        assert_eq!(mapping.map(1), Err(StepRefusal::Stale { asked: 1, current: 1 }));
        mapping.map(2).unwrap();
    }

    #[test]
    fn bytes_with_a_failed_copy_are_awaited_only_after_a_new_copy() {
        let mut mapping = MappingState::default();
        mapping.map(1).unwrap();
        mapping.fail(10..20);
        assert_eq!(mapping.check_awaitable(0..10), Ok(()));
        assert_eq!(mapping.check_awaitable(15..30), Err(StepRefusal::CopyFailed(15..30)));
        mapping.expect(10..20);
        assert_eq!(mapping.check_awaitable(15..30), Ok(()));
        mapping.fail(10..20);
        mapping.unmap(1);
        mapping.map(2).unwrap();
        assert_eq!(mapping.check_awaitable(15..30), Ok(()));
    }

    #[test]
    fn a_lost_device_stays_lost_across_mappings() {
        let mut mapping = MappingState::default();
        mapping.map(1).unwrap();
        mapping.lose("gone");
        assert_eq!(mapping.check(1), Err(StepRefusal::Lost("gone".to_owned())));
        mapping.unmap(1);
        mapping.map(2).unwrap();
        assert_eq!(mapping.check(2), Err(StepRefusal::Lost("gone".to_owned())));
    }

    #[test]
    fn unloading_a_program_unmaps_its_memory() {
        let mut mapping = MappingState::default();
        assert_eq!(mapping.retire(), UnmapAction::Ignored);
        mapping.map(1).unwrap();
        assert_eq!(mapping.retire(), UnmapAction::Now(1));
    }
}
