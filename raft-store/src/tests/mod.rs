//! Tests of the whole store.
//!
//! | module | what it shows |
//! |---|---|
//! | [`suite`] | openraft's own storage suite |
//! | [`restart`] | what was acknowledged is there after a clean restart; snapshot and log give the state |

mod restart;
mod suite;
mod tally;
