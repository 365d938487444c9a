//! The library for a program that Millrace serves as a function (`runtime: process`). A worker
//! starts the program, and the program serves calls through this library (FaaSTube's single
//! interface, D02, D03, D04).
//!
//! ```text
//! Session::open ─► next ─► Call: inputs, each with an id
//!                           │ fetch(id)        ─► Buffer, mapped when it is first read
//!                           │ unique_id        ─► an id unique in the cluster, usually without a message
//!                           │ create(bytes)    ─► Room, written in place
//!                           │ store(id, room)  ─► an object of the worker, without a copy
//!                           │ output, response ─► the stored data of each output
//!                           └ finish or fail
//! ```
//!
//! The function sees memory and never a device (D11). Calls cross one Unix socket, and large data
//! lies in memfds (D10). A process serves one call at a time. A call's methods may be used from any
//! thread.
//!
//! `include/millrace.h` is the same interface for other languages ([`ffi`]). The unsafe
//! code of this crate is mapped memory ([`memory`]) and the C interface.
//!
//! ```no_run
//! use millrace_function::{Call, DataType, Error};
//!
//! fn double(call: &Call) -> Result<(), Error> {
//!     let input = call.input("x")?;
//!     let x = call.fetch(&input.id)?;
//!     let mut y = call.create(x.len())?;
//!     for (to, from) in y.iter_mut().zip(x.bytes()?) {
//!         *to = from.wrapping_mul(2);
//!     }
//!     let id = call.unique_id()?;
//!     call.store(&id, y)?;
//!     call.output("y", &id, DataType::Uint8, &input.shape)
//! }
//!
//! # fn main() -> Result<(), Error> {
//! millrace_function::serve(double)
//! # }
//! ```

#![warn(missing_docs)]

mod call;
mod error;
mod ffi;
mod ids;
mod link;
mod memory;
mod session;

pub use call::{Call, Input};
pub use error::Error;
pub use memory::{Buffer, Room};
pub use millrace_types::{DataId, DataType};
pub use session::{Session, serve};

/// The largest data that travels inside a message, in bytes. Larger data lies in memory that both
/// sides map.
pub const INLINE_BYTES_MAX: usize = 64 << 10;
