//! Files of a data directory, which controllers and workers treat alike: model files named by their
//! digest, and the lock of the directory.
//!
//! | module | content |
//! |---|---|
//! | [`files`] | [`FileStore`]: model files, verified at each write and read |
//! | [`lock`] | [`DirectoryLock`]: one process at a time uses a directory |
//! | [`space`] | the part of a disk that stays free |

mod disk;
mod error;
pub mod files;
pub mod lock;
pub mod space;

pub use error::Error;
pub use files::{FileReader, FileStore, FileWriter, ListedFile, VerifiedFile};
pub use lock::{DirectoryLock, LockError};
