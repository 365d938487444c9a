//! The leadership of this controller, and the results of the leader's duties. [`crate::leader`] computes
//! them.
//!
//! | module | task |
//! |---|---|
//! | [`status`] | the results: lease states, shortages, the number of needed nodes |
//! | [`desired`] | the desired state of each worker |

mod desired;
mod status;

pub(crate) use desired::DesiredStates;
pub(crate) use status::{LeaderStatus, Leadership, LeaseStates, MissingSlices, Shortages};
