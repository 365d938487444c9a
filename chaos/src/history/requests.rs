//! The clients' record of each request. The oracle judges by the records whether requests were
//! answered, answered right and billed once.

use std::time::Duration;

/// The result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestResult {
    /// The answer equals the answer from before the faults.
    Right,
    /// The answer differs, or belongs to another request.
    Wrong(String),
    /// The request was refused by an error that allows no retry.
    Refused(String),
    /// The request was not answered when its client gave up.
    GivenUp(String),
}

/// A request, with all its tries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestRecord {
    /// The id, which is the same for each try.
    pub id: String,
    /// The name of the function.
    pub function: String,
    /// Time of the first try, since the start of the run.
    pub begun: Duration,
    /// Time of the end, since the start of the run.
    pub ended: Duration,
    /// The errors that allowed a retry.
    pub retried: Vec<String>,
    pub how: RequestResult,
}

impl RequestRecord {
    /// Returns a line of evidence.
    pub(crate) fn line(&self, why: &str) -> String {
        let Self { id, function, begun, ended, retried, .. } = self;
        let from = begun.as_secs_f64();
        let to = ended.as_secs_f64();
        let after = match retried.len() {
            0 => String::new(),
            tries => format!(", after {tries} tries, the last: {}", retried[tries - 1]),
        };
        format!("{from:>9.3} .. {to:>9.3}  {id} to {function}: {why}{after}")
    }
}

#[cfg(test)]
pub(crate) fn request(how: RequestResult, retried: &[&str]) -> RequestRecord {
    RequestRecord {
        id: "r".into(),
        function: "f".into(),
        begun: Duration::from_secs(1),
        ended: Duration::from_secs(2),
        retried: retried.iter().map(|&it| it.to_owned()).collect(),
        how,
    }
}
