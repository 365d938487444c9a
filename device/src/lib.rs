//! Millrace: device.
