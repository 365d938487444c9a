//! Millrace: client.
