//! The paper's packing: slices as rectangles of time and SMs, placed by the Maximal Rectangles Algorithm of
//! FaST-GShare, section 3.4.2 (F15, F16). The baseline of [`pack`](crate::pack).
//!
//! A GPU is 1000 (time) by 1000 (SMs). Our readings: a slice fits a free rectangle that is at least as wide and
//! high (the paper's comparison is reversed). A free rectangle that a slice meets is replaced by the at most four
//! maximal parts around the slice (the paper keeps the rectangle), and of equal rectangles one stays (the paper
//! drops both).

use std::collections::{BTreeMap, BTreeSet};

use millrace_types::{SliceId, Terms};

/// Width and height of a GPU.
pub const SIDE: u16 = 1000;
/// Free rectangles beyond this number plus [`FREE_PER_SLICE`] for each slice let a kept list be rebuilt.
const FREE_BASE: usize = 8;
const FREE_PER_SLICE: usize = 4;

/// A rectangle: a share of the time from `x` on, and of the SMs from `y` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rectangle {
    pub x: u16,
    pub y: u16,
    pub width: u16,
    pub height: u16,
}

impl Rectangle {
    /// A whole GPU.
    pub const GPU: Self = Self { x: 0, y: 0, width: SIDE, height: SIDE };

    const fn right(self) -> u16 {
        self.x + self.width
    }

    const fn top(self) -> u16 {
        self.y + self.height
    }

    /// Returns the area: at most 1,000,000.
    #[must_use]
    pub const fn area(self) -> u32 {
        self.width as u32 * self.height as u32
    }

    /// Returns whether two rectangles share a point of their insides.
    #[must_use]
    pub const fn meets(self, other: Self) -> bool {
        self.x < other.right() && other.x < self.right() && self.y < other.top() && other.y < self.top()
    }

    /// Returns whether the other rectangle lies in this one.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        other.x >= self.x && other.y >= self.y && other.right() <= self.right() && other.top() <= self.top()
    }

    /// Returns the maximal parts that are left around a taken rectangle.
    fn around(self, taken: Self) -> impl Iterator<Item = Self> {
        let left = Self { width: taken.x.saturating_sub(self.x), ..self };
        let right = Self { x: taken.right(), width: self.right().saturating_sub(taken.right()), ..self };
        let below = Self { height: taken.y.saturating_sub(self.y), ..self };
        let above = Self { y: taken.top(), height: self.top().saturating_sub(taken.top()), ..self };
        [left, right, below, above].into_iter().filter(|part| part.width > 0 && part.height > 0)
    }
}

/// Returns the free list after a rectangle is taken.
fn take(free: &[Rectangle], taken: Rectangle) -> Vec<Rectangle> {
    let mut parts = Vec::with_capacity(free.len() + 4);
    for rectangle in free {
        if rectangle.meets(taken) {
            parts.extend(rectangle.around(taken));
        } else {
            parts.push(*rectangle);
        }
    }
    without_contained(parts)
}

/// Returns the rectangles that lie in no other, each once.
fn without_contained(rectangles: Vec<Rectangle>) -> Vec<Rectangle> {
    let unique: BTreeSet<_> = rectangles.into_iter().collect();
    let in_another = |it: &Rectangle| unique.iter().any(|other| other != it && other.contains(*it));
    unique.iter().filter(|it| !in_another(it)).copied().collect()
}

/// When the free list of a GPU is computed anew from the slices that remain (F16).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Restructure {
    /// At each release, so that the free list is always exactly the maximal free rectangles.
    Always,
    /// When the list is long. Until then, a released rectangle is only added to the list. The paper does not
    /// state its threshold.
    Keep,
}

/// The rectangles of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RectangleGpu {
    free: Vec<Rectangle>,
    taken: BTreeMap<SliceId, Rectangle>,
}

impl RectangleGpu {
    /// Returns an empty GPU.
    #[must_use]
    pub fn new() -> Self {
        Self { free: vec![Rectangle::GPU], taken: BTreeMap::new() }
    }

    /// Returns the free rectangles, sorted. They may overlap.
    #[must_use]
    pub fn free(&self) -> &[Rectangle] {
        &self.free
    }

    /// Returns the rectangle of each slice.
    #[must_use]
    pub fn taken(&self) -> &BTreeMap<SliceId, Rectangle> {
        &self.taken
    }

    /// Returns the area of all slices.
    #[must_use]
    pub fn used_area(&self) -> u32 {
        self.taken.values().map(|it| it.area()).sum()
    }

