//! Millrace: raft-store.
