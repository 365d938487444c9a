//! The state of a node that survives the restarts of its actors: the addresses of the actors, the installed
//! functions and models, the accounts and the policy. Lives on the actor thread.
//!
//! | module | contents |
//! |---|---|
//! | [`state`] | the addresses of the actors, and the surviving state |
//! | [`functions`] | the registration and the removal of functions |
//! | [`policy`] | the policy in force, and the resulting settings of functions |
//! | [`accounts`] | SLO counts, idle residence and caps |
//! | [`slices`] | the slices of the GPUs |
//! | [`slo_counts`] | whether Function actors report SLO counts |

mod accounts;
mod functions;
mod policy;
mod slices;
mod slo_counts;
mod state;

pub(crate) use slices::slices_on;
pub(crate) use slo_counts::{SloCountReports, slo_counts};
pub(crate) use state::NodeState;
