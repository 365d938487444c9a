//! How a GPU's memory is cut up. Sizes are the paper's and its artifact's (T12, T13); what they
//! leave open is ours and said so.

use millrace_types::Bytes;

use super::BLOCK;

/// The most blocks a partition has: the bits of the word that says which are free.
pub const PARTITION_BLOCKS_MAX: u32 = u128::BITS;
/// The most common sizes there are.
pub const REGULAR_MAX: usize = 8;

/// What the addresses of a model's memory have to look like.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Any 2 MiB block will do: virtual memory management shows them side by side.
    #[default]
    Scattered,
    /// Each piece that the model's framework asks for lies in one stretch. For devices without
    /// virtual memory management, whose pointers are patched piece by piece (§4.4).
    Contiguous,
}

/// Who keeps the books of free memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Arrangement {
    /// Runs of blocks, the tightest that fits, else the longest. Ours.
    #[default]
    BestFit,
    /// Two tiers: partitions of common sizes, and buddies for the rest (T13).
    Partitions,
    /// One pool of released pieces over a native allocator: the paper's baseline Torpor-Block (§7.3).
    Pool,
}

/// How a GPU's memory is cut up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// The length of a partition: a power of two of blocks, at most [`PARTITION_BLOCKS_MAX`].
    pub partition: Bytes,
    /// The common sizes, ascending: pieces of them share partitions, apart from other sizes.
    pub regular: Vec<Bytes>,
    /// The smallest buddy: smaller irregular pieces begin at its multiples. A power of two of blocks.
    pub irregular_min: Bytes,
    /// What the addresses of a model's memory have to look like.
    pub placement: Placement,
    /// Who keeps the books.
    pub arrangement: Arrangement,
    /// The most that one step of consolidation moves: at least a partition, so that every partition
    /// can be emptied in one.
    pub step: Bytes,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            partition: Bytes::mib(128),
            regular: vec![Bytes::mib(2), Bytes::mib(20)],
            irregular_min: Bytes::mib(16),
            placement: Placement::default(),
            arrangement: Arrangement::default(),
            step: Bytes::mib(512),
        }
    }
}

/// Why memory cannot be cut up like that.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Sizes are counted in blocks.
    #[error("{name} is {size}: give a multiple of {BLOCK}, at least {BLOCK}")]
    NotBlocks {
        /// Which size.
        name: &'static str,
        /// What it is.
        size: Bytes,
    },
    /// A size that has to halve evenly does not.
    #[error("{name} is {size}: give {BLOCK} times a power of two")]
    NotAPower {
        /// Which size.
        name: &'static str,
        /// What it is.
        size: Bytes,
    },
    /// A partition is too long.
    #[error("partition is {size}: give at most {max}")]
    PartitionTooLong {
        /// What it is.
        size: Bytes,
        /// What it may be.
        max: Bytes,
    },
    /// A size does not fit a partition.
    #[error("{name} has {size}, which is more than a partition of {partition}: make the partition longer")]
    BeyondPartition {
        /// Which size.
        name: &'static str,
        /// What it is.
        size: Bytes,
        /// A partition's length.
        partition: Bytes,
    },
    /// The common sizes are not in order.
    #[error("regular sizes are out of order: list them ascending, each once")]
    Unordered,
    /// There are too many or none.
    #[error("{0} regular sizes: give 1 to {REGULAR_MAX}")]
    RegularCount(usize),
    /// A step of consolidation could not empty a partition.
    #[error("step is {step}: give at least a partition, {partition}")]
    StepTooShort {
        /// What it is.
        step: Bytes,
        /// A partition's length.
        partition: Bytes,
    },
}

