//! Tests of a whole controller over real ports, with stub workers on real ports too.

#![allow(clippy::unwrap_used, reason = "tests")]

mod admin;
mod checkpoints;
mod control_stream;
mod dry_run;
mod durability;
mod faults;
mod fleet;
mod founding;
mod group;
mod group_artifacts;
mod group_fleet;
mod leases;
mod logs;
mod object_store;
mod placement;
mod readiness;
mod routing;
mod sequences;
mod stub;
mod support;
mod tenants;
mod uploads;
mod workflows;
