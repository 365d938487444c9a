//! Counters, and the report at exit of these and of all that is left.
#![allow(unsafe_code, reason = "runs a function at exit")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use serde_json::{Value, json};

use crate::calls;
use crate::config::CONFIG;
use crate::memory::FILE_NAME;
use crate::state::{State, state};

/// Direction of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    ToDevice,
    ToHost,
    Within,
}

static CALLS: Mutex<BTreeMap<&str, u64>> = Mutex::new(BTreeMap::new());
static BROKEN_RULES: AtomicU64 = AtomicU64::new(0);
static TO_DEVICE: AtomicU64 = AtomicU64::new(0);
static TO_HOST: AtomicU64 = AtomicU64::new(0);
static WITHIN: AtomicU64 = AtomicU64::new(0);
static PAGEABLE: AtomicU64 = AtomicU64::new(0);

/// Counts a call, and returns its number among those of the same name.
pub(crate) fn count_call(name: &'static str) -> u64 {
    let mut calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = calls.entry(name).or_default();
    *count += 1;
    *count
}

pub(crate) fn count_broken_rule() {
    BROKEN_RULES.fetch_add(1, Ordering::Relaxed);
}

/// Counts the bytes of a copy. A graph's copies count when they are captured.
pub(crate) fn count_bytes(direction: Direction, bytes: u64, pageable: bool) {
    let counter = match direction {
        Direction::ToDevice => &TO_DEVICE,
        Direction::ToHost => &TO_HOST,
        Direction::Within => &WITHIN,
    };
    counter.fetch_add(bytes, Ordering::Relaxed);
    if pageable {
        PAGEABLE.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Returns the number of descriptors of device memory that are open and belong to no handle or mapping:
/// exported ones that the program did not close.
fn open_descriptors(state: &State) -> usize {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return 0 };
    let is_memory = |entry: &std::fs::DirEntry| {
        let link = std::fs::read_link(entry.path()).ok();
        link.is_some_and(|link| link.to_string_lossy().starts_with(&format!("/memfd:{FILE_NAME}")))
    };
    let open = entries.filter_map(Result::ok).filter(is_memory).count();
    let handles = state.memory.handles.values().map(|handle| &handle.physical);
    let mappings = state.memory.mappings.values().map(|mapping| &mapping.physical);
    let own: std::collections::BTreeSet<_> = handles.chain(mappings).map(std::sync::Arc::as_ptr).collect();
    open.saturating_sub(own.len())
}

/// Returns the number of objects that are left, by kind.
fn leftovers(state: &State) -> Vec<(&'static str, usize)> {
    let allocated = state.host.values().filter(|range| range.allocated).count();
    vec![
        ("handles", state.memory.handles.len()),
        ("mappings", state.memory.mappings.len() - state.memory.allocations.len()),
        ("reservations", state.memory.reservations.len()),
        ("allocations", state.memory.allocations.len()),
        ("descriptors", open_descriptors(state)),
        ("registrations", state.host.len() - allocated),
        ("host_allocations", allocated),
        ("streams", state.streams.len()),
        ("events", state.events.len()),
        ("modules", state.modules.len()),
        ("graphs", state.graphs.len() + state.executable_graphs.len()),
        ("green_contexts", state.green_contexts.len()),
        ("contexts", state.devices.iter().filter(|device| device.retained > 0).count()),
    ]
}

fn report(left: &[(&'static str, usize)]) -> Value {
    let calls = CALLS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    json!({
        "pid": std::process::id(),
        "calls": calls.iter().map(|(name, count)| ((*name).to_owned(), json!(count))).collect::<serde_json::Map<_, _>>(),
        "creates": calls.get("cuMemCreate").copied().unwrap_or_default(),
        "bytes": {
            "to_device": count(&TO_DEVICE),
            "to_host": count(&TO_HOST),
            "within": count(&WITHIN),
            "pageable": count(&PAGEABLE),
        },
        "broken_rules": count(&BROKEN_RULES),
        "left": left.iter().map(|&(kind, count)| (kind.to_owned(), json!(count))).collect::<serde_json::Map<_, _>>(),
    })
}

/// Runs when the process exits, unless a signal ends the process.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

extern "C" fn at_exit() {
    if !calls::has_started() {
        return;
    }
    let left = leftovers(&state());
    for (kind, count) in left.iter().filter(|(_, count)| *count > 0) {
        eprintln!("cuda double: left at exit: {count} {}", kind.replace('_', " "));
    }
    if let Some(path) = &CONFIG.report
        && let Err(error) = std::fs::write(path, report(&left).to_string())
    {
        eprintln!("cuda double: cannot write {}: {error}", path.display());
    }
}
