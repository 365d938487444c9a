//! Messages on the worker's socket.
//!
//! | module | holds |
//! |---|---|
//! | `conversions` | conversion and checks of messages |
//! | `events` | events to the worker, sent from any thread |

pub(crate) mod conversions;
pub(crate) mod events;

pub use conversions::INLINE_BYTES_MAX;
