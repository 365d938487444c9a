//! The text forms of quantities.

use std::time::{Duration, SystemTime};

use millrace_client::slices::SliceTerms;
use millrace_types::{Bytes, Permille};

/// Formats a size in binary units.
pub(crate) fn size(bytes: u64) -> String {
    Bytes(bytes).to_string()
}

/// Formats thousandths as a percentage: `12%`, `12.5%`.
pub(crate) fn percent(thousandths: u32) -> String {
    let share = u16::try_from(thousandths).ok().and_then(Permille::new);
    share.map_or_else(|| format!("{thousandths}‰"), |share| share.to_string())
}

/// Formats the SMs of a slice as a manifest has them: `12%`, or `12%..50%`.
pub(crate) fn sm_range(terms: &SliceTerms) -> String {
    percent_range(terms.sm_least_permille, terms.sm_most_permille)
}

/// Formats the least and the greatest share: `30%..80%`, or `30%` if both are equal.
pub(crate) fn percent_range(least: u32, most: u32) -> String {
    let least_text = percent(least);
    if least == most { least_text } else { format!("{least_text}..{}", percent(most)) }
}

/// Formats a latency with three significant digits: `412 µs`, `1.93 ms`, `12.0 s`.
pub(crate) fn latency(span: Duration) -> String {
    if span.is_zero() {
        return "0".to_owned();
    }
    let nanos = span.as_nanos() as f64;
    let (value, unit) = match span.as_nanos() {
        0..1_000 => (nanos, "ns"),
        1_000..1_000_000 => (nanos / 1e3, "µs"),
        1_000_000..1_000_000_000 => (nanos / 1e6, "ms"),
        _ => (nanos / 1e9, "s"),
    };
    let decimals = match value {
        _ if unit == "ns" || value >= 100.0 => 0,
        _ if value >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.decimals$} {unit}")
}

/// Formats an age with its largest unit, and with the next unit while that matters (`5d`, `3h12m`,
/// `40s`).
pub(crate) fn age(span: Duration) -> String {
    let seconds = span.as_secs();
    let minutes = seconds / 60;
    let hours = seconds / 3600;
    let days = seconds / 86_400;
    match seconds {
        0..120 => format!("{seconds}s"),
        120..600 if !seconds.is_multiple_of(60) => format!("{minutes}m{}s", seconds % 60),
        120..10_800 => format!("{minutes}m"),
        10_800..36_000 if !minutes.is_multiple_of(60) => format!("{hours}h{}m", minutes % 60),
        10_800..172_800 => format!("{hours}h"),
        _ => format!("{days}d"),
    }
}

/// Returns the age of a timestamp. Empty without a timestamp, or if the timestamp is in the future.
pub(crate) fn age_of(moment: Option<prost_types::Timestamp>, now: SystemTime) -> String {
    moment
        .and_then(|moment| SystemTime::try_from(moment).ok())
        .and_then(|moment| now.duration_since(moment).ok())
        .map(age)
        .unwrap_or_default()
}

/// Formats a timestamp as RFC 3339.
pub(crate) fn moment(moment: prost_types::Timestamp) -> Option<String> {
    let moment = SystemTime::try_from(moment).ok()?;
    // humantime panics for years beyond 9999.
    let written = moment.duration_since(SystemTime::UNIX_EPOCH).ok()?.as_secs() < 253_402_300_800;
    written.then(|| humantime::format_rfc3339_seconds(moment).to_string())
}

/// Returns a text of a message, or `None` if the text is empty.
pub(crate) fn non_empty(text: String) -> Option<String> {
    Some(text).filter(|text| !text.is_empty())
}

/// Formats a count with thousands separators: `25,557,032`.
pub(crate) fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats a shape as on the command line, with variable dimensions as `N`.
pub(crate) fn shape(dims: &[i64]) -> String {
    let dim = |&dim: &i64| if dim < 0 { "N".to_owned() } else { dim.to_string() };
    format!("[{}]", dims.iter().map(dim).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_have_three_significant_digits() {
        for (nanos, text) in [
            (0, "0"),
            (999, "999 ns"),
            (1_500, "1.50 µs"),
            (412_300, "412 µs"),
            (1_930_000, "1.93 ms"),
            (45_000_000, "45.0 ms"),
            (12_000_000_000, "12.0 s"),
        ] {
            assert_eq!(latency(Duration::from_nanos(nanos)), text);
        }
    }

    #[test]
    fn ages_have_the_form_of_kubectls() {
        for (seconds, text) in [
            (0, "0s"),
            (119, "119s"),
            (125, "2m5s"),
            (180, "3m"),
            (3_600, "60m"),
            (11_520, "3h12m"),
            (100_000, "27h"),
            (864_000, "10d"),
        ] {
            assert_eq!(age(Duration::from_secs(seconds)), text);
        }
    }

    #[test]
    fn timestamps_counts_and_shapes_are_formatted() {
        let stamp = prost_types::Timestamp { seconds: 1_700_000_000, nanos: 5 };
        assert_eq!(moment(stamp).unwrap(), "2023-11-14T22:13:20Z");
        assert_eq!(moment(prost_types::Timestamp { seconds: i64::MAX, nanos: 0 }), None);
        assert_eq!([count(7), count(1_000), count(25_557_032)], ["7", "1,000", "25,557,032"]);
        assert_eq!(shape(&[-1, 3, 224]), "[N, 3, 224]");
    }
}
