//! Millrace: cluster-state.
