//! The worker in virtual time: the real actors and cores, modelled executors.

mod actors;
mod bare;
mod failures;
mod panics;
mod requests;
mod scenario;
mod two_times;
mod world;