    /// Returns the best free rectangle: least area left over, then lowest, leftmost, narrowest.
    fn best(&self, width: u16, height: u16) -> Option<(u32, Rectangle)> {
        let fits = self.free.iter().filter(|free| free.width >= width && free.height >= height);
        let area = u32::from(width) * u32::from(height);
        let rank = |free: &Rectangle| (free.area() - area, free.y, free.x, free.width);
        fits.map(|free| (rank(free), *free)).min().map(|((left, ..), free)| (left, free))
    }

    fn put(&mut self, slice: SliceId, taken: Rectangle) {
        self.free = take(&self.free, taken);
        self.taken.insert(slice, taken);
    }

    /// Returns a slice's rectangle to the free list.
    fn release(&mut self, slice: SliceId, restructure: Restructure) -> bool {
        let Some(released) = self.taken.remove(&slice) else { return false };
        let mut kept = std::mem::take(&mut self.free);
        kept.push(released);
        self.free = without_contained(kept);
        let long = self.free.len() > FREE_PER_SLICE * self.taken.len() + FREE_BASE;
        if restructure == Restructure::Always || long || self.taken.is_empty() {
            self.rebuild();
        }
        true
    }

    fn rebuild(&mut self) {
        self.free = self.taken.values().fold(vec![Rectangle::GPU], |free, taken| take(&free, *taken));
    }
}

impl Default for RectangleGpu {
    fn default() -> Self {
        Self::new()
    }
}

/// Packs slices as rectangles on as many GPUs as are needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RectanglePacker {
    restructure: Restructure,
    gpus_max: usize,
    gpus: Vec<RectangleGpu>,
}

impl RectanglePacker {
    /// Creates a packer for at most so many GPUs.
    #[must_use]
    pub fn new(gpus_max: usize, restructure: Restructure) -> Self {
        Self { restructure, gpus_max, gpus: Vec::new() }
    }

    /// Returns the GPUs that were opened. A GPU stays after its last slice has left.
    #[must_use]
    pub fn gpus(&self) -> &[RectangleGpu] {
        &self.gpus
    }

    /// Places a slice on the GPU, of those that `may_use` accepts, with the free rectangle of least area left
    /// over; on a new GPU if no free rectangle suffices. Returns the GPU and the rectangle; `None` if all GPUs are
    /// in use. A slice takes its request of the time and its least share of the SMs; both must be above zero.
    pub fn place(
        &mut self,
        slice: SliceId,
        terms: Terms,
        may_use: impl Fn(usize) -> bool,
    ) -> Option<(usize, Rectangle)> {
        let width = terms.request().get();
        let height = terms.least().get();
        if width == 0 {
            return None;
        }
        let (gpu, free) = match self.best(width, height, may_use) {
            Some(found) => found,
            None if self.gpus.len() < self.gpus_max => {
                self.gpus.push(RectangleGpu::new());
                (self.gpus.len() - 1, Rectangle::GPU)
            }
            None => return None,
        };
        let taken = Rectangle { x: free.x, y: free.y, width, height };
        self.gpus[gpu].put(slice, taken);
        Some((gpu, taken))
    }

    fn best(&self, width: u16, height: u16, may_use: impl Fn(usize) -> bool) -> Option<(usize, Rectangle)> {
        let gpus = self.gpus.iter().enumerate().filter(|(place, _)| may_use(*place));
        let fits =
            gpus.filter_map(|(place, gpu)| gpu.best(width, height).map(|(left, free)| (left, place, free)));
        fits.min_by_key(|(left, place, _)| (*left, *place)).map(|(_, place, free)| (place, free))
    }

    /// Removes a slice. Returns whether the slice was placed.
    pub fn remove(&mut self, slice: SliceId) -> bool {
        self.gpus.iter_mut().any(|gpu| gpu.release(slice, self.restructure))
    }

    /// Moves all slices of the GPU with the least used area to other GPUs in use, the longest first, if all of
    /// them fit there. Returns the number of moved slices.
    pub fn empty_one(&mut self) -> usize {
        let in_use: Vec<usize> =
            (0..self.gpus.len()).filter(|gpu| !self.gpus[*gpu].taken.is_empty()).collect();
        let Some(&least) = in_use.iter().min_by_key(|gpu| self.gpus[**gpu].used_area()) else { return 0 };
        let mut moved: Vec<_> =
            self.gpus[least].taken.iter().map(|(slice, taken)| (*slice, *taken)).collect();
        moved.sort_by_key(|(slice, it)| (std::cmp::Reverse((it.width.max(it.height), it.area())), *slice));
        let mut after = self.clone();
        after.gpus[least] = RectangleGpu::new();
        for (slice, it) in &moved {
            let others = |gpu: usize| gpu != least && in_use.contains(&gpu);
            let Some((gpu, free)) = after.best(it.width, it.height, others) else { return 0 };
            after.gpus[gpu].put(*slice, Rectangle { x: free.x, y: free.y, ..*it });
        }
        *self = after;
        moved.len()
    }
}
