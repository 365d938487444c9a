//! Counts, outside of every scheduler, which launch holds which SM units of an emulated GPU.
//!
//! ```text
//! worker:    SmPage::create ─ share ─┐                   figures <─ audit
//!                                    ▼ descriptor           │
//! executor:  SmPage::open ─ claim ─> [page in memory: owners, busy times, counters]
//! ```
//! A worker creates a page for each incarnation of an executor, beside the GPU's
//! [memory](crate::DeviceMemory). A launch claims its SMs in the page before the launch computes,
//! and frees the SMs afterwards. A launch that begins on SMs of another launch is a violation: the
//! page counts the violation, and the launch goes on.
//!
//! Another process may write anything into the page. The figures are then wrong, but no code here
//! panics, waits, or computes an address from the page's contents.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use millrace_types::Timestamp;
use millrace_types::slices::{SmShare, UNITS};
use rustix::fs::SealFlags;

use crate::clock::monotonic_now;
use crate::error::Error;
use crate::map::{SharedWords, WORDS, WORDS_BYTES};
use crate::memfd;

const UNIT_COUNT: usize = UNITS as usize;

/// The compute of the whole GPU, in 1600ths: a unit is 100 of these parts, a percent is 16.
const WHOLE: u64 = 1600;
const PARTS_PER_UNIT: u64 = WHOLE / UNITS as u64;
const PARTS_PER_PERCENT: u64 = WHOLE / 100;

// Positions of the counters in the page, in words.
const OWNERS: usize = 0;
const BUSY: usize = UNIT_COUNT;
const LAUNCHES: usize = 2 * UNIT_COUNT;
const VIOLATIONS: usize = LAUNCHES + 1;
const IN_USE: usize = LAUNCHES + 2;
const _: () = assert!(IN_USE < WORDS, "the counters fit the page");

/// The counters of a GPU's SMs, in memory that a worker shares with its executors. Clones are the
/// same page.
#[derive(Debug, Clone)]
pub struct SmPage(Arc<MappedPage>);

#[derive(Debug)]
struct MappedPage {
    file: OwnedFd,
    words: SharedWords,
}

/// The figures of a page. Launches may begin and end while the figures are read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SmFigures {
    /// Launches that began.
    pub launches: u64,
    /// Launches that began on SMs of another launch, or that used more than the whole GPU together
    /// with the other launches.
    pub violations: u64,
    /// Time for which launches held each unit. A launch is included once the launch ends.
    pub busy: [Duration; UNIT_COUNT],
    /// Number of the launch that holds each unit; 0 for a free unit. The upper 32 bits are the
    /// process id of the launch's executor.
    pub owners: [u64; UNIT_COUNT],
}

impl SmPage {
    /// Creates a page on which all units are free.
    ///
    /// # Errors
    /// [`Error::Os`] or [`Error::OutOfMemory`] from the kernel.
    pub fn create(name: &str) -> Result<Self, Error> {
        let file = memfd::create(name, WORDS_BYTES)?;
        // Allocates the memory now: a machine without memory fails this call instead of a later store.
        memfd::write_at(&file, &[0; WORDS_BYTES as usize], 0)?;
        memfd::seal(&file, SealFlags::empty())?;
        Self::open(file)
    }

    /// Opens a page that a worker lent.
    ///
    /// # Errors
    /// [`Error::Unsealed`] if the file is not 4 KiB long or could shrink; [`Error::Os`].
    pub fn open(file: OwnedFd) -> Result<Self, Error> {
        let words = SharedWords::of_sealed(&file)?;
        Ok(Self(Arc::new(MappedPage { file, words })))
    }

    /// Returns a new descriptor of the page, to send to an executor.
    ///
    /// # Errors
    /// [`Error::Os`] if this process has too many open descriptors.
    pub fn share(&self) -> Result<OwnedFd, Error> {
        self.0.file.try_clone().map_err(Error::io("share an SM page"))
    }

    /// Returns the current figures.
    #[must_use]
    pub fn figures(&self) -> SmFigures {
        let read = |word: usize| self.word(word).load(Ordering::Acquire);
        SmFigures {
            launches: read(LAUNCHES),
            violations: read(VIOLATIONS),
            busy: std::array::from_fn(|unit| Duration::from_nanos(read(BUSY + unit))),
            owners: std::array::from_fn(|unit| read(OWNERS + unit)),
        }
    }

