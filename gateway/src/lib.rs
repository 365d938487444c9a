//! Millrace: gateway.
