//! The row of a link, with the traffic of both directions. [`super::detail`] shows each direction.

use millrace_proto::activity::LinkActivity;

use super::sample::SampleInterval;
use super::table::{Cell, PaneRow};
use crate::output::text::size;

pub(super) fn name(link: &LinkActivity) -> String {
    format!("{}/{}", link.node, link.name)
}

/// Returns a link's row. With an earlier sample, the rates are since that sample.
pub(super) fn row(since: Option<(&LinkActivity, SampleInterval)>, now: &LinkActivity) -> PaneRow {
    // The rates towards GPUs and to the host.
    let rates = since.map(|(before, span)| {
        let to_gpu = span.rate(before.carried_bytes, now.carried_bytes);
        (to_gpu, span.rate(before.carried_to_host_bytes, now.carried_to_host_bytes))
    });
    let per_second = |rate: f64| Cell::number(rate, format!("{}/s", size(rate as u64)));
    let rate = rates.map(|(to_gpu, to_host)| to_gpu + to_host);
    // The directions do not share the link's rate: each can use all of it.
    let busier = rates.map(|(to_gpu, to_host)| to_gpu.max(to_host) / now.bytes_per_second as f64);
    let measured = now.measured_bytes_per_second.max(now.measured_to_host_bytes_per_second);
    let measured = (measured > 0).then_some(measured as f64);
    let carried = now.carried_bytes.saturating_add(now.carried_to_host_bytes);
    PaneRow {
        id: name(now),
        cells: vec![
            Cell::text(&now.node),
            Cell::text(&now.name),
            rate.map_or_else(Cell::unknown, per_second),
            busier.map_or_else(Cell::unknown, |of| Cell::number(of, format!("{:.0}%", of * 100.0))),
            measured.map_or_else(Cell::unknown, per_second),
            Cell::number(carried as f64, size(carried)),
            Cell::number(f64::from(now.outstanding), now.outstanding.to_string()),
        ],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that the link had carried in each direction in the earlier sample.
    const BEFORE: u64 = 1 << 20;
    /// The bytes that a direction has carried in the later sample.
    const MOVED: u64 = BEFORE + (1 << 28);

    #[test]
    fn traffic_to_the_host_counts_like_traffic_towards_gpus() {
        let link = |carried_bytes, carried_to_host_bytes| LinkActivity {
            name: "pcie 0".into(),
            bytes_per_second: 1 << 30,
            carried_bytes,
            carried_to_host_bytes,
            ..LinkActivity::default()
        };
        let check = |now: &LinkActivity, expected: [&str; 4]| {
            let row = row(Some((&link(BEFORE, BEFORE), SampleInterval(1.0))), now);
            let texts: Vec<_> = row.cells[2..6].iter().map(|cell| cell.text.as_str()).collect();
            assert_eq!(texts, expected);
        };
        check(&link(MOVED, BEFORE), ["256.0 MiB/s", "25%", "-", "258.0 MiB"]);
        check(&link(BEFORE, MOVED), ["256.0 MiB/s", "25%", "-", "258.0 MiB"]);
        check(&link(MOVED, MOVED), ["512.0 MiB/s", "25%", "-", "514.0 MiB"]);
        let measured = LinkActivity { measured_to_host_bytes_per_second: 1 << 29, ..link(MOVED, BEFORE) };
        check(&measured, ["256.0 MiB/s", "25%", "512.0 MiB/s", "258.0 MiB"]);
    }
}