    /// Claims SMs for a launch that begins now. The claim never waits and never fails: a launch on
    /// SMs of another launch is counted as a violation, once per launch.
    ///
    /// A launch on a block is a violation if another launch holds a unit of the block. A launch is
    /// also a violation if the held units and all percentages in use exceed the whole GPU.
    #[must_use = "dropping the claim frees the SMs"]
    pub fn claim(&self, on: SmShare) -> SmClaim {
        let ordinal = self.word(LAUNCHES).fetch_add(1, Ordering::Relaxed);
        // The low half makes the number unique on the page, also if two executors in different PID
        // namespaces have the same process id. The high half is never 0, and so is the number.
        let number = u64::from(std::process::id()) << 32 | (ordinal & u64::from(u32::MAX));
        let mut owned = 0u16;
        let mut contested = false;
        let parts = match on {
            SmShare::Block(block) => {
                for unit in units(block.bits()) {
                    let owner = self.word(OWNERS + unit);
                    match owner.compare_exchange(0, number, Ordering::AcqRel, Ordering::Relaxed) {
                        Ok(_) => owned |= 1 << unit,
                        Err(_) => contested = true,
                    }
                }
                // Units of another launch are already part of the sum.
                u64::from(owned.count_ones()) * PARTS_PER_UNIT
            }
            SmShare::Cap(percent) => u64::from(percent.get()) * PARTS_PER_PERCENT,
        };
        let before = self.word(IN_USE).fetch_add(parts, Ordering::AcqRel);
        if contested || before.saturating_add(parts) > WHOLE {
            self.word(VIOLATIONS).fetch_add(1, Ordering::Relaxed);
        }
        SmClaim { page: self.clone(), number, owned, parts, began: monotonic_now() }
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        &self.0.words.as_atomics()[word]
    }
}

/// The SMs of a running launch. Dropping the claim frees the units that the launch holds, and adds the
/// time since the claim to the busy time of these units.
#[derive(Debug)]
pub struct SmClaim {
    page: SmPage,
    number: u64,
    /// Units that the launch holds, a bit for each.
    owned: u16,
    /// Share of the whole GPU that the claim added to the sum.
    parts: u64,
    began: Timestamp,
}

impl Drop for SmClaim {
    fn drop(&mut self) {
        let nanos = monotonic_now().since(self.began).as_nanos();
        let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
        // Before the units are free: in the other order the next launch on these units would find both
        // its own share and this one in the sum.
        self.page.word(IN_USE).fetch_sub(self.parts, Ordering::AcqRel);
        for unit in units(self.owned) {
            self.page.word(BUSY + unit).fetch_add(nanos, Ordering::Relaxed);
            let owner = self.page.word(OWNERS + unit);
            match owner.compare_exchange(self.number, 0, Ordering::Release, Ordering::Relaxed) {
                // Failure means that another process wrote to the page, and is not this launch's to repair.
                Ok(_) | Err(_) => {}
            }
        }
    }
}

/// A launch that may compute on the caller's thread. An engine keeps the value while the launch
/// computes, because the value holds the launch's SMs.
#[derive(Debug)]
#[must_use = "dropping the value frees the launch's SMs"]
pub struct EmulatedLaunch {
    _claim: Option<SmClaim>,
}

impl EmulatedLaunch {
    /// Begins a launch, which is counted if the GPU has a page.
    pub(super) fn begin(sms: Option<&SmPage>, on: SmShare) -> Self {
        Self { _claim: sms.map(|page| page.claim(on)) }
    }
}

/// Returns the units of a set of bits.
fn units(bits: u16) -> impl Iterator<Item = usize> {
    (0..UNIT_COUNT).filter(move |unit| bits >> unit & 1 == 1)
}

#[cfg(test)]
mod tests {
    use millrace_types::slices::{SmPercent, UnitSet};

    use super::*;

    fn page() -> SmPage {
        SmPage::create("test").unwrap()
    }

    fn block(first: u8, width: u8) -> SmShare {
        SmShare::Block(UnitSet::block(first, width).unwrap())
    }

    fn cap(percent: u8) -> SmShare {
        SmShare::Cap(SmPercent::new(percent).unwrap())
    }

    /// Returns the units that some launch holds, a bit for each.
    fn held(page: &SmPage) -> u16 {
        let owners = page.figures().owners;
        units(u16::MAX).filter(|unit| owners[*unit] != 0).fold(0, |bits, unit| bits | 1 << unit)
    }

    #[test]
    fn an_overlapping_claim_is_a_violation_and_frees_only_its_own_units() {
        let page = page();
        let first = page.claim(block(0, 4));
        let second = page.claim(block(0, 8));
        assert_eq!((page.figures().launches, page.figures().violations), (2, 1), "once per launch");
        assert_eq!(held(&page), 0x00ff);
        drop(second);
        assert_eq!(held(&page), 0x000f);
        drop(first);
        assert_eq!(held(&page), 0);
        drop(page.claim(SmShare::Block(UnitSet::ALL)));
        assert_eq!((page.figures().launches, page.figures().violations), (3, 1));
    }

    #[test]
    fn disjoint_claims_are_no_violation_even_after_an_overlap() {
        let page = page();
        let first = page.claim(block(0, 8));
        let second = page.claim(block(8, 4));
        let third = page.claim(block(12, 4));
        assert_eq!(held(&page), u16::MAX);
        assert_eq!(page.figures().violations, 0);
        drop(third);
        let overlapping = page.claim(block(8, 4));
        assert_eq!(page.figures().violations, 1);
        let disjoint = page.claim(block(12, 4));
        assert_eq!(page.figures().violations, 1);
        drop((first, second, overlapping, disjoint));
        assert_eq!(held(&page), 0);
    }

