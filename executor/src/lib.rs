//! Millrace: executor.
