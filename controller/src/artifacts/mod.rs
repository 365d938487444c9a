//! Model files: content-addressed, verified at each write and read, and collected after a grace period
//! without use.
//!
//! ```text
//! upload: receive ─► fsync ─► digest ─► inspect ─► rename ─► fsync dir
//!                 ─► the same on a majority of the voters ─► AddArtifact in Raft, once per holder
//! ```
//! The file is durable before the state records the holder, and is removed only after the state has
//! removed the holder. An upload that ends early leaves neither a file nor a record.
//!
//! If the controllers share an object store, the store holds the files: see [`pool`].
//!
//! | module | task |
//! |---|---|
//! | [`service`] | the model files of this controller, and look-ups |
//! | [`upload`] | uploads: inspect, spread and record; [`receive`] has the slots and the transfer |
//! | [`inspection`] | checks a model in a child process |
//! | [`spread`] | copies on the other controllers; [`transfer`] has the calls |
//! | [`fetch`] | sends files to workers and other controllers |
//! | [`loss`] | lost and damaged files |
//! | [`collect`] | garbage collection; [`orphans`] are files without a record |
//! | [`pool`] | the shared object store; [`bucket`] has its calls |
//! | [`FileStore`](millrace_storage::FileStore) | files on the local disk; [`blocking`] runs the operations, [`pieces`] reads in pieces |
//! | [`file`] | names a file, and says whether enough controllers hold it |
//! | [`locks`] | locks of files |

mod blocking;
mod bucket;
mod collect;
mod fetch;
mod file;
mod inspection;
mod locks;
mod loss;
mod orphans;
mod pieces;
mod pool;
mod receive;
mod service;
mod spread;
mod transfer;
mod upload;

pub(crate) use bucket::Bucket;
pub(crate) use file::ArtifactFile;
pub use inspection::serve_inspection;
pub(crate) use service::ArtifactService;
