//! Ranks of GPU memory sizes.

/// Rank of GPU memory sizes. A model fits the GPUs of its own rank and above. Most nodes have a
/// single rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SizeRank(pub(super) usize);
