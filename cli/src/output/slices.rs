//! Slices of GPUs for people and programs.

use std::time::Duration;

use millrace_client::messages as wire;
use millrace_client::slices::SliceTerms;
use serde::Serialize;

use crate::output::table::{TextTable, col, wide};
use crate::output::text::{latency, non_empty, percent, percent_range, sm_range};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SliceDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    tenant: String,
    function: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<u32>,
    sm: String,
    quota_request: String,
    quota_limit: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<UsageDocument>,
    #[serde(skip_serializing_if = "Option::is_none")]
    waits: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct UsageDocument {
    used: String,
    busy_ns: u64,
    sm_ns: u64,
    starved: u64,
}

impl From<wire::Slice> for SliceDocument {
    fn from(slice: wire::Slice) -> Self {
        let terms = slice.terms.unwrap_or_default();
        let has_gpu = slice.waits.is_empty();
        Self {
            id: has_gpu.then_some(slice.id),
            tenant: slice.tenant,
            function: slice.function,
            node: non_empty(slice.node),
            gpu: has_gpu.then_some(slice.gpu),
            sm: sm_range(&terms),
            quota_request: percent(terms.quota_request_permille),
            quota_limit: percent(terms.quota_limit_permille),
            usage: slice.r#use.map(|used| UsageDocument {
                used: percent(used.used_permille),
                busy_ns: used.busy_ns,
                sm_ns: used.sm_ns,
                starved: used.starved,
            }),
            waits: non_empty(slice.waits),
        }
    }
}

pub(crate) fn table(slices: &[wire::Slice]) -> TextTable {
    let mut table = TextTable::new([
        col("ID"),
        col("TENANT"),
        col("FUNCTION"),
        col("NODE/GPU"),
        col("SM"),
        col("TIME"),
        col("USED"),
        col("STARVED"),
        wide("BUSY"),
        wide("SM-TIME"),
        col("WAITS"),
    ]);
    for slice in slices {
        let terms = slice.terms.unwrap_or_default();
        let has_gpu = slice.waits.is_empty();
        let used = slice.r#use.filter(|_| has_gpu);
        let shown = |text: String| if has_gpu { text } else { String::new() };
        table.row([
            shown(slice.id.to_string()),
            slice.tenant.clone(),
            slice.function.clone(),
            shown(format!("{}/{}", slice.node, slice.gpu)),
            sm_range(&terms),
            time(&terms),
            used.map(|used| percent(used.used_permille)).unwrap_or_default(),
            used.map(|used| used.starved.to_string()).unwrap_or_default(),
            used.map(|used| latency(Duration::from_nanos(used.busy_ns))).unwrap_or_default(),
            used.map(|used| latency(Duration::from_nanos(used.sm_ns))).unwrap_or_default(),
            slice.waits.clone(),
        ]);
    }
    table
}

/// Formats the guaranteed and the greatest share of the time.
fn time(terms: &SliceTerms) -> String {
    percent_range(terms.quota_request_permille, terms.quota_limit_permille)
}

/// Describes the slices that a function asks for.
pub(crate) fn asked(slices: &wire::AskedSlices) -> String {
    let terms = slices.terms.unwrap_or_default();
    let min = slices.min.max(1);
    let count = match (min, slices.max) {
        (min, max) if max > min => format!("{min} to {max} slices, by the load,"),
        (1, _) => "one slice".to_owned(),
        (count, _) => format!("{count} slices"),
    };
    format!("{count} of {} of the SMs, {} of the time", sm_range(&terms), time(&terms))
}

#[cfg(test)]
mod tests {
    use millrace_client::slices::SliceUse;

    use super::*;
    use crate::output::ListFormat;

    #[test]
    fn slices_with_and_without_a_gpu_are_shown() {
        let terms = SliceTerms {
            sm_least_permille: 120,
            sm_most_permille: 500,
            quota_request_permille: 300,
            quota_limit_permille: 800,
        };
        let used = SliceUse { id: 3, used_permille: 415, starved: 2, ..SliceUse::default() };
        let placed = wire::Slice {
            id: 3,
            tenant: "shop".into(),
            function: "classify".into(),
            node: "n1".into(),
            gpu: 1,
            terms: Some(terms),
            r#use: Some(used),
            waits: String::new(),
        };
        let waits = wire::Slice {
            id: 0,
            node: String::new(),
            r#use: None,
            waits: "of the GPUs of its nodes, 2 lacks SM time".into(),
            ..placed.clone()
        };
        let text = table(&[placed, waits.clone()]).render(ListFormat::Table);
        let lines: Vec<_> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines[1], "3 shop classify n1/1 12%..50% 30%..80% 41.5% 2 -");
        assert_eq!(
            lines[2],
            "- shop classify - 12%..50% 30%..80% - - of the GPUs of its nodes, 2 lacks SM time"
        );
        let document = serde_json::to_value(SliceDocument::from(waits)).unwrap();
        assert!(document.get("id").is_none() && document.get("gpu").is_none(), "{document}");
        let scaled = asked(&wire::AskedSlices { terms: Some(terms), min: 2, max: 6 });
        assert!(scaled.starts_with("2 to 6 slices, by the load, of 12%"), "{scaled}");
        let asked_for = asked(&wire::AskedSlices { terms: Some(terms), min: 2, max: 0 });
        assert_eq!(asked_for, "2 slices of 12%..50% of the SMs, 30%..80% of the time");
    }
}
