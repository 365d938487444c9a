//! Intermediate data of workflows: the objects on this worker, and fetches from other workers. This
//! is tier 1 of the index ([`millrace_nodes::index`]), the truth about the node's data.
//!
//! An output that the caller wants stored stays here as an *object*, and only its name travels. A
//! request with the object as an input finds the object by its name. The object stays in the memory
//! of the GPU that made it, and the next run on that GPU reads it in place. Dispatch knows the
//! object's GPU (`scheduling::dispatch`). Without capacity on the GPU, the object is in host memory
//! that executors map. Each request of a batched run gets an object of its own rows. For a run on
//! another GPU the object is copied there, over NVLinks between the GPUs if there are any,
//! otherwise through the host. From another node the bytes come directly from the worker. The bytes
//! are checked on arrival, and a broken transfer continues at the byte that was reached.
//!
//! An object lives until its last consumer has read it (D28), or until its lifetime ends, because the
//! caller may be gone. If an output does not fit, its bytes are answered instead.
//!
//! | module | contents |
//! |---|---|
//! | [`store`] | the objects of this worker |
//! | [`contents`] | a tensor's bytes, in a message, in host memory or on a GPU |
//! | [`named`] | objects that functions' processes name themselves |
//! | [`gather`] | the collection of a request's inputs |
//! | [`peers`] | fetches from a given worker |
//! | [`remote_fetch`] | remote fetches of objects by their name alone |
//! | [`directory`] | the client of the object directory |
//! | [`reservation`] | reservations of object memory for functions' state |
//! | [`program_input`] | data in the form that programs read |
//! | [`serve`] | this worker's objects for other workers |

mod contents;
mod directory;
mod gather;
mod named;
mod peers;
mod program_input;
mod remote_fetch;
mod reservation;
mod serve;
mod store;

pub use contents::INLINE_BYTES_MAX;
pub(crate) use contents::{Contents, InputTensor, memory, size_of_memory};
pub(crate) use directory::DirectoryClient;
pub(crate) use gather::{GatherError, GatheredInputs, fetched, size_of};
pub(crate) use named::StoreError;
pub(crate) use program_input::{ProgramInput, seal, sealed};
pub(crate) use remote_fetch::FetchError;
pub(crate) use reservation::ObjectReservation;
pub(crate) use serve::ChunkStream;
pub use store::OBJECT_MEMORY;
pub(crate) use store::{FetchCounts, METHODS, ObjectStore, ObjectTally, method_name};
