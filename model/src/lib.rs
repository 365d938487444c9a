//! Millrace: model.
