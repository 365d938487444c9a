//! Millrace: worker.
