//! The check of a promise, and the verdict.

use std::fmt;

use serde::Serialize;

/// The result of a check or of a whole run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckVerdict {
    /// The promise was kept.
    Pass,
    /// The promise was broken, or could not be decided.
    Fail,
    /// This machine does not allow the scenario.
    Skipped,
}

impl fmt::Display for CheckVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pass => "PASS",
            Self::Fail => "FAIL",
            Self::Skipped => "SKIPPED",
        })
    }
}

/// The check of a promise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct PromiseCheck {
    pub name: String,
    /// Whether the promise was kept.
    pub verdict: CheckVerdict,
    /// The measured numbers.
    pub detail: String,
    /// The evidence of a failure, such as the history that violates the promise.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub evidence: Vec<String>,
}

impl PromiseCheck {
    /// Returns the check of a kept promise.
    #[must_use]
    pub fn pass(name: impl Into<String>, detail: impl Into<String>) -> Self {
        Self { name: name.into(), verdict: CheckVerdict::Pass, detail: detail.into(), evidence: Vec::new() }
    }

    /// Returns the check of a broken promise.
    #[must_use]
    pub fn fail(name: impl Into<String>, detail: impl Into<String>, evidence: Vec<String>) -> Self {
        Self { name: name.into(), verdict: CheckVerdict::Fail, detail: detail.into(), evidence }
    }

    /// Returns the check of a promise that was kept unless there is evidence to the contrary.
    #[must_use]
    pub fn of(name: impl Into<String>, detail: impl Into<String>, evidence: Vec<String>) -> Self {
        if evidence.is_empty() { Self::pass(name, detail) } else { Self::fail(name, detail, evidence) }
    }
}
