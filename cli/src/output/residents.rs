//! Models on GPUs, and what they do there.

use std::collections::BTreeMap;

use millrace_client::messages as wire;

/// The size of each model's weights, by digest. A GPU tells only what of them has arrived.
pub(crate) fn weights(functions: &[wire::Function]) -> BTreeMap<&str, u64> {
    let revisions = functions.iter().flat_map(|function| &function.revisions);
    revisions
        .filter_map(|revision| {
            Some((revision.artifact.as_ref()?.digest.as_str(), revision.model.as_ref()?.weights_bytes))
        })
        .collect()
}

/// Every model on every GPU.
pub(crate) fn residents(
    nodes: &[wire::Node],
) -> impl Iterator<Item = (&str, &wire::Gpu, &wire::ResidentModel)> {
    nodes.iter().flat_map(|node| {
        node.gpus
            .iter()
            .flat_map(move |gpu| gpu.models.iter().map(move |model| (node.name.as_str(), gpu, model)))
    })
}

/// What a model on a GPU does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// It is its function's turn.
    Running,
    /// Not all of its weights are there, which are so many bytes.
    Loading {
        of: u64,
    },
    Idle,
}

impl State {
    /// The weights' sizes are those of known functions: one that has just been deleted is not.
    pub(crate) fn of(gpu: &wire::Gpu, model: &wire::ResidentModel, weights: &BTreeMap<&str, u64>) -> Self {
        let all = weights.get(model.digest.as_str()).copied();
        match all.filter(|&all| model.loaded_bytes < all) {
            _ if is_running(gpu, model) => Self::Running,
            Some(of) => Self::Loading { of },
            None => Self::Idle,
        }
    }
}

/// Whether it is the turn of one of a model's functions.
pub(crate) fn is_running(gpu: &wire::Gpu, model: &wire::ResidentModel) -> bool {
    !gpu.running.is_empty() && model.functions.contains(&gpu.running)
}
