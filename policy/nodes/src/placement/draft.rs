//! A plan under construction.

use super::view::PlacementChange;

/// A plan under construction, with a bound on its steps.
pub(super) struct Draft {
    pub(super) steps: Vec<PlacementChange>,
    pub(super) steps_max: usize,
    /// Whether a step was left out for lack of room.
    pub(super) more: bool,
}

impl Draft {
    pub(super) fn is_full(&self) -> bool {
        self.steps.len() >= self.steps_max
    }

    /// Returns the number of steps that still fit.
    pub(super) fn left(&self) -> usize {
        self.steps_max.saturating_sub(self.steps.len())
    }

    pub(super) fn push(&mut self, step: PlacementChange) {
        if self.is_full() {
            self.more = true;
        } else {
            self.steps.push(step);
        }
    }
}
