//! The lines that the reports of functions and of workflows share.

use std::time::SystemTime;

use millrace_client::messages as wire;

use crate::output::{documents, text};

pub(super) fn field(name: &str, value: &str) -> String {
    format!("{:<13}{}", format!("{name}:"), if value.is_empty() { "-" } else { value })
}

/// Formats a timestamp and the age.
pub(super) fn moment(stamp: Option<prost_types::Timestamp>, now: SystemTime) -> String {
    let ago = text::age_of(stamp, now);
    stamp.and_then(text::moment).map(|moment| format!("{moment} ({ago} ago)")).unwrap_or_default()
}

pub(super) fn tensor_line(tensor: &wire::TensorSpec) -> String {
    format!("  {:<20} {:<6} {}", tensor.name, tensor.datatype, text::shape(&tensor.shape))
}

pub(super) fn condition_line(condition: &wire::Condition) -> String {
    let status = documents::status_word(condition);
    format!("  {:<10} {status:<8} {:<14} {}", condition.r#type, condition.reason, condition.message)
        .trim_end()
        .to_owned()
}
