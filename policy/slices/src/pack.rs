//! Our packing: a slice goes to the fullest GPU on which a dry run of the token core meets all requests.
//!
//! ```text
//! place(slice) ─► fullest GPU first ─► cheap bounds ─► dry run (cached) ─► GPU, or the reasons of each GPU
//! empty_one()  ─► all slices of the emptiest GPU to others, if all fit there
//! ```
//!
//! The paper packs rectangles instead ([`rectangles`](crate::rectangles)): then the order of arrival decides
//! whether a set fits, although slices have no fixed place in time when they run.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use millrace_types::limits::SLICES_PER_GPU_MAX;
use millrace_types::{Bytes, Permille, SliceId, Terms};

use crate::dry_run;
use crate::tokens::Config;
use crate::units::Grid;

/// Greatest number of remembered dry runs.
const KNOWN_MAX: usize = 10_000;

/// A slice to place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SliceDemand {
    pub id: SliceId,
    pub terms: Terms,
    /// GPU memory: weights and workspace. Counts in full for each slice; a caller sets 0 for a slice whose
    /// memory another slice already counts.
    pub memory: Bytes,
    /// Share of the GPU's memory bandwidth that the slice uses at full speed.
    pub bandwidth: Permille,
}

impl SliceDemand {
    /// Returns the SM time: units times thousandths of the time.
    fn sm_time(&self, grid: Grid) -> u32 {
        u32::from(grid.units(self.terms.least())) * u32::from(self.terms.request().get())
    }

    /// Returns the rank of a slice among those that are placed together: wide and long slices first, because
    /// they have the fewest places.
    fn longest_first(&self, grid: Grid) -> impl Ord + use<> {
        let longest = self.terms.least().max(self.terms.request());
        (Reverse(longest), Reverse(self.sm_time(grid)), self.id)
    }
}

/// The reason why a slice does not fit on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Misfit {
    /// The GPU has [`SLICES_PER_GPU_MAX`] slices.
    Count,
    Memory,
    /// The requests exceed the SMs times the time.
    SmTime,
    Bandwidth,
    /// Slices wider than half of the SMs exclude each other, and their requests exceed the time.
    WideSlices,
    /// There is SM time enough, but the token core would not meet all requests.
    Requests,
}

impl fmt::Display for Misfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Count => "has as many slices as a GPU may have",
            Self::Memory => "lacks memory",
            Self::SmTime => "lacks SM time",
            Self::Bandwidth => "lacks memory bandwidth",
            Self::WideSlices => "lacks time for slices wider than half",
            Self::Requests => "cannot guarantee all requested time",
        })
    }
}

/// The reason why a slice was not placed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("larger than a whole GPU: an empty GPU {0}")]
    LargerThanGpu(Misfit),
    /// The number of GPUs by their reason.
    #[error("no GPU has room: {}", reasons(.0))]
    NoRoom(BTreeMap<Misfit, usize>),
    /// No GPU has a free rectangle of this width and height, in thousandths.
    #[error("no GPU has memory and a free rectangle of {width} of the time by {height} of the SMs")]
    NoRectangle { width: Permille, height: Permille },
}

fn reasons(gpus: &BTreeMap<Misfit, usize>) -> String {
    let texts = gpus.iter().map(|(misfit, count)| format!("{count} {misfit}"));
    texts.collect::<Vec<_>>().join(", ")
}

/// A slice that changed GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Move {
    pub slice: SliceId,
    pub from: usize,
    pub to: usize,
}

/// Checks whether slices fit a GPU together. Remembers dry runs.
#[derive(Debug, Clone)]
pub struct FitCheck {
    config: Config,
    /// Shortfalls of dry runs, by the sorted terms.
    known: BTreeMap<Vec<Terms>, Duration>,
}

/// Packs slices on equal GPUs.
#[derive(Debug, Clone)]
pub struct Packer {
    fit: FitCheck,
    memory: Bytes,
    gpus_max: usize,
    gpus: Vec<Vec<SliceDemand>>,
}

impl Packer {
    /// Creates a packer for at most so many GPUs, each with this memory.
    #[must_use]
    pub fn new(config: Config, memory: Bytes, gpus_max: usize) -> Self {
        Self { fit: FitCheck::new(config), memory, gpus_max, gpus: Vec::new() }
    }

    /// Returns the slices of each GPU that was opened. A GPU may be empty again.
    #[must_use]
    pub fn gpus(&self) -> &[Vec<SliceDemand>] {
        &self.gpus
    }

    /// Returns the number of GPUs with slices.
    #[must_use]
    pub fn gpus_used(&self) -> usize {
        self.gpus.iter().filter(|gpu| !gpu.is_empty()).count()
    }

