//! The messages to the actors, and the data of a request that messages carry. No actor is named here: an
//! actor that sends a message needs only the receiver's messages.
//!
//! | module | contents |
//! |---|---|
//! | [`work`] | a request with its inputs and the address of its answer |
//! | [`request_update`] | the progress and the outputs of a request |
//! | [`function`], [`node`], [`gpu`], [`executor`], [`link`], [`process_pool`] | the messages to each actor |

pub(crate) mod executor;
pub(crate) mod function;
pub(crate) mod gpu;
pub(crate) mod link;
pub(crate) mod node;
pub(crate) mod process_pool;
pub(crate) mod request_update;
pub(crate) mod work;
