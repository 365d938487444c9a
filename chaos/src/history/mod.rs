//! The clients' records of operations and requests, with the answers and the times. The oracle judges
//! the records.
//!
//! | module | records |
//! |---|---|
//! | [`admin`] | admin operations on functions |
//! | [`requests`] | requests to functions and workflows |
//! | [`sequences`] | requests of sequences |

mod admin;
pub(crate) mod requests;
mod sequences;

pub use self::admin::{AdminAnswer, AdminHistory, AdminOp, AdminOperation, AdminResult, FunctionReading};
pub use self::requests::{RequestRecord, RequestResult};
pub use self::sequences::{SequenceRequest, SequenceRequestResult};
