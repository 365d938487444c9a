//! The properties of a function or workflow that matter to a workflow that runs it: its signature,
//! its nesting depth, and whether it keeps state.

use std::collections::BTreeMap;

use super::{CheckError, NESTING_MAX, StepTarget, WorkflowSpec};
use crate::signature::{Signature, SignatureRef};

/// The reason why a workflow cannot run one of its functions or workflows.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompositionError {
    /// An edge does not fit.
    #[error(transparent)]
    Check(#[from] Box<CheckError>),
    /// The nesting would exceed [`NESTING_MAX`].
    #[error(
        "{run} nests workflows {nesting} deep: inside another workflow the depth would exceed {NESTING_MAX}; run its functions directly instead"
    )]
    TooDeep {
        /// The workflow that is too deep.
        run: StepTarget,
        /// The nesting depth of that workflow.
        nesting: u32,
    },
    /// A step runs a function with sequences.
    #[error(
        "{run} has sequences, and a step belongs to no sequence: run a function without state, or call this function directly"
    )]
    KeepsState {
        /// The function that keeps state.
        run: StepTarget,
    },
}

/// The properties of a function or workflow that matter to a workflow that runs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunnableSignature {
    /// The inputs and outputs.
    pub signature: Signature,
    /// The depth of the nested workflows; 0 for a function.
    pub nesting: u32,
    /// Whether this is a function that keeps state between requests.
    pub keeps_state: bool,
}

/// A borrowed [`RunnableSignature`], wherever the signature is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunnableSignatureRef<'a> {
    /// The inputs and outputs.
    pub ports: SignatureRef<'a>,
    /// The depth of the nested workflows; 0 for a function.
    pub nesting: u32,
    /// Whether this is a function that keeps state between requests.
    pub keeps_state: bool,
}

impl RunnableSignature {
    /// Creates the properties of a function without state.
    #[must_use]
    pub fn of_function(signature: Signature) -> Self {
        Self { signature, nesting: 0, keeps_state: false }
    }

    /// Borrows the properties.
    #[must_use]
    pub fn by_ref(&self) -> RunnableSignatureRef<'_> {
        RunnableSignatureRef {
            ports: (&self.signature).into(),
            nesting: self.nesting,
            keeps_state: self.keeps_state,
        }
    }
}

impl WorkflowSpec {
    /// Checks the workflow against the functions and workflows that it runs, and returns the
    /// properties that matter to a workflow around this one. Requires a prior [`Self::validate`],
    /// because this function trusts the graph.
    ///
    /// # Errors
    /// The first [`CompositionError`] found.
    pub fn fit<'a>(
        &self,
        of: impl Fn(&StepTarget) -> Option<RunnableSignatureRef<'a>>,
    ) -> Result<RunnableSignature, CompositionError> {
        let mut known: BTreeMap<&StepTarget, SignatureRef<'_>> = BTreeMap::new();
        let mut nesting = 0;
        for run in self.runs() {
            // Skipped here: `check` reports an unknown function or workflow together with its step.
            let Some(fit) = of(run) else { continue };
            if fit.keeps_state {
                return Err(CompositionError::KeepsState { run: run.clone() });
            }
            if matches!(run, StepTarget::Workflow(_)) {
                if u64::from(fit.nesting) >= NESTING_MAX as u64 {
                    return Err(CompositionError::TooDeep { run: run.clone(), nesting: fit.nesting });
                }
                nesting = nesting.max(fit.nesting + 1);
            }
            known.insert(run, fit.ports);
        }
        let signature = self.check(|run| known.get(run).copied()).map_err(Box::new)?;
        Ok(RunnableSignature { signature, nesting, keeps_state: false })
    }
}
