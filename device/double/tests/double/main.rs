//! Tests of the double. Each test runs in a process of its own, which loads the built library as a program
//! loads the driver.
#![allow(unsafe_code, reason = "calls the driver")]
#![allow(clippy::unwrap_used, reason = "a failed helper fails its test")]

#[macro_use]
mod child;
mod counters;
mod device;
mod faults;
mod kernels;
mod memory;
mod order;
mod rules;
