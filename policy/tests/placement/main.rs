//! The placement planner against a cluster that does what it is told: in tables, and with random
//! events.

mod groups;
mod properties;
mod tables;
mod world;
