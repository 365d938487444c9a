//! Requests from one controller to another, and to the attached workers, beside the calls of the Raft
//! group.
//!
//! | module | task |
//! |---|---|
//! | [`service`] | the service for the other controllers |
//! | [`fanout`] | asks every other controller and every attached worker |
//! | [`activity`] | activity of functions and links, summed over all processes |
//! | [`traces`] | traces, assembled from the spans of all processes |
//! | [`logs`] | log lines of another controller |
//! | [`traffic`] | traffic counts of another controller |
//!
//! Model files are sent and fetched by [`crate::artifacts`].

mod activity;
mod fanout;
pub(crate) mod logs;
mod service;
mod traces;
pub(crate) mod traffic;

pub(crate) use activity::{Activities, GatewayActivity};
pub(crate) use fanout::{PeerAnswer, PeerFanout};
pub(crate) use service::{PeerService, ReadableParts};
pub(crate) use traces::Traces;
