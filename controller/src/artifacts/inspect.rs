//! Makes sure that a model file or program can be served, before anything of it is stored.

use bytes::Bytes;
use millrace_cluster_state::ModelSummary;
use millrace_cluster_state::quota::check_model;
use millrace_model::program::{self, Program, ProgramError};
use millrace_model::{Compiled, ModelError};
use millrace_types::workflow::Signature;
use millrace_types::{Failure, Reason};

use super::store::Verified;

/// Compiles the file as a worker will, and says what it is.
pub(super) async fn inspect(verified: Verified) -> Result<(Verified, ModelSummary), Failure> {
    let work = move || {
        let contents = Bytes::from(verified.read()?);
        if program::is_program(&contents) {
            let unusable = |error: ProgramError| Failure::new(Reason::InvalidModel, error.to_string());
            let program = Program::unpack(&contents).map_err(unusable)?;
            return Ok((verified, summary_of_program(program)));
        }
        let compiled = millrace_model::compile(&contents).map_err(|error| refusal(&error))?;
        Ok((verified, summary(compiled)))
    };
    // Checked here too, so that nothing of a model whose names are too long is stored.
    let within_bounds = |(verified, summary): (Verified, ModelSummary)| match check_model(&summary) {
        Ok(()) => Ok((verified, summary)),
        Err(error) => Err(Failure::new(Reason::InvalidModel, error.to_string())),
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result.and_then(within_bounds),
        // A panic on a client's bytes: our bug, and not a reason to take the file.
        Err(error) => Err(Failure::new(Reason::Internal, format!("the model could not be checked: {error}"))),
    }
}

fn refusal(error: &ModelError) -> Failure {
    let reason = match error {
        ModelError::UnsupportedOperators { .. } => Reason::UnsupportedOperator,
        _ => Reason::InvalidModel,
    };
    Failure::new(reason, error.to_string())
}

/// A program has no weights and no launches.
fn summary_of_program(program: Program) -> ModelSummary {
    let Signature { inputs, outputs } = program.declared;
    ModelSummary { weights: millrace_types::Bytes::ZERO, parameters: 0, launches: 0, inputs, outputs }
}

fn summary(compiled: Compiled) -> ModelSummary {
    ModelSummary {
        weights: millrace_types::Bytes(compiled.summary.weights_bytes),
        parameters: compiled.summary.parameters,
        launches: u32::try_from(compiled.launches.len()).unwrap_or(u32::MAX),
        inputs: compiled.summary.inputs,
        outputs: compiled.summary.outputs,
    }
}
