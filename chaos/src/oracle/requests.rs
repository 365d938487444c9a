//! What clients record of each request: what [`answered`](super::answered), [`right`](super::right)
//! and [`billed`](super::billed) judge.

use std::time::Duration;

/// How a request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// Answered as before any fault.
    Right,
    /// Answered otherwise, or in another's name.
    Wrong(String),
    /// Refused by an error that does not say to try again.
    Refused(String),
    /// Still not answered when its client gave up.
    GivenUp(String),
}

/// One request, with its client's tries at it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Its id, the same at each try.
    pub id: String,
    /// The function's name.
    pub function: String,
    /// When it was first sent.
    pub begun: Duration,
    /// When it ended.
    pub ended: Duration,
    /// The errors that said to try again.
    pub retried: Vec<String>,
    /// How it ended.
    pub how: Ended,
}

impl Request {
    /// A line of evidence.
    pub(super) fn line(&self, why: &str) -> String {
        let Self { id, function, begun, ended, retried, .. } = self;
        let (from, to) = (begun.as_secs_f64(), ended.as_secs_f64());
        let after = match retried.len() {
            0 => String::new(),
            tries => format!(", after {tries} tries, the last: {}", retried[tries - 1]),
        };
        format!("{from:>9.3} .. {to:>9.3}  {id} to {function}: {why}{after}")
    }
}

#[cfg(test)]
pub(super) fn request(how: Ended, retried: &[&str]) -> Request {
    Request {
        id: "r".into(),
        function: "f".into(),
        begun: Duration::from_secs(1),
        ended: Duration::from_secs(2),
        retried: retried.iter().map(|&it| it.to_owned()).collect(),
        how,
    }
}
