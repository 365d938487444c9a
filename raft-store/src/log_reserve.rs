//! The size of the disk space that is reserved for the log. Snapshots must leave this space free. Pure.

/// Bytes reserved for the log ahead of its end.
const LOG_RESERVE_BYTES: u64 = 256 << 20;
/// The divisor that bounds the reserve on a small file system: at most a tenth of its size.
const LOG_RESERVE_PART: u64 = 10;

/// Returns the size of the log's reserve on a file system of this size, in bytes.
pub(crate) fn reserve_bytes(file_system_bytes: u64) -> u64 {
    LOG_RESERVE_BYTES.min(file_system_bytes / LOG_RESERVE_PART)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_at_most_a_tenth_of_a_small_file_system() {
        assert_eq!(reserve_bytes(1 << 40), LOG_RESERVE_BYTES);
        assert_eq!(reserve_bytes(100 << 20), 10 << 20);
        assert_eq!(reserve_bytes(0), 0);
    }
}
