//! Transparent huge pages: off in every process of this binary, except in processes that run models or
//! programs of users.
//!
//! The allocator requests huge pages. For the buffer of a message, the kernel would then zero 2 MiB at the
//! first touch, and again after the allocator has returned the memory. Under many large messages, this
//! work delays all other requests (`docs/reliability.md`, hostile clients).

/// Disables or enables transparent huge pages for this process. Children inherit the setting.
pub(crate) fn enable(enabled: bool) {
    // Not fatal: the setting changes only the speed and the resident memory. No log exists yet.
    let _unsupported = rustix::thread::disable_transparent_huge_pages(!enabled);
}
