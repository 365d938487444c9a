//! Snapshots: files with a checksum, and the directory that holds the newest.
//!
//! | module | job |
//! |---|---|
//! | [`format`] | the bytes of a snapshot |
//! | [`file`] | an open snapshot, to be sent or received |
//! | [`directory`] | the snapshot directory, which holds only the newest snapshot |

pub(crate) mod directory;
pub(crate) mod file;
pub(crate) mod format;

pub use self::file::SnapshotFile;
