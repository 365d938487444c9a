//! Records the order in which an opaque program first reads its memory, on the program's first run (T06).
//! Pure: the caller runs the program and passes the reads of each launch.
//!
//! The launches of an opaque program do not declare their reads. A redirected API sees the arguments of a
//! launch when the launch is issued (Torpor §4.3, §4.4), too late to copy in the right order. So each launch
//! of the first run waits for all memory, and the run is recorded. Later swaps copy in the recorded order, and
//! launches wait only for their own reads. Positions are blocks from the start of the program's region, so
//! a record is valid at every address and on every GPU.
//!
//! Only tests use this module now: the launches of models declare their reads. User code on a GPU will
//! use this module (T06), because nothing declares the reads of user code.
//!
//! ```text
//!              every launch waits for everything
//! Unknown ──────────────────────────────────────► Recorded ◄───────────┐
//!              end of the run                        │                 │ end of the run
//!                                                    └─► unexpected ───┘
//!                                                    waits for everything, records from there on
//! ```
//! A run that reads as recorded costs comparisons of numbers and writes nothing. A block that only an
//! earlier behaviour read stays in the record. So a program with several behaviours settles: each new
//! recording moves some block to an earlier launch and no block to a later launch.

use std::num::NonZeroU64;
use std::ops::Range;

/// Value of `first_use` for a block that no launch has read yet.
const NEVER: u32 = u32::MAX;

/// The recorded order in which a program reads its memory, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadOrder {
    bytes: u64,
    block: NonZeroU64,
    record: Option<Record>,
}

/// A recorded order.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Record {
    /// Block numbers in the order of first use.
    blocks: Vec<u32>,
    /// By block number: the launch that reads the block first.
    first_use: Vec<u32>,
}

/// The state of a run in progress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunTrace {
    next: u32,
    /// New record of this run; `None` while the run reads as recorded.
    recording: Option<Record>,
}

/// The memory that a launch has to wait for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LaunchWait {
    /// The launch waits for all memory of the program, because its reads are not known or not as
    /// recorded.
    Everything,
    /// The launch waits only for the bytes that it reads.
    Reads,
}

impl ReadOrder {
    /// Creates an order without a record, for a program with `bytes` of memory in blocks of `block` bytes.
    #[must_use]
    pub fn unknown(bytes: u64, block: NonZeroU64) -> Self {
        Self { bytes, block, record: None }
    }

    /// Creates an order from another process's [`Self::first_reads`] of the same program. Returns
    /// `None` if a range lies outside the program's memory.
    #[must_use]
    pub fn recorded(bytes: u64, block: NonZeroU64, first_reads: &[Vec<Range<u64>>]) -> Option<Self> {
        let is_within = |read: &Range<u64>| read.start <= read.end && read.end <= bytes;
        if !first_reads.iter().flatten().all(is_within) {
            return None;
        }
        let mut order = Self::unknown(bytes, block);
        let mut trace = order.begin();
        for reads in first_reads {
            order.on_launch(&mut trace, reads);
        }
        order.end(trace)?;
        Some(order)
    }

    /// Merges the older record of another process for the same program. The result is as if a single
    /// process had recorded both, `self` last.
    #[must_use]
    pub fn merge_older(mut self, older: &Self) -> Self {
        let Some(older) = &older.record else { return self };
        match &mut self.record {
            Some(record) => record.keep(older),
            None => self.record = Some(older.clone()),
        }
        self
    }

    /// Returns the bytes that each launch was the first to read, according to the record. The ranges
    /// consist of whole blocks, with neighbours joined. Trailing launches without first reads are
    /// omitted.
    #[must_use]
    pub fn first_reads(&self) -> Vec<Vec<Range<u64>>> {
        let mut reads = Vec::new();
        let Some(record) = &self.record else { return reads };
        for &block in &record.blocks {
            let launch = record.first_use[block as usize] as usize;
            if reads.len() <= launch {
                reads.resize_with(launch + 1, Vec::new);
            }
            join(&mut reads[launch], self.bytes_of(block));
        }
        reads
    }

