//! Memory of this process.

/// Returns the resident set of `/proc/self/statm` in bytes. A counting allocator would need unsafe
/// code, which the workspace forbids.
pub(crate) fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok());
    pages.expect("the second number is the resident set's") * rustix::param::page_size()
}
