//! The SM units of a GPU that tokens are for: aligned blocks for green contexts, or percentages for MPS.

use millrace_types::slices::UNITS;
use millrace_types::{Permille, SmPercent, SmShare, UnitSet};

/// The division of a GPU's SMs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Grid {
    /// 16 units in aligned blocks of 1, 2, 4, 8 or 16. Blocks of different runs share no SM (F23).
    Blocks16,
    /// Percentages of MPS, as in the paper. Only their sum counts.
    Caps100,
}

impl Grid {
    /// Returns the number of units of a GPU.
    #[must_use]
    pub const fn total(self) -> u8 {
        match self {
            Self::Blocks16 => UNITS,
            Self::Caps100 => 100,
        }
    }

    /// Returns the units for a share of the SMs, rounded up to the next block or percent; at least 1.
    #[must_use]
    pub fn units(self, sms: Permille) -> u8 {
        let exact = (u32::from(sms.get()) * u32::from(self.total())).div_ceil(1000).max(1) as u8;
        match self {
            Self::Blocks16 => exact.next_power_of_two(),
            Self::Caps100 => exact,
        }
    }

    /// Returns the share of the SMs that units are.
    pub(crate) fn share(self, units: u8) -> Permille {
        let thousandths = u16::from(units) * 1000 / u16::from(self.total());
        Permille::new(thousandths).unwrap_or(Permille::ALL)
    }
}

/// The units of a GPU for which no token is out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UnitPool {
    /// A bit for each free unit.
    Blocks { free: u16 },
    /// The sum of the percentages given, and its bound. Without a bound, runs race for the SMs.
    Caps { given: u32, bound: Option<u32> },
}

impl UnitPool {
    pub(crate) fn new(grid: Grid) -> Self {
        match grid {
            Grid::Blocks16 => Self::Blocks { free: u16::MAX },
            Grid::Caps100 => Self::Caps { given: 0, bound: Some(100) },
        }
    }

    /// Returns a pool of percentages without a bound on their sum.
    pub(crate) fn unbounded() -> Self {
        Self::Caps { given: 0, bound: None }
    }

    /// Takes so many units, if they are free. A block comes from the smallest free block that suffices: while no
    /// block has been put back, a width then fits whenever as many units are free.
    pub(crate) fn take(&mut self, units: u8) -> Option<SmShare> {
        match self {
            Self::Blocks { free } => {
                let block = smallest_sufficient(*free, units)?;
                *free &= !block.bits();
                Some(SmShare::Block(block))
            }
            Self::Caps { given, bound } => {
                let sum = *given + u32::from(units);
                if bound.is_some_and(|bound| sum > bound) {
                    return None;
                }
                let percent = SmPercent::new(units)?;
                *given = sum;
                Some(SmShare::Cap(percent))
            }
        }
    }

    /// Takes `units` in place of a share that was taken before. Without room for them, the share stays taken.
    pub(crate) fn exchange(&mut self, share: SmShare, units: u8) -> Option<SmShare> {
        let before = self.clone();
        self.put_back(share);
        let taken = self.take(units);
        if taken.is_none() {
            *self = before;
        }
        taken
    }

    /// Whether no unit is taken.
    pub(crate) fn is_free(&self) -> bool {
        match self {
            Self::Blocks { free } => *free == u16::MAX,
            Self::Caps { given, .. } => *given == 0,
        }
    }

    pub(crate) fn put_back(&mut self, share: SmShare) {
        match (self, share) {
            (Self::Blocks { free }, SmShare::Block(block)) => {
                debug_assert_eq!(*free & block.bits(), 0, "a block is put back once");
                *free |= block.bits();
            }
            (Self::Caps { given, .. }, SmShare::Cap(percent)) => *given -= u32::from(percent.get()),
            _ => debug_assert!(false, "a share is put back to the pool that gave it"),
        }
    }
}

/// Returns the first `width` units of the smallest free aligned block that has as many.
fn smallest_sufficient(free: u16, width: u8) -> Option<UnitSet> {
    let is_free = |block: UnitSet| free & block.bits() == block.bits();
    let mut size = width;
    while size <= UNITS {
        for first in (0..UNITS).step_by(usize::from(size)) {
            let inside_larger =
                size < UNITS && UnitSet::block(first - first % (2 * size), 2 * size).is_some_and(is_free);
            if UnitSet::block(first, size).is_some_and(is_free) && !inside_larger {
                return UnitSet::block(first, width);
            }
        }
        size *= 2;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(thousandths: u16) -> Permille {
        Permille::new(thousandths).unwrap()
    }

    #[test]
    fn shares_are_rounded_up_to_the_next_block_or_percent() {
        let blocks = [60, 120, 240, 500, 600, 1000].map(|sms| Grid::Blocks16.units(share(sms)));
        assert_eq!(blocks, [1, 2, 4, 8, 16, 16]);
        let caps = [1, 60, 125, 1000].map(|sms| Grid::Caps100.units(share(sms)));
        assert_eq!(caps, [1, 6, 13, 100]);
    }

    #[test]
    fn a_block_comes_from_the_smallest_free_block() {
        let mut pool = UnitPool::new(Grid::Blocks16);
        let widths = [1, 8, 4, 2, 1];
        let firsts = widths.map(|width| match pool.take(width) {
            Some(SmShare::Block(block)) => block.first(),
            _ => u8::MAX,
        });
        assert_eq!(firsts, [0, 8, 4, 2, 1]);
        assert_eq!(pool.take(1), None);
    }

    #[test]
    fn any_widths_that_sum_to_the_units_fit_an_empty_gpu() {
        fn fill(pool: &UnitPool, left: u8) {
            for width in [1, 2, 4, 8, 16].into_iter().filter(|width| *width <= left) {
                let mut next = pool.clone();
                assert!(next.take(width).is_some(), "{width} of {left} units from {pool:?}");
                if left - width > 0 && left > 6 {
                    fill(&next, left - width);
                }
            }
        }
        fill(&UnitPool::new(Grid::Blocks16), UNITS);
    }

    #[test]
    fn an_exchange_without_room_changes_nothing() {
        let mut pool = UnitPool::new(Grid::Blocks16);
        let narrow = pool.take(4).unwrap();
        assert!(pool.take(4).is_some());
        assert_eq!(pool.exchange(narrow, 16), None);
        assert_eq!(pool.exchange(narrow, 8), UnitSet::block(8, 8).map(SmShare::Block));
        assert_eq!(pool.take(4), UnitSet::block(0, 4).map(SmShare::Block));
    }

    #[test]
    fn percentages_sum_to_at_most_100_unless_runs_race() {
        let mut pool = UnitPool::new(Grid::Caps100);
        assert!(pool.take(60).is_some());
        assert_eq!(pool.take(50), None);
        assert!(pool.take(40).is_some());
        let mut race = UnitPool::unbounded();
        assert!((0..3).all(|_| race.take(100).is_some()));
    }
}
