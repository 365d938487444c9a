//! Whose something is that was made on this machine: a name carries the pid of the harness that made
//! it. Whose harness is gone, killed perhaps, may be removed.

use super::PREFIX;

/// The name of everything of this harness.
pub(super) fn own() -> String {
    format!("{PREFIX}{}", std::process::id())
}

/// Whether a name is of a harness that is gone.
pub(super) fn is_orphan(name: &str) -> bool {
    pid_in(name).is_some_and(|pid| pid != std::process::id() && !is_harness(pid))
}

/// The pid in a name of ours: `millrace-chaos-123` and `millrace-chaos-123-worker-1`.
fn pid_in(name: &str) -> Option<u32> {
    let rest = name.strip_prefix(PREFIX)?;
    rest.split_once('-').map_or(rest, |(pid, _)| pid).parse().ok()
}

/// Whether a process is there that may be a harness: the kernel gives pids out again.
fn is_harness(pid: u32) -> bool {
    let own = std::fs::read("/proc/self/comm").unwrap_or_default();
    std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_whose_it_is() {
        assert_eq!(pid_in(&own()), Some(std::process::id()));
        assert_eq!(pid_in("millrace-chaos-12-worker-1"), Some(12));
        assert_eq!(pid_in("millrace-test-12"), None);
        assert_eq!(pid_in("millrace-chaos-mine"), None);
    }

    #[test]
    fn what_is_of_nobody_who_runs_is_an_orphan() {
        // Pids end at 4194304.
        assert!(is_orphan("millrace-chaos-4194305-worker-1"));
        // It runs, and is no harness.
        assert!(is_orphan("millrace-chaos-1"));
        assert!(!is_orphan(&own()) && !is_orphan("millrace-test-4194305"));
    }
}
