//! Millrace: controller.
