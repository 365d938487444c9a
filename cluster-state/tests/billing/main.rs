//! Billing (T26) from a request's answer to the invoice. Requests and batches are retried, lost,
//! repeated and reordered, and processes crash. A bill only grows, nothing is charged twice, and
//! the charge equals the time of the answered attempts and the idle time.

#![allow(clippy::unwrap_used, reason = "a test")]

mod group;
mod reports;
mod requests;
