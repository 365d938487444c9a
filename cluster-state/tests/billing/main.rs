//! Billing (T26) from a request's answer to the invoice: whatever is retried, crashes, gets lost,
//! comes twice or in another order, a bill only grows, nothing is charged twice, and what is charged
//! is what the answered attempts and the idle clocks say.

#![allow(clippy::unwrap_used, reason = "a test")]

mod group;
mod reports;
mod requests;
