//! Millrace: policy.