    /// Whether a run has been recorded.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        self.record.is_some()
    }

    /// Begins a run.
    #[must_use]
    pub fn begin(&self) -> RunTrace {
        let recording = self
            .record
            .is_none()
            .then(|| Record { blocks: Vec::new(), first_use: vec![NEVER; self.block_count() as usize] });
        RunTrace { next: 0, recording }
    }

    /// Registers that the run's next launch reads these bytes, which must be within the program's
    /// memory. Returns the memory that the launch has to wait for.
    pub fn on_launch(&self, trace: &mut RunTrace, reads: &[Range<u64>]) -> LaunchWait {
        let launch = trace.next;
        trace.next += 1;
        if trace.recording.is_none() {
            if let Some(record) = &self.record
                && self.blocks(reads).all(|block| record.first_use[block as usize] <= launch)
            {
                return LaunchWait::Reads;
            }
            trace.recording = self.record.as_ref().map(|record| record.before(launch));
        }
        if let Some(recording) = &mut trace.recording {
            self.blocks(reads).for_each(|block| recording.read(block, launch));
        }
        LaunchWait::Everything
    }

    /// Ends a run. Returns the new copy order if the run was recorded.
    pub fn end(&mut self, trace: RunTrace) -> Option<Vec<Range<u64>>> {
        let mut recording = trace.recording?;
        if let Some(before) = &self.record {
            recording.keep(before);
        }
        self.record = Some(recording);
        Some(self.copy_order())
    }

    /// Returns all of the program's memory in the order in which to copy it: the recorded blocks
    /// first, then the blocks that no launch has read. Neighbours are joined.
    #[must_use]
    pub fn copy_order(&self) -> Vec<Range<u64>> {
        let recorded = self.record.iter().flat_map(|record| record.blocks.iter().copied());
        let unread = |&block: &u32| {
            self.record.as_ref().is_none_or(|record| record.first_use[block as usize] == NEVER)
        };
        let mut order: Vec<Range<u64>> = Vec::new();
        for block in recorded.chain((0..self.block_count()).filter(unread)) {
            join(&mut order, self.bytes_of(block));
        }
        order
    }

    fn bytes_of(&self, block: u32) -> Range<u64> {
        let start = u64::from(block) * self.block.get();
        start..(start + self.block.get()).min(self.bytes)
    }

    fn block_count(&self) -> u32 {
        u32::try_from(self.bytes.div_ceil(self.block.get())).unwrap_or(NEVER)
    }

    /// Returns the blocks that contain these bytes, in order.
    fn blocks<'a>(&'a self, reads: &'a [Range<u64>]) -> impl Iterator<Item = u32> + 'a {
        let block = self.block.get();
        let read = reads.iter().filter(|read| !read.is_empty());
        read.flat_map(move |read| (read.start / block) as u32..read.end.div_ceil(block) as u32)
    }
}

/// Appends a range, joined with the last one if the two touch.
fn join(order: &mut Vec<Range<u64>>, next: Range<u64>) {
    match order.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => order.push(next),
    }
}

impl Record {
    /// Returns the part of the record before this launch.
    fn before(&self, launch: u32) -> Self {
        let earlier = |block: &u32| self.first_use[*block as usize] < launch;
        let blocks: Vec<u32> = self.blocks.iter().copied().filter(earlier).collect();
        let first_use = self.first_use.iter().map(|&first| if first < launch { first } else { NEVER });
        Self { blocks, first_use: first_use.collect() }
    }

    fn read(&mut self, block: u32, launch: u32) {
        let first = &mut self.first_use[block as usize];
        if *first == NEVER {
            *first = launch;
            self.blocks.push(block);
        }
    }

    /// Adds the blocks of an older record that this record lacks. Each block gets the earlier first
    /// use of both records. Within a launch, the older record's blocks follow this record's.
    fn keep(&mut self, older: &Self) {
        let missing = older.blocks.iter().filter(|&&block| self.first_use[block as usize] == NEVER);
        self.blocks.extend(missing);
        for (first, &older) in self.first_use.iter_mut().zip(&older.first_use) {
            *first = (*first).min(older);
        }
        // The sort is stable: within a launch the order of the newer record is kept, followed by the
        // older one's.
        self.blocks.sort_by_key(|&block| self.first_use[block as usize]);
    }
}

#[cfg(test)]
mod tests;
