//! What a function or workflow is to a workflow that runs it: what it takes and gives, and how deep
//! workflows lie in it.

use std::collections::BTreeMap;

use super::{CheckError, NESTING_MAX, Ports, Run, Signature, WorkflowSpec};

/// Why a workflow cannot run what it runs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FitError {
    /// One of its edges.
    #[error(transparent)]
    Check(#[from] Box<CheckError>),
    /// Workflows too deep in workflows.
    #[error(
        "{run} has workflows {nesting} deep in it: in another they would lie deeper than {NESTING_MAX}; run what is in it instead"
    )]
    TooDeep {
        /// What it runs that is deep.
        run: Run,
        /// How deep workflows lie in that.
        nesting: u32,
    },
    /// A function whose requests belong to sequences.
    #[error(
        "{run} has sequences, and a step belongs to none: run a function without state, or ask for this one by itself"
    )]
    KeepsState {
        /// What it runs that keeps state.
        run: Run,
    },
}

/// What a function or workflow is to a workflow that runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fit {
    /// What it takes and gives.
    pub signature: Signature,
    /// How deep workflows lie in it: 0 in a function.
    pub nesting: u32,
    /// Whether it is a function that keeps state from one request to the next.
    pub keeps_state: bool,
}

/// The same, wherever it is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FitRef<'a> {
    /// What it takes and gives.
    pub ports: Ports<'a>,
    /// How deep workflows lie in it: 0 in a function.
    pub nesting: u32,
    /// Whether it is a function that keeps state from one request to the next.
    pub keeps_state: bool,
}

impl Fit {
    /// What a function without state is.
    #[must_use]
    pub fn of_function(signature: Signature) -> Self {
        Self { signature, nesting: 0, keeps_state: false }
    }

    /// A look at it.
    #[must_use]
    pub fn by_ref(&self) -> FitRef<'_> {
        FitRef { ports: (&self.signature).into(), nesting: self.nesting, keeps_state: self.keeps_state }
    }
}

impl WorkflowSpec {
    /// Checks it against what it runs, and says what it is to a workflow that runs it. Call
    /// [`Self::validate`] first: this trusts the graph.
    ///
    /// # Errors
    /// The first [`FitError`] found.
    pub fn fit<'a>(&self, of: impl Fn(&Run) -> Option<FitRef<'a>>) -> Result<Fit, FitError> {
        let mut known: BTreeMap<&Run, Ports<'_>> = BTreeMap::new();
        let mut nesting = 0;
        for run in self.runs() {
            // What is not there is for the check to name, with its step.
            let Some(fit) = of(run) else { continue };
            if fit.keeps_state {
                return Err(FitError::KeepsState { run: run.clone() });
            }
            if matches!(run, Run::Workflow(_)) {
                if u64::from(fit.nesting) >= NESTING_MAX as u64 {
                    return Err(FitError::TooDeep { run: run.clone(), nesting: fit.nesting });
                }
                nesting = nesting.max(fit.nesting + 1);
            }
            known.insert(run, fit.ports);
        }
        let signature = self.check(|run| known.get(run).copied()).map_err(Box::new)?;
        Ok(Fit { signature, nesting, keeps_state: false })
    }
}
