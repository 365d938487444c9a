//! The report that is written at exit: the counts, and the values that were not released.
#![allow(unsafe_code, reason = "registers a function that runs at exit")]

use std::fmt::Write as _;

use crate::rule::print;
use crate::state::{State, lock};

/// Returns the report as JSON. Names are those of this crate, and need no escapes.
fn report(state: &State) -> String {
    let counts = &state.counts;
    let calls: Vec<_> = counts.calls.iter().map(|(name, count)| format!("\"{name}\":{count}")).collect();
    let left = [
        ("handles", state.memory.handles.len()),
        ("mappings", state.memory.mappings.len()),
        ("reservations", state.memory.reservations.len()),
        ("registrations", state.host.registered.len()),
        ("pinned", state.host.pinned.len()),
        ("streams", state.streams.all.len()),
        ("events", state.streams.events.len()),
        ("modules", state.modules.all.len()),
        ("graphs", state.graphs.captured.len() + state.graphs.executable.len()),
        ("green_contexts", state.greens.contexts.len()),
        ("contexts", state.context.retained as usize),
    ];
    let left: Vec<_> = left.iter().map(|(name, count)| format!("\"{name}\":{count}")).collect();
    let mut text = String::new();
    write!(text, "{{\"calls\":{{{}}},", calls.join(",")).expect("a string");
    write!(text, "\"to_gpu\":{},\"to_host\":{},", counts.to_gpu, counts.to_host).expect("a string");
    writeln!(text, "\"on_gpu\":{},\"left\":{{{}}}}}", counts.on_gpu, left.join(",")).expect("a string");
    text
}

/// Runs when the process ends, and when the library is closed.
#[used]
#[unsafe(link_section = ".fini_array")]
static AT_EXIT: extern "C" fn() = at_exit;

extern "C" fn at_exit() {
    let state = lock();
    // A program that only looks for the driver opens and closes the library.
    if !state.context.started {
        return;
    }
    if let Ok(path) = std::env::var("MILLRACE_DOUBLE_REPORT")
        && let Err(error) = std::fs::write(&path, report(&state))
    {
        print("MILLRACE_DOUBLE_REPORT", &format!("{path}: {error}"));
    }
}
