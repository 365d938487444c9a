//! MessagePack that a disk or another process has written, read with a bound on how deep it nests: each
//! level takes stack, and a thread that is out of stack ends its process.

use std::io;

use rmp_serde::Deserializer;
use rmp_serde::decode::Error;
use serde::de::DeserializeOwned;

/// The deepest nesting that is read. Nothing that is written comes near.
pub const NESTING_MAX: usize = 128;

/// Reads a value.
///
/// # Errors
/// Where the bytes are no such value, or nest deeper than [`NESTING_MAX`].
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Error> {
    let mut deserializer = Deserializer::from_read_ref(bytes);
    deserializer.set_max_depth(NESTING_MAX);
    T::deserialize(&mut deserializer)
}

/// Reads a value in pieces.
///
/// # Errors
/// As [`from_slice`], and those of the reader.
pub fn from_read<T: DeserializeOwned>(from: impl io::Read) -> Result<T, Error> {
    let mut deserializer = Deserializer::new(from);
    deserializer.set_max_depth(NESTING_MAX);
    T::deserialize(&mut deserializer)
}

#[cfg(test)]
mod tests {
    use serde::de::IgnoredAny;

    use super::*;

    /// At 1,024 levels, which rmp-serde reads, a thread of 2 MiB ran out of stack.
    #[test]
    fn deep_nesting_is_refused_before_the_stack_ends() {
        let nested = |levels: usize| [vec![0x91; levels], vec![0xc0]].concat();
        for levels in [1, NESTING_MAX - 1] {
            assert!(from_slice::<IgnoredAny>(&nested(levels)).is_ok());
        }
        for levels in [NESTING_MAX + 1, 1_000, 100_000] {
            assert!(matches!(from_slice::<IgnoredAny>(&nested(levels)), Err(Error::DepthLimitExceeded)));
            let read = from_read::<IgnoredAny>(&nested(levels)[..]);
            assert!(matches!(read, Err(Error::DepthLimitExceeded)));
        }
    }
}
