//! Decisions about bytes on links, as pure state machines.
//!
//! | module | decides |
//! |---|---|
//! | [`fabric`] | which bytes cross which link when |
//! | [`rates`] | the rate at which each flow meets its deadline, and which batch is next |
//! | [`paths`] | which NVLinks bytes cross from one GPU to another |

mod batch;
pub mod fabric;
#[cfg(test)]
mod fixtures;
pub mod paths;
pub mod rates;
