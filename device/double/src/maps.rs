//! The memory map of the process, as the system shows it.

/// A line of `/proc/self/maps`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MapLine {
    start: u64,
    end: u64,
    readable: bool,
    pub(crate) writable: bool,
    pub(crate) shared: bool,
    /// Whether a file is mapped, which includes memfds.
    pub(crate) has_file: bool,
}

impl MapLine {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let rights = fields.next()?.as_bytes();
        let inode = fields.nth(2)?;
        Some(Self {
            start: u64::from_str_radix(start, 16).ok()?,
            end: u64::from_str_radix(end, 16).ok()?,
            readable: rights.first() == Some(&b'r'),
            writable: rights.get(1) == Some(&b'w'),
            shared: rights.get(3) == Some(&b's'),
            has_file: inode != "0",
        })
    }
}

/// Returns the lines that make up a range, or `None` if a byte of the range is not mapped.
pub(crate) fn lines(at: u64, bytes: u64) -> Option<Vec<MapLine>> {
    covering(&std::fs::read_to_string("/proc/self/maps").ok()?, at, bytes)
}

fn covering(text: &str, at: u64, bytes: u64) -> Option<Vec<MapLine>> {
    let end = at.checked_add(bytes)?;
    let mut next = at;
    let mut found = Vec::new();
    for line in text.lines().filter_map(MapLine::parse) {
        if line.end <= at || line.start >= end {
            continue;
        }
        if line.start > next {
            return None;
        }
        next = line.end;
        found.push(line);
    }
    (next >= end).then_some(found)
}

/// Returns whether the process may read, or also write, the whole range.
pub(crate) fn allows(at: u64, bytes: u64, write: bool) -> bool {
    let allows = |line: &MapLine| line.readable && (line.writable || !write);
    lines(at, bytes).is_some_and(|lines| lines.iter().all(allows))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
1000-3000 r--s 00000000 00:01 77 /memfd:a (deleted)
3000-4000 rw-p 00000000 00:00 0 [heap]
6000-7000 rw-p 00000000 08:01 99 /file";

    #[test]
    fn a_range_over_two_lines_is_covered() {
        let first = MapLine {
            start: 0x1000,
            end: 0x3000,
            readable: true,
            writable: false,
            shared: true,
            has_file: true,
        };
        let second = MapLine {
            start: 0x3000,
            end: 0x4000,
            readable: true,
            writable: true,
            shared: false,
            has_file: false,
        };
        assert_eq!(covering(TEXT, 0x2000, 0x1800), Some(vec![first, second]));
    }

    #[test]
    fn a_range_with_a_hole_is_not_covered() {
        assert_eq!(covering(TEXT, 0x3000, 0x4000), None);
        assert_eq!(covering(TEXT, 0x4000, 0x10), None);
        assert_eq!(covering(TEXT, u64::MAX, 2), None);
    }
}
