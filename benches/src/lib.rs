//! Millrace: benches.
