//! The verbs, each in a file or folder, and the options that several servers share.

pub(crate) mod apply;
pub(crate) mod autoscale;
pub(crate) mod billing;
pub(crate) mod cluster;
pub(crate) mod completions;
pub(crate) mod connections;
pub(crate) mod controller;
pub(crate) mod delete;
pub(crate) mod demo;
pub(crate) mod describe;
pub(crate) mod events;
pub(crate) mod get;
pub(crate) mod gpus;
pub(crate) mod health;
pub(crate) mod inspect;
pub(crate) mod invoke;
pub(crate) mod logs;
pub(crate) mod operation;
pub(crate) mod options;
pub(crate) mod policy;
pub(crate) mod profile;
pub(crate) mod ps;
pub(crate) mod scheduling;
pub(crate) mod sim;
pub(crate) mod slices;
pub(crate) mod synth;
pub(crate) mod tenant;
#[cfg(test)]
mod testing;
pub(crate) mod top;
pub(crate) mod trace;
pub(crate) mod up;
pub(crate) mod version;
pub(crate) mod worker;
