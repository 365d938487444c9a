//! What functions take and give of their models: of one that keeps state, all but that (T11).

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use millrace_types::sequences::StateTensor;
use millrace_types::workflow::{Ports, Signature as Shown};
use millrace_types::{Digest, RevisionKey};

use super::plan::Phase;
use super::{Signature, Signatures, desired};

/// The state that a function keeps from one request of a sequence to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct State {
    /// Its tensors.
    pub tensors: Arc<[StateTensor]>,
    /// A sequence that nobody asked for so long ends.
    pub idle: Duration,
    /// How many sequences there are at one time.
    pub max: u32,
}

/// The signatures of those functions that are ready. One whose model cannot keep its state is not: the
/// controller should have refused it.
pub(super) fn signatures(
    phases: &mut [(RevisionKey, Phase)],
    functions: &BTreeMap<RevisionKey, desired::Function>,
    known: &BTreeMap<Digest, Arc<Signature>>,
) -> Signatures {
    let mut ready = Signatures::new();
    for (key, phase) in phases.iter_mut().filter(|(_, phase)| *phase == Phase::Ready) {
        let Some(function) = functions.get(key) else { continue };
        let Some(model) = known.get(&function.digest) else { continue };
        match of_function(model, function) {
            Ok(signature) => drop(ready.insert(key.clone(), signature)),
            Err(why) => *phase = Phase::Failed(why),
        }
    }
    ready
}

fn of_function(model: &Arc<Signature>, function: &desired::Function) -> Result<Arc<Signature>, String> {
    let Some(sequences) = &function.sequences else { return Ok(Arc::clone(model)) };
    let ports = Ports { inputs: &model.inputs, outputs: &model.outputs };
    let tensors = sequences.states(ports).map_err(|error| error.to_string())?;
    let state = State { tensors: tensors.into(), idle: sequences.idle, max: sequences.max };
    let Shown { inputs, outputs } = sequences.shown(ports);
    let (digest, reader, state) = (model.digest, model.reader, Some(state));
    Ok(Arc::new(Signature { digest, inputs, outputs, reader, state }))
}
