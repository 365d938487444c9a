//! The signatures of functions. The signature of a function that keeps state leaves out the model's state
//! tensors (T11).

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_types::workflow::{Signature as Shown, SignatureRef};
use millrace_types::{Digest, RevisionKey};

use super::plan::ServingPhase;
use crate::desired_state::PlacedFunction;
use crate::signature::{FunctionSignature, FunctionState, Signatures};

/// Returns the signatures of the functions that are ready. A function with a model that cannot keep the
/// declared state becomes failed; the controller should have refused such a function.
pub(super) fn signatures(
    phases: &mut [(RevisionKey, ServingPhase)],
    functions: &BTreeMap<RevisionKey, PlacedFunction>,
    known: &BTreeMap<Digest, Arc<FunctionSignature>>,
) -> Signatures {
    let mut ready = Signatures::new();
    for (key, phase) in phases.iter_mut().filter(|(_, phase)| *phase == ServingPhase::Ready) {
        let Some(function) = functions.get(key) else { continue };
        let Some(model) = known.get(&function.digest) else { continue };
        match of_function(model, function) {
            Ok(signature) => drop(ready.insert(key.clone(), signature)),
            Err(why) => *phase = ServingPhase::Failed(why),
        }
    }
    ready
}

fn of_function(
    model: &Arc<FunctionSignature>,
    function: &PlacedFunction,
) -> Result<Arc<FunctionSignature>, String> {
    let Some(sequences) = &function.sequences else { return Ok(Arc::clone(model)) };
    let ports = SignatureRef { inputs: &model.inputs, outputs: &model.outputs };
    let tensors = sequences.states(ports).map_err(|error| error.to_string())?;
    let state = FunctionState { tensors: tensors.into(), idle: sequences.idle, max: sequences.max };
    let Shown { inputs, outputs } = sequences.shown(ports);
    Ok(Arc::new(FunctionSignature {
        digest: model.digest,
        inputs,
        outputs,
        reader: model.reader,
        state: Some(state),
    }))
}