    #[test]
    fn busy_time_accrues_to_exactly_the_claimed_units() {
        let page = page();
        let began = monotonic_now();
        let claim = page.claim(block(4, 2));
        let contested = page.claim(block(4, 4));
        assert_eq!(page.figures().busy, [Duration::ZERO; UNIT_COUNT], "the launches still run");
        // Lets the clock advance, so that the busy time is not zero.
        while monotonic_now() == began {}
        drop(contested);
        let after_one = page.figures().busy;
        drop(claim);
        let after_both = page.figures().busy;
        let busy = |busy: [Duration; UNIT_COUNT]| {
            units(u16::MAX).filter(|unit| busy[*unit] > Duration::ZERO).collect::<Vec<_>>()
        };
        assert_eq!(busy(after_one), [6, 7], "units of the other launch are not counted twice");
        assert_eq!(busy(after_both), [4, 5, 6, 7]);
        drop(page.claim(cap(50)));
        assert_eq!(page.figures().busy, after_both, "a percentage is on no certain units");
    }

    #[test]
    fn percentages_above_100_in_sum_are_a_violation() {
        let page = page();
        let first = page.claim(cap(60));
        let second = page.claim(cap(40));
        assert_eq!(page.figures().violations, 0);
        let third = page.claim(cap(1));
        assert_eq!(page.figures().violations, 1);
        drop((second, third));
        let fourth = page.claim(cap(40));
        assert_eq!(page.figures().violations, 1);
        drop((first, fourth));
    }

    #[test]
    fn blocks_and_percentages_above_the_whole_gpu_in_sum_are_a_violation() {
        let page = page();
        let half = page.claim(block(0, 8));
        let rest = page.claim(cap(50));
        assert_eq!(page.figures().violations, 0);
        let more = page.claim(block(8, 1));
        assert_eq!(page.figures().violations, 1);
        drop((half, rest, more));
        let whole = page.claim(block(0, 16));
        let percent = page.claim(cap(1));
        assert_eq!(page.figures().violations, 2);
        drop((whole, percent));
    }

    #[test]
    fn claims_through_two_mappings_see_each_other() {
        let page = page();
        let [one, other] = [(), ()].map(|()| SmPage::open(page.share().unwrap()).unwrap());
        let first = one.claim(block(0, 2));
        let second = other.claim(block(0, 4));
        assert_eq!((page.figures().launches, page.figures().violations), (2, 1));
        drop((one, first));
        assert_eq!(held(&page), 0b1100);
        let owners = page.figures().owners;
        assert_eq!(owners[2] >> 32, u64::from(std::process::id()));
        drop(second);
        assert_eq!(held(&other), 0);
    }

    #[test]
    fn concurrent_claims_of_a_unit_leave_at_most_one_owner() {
        let page = page();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                let page = SmPage::open(page.share().unwrap()).unwrap();
                scope.spawn(move || (0..500).for_each(|_| drop(page.claim(block(3, 1)))));
            }
            let page = &page;
            scope.spawn(move || (0..500).for_each(|_| drop(page.claim(block(8, 8)))));
        });
        let figures = page.figures();
        assert_eq!(figures.launches, 2500);
        assert!(figures.violations < 2000, "the first launch and the launches on the other units are none");
        assert_eq!((held(&page), page.word(IN_USE).load(Ordering::Acquire)), (0, 0));
    }

    #[test]
    fn a_page_with_garbage_does_not_panic() {
        let page = page();
        let before = page.claim(SmShare::Block(UnitSet::ALL));
        memfd::write_at(&page.0.file, &[0xff; WORDS_BYTES as usize], 0).unwrap();
        let contested = page.claim(block(0, 4));
        let percent = page.claim(cap(100));
        assert_eq!(page.figures().owners, [u64::MAX; UNIT_COUNT]);
        drop((before, contested, percent));
        assert_eq!(page.figures().owners, [u64::MAX; UNIT_COUNT], "units of an unknown owner stay");
        memfd::write_at(&page.0.file, &[0; WORDS_BYTES as usize], 0).unwrap();
        let claim = page.claim(SmShare::Block(UnitSet::ALL));
        memfd::write_at(&page.0.file, &[0; WORDS_BYTES as usize], 0).unwrap();
        drop(claim);
        assert_eq!(page.figures().owners, [0; UNIT_COUNT]);
    }

    #[test]
    fn a_file_of_another_size_or_without_seals_is_refused() {
        let long = memfd::create("test", 2 * WORDS_BYTES).unwrap();
        memfd::seal(&long, SealFlags::empty()).unwrap();
        let unsealed = memfd::create("test", WORDS_BYTES).unwrap();
        for file in [long, unsealed] {
            assert!(matches!(SmPage::open(file), Err(Error::Unsealed { written: false, .. })));
        }
        let frozen = memfd::create("test", WORDS_BYTES).unwrap();
        memfd::seal(&frozen, SealFlags::WRITE).unwrap();
        assert!(matches!(SmPage::open(frozen), Err(Error::Os { .. })), "the page must be writable");
    }
}