impl Config {
    /// Checks the sizes and counts them in blocks.
    ///
    /// # Errors
    /// [`ConfigError`], which names the size and what it may be.
    pub fn grid(&self) -> Result<Grid, ConfigError> {
        let partition = power("partition", self.partition)?;
        if partition > PARTITION_BLOCKS_MAX {
            let max = Bytes(BLOCK.0 * u64::from(PARTITION_BLOCKS_MAX));
            return Err(ConfigError::PartitionTooLong { size: self.partition, max });
        }
        if self.regular.is_empty() || self.regular.len() > REGULAR_MAX {
            return Err(ConfigError::RegularCount(self.regular.len()));
        }
        let within = |name, size: Bytes| {
            let partition = self.partition;
            if size > partition {
                Err(ConfigError::BeyondPartition { name, size, partition })
            } else {
                Ok(())
            }
        };
        let mut regular = Vec::new();
        for &size in &self.regular {
            within("regular", size)?;
            regular.push(blocks("regular", size)?);
        }
        if !regular.is_sorted_by(|one, next| one < next) {
            return Err(ConfigError::Unordered);
        }
        within("irregular_min", self.irregular_min)?;
        let irregular_min = power("irregular_min", self.irregular_min)?;
        if self.step < self.partition {
            return Err(ConfigError::StepTooShort { step: self.step, partition: self.partition });
        }
        let step = u32::try_from(self.step.0 / BLOCK.0).unwrap_or(u32::MAX);
        let (placement, arrangement) = (self.placement, self.arrangement);
        Ok(Grid { partition, regular, irregular_min, placement, arrangement, step })
    }
}

fn blocks(name: &'static str, size: Bytes) -> Result<u32, ConfigError> {
    let blocks = u32::try_from(size.0 / BLOCK.0).ok().filter(|&blocks| blocks > 0);
    blocks.filter(|_| size.0.is_multiple_of(BLOCK.0)).ok_or(ConfigError::NotBlocks { name, size })
}

fn power(name: &'static str, size: Bytes) -> Result<u32, ConfigError> {
    let blocks = blocks(name, size)?;
    if blocks.is_power_of_two() { Ok(blocks) } else { Err(ConfigError::NotAPower { name, size }) }
}

/// A checked [`Config`], its sizes in blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grid {
    pub(super) partition: u32,
    pub(super) regular: Vec<u32>,
    pub(super) irregular_min: u32,
    pub(super) placement: Placement,
    pub(super) arrangement: Arrangement,
    pub(super) step: u32,
}

impl Default for Grid {
    fn default() -> Self {
        Config::default().grid().expect("the defaults are checked by a test")
    }
}

impl Grid {
    /// Cuts a model of which only the size is known into pieces of the common sizes, the largest
    /// first; frameworks gather small and middling tensors in such (A.2). What is less than the
    /// smallest is one piece.
    #[must_use]
    pub fn cut(&self, blocks: u32) -> Vec<u32> {
        let (mut pieces, mut left) = (Vec::new(), blocks);
        for &size in self.regular.iter().rev() {
            pieces.extend((0..left / size).map(|_| size));
            left %= size;
        }
        pieces.extend((left > 0).then_some(left));
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(change: impl Fn(&mut Config), expected: &str) {
        let mut config = Config::default();
        change(&mut config);
        assert_eq!(config.grid().unwrap_err().to_string(), expected);
    }

    #[test]
    fn the_defaults_are_the_papers() {
        let grid = Grid::default();
        assert_eq!((grid.partition, grid.regular, grid.irregular_min), (64, vec![1, 10], 8));
    }

    #[test]
    fn bad_sizes_are_refused_with_what_to_give() {
        check(|c| c.partition = Bytes(5), "partition is 5 B: give a multiple of 2.0 MiB, at least 2.0 MiB");
        check(|c| c.partition = Bytes::mib(100), "partition is 100.0 MiB: give 2.0 MiB times a power of two");
        check(|c| c.partition = Bytes::mib(512), "partition is 512.0 MiB: give at most 256.0 MiB");
        check(|c| c.regular = vec![], "0 regular sizes: give 1 to 8");
        check(
            |c| c.regular = vec![Bytes::mib(20), Bytes::mib(2)],
            "regular sizes are out of order: list them ascending, each once",
        );
        check(
            |c| c.regular = vec![Bytes::mib(130)],
            "regular has 130.0 MiB, which is more than a partition of 128.0 MiB: make the partition longer",
        );
        check(
            |c| c.irregular_min = Bytes::mib(12),
            "irregular_min is 12.0 MiB: give 2.0 MiB times a power of two",
        );
        check(|c| c.step = Bytes::mib(64), "step is 64.0 MiB: give at least a partition, 128.0 MiB");
    }

    #[test]
    fn a_size_is_cut_into_common_ones() {
        assert_eq!(Grid::default().cut(23), [10, 10, 1, 1, 1]);
        let large = Config { regular: vec![Bytes::mib(20)], ..Config::default() }.grid().unwrap();
        assert_eq!(large.cut(23), [10, 10, 3]);
        assert_eq!(large.cut(0), [0; 0]);
    }
}
