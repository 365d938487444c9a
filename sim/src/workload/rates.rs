//! A reader of requests by function and minute, one function a line, and the rates of Torpor's artifact,
//! which are in `sim/data/torpor-function-rates.csv`.

use std::io::Read;

use super::azure::Error;

/// The rates of Torpor's 203 functions, 31 minutes each. The last minute is cut short; [`torpor`] leaves the
/// last minute out.
const TORPOR: &str = include_str!("../../data/torpor-function-rates.csv");

/// Reads a table without a header, one function a line. Lines may differ in length.
///
/// # Errors
/// Returns [`Error`] if the input is not CSV, or a count is not a number.
pub fn read(from: impl Read) -> Result<Vec<Vec<u32>>, Error> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(from);
    let mut functions = Vec::new();
    for (row, line) in reader.records().zip(1..) {
        let mut counts = Vec::new();
        for (text, minute) in row?.iter().zip(1..) {
            let wrong = |_| Error::Count { line, minute, text: text.to_owned() };
            counts.push(text.trim().parse::<u32>().map_err(wrong)?);
        }
        functions.push(counts);
    }
    Ok(functions)
}

/// Returns Torpor's rates by function, 30 minutes each.
///
/// # Panics
/// Never: the table is built into the program, and a test reads the table.
#[must_use]
pub fn torpor() -> Vec<Vec<u32>> {
    let mut functions = read(TORPOR.as_bytes()).expect("the built-in table is well formed");
    functions.iter_mut().for_each(|minutes| minutes.truncate(30));
    functions
}

/// Returns the first `minutes` minutes of `functions` functions, by minute, beginning at the function
/// `first`. If more functions are requested than the table has, the table repeats.
#[must_use]
pub fn by_minute(rates: &[Vec<u32>], functions: usize, minutes: usize, first: usize) -> Vec<Vec<u32>> {
    let rate = |function: usize, minute: usize| {
        rates[(first + function) % rates.len()].get(minute).copied().unwrap_or(0)
    };
    (0..minutes).map(|minute| (0..functions).map(|function| rate(function, minute)).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn torpor_table_has_203_functions_of_4_to_16_requests_a_minute() {
        let rates = torpor();
        assert_eq!((rates.len(), rates.iter().all(|minutes| minutes.len() == 30)), (203, true));
        let mean = |minutes: &Vec<u32>| f64::from(minutes.iter().sum::<u32>()) / 30.0;
        let means: Vec<f64> = rates.iter().map(mean).collect();
        let least = means.iter().copied().fold(f64::MAX, f64::min);
        let most = means.iter().copied().fold(0.0, f64::max);
        assert!(least > 4.0 && most < 16.0, "{least} to {most} requests a minute");
    }

    #[test]
    fn rates_repeat_for_functions_beyond_the_table() {
        let rates = [vec![1, 2], vec![3, 4]];
        assert_eq!(by_minute(&rates, 3, 2, 1), [[3, 1, 3], [4, 2, 4]]);
    }
}
