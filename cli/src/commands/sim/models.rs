//! The models of simulated functions.

use std::time::Duration;

use millrace_sim::models::{ModelFigures, SharedSpeed, lalb, torpor};
use millrace_types::Bytes;
use serde::Deserialize;

use crate::failure::CommandFailure;

/// The largest number of models in a file.
const MODELS_MAX: usize = 10_000;

/// A model as a file declares it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ModelEntry {
    name: String,
    /// The size of the weights that are copied to a GPU, such as 440MB.
    weights: String,
    /// The memory on the GPU [default: the size of the weights].
    memory: Option<String>,
    /// The computing time of a run.
    run: String,
    /// The computing time that remains when the last weights arrive [default: a quarter of `run`].
    tail: Option<String>,
    /// The start time of the model's own process, if it has one.
    start: Option<String>,
}

/// Returns the models of a paper or a file.
pub(super) fn read(name: &str) -> Result<Vec<ModelFigures>, CommandFailure> {
    match name {
        "torpor" => Ok(torpor()),
        "lalb" => Ok(lalb()),
        path => {
            let wrong = |problem: String| CommandFailure::usage(format!("--models {path}: {problem}"));
            let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
            parse(&text).map_err(wrong)
        }
    }
}

fn parse(text: &str) -> Result<Vec<ModelFigures>, String> {
    let entries: Vec<ModelEntry> = serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
    if entries.is_empty() || entries.len() > MODELS_MAX {
        return Err(format!("the file has {} models: write 1 to {MODELS_MAX}", entries.len()));
    }
    entries.into_iter().map(figures).collect()
}

fn figures(entry: ModelEntry) -> Result<ModelFigures, String> {
    let ModelEntry { name, weights, memory, run, tail, start } = entry;
    let span = |field: &str, text: &str| {
        let parsed = humantime::parse_duration(text);
        parsed
            .map_err(|error| format!("model {name}: {field} {text:?}: {error}; write 12ms or 1.5s as 1500ms"))
    };
    let size = |field: &str, text: &str| {
        let parsed = text.parse::<Bytes>();
        parsed.map_err(|error| format!("model {name}: {field}: {error}"))
    };
    let weights = size("weights", &weights)?;
    let memory = memory.map(|text| size("memory", &text)).transpose()?;
    let run = span("run", &run)?;
    let tail = tail.map(|text| span("tail", &text)).transpose()?.unwrap_or(run / 4);
    let start = start.map(|text| span("start", &text)).transpose()?.unwrap_or(Duration::ZERO);
    if weights == Bytes::ZERO || run.is_zero() {
        return Err(format!("model {name}: weights or run is zero: write values above zero"));
    }
    let memory = memory.unwrap_or(weights).max(weights);
    Ok(ModelFigures { name, weights, memory, run, tail, start, shared: SharedSpeed::PROPORTIONAL })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_needs_only_its_weights_and_its_run_time() {
        let text = "- {name: a, weights: 100MB, run: 12ms}\n\
                    - {name: b, weights: 1GB, memory: 2GB, run: 40ms, tail: 5ms, start: 2s}\n";
        let ms = Duration::from_millis;
        let a = ModelFigures {
            shared: SharedSpeed::PROPORTIONAL,
            name: "a".to_owned(),
            weights: Bytes(100_000_000),
            memory: Bytes(100_000_000),
            run: ms(12),
            tail: ms(3),
            start: Duration::ZERO,
        };
        let b = ModelFigures {
            shared: SharedSpeed::PROPORTIONAL,
            name: "b".to_owned(),
            weights: Bytes(1_000_000_000),
            memory: Bytes(2_000_000_000),
            run: ms(40),
            tail: ms(5),
            start: ms(2000),
        };
        assert_eq!(parse(text), Ok(vec![a, b]));
    }

    #[test]
    fn a_malformed_model_is_refused_by_name() {
        let refused = |text: &str| parse(text).unwrap_err();
        assert!(refused("[]").contains("0 models"));
        assert!(refused("- {name: a, weights: 0B, run: 1ms}").contains("model a"));
        assert!(refused("- {name: a, weights: 1MB, run: soon}").contains("model a: run \"soon\""));
        assert!(refused("- {name: a, weights: 1MB, run: 1ms, size: 3}").contains("size"));
    }
}
