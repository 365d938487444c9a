//! A whole controller over its real ports, with stub workers over theirs.

#![allow(clippy::unwrap_used, reason = "tests")]

mod admin;
mod durability;
mod fleet;
mod routing;
mod support;
