//! A small seeded generator, so that a network's bytes depend only on its seed and not on the version
//! of a crate.

/// SplitMix64: an addition and three mixing steps per number.
pub(super) struct SplitMix64(u64);

impl SplitMix64 {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns little-endian floats, uniform with mean 0 and the given standard deviation.
    pub(super) fn floats(&mut self, count: usize, deviation: f32) -> Vec<u8> {
        let scale = deviation * 3f32.sqrt() / (1u32 << 23) as f32;
        let mut bytes = Vec::with_capacity(count * 4);
        for _ in 0..count {
            // 24 random bits are exact in a float: -2^23..2^23.
            let centered = (self.next() >> 40) as f32 - (1u32 << 23) as f32;
            bytes.extend_from_slice(&(centered * scale).to_le_bytes());
        }
        bytes
    }
}
