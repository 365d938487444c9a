//! Every decision, as pure state machines: `fn on_event(&mut self, now, event) -> actions`. They
//! never read a clock, draw a random number or do I/O: callers pass `now`, carry the actions out
//! and report back with events.

pub mod ids;