    /// Places a slice on the fullest GPU on which it fits, ties to the first; on an empty GPU if there is none.
    ///
    /// # Errors
    ///
    /// Fails if the slice fits on no GPU, with the reason of each GPU.
    pub fn place(&mut self, slice: SliceDemand) -> Result<usize, Refusal> {
        self.fit.check(self.memory, &[], &slice).map_err(Refusal::LargerThanGpu)?;
        let mut why: BTreeMap<Misfit, usize> = BTreeMap::new();
        for gpu in self.fullest_first() {
            match self.fit.check(self.memory, &self.gpus[gpu], &slice) {
                Ok(()) => {
                    self.gpus[gpu].push(slice);
                    return Ok(gpu);
                }
                Err(misfit) => *why.entry(misfit).or_default() += 1,
            }
        }
        if self.gpus.len() >= self.gpus_max {
            return Err(Refusal::NoRoom(why));
        }
        self.gpus.push(vec![slice]);
        Ok(self.gpus.len() - 1)
    }

    /// Removes a slice. Returns whether the slice was placed.
    pub fn remove(&mut self, slice: SliceId) -> bool {
        self.gpus.iter_mut().any(|gpu| {
            let place = gpu.iter().position(|it| it.id == slice);
            place.map(|place| gpu.remove(place)).is_some()
        })
    }

    /// Moves all slices of the emptiest GPU in use to other GPUs in use, the longest first, if all of them fit
    /// there. Returns the moves.
    pub fn empty_one(&mut self) -> Vec<Move> {
        let in_use: Vec<usize> = (0..self.gpus.len()).filter(|gpu| !self.gpus[*gpu].is_empty()).collect();
        let Some(&from) = in_use.iter().min_by_key(|gpu| self.sm_time(**gpu)) else { return Vec::new() };
        let grid = self.fit.config.grid();
        let mut slices = self.gpus[from].clone();
        slices.sort_by_key(|slice| slice.longest_first(grid));
        let before = self.gpus.clone();
        self.gpus[from].clear();
        let mut moves = Vec::with_capacity(slices.len());
        for slice in slices {
            let others =
                self.fullest_first().into_iter().filter(|gpu| *gpu != from && !before[*gpu].is_empty());
            let others: Vec<usize> = others.collect();
            let to =
                others.into_iter().find(|gpu| self.fit.check(self.memory, &self.gpus[*gpu], &slice).is_ok());
            let Some(to) = to else {
                self.gpus = before;
                return Vec::new();
            };
            self.gpus[to].push(slice);
            moves.push(Move { slice: slice.id, from, to });
        }
        moves
    }

    /// Returns the used SM time of a GPU: units times thousandths of the time.
    fn sm_time(&self, gpu: usize) -> u32 {
        self.gpus[gpu].iter().map(|slice| slice.sm_time(self.fit.config.grid())).sum()
    }

    fn fullest_first(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.gpus.len()).collect();
        order.sort_by_key(|gpu| (Reverse(self.sm_time(*gpu)), *gpu));
        order
    }
}

impl FitCheck {
    /// Creates a check for GPUs with tokens by this configuration.
    #[must_use]
    pub fn new(config: Config) -> Self {
        Self { config, known: BTreeMap::new() }
    }

    /// Checks whether a slice fits beside others on a GPU with this memory: the cheap bounds first, then
    /// the dry run.
    ///
    /// # Errors
    ///
    /// The first reason why the slice does not fit.
    pub fn check(
        &mut self,
        memory_max: Bytes,
        others: &[SliceDemand],
        slice: &SliceDemand,
    ) -> Result<(), Misfit> {
        let grid = self.config.grid();
        let all = || others.iter().chain([slice]);
        if all().count() > SLICES_PER_GPU_MAX {
            return Err(Misfit::Count);
        }
        let memory = all().try_fold(0_u64, |sum, it| sum.checked_add(it.memory.get()));
        if memory.is_none_or(|memory| memory > memory_max.get()) {
            return Err(Misfit::Memory);
        }
        if all().map(|it| it.sm_time(grid)).sum::<u32>() > u32::from(grid.total()) * 1000 {
            return Err(Misfit::SmTime);
        }
        let product = |it: &SliceDemand| u32::from(it.terms.request().get()) * u32::from(it.bandwidth.get());
        if all().map(product).sum::<u32>() > 1_000_000 {
            return Err(Misfit::Bandwidth);
        }
        let wide = all().filter(|it| 2 * u16::from(grid.units(it.terms.least())) > u16::from(grid.total()));
        if wide.map(|it| it.terms.request().get()).sum::<u16>() > 1000 {
            return Err(Misfit::WideSlices);
        }
        let terms = all().map(|it| it.terms).collect();
        if self.shortfall(terms) > self.config.token() { Err(Misfit::Requests) } else { Ok(()) }
    }

