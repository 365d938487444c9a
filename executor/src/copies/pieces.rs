//! Cuts copies into pieces that the device accepts.

use std::ops::Range;

/// Cuts a range into pieces of at most `max` bytes.
pub(crate) fn pieces(range: Range<u64>, max: u64) -> impl Iterator<Item = Range<u64>> {
    let starts = (range.start..range.end).step_by(max as usize);
    starts.map(move |start| start..range.end.min(start + max))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_range_in_order() {
        let cut = |range| pieces(range, 10).collect::<Vec<_>>();
        assert_eq!(cut(3..25), [3..13, 13..23, 23..25]);
        assert_eq!(cut(3..13), std::slice::from_ref(&(3..13)));
        assert_eq!(cut(3..3), []);
    }
}
