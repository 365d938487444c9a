//! The functions, workflows and rules of manifests, for the verbs that apply and delete them.
//!
//! | module | content |
//! |---|---|
//! | [`resource`] | an applied resource of any kind |
//! | [`rules`] | tenants' caps and the policy, compared with the cluster's |
//! | [`items`] | the functions, workflows and rules of manifests |
//! | [`order`] | the order of workflows that run each other |
//! | [`mod@read`] | reads manifests from files, folders and standard input |

mod items;
mod order;
mod read;
pub(crate) mod resource;
pub(crate) mod rules;

pub(crate) use self::items::{FunctionItem, Items, ModelLocation, WorkflowItem};
pub(crate) use self::read::read;
