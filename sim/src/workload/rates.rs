//! Requests by function and minute, one function a line: the rates of Torpor's artifact, whose
//! numbers are in `sim/data/torpor-function-rates.csv` (MECHANISMS 1.5).

use std::io::Read;

use super::azure::Error;

/// Torpor's functions: 203, 31 minutes each. The last minute is cut short; [`torpor`] leaves it out.
const TORPOR: &str = include_str!("../../data/torpor-function-rates.csv");

/// Reads a table without a header, one function a line. Lines may differ in length.
///
/// # Errors
/// [`Error`].
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

/// Torpor's rates, by function, 30 minutes each.
///
/// # Panics
/// Never: the table is a part of this program, and a test reads it.
#[must_use]
pub fn torpor() -> Vec<Vec<u32>> {
    let mut functions = read(TORPOR.as_bytes()).expect("the table that is built in");
    functions.iter_mut().for_each(|minutes| minutes.truncate(30));
    functions
}

/// The first minutes of so many functions, by minute: those there are, again from the first where
/// more are asked for, beginning at one of them.
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
    fn torpors_rates_are_those_of_its_functions() {
        let rates = torpor();
        assert_eq!((rates.len(), rates.iter().all(|minutes| minutes.len() == 30)), (203, true));
        let mean = |minutes: &Vec<u32>| f64::from(minutes.iter().sum::<u32>()) / 30.0;
        let means: Vec<f64> = rates.iter().map(mean).collect();
        let (least, most) =
            (means.iter().copied().fold(f64::MAX, f64::min), means.iter().copied().fold(0.0, f64::max));
        assert!(least > 4.0 && most < 16.0, "{least} to {most} requests a minute");
    }

    #[test]
    fn functions_beyond_the_table_begin_it_again() {
        let rates = [vec![1, 2], vec![3, 4]];
        assert_eq!(by_minute(&rates, 3, 2, 1), [[3, 1, 3], [4, 2, 4]]);
    }
}