    /// Returns the shortfall of a set. The terms are sorted, so that the result depends on the set alone.
    fn shortfall(&mut self, mut terms: Vec<Terms>) -> Duration {
        terms.sort_unstable();
        if let Some(known) = self.known.get(&terms) {
            return *known;
        }
        if self.known.len() >= KNOWN_MAX {
            self.known.clear();
        }
        let missed = dry_run::shortfall(self.config, &terms);
        self.known.insert(terms, missed);
        missed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Bytes = Bytes::gib(16);

    fn share(percent: u16) -> Permille {
        Permille::new(percent * 10).unwrap()
    }

    fn slice(id: u64, sm: u16, request: u16) -> SliceDemand {
        let terms = Terms::new(share(sm), share(sm), share(request), Permille::ALL).unwrap();
        SliceDemand { id: SliceId(id), terms, memory: Bytes::gib(1), bandwidth: Permille::ZERO }
    }

    fn packer(gpus_max: usize) -> Packer {
        Packer::new(Config::SLICES, MEMORY, gpus_max)
    }

    #[test]
    fn a_slice_goes_to_the_fullest_gpu_on_which_it_fits() {
        let mut packer = packer(3);
        assert_eq!(packer.place(slice(0, 100, 40)), Ok(0));
        assert_eq!(packer.place(slice(1, 100, 70)), Ok(1));
        assert_eq!(packer.place(slice(2, 50, 30)), Ok(1));
        assert_eq!(packer.place(slice(3, 100, 60)), Ok(0));
        assert_eq!(packer.gpus_used(), 2);
    }

    #[test]
    fn each_refusal_states_its_reason() {
        let mut one = packer(1);
        let huge = SliceDemand { memory: Bytes::gib(17), ..slice(0, 12, 10) };
        assert_eq!(one.place(huge), Err(Refusal::LargerThanGpu(Misfit::Memory)));
        one.place(slice(1, 60, 60)).unwrap();
        let refused = |packer: &mut Packer, slice| packer.place(slice).unwrap_err().to_string();
        assert_eq!(refused(&mut one, slice(2, 60, 60)), "no GPU has room: 1 lacks SM time");
        let memory = SliceDemand { memory: MEMORY, ..slice(3, 6, 10) };
        assert_eq!(refused(&mut one, memory), "no GPU has room: 1 lacks memory");
        let mut caps = Packer::new(Config::PAPER, MEMORY, 1);
        caps.place(slice(1, 60, 60)).unwrap();
        assert_eq!(
            refused(&mut caps, slice(2, 60, 60)),
            "no GPU has room: 1 lacks time for slices wider than half"
        );
    }

    #[test]
    fn bandwidth_bounds_the_slices_of_a_gpu() {
        let demanding = |id| SliceDemand { bandwidth: share(66), ..slice(id, 6, 100) };
        let mut packer = packer(1);
        packer.place(demanding(0)).unwrap();
        let reasons = [(Misfit::Bandwidth, 1)].into();
        assert_eq!(packer.place(demanding(1)), Err(Refusal::NoRoom(reasons)));
    }

    #[test]
    fn a_gpu_has_at_most_fifteen_slices() {
        let mut packer = packer(2);
        let gpus: Vec<_> = (0..16).map(|id| packer.place(slice(id, 6, 10)).unwrap()).collect();
        assert_eq!(gpus, [vec![0; 15], vec![1]].concat());
    }

    #[test]
    fn the_emptiest_gpu_is_emptied_if_all_of_its_slices_fit_elsewhere() {
        let mut packer = packer(3);
        packer.place(slice(0, 100, 60)).unwrap();
        packer.place(slice(1, 100, 80)).unwrap();
        packer.place(slice(2, 50, 40)).unwrap();
        packer.place(slice(3, 50, 40)).unwrap();
        assert_eq!(packer.empty_one(), [], "the slices fit nowhere else");
        packer.remove(SliceId(1));
        assert_eq!(packer.gpus_used(), 1);
        packer.place(slice(4, 100, 30)).unwrap();
        packer.remove(SliceId(2));
        packer.remove(SliceId(3));
        assert_eq!(packer.empty_one(), [Move { slice: SliceId(4), from: 1, to: 0 }]);
        assert_eq!(packer.gpus_used(), 1);
    }
}
