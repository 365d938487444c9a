//! The owner of a resource on this machine. The name of the resource carries the pid of its
//! harness. A resource may be removed if its harness no longer runs, for example because it was
//! killed.

/// The prefix of the name of every resource that a harness makes on a machine.
const PREFIX: &str = "millrace-chaos-";

/// Returns the common prefix of this harness's resources.
pub(super) fn own() -> String {
    format!("{PREFIX}{}", std::process::id())
}

/// Whether a name belongs to a harness that no longer runs.
pub(super) fn is_orphan(name: &str) -> bool {
    pid_in(name).is_some_and(|pid| pid != std::process::id() && !is_harness(pid))
}

/// Returns the pid in a harness's name, such as `millrace-chaos-123` or
/// `millrace-chaos-123-worker-1`.
fn pid_in(name: &str) -> Option<u32> {
    let rest = name.strip_prefix(PREFIX)?;
    rest.split_once('-').map_or(rest, |(pid, _)| pid).parse().ok()
}

/// Whether a process with this pid may be a harness. The kernel reuses pids, so the program's name
/// is compared too.
fn is_harness(pid: u32) -> bool {
    let own = std::fs::read("/proc/self/comm").unwrap_or_default();
    std::fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name == own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_contains_the_pid_of_its_harness() {
        assert_eq!(pid_in(&own()), Some(std::process::id()));
        assert_eq!(pid_in("millrace-chaos-12-worker-1"), Some(12));
        assert_eq!(pid_in("millrace-test-12"), None);
        assert_eq!(pid_in("millrace-chaos-mine"), None);
    }

    #[test]
    fn a_resource_without_a_running_harness_is_an_orphan() {
        // The maximum pid is 4194304.
        assert!(is_orphan("millrace-chaos-4194305-worker-1"));
        // Process 1 runs, and is not a harness.
        assert!(is_orphan("millrace-chaos-1"));
        assert!(!is_orphan(&own()) && !is_orphan("millrace-test-4194305"));
    }
}
