//! The placement planner against a cluster that carries out its plans: in tables, and with random
//! events.

mod groups;
mod properties;
mod tables;
mod world;
