//! The engine that a worker's executors run models with.

use std::fmt;
use std::str::FromStr;

use millrace_core::names::{self, UnknownName};
use millrace_proto::executor::Engine;

/// The engine of a worker's executors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ExecutorEngine {
    /// rten, which is part of this program.
    #[default]
    Rten,
    /// ONNX Runtime, with a library that the executor opens.
    Ort,
}

/// Every name with its engine.
pub const ENGINES: [(&str, ExecutorEngine); 2] =
    [("rten", ExecutorEngine::Rten), ("ort", ExecutorEngine::Ort)];

impl ExecutorEngine {
    /// Returns the engine's number in messages to executors.
    pub(super) fn wire(self) -> Engine {
        match self {
            Self::Rten => Engine::Rten,
            Self::Ort => Engine::Ort,
        }
    }
}

impl FromStr for ExecutorEngine {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        names::read("engine", &ENGINES, text)
    }
}

impl fmt::Display for ExecutorEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(names::of(&ENGINES, self))
    }
}
