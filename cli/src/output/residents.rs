//! Models on GPUs, and their states.

use std::collections::BTreeMap;

use millrace_client::messages as wire;

/// Returns the size of each model's weights in bytes, by digest. A GPU reports only the bytes that
/// have arrived.
pub(crate) fn weights(functions: &[wire::Function]) -> BTreeMap<&str, u64> {
    let revisions = functions.iter().flat_map(|function| &function.revisions);
    revisions
        .filter_map(|revision| {
            Some((revision.artifact.as_ref()?.digest.as_str(), revision.model.as_ref()?.weights_bytes))
        })
        .collect()
}

/// Returns every model on every GPU, with the node's name.
pub(crate) fn residents(
    nodes: &[wire::Node],
) -> impl Iterator<Item = (&str, &wire::Gpu, &wire::ResidentModel)> {
    nodes.iter().flat_map(|node| {
        node.gpus
            .iter()
            .flat_map(move |gpu| gpu.models.iter().map(move |model| (node.name.as_str(), gpu, model)))
    })
}

/// The state of a model on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResidentState {
    /// A function of the model is running.
    Running,
    /// Some of the model's weights have not arrived.
    Loading {
        /// The size of all weights in bytes.
        of: u64,
    },
    /// The model is resident, and none of its functions runs.
    Idle,
}

impl ResidentState {
    /// Returns the state of a model. `weights` has the models of known functions, so the model of a
    /// deleted function is never `Loading`.
    pub(crate) fn of(gpu: &wire::Gpu, model: &wire::ResidentModel, weights: &BTreeMap<&str, u64>) -> Self {
        let all = weights.get(model.digest.as_str()).copied();
        match all.filter(|&all| model.loaded_bytes < all) {
            _ if is_running(gpu, model) => Self::Running,
            Some(of) => Self::Loading { of },
            None => Self::Idle,
        }
    }
}

/// Returns whether a function of the model is running.
pub(crate) fn is_running(gpu: &wire::Gpu, model: &wire::ResidentModel) -> bool {
    gpu.running.iter().any(|running| model.functions.contains(&running.function))
}

/// Returns the functions that run on a GPU, each with its share of the SMs if that is a part.
pub(crate) fn running(gpu: &wire::Gpu) -> String {
    let one = |running: &wire::RunningRequest| match running.units {
        0 | UNITS => running.function.clone(),
        units => format!("{} ({}%)", running.function, units * 100 / UNITS),
    };
    gpu.running.iter().map(one).collect::<Vec<_>>().join(", ")
}

/// Number of SM units of a GPU.
pub(crate) const UNITS: u32 = millrace_types::slices::UNITS as u32;
