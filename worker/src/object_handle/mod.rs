//! Handles to objects on GPUs, and the messages that handles send.
//!
//! | module | contents |
//! |---|---|
//! | [`handle`] | handles to objects in the memory of the GPU that made them |
//! | [`request`] | the requests of handles to the object's Gpu actor |
//! | [`queue`] | the notices to the queue about objects that moved |
//! | [`reader`] | the requests that wait for an object's bytes |

mod handle;
mod queue;
mod reader;
mod request;

pub(crate) use handle::{HandleLocation, ObjectHandle, ObjectRange};
pub(crate) use queue::{InputMoved, QueueAddress};
pub(crate) use reader::{AnsweredRequest, TransferReader, TransferRequester};
pub(crate) use request::{HostBytes, ObjectLost, ObjectRequest, Reply};
