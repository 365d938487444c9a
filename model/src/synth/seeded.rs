//! The seed of a network's weights.

/// Seed of the networks' weights. Another seed makes a file of the same shape with different results.
/// The functions of [`synth`](super) without a seed use [`Seeded::default`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seeded(pub u64);

impl Default for Seeded {
    fn default() -> Self {
        Self(42)
    }
}
