//! A reader of the Azure Functions trace of 2019, which counts invocations per function and minute. Columns:
//! `HashOwner`, `HashApp`, `HashFunction`, `Trigger`, then one for each minute of a day. This repository does
//! not include the trace; its owners publish the trace at <https://github.com/Azure/AzurePublicDataset>.

use std::io::Read;

use super::apportion;

/// The number of minutes in a file.
pub const MINUTES: usize = 1440;
/// The number of columns before the first minute.
const NAMES: usize = 4;

/// A fault of a trace.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The trace is not CSV, or its reader failed.
    #[error("cannot read the trace: {0}")]
    Csv(#[from] csv::Error),
    /// The header is that of another table.
    #[error(
        "the trace's header is not HashOwner,HashApp,HashFunction,Trigger,1,2,…: use a file invocations_per_function_md.anon.d??.csv"
    )]
    Header,
    /// A count is not a number.
    #[error("line {line}, minute {minute}: {text:?} is not a number of requests")]
    Count {
        /// The line, counted from 1.
        line: u64,
        /// The minute, counted from 1.
        minute: usize,
        /// The text in place of a number.
        text: String,
    },
    /// No function has a request in the minutes that were read.
    #[error("the trace has no requests in its first {0} minutes")]
    Empty(usize),
}

/// Reads the first `minutes` minutes of a trace, for the `functions` most popular functions. Returns the
/// counts by minute, then by function, most popular first. Functions without requests are left out.
///
/// # Errors
/// Returns [`Error`] if the input is not such a trace, or has no requests.
pub fn read(from: impl Read, minutes: usize, functions: usize) -> Result<Vec<Vec<u32>>, Error> {
    let mut reader = csv::ReaderBuilder::new().flexible(true).from_reader(from);
    let minutes = minutes.clamp(1, MINUTES);
    let header = reader.headers()?;
    let named = ["HashOwner", "HashApp", "HashFunction", "Trigger", "1"];
    if !named.iter().enumerate().all(|(place, name)| header.get(place) == Some(name)) {
        return Err(Error::Header);
    }
    let mut rows: Vec<(u64, Vec<u32>)> = Vec::new();
    for row in reader.records() {
        let row = row?;
        let line = row.position().map_or(0, csv::Position::line);
        let mut counts = Vec::with_capacity(minutes);
        for (minute, text) in row.iter().skip(NAMES).take(minutes).enumerate() {
            let wrong = |_| Error::Count { line, minute: minute + 1, text: text.to_owned() };
            counts.push(text.parse::<u32>().map_err(wrong)?);
        }
        counts.resize(minutes, 0);
        let total = counts.iter().map(|&count| u64::from(count)).sum::<u64>();
        if total > 0 {
            rows.push((total, counts));
        }
    }
    if rows.is_empty() {
        return Err(Error::Empty(minutes));
    }
    // The sort is stable, so functions of the same popularity stay in the file's order.
    rows.sort_by_key(|(total, _)| std::cmp::Reverse(*total));
    rows.truncate(functions);
    let by_minute = (0..minutes).map(|minute| rows.iter().map(|(_, counts)| counts[minute]).collect());
    Ok(by_minute.collect())
}

/// Returns the counts scaled to `per_minute` requests in each minute that has any, as for a smaller testbed
/// (L19).
#[must_use]
pub fn normalise(minutes: &[Vec<u32>], per_minute: u32) -> Vec<Vec<u32>> {
    let scaled = minutes.iter().map(|counts| {
        let shares: Vec<f64> = counts.iter().map(|&count| f64::from(count)).collect();
        if shares.iter().sum::<f64>() > 0.0 { apportion(per_minute, &shares) } else { counts.clone() }
    });
    scaled.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "HashOwner,HashApp,HashFunction,Trigger,1,2,3\n\
                         o,a,few,http,1,0,0\no,a,none,http,0,0,0\no,a,many,timer,5,15,2\n";

    #[test]
    fn popular_functions_come_first_and_functions_without_requests_are_left_out() {
        assert_eq!(read(TRACE.as_bytes(), 2, 9).unwrap(), [[5, 1], [15, 0]]);
        assert_eq!(read(TRACE.as_bytes(), 3, 1).unwrap(), [[5], [15], [2]]);
        assert_eq!(normalise(&read(TRACE.as_bytes(), 2, 9).unwrap(), 12), [[10, 2], [12, 0]]);
    }

    #[test]
    fn a_malformed_trace_is_refused_with_line_minute_and_text() {
        let refused = |text: &str| read(text.as_bytes(), 2, 9).unwrap_err().to_string();
        assert!(refused("a,b\n1,2\n").contains("HashOwner"));
        let wrong = refused("HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,1,x\n");
        assert_eq!(wrong, "line 2, minute 2: \"x\" is not a number of requests");
        assert!(refused("HashOwner,HashApp,HashFunction,Trigger,1\no,a,f,http,0\n").contains("no requests"));
    }
}
