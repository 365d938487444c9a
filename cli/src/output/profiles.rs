//! Profiles of functions for people and programs.

use std::time::Duration;

use millrace_client::messages as wire;
use millrace_client::slices::ProfilePoint as PointWire;
use millrace_proto::convert::profile_point;
use millrace_types::profile::ProfilePoint;
use serde::Serialize;

use crate::output::residents::UNITS;
use crate::output::table::{TextTable, col, wide};
use crate::output::text::{latency, percent};

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ProfileDocument {
    tenant: String,
    function: String,
    digest: String,
    gpu_type: String,
    operation: String,
    running: bool,
    points: Vec<PointDocument>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct PointDocument {
    sm_units: u32,
    sm: String,
    quota: String,
    runs: u32,
    p50_ns: u64,
    p99_ns: u64,
    requests_per_second: f64,
    utilisation: f64,
    occupancy: f64,
    requests_per_second_and_gpu: f64,
}

impl From<wire::Profile> for ProfileDocument {
    fn from(profile: wire::Profile) -> Self {
        let points = sorted(&profile.points);
        Self {
            tenant: profile.tenant,
            function: profile.function,
            digest: profile.digest,
            gpu_type: profile.gpu_type,
            operation: profile.operation,
            running: profile.running,
            points: points.iter().map(PointDocument::of).collect(),
        }
    }
}

impl PointDocument {
    fn of(point: &ProfilePoint) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            sm_units: point.setting.units().into(),
            sm: sm(point),
            quota: percent(point.setting.quota().get().into()),
            runs: point.runs,
            p50_ns: nanos(point.p50),
            p99_ns: nanos(point.p99),
            requests_per_second: point.throughput(),
            utilisation: point.utilisation(),
            occupancy: point.occupancy(),
            requests_per_second_and_gpu: point.throughput_per_share(),
        }
    }
}

/// Returns the points, the narrowest width and the smallest quota first.
fn sorted(points: &[PointWire]) -> Vec<ProfilePoint> {
    // A newer server may measure other parts of a GPU.
    let mut points: Vec<_> = points.iter().filter_map(|point| profile_point(*point).ok()).collect();
    points.sort_by_key(|point| point.setting);
    points
}

/// Formats the share of the SMs: `12.5%`.
fn sm(point: &ProfilePoint) -> String {
    // A unit is 62.5 thousandths.
    percent(u32::from(point.setting.units()) * 1000 / UNITS)
}

pub(crate) fn table(profiles: &[wire::Profile]) -> TextTable {
    let mut table = TextTable::new([
        col("TENANT"),
        col("FUNCTION"),
        col("GPU-TYPE"),
        col("SM"),
        col("TIME"),
        col("P50"),
        col("P99"),
        col("REQ/S"),
        col("REQ/S/GPU"),
        wide("SM-USE"),
        wide("RUNS"),
        wide("OPERATION"),
    ]);
    for profile in profiles {
        for point in sorted(&profile.points) {
            table.row([
                profile.tenant.clone(),
                profile.function.clone(),
                profile.gpu_type.clone(),
                sm(&point),
                percent(point.setting.quota().get().into()),
                latency(point.p50),
                latency(point.p99),
                format!("{:.1}", point.throughput()),
                format!("{:.1}", point.throughput_per_share()),
                format!("{:.0}%", point.utilisation() * 100.0),
                point.runs.to_string(),
                profile.operation.clone(),
            ]);
        }
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ListFormat;

    fn point(sm_units: u32, quota_permille: u32) -> PointWire {
        PointWire {
            sm_units,
            quota_permille,
            runs: 200,
            p50_ns: 10_000_000,
            p99_ns: 12_000_000,
            elapsed_ns: 2_000_000_000,
            computed_ns: 1_000_000_000,
        }
    }

    #[test]
    fn points_are_shown_from_the_narrowest_to_the_widest() {
        let profile = wire::Profile {
            tenant: "shop".into(),
            function: "classify".into(),
            gpu_type: "V100".into(),
            points: vec![point(16, 1000), point(2, 1000), point(2, 200), point(3, 1000)],
            ..Default::default()
        };
        let text = table(std::slice::from_ref(&profile)).render(ListFormat::Table);
        let rows: Vec<_> =
            text.lines().skip(1).map(|row| row.split_whitespace().collect::<Vec<_>>()).collect();
        assert_eq!(rows.len(), 3, "{text}");
        assert_eq!(rows[0][3..], ["12.5%", "20%", "10.0", "ms", "12.0", "ms", "100.0", "4000.0"], "{text}");
        assert_eq!((rows[1][4], rows[2][3]), ("100%", "100%"));
        let document = serde_json::to_value(ProfileDocument::from(profile)).unwrap();
        assert_eq!(document["points"][0]["smUnits"], 2);
        assert_eq!(document["points"][0]["utilisation"], 0.5);
    }
}
