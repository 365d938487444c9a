//! Snapshots: files with a checksum, and the folder that holds the newest.
//!
//! | module | job |
//! |---|---|
//! | [`format`] | a snapshot's bytes |
//! | [`file`] | an open snapshot, to be sent or received |
//! | [`shelf`] | the folder: the newest one, durably, and no others |

pub(crate) mod file;
pub(crate) mod format;
pub(crate) mod shelf;

pub use self::file::SnapshotFile;
