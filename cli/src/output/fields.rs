//! The fields of functions and workflows as text, for listings and reports.

use std::collections::{BTreeMap, HashMap};

use millrace_client::messages as wire;
use millrace_types::Digest;

use crate::output::documents;

/// Returns the status of the Ready condition.
pub(crate) fn readiness(conditions: &[wire::Condition]) -> &'static str {
    let ready = conditions.iter().find(|condition| condition.r#type == "Ready");
    ready.map_or("Unknown", documents::status_word)
}

/// Formats labels as `KEY=VALUE`, sorted by key.
pub(crate) fn labels(labels: &HashMap<String, String>) -> Vec<String> {
    let sorted: BTreeMap<_, _> = labels.iter().collect();
    sorted.iter().map(|(key, value)| format!("{key}={value}")).collect()
}

/// Formats an objective: `p98 50ms`.
pub(crate) fn objective(slo: &wire::Slo) -> String {
    // A share such as 0.999 is p99.9. Rounding hides that 0.98 * 100 is not exactly 98.
    let percentile = (slo.percentile * 1e6).round() / 1e4;
    format!("p{percentile} {}", slo.deadline.and_then(documents::span).unwrap_or_default())
}

/// Returns the leading digits of a digest, or the text itself if it is not a digest.
pub(crate) fn short_digest(digest: &str) -> String {
    digest.parse::<Digest>().map_or_else(|_| digest.to_owned(), |digest| digest.short())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objectives_are_formatted_as_percentiles() {
        let deadline = prost_types::Duration { seconds: 0, nanos: 50_000_000 };
        for (percentile, expected) in [(0.98, "p98 50ms"), (0.999, "p99.9 50ms"), (0.5, "p50 50ms")] {
            let slo = wire::Slo { deadline: Some(deadline), percentile };
            assert_eq!(objective(&slo), expected);
        }
    }
}
