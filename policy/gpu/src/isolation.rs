//! The rules by which models share an executor (L05, L06).
//!
//! | name | an executor process per | it ends |
//! |---|---|---|
//! | `gpu` | GPU | when the device or the worker does (runtime sharing) |
//! | `model` | model that the GPU was asked for | when [`PROCESSES_MAX`] others were asked for since |
//! | `resident` | model on the GPU | as its model is evicted: the process set is the cached set (L06) |

use std::fmt;
use std::str::FromStr;

use millrace_core::names::{self, UnknownName};

/// Executor processes of a GPU, at most, if each model has a process. The process with the oldest
/// last request is ended first, and the model leaves the GPU.
pub const PROCESSES_MAX: usize = 64;

/// The rule by which models share executor processes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum ExecutorIsolation {
    /// All models of a GPU share a process.
    #[default]
    Gpu,
    /// Each model has a process while its program is loaded.
    Model,
    /// Each model has a process while the model is on the GPU (L06).
    Resident,
}

/// Every name with its isolation.
pub const ISOLATIONS: [(&str, ExecutorIsolation); 3] = [
    ("gpu", ExecutorIsolation::Gpu),
    ("model", ExecutorIsolation::Model),
    ("resident", ExecutorIsolation::Resident),
];

impl ExecutorIsolation {
    /// Whether each model has a process of its own.
    #[must_use]
    pub fn per_model(self) -> bool {
        self != Self::Gpu
    }
}

impl FromStr for ExecutorIsolation {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("isolation", &ISOLATIONS, text)
    }
}

impl fmt::Display for ExecutorIsolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(names::of(&ISOLATIONS, self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_isolation_is_parsed_from_the_displayed_name() {
        for (name, isolation) in ISOLATIONS {
            assert_eq!((name.parse(), isolation.to_string()), (Ok(isolation), name.to_owned()));
        }
        assert_eq!(ExecutorIsolation::default(), ExecutorIsolation::Gpu);
        let refused = "process".parse::<ExecutorIsolation>().unwrap_err().to_string();
        assert_eq!(refused, "isolation \"process\" is not known: use one of gpu, model, resident");
    }
}
