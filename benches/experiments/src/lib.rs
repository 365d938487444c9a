//! The papers' experiments. Each runs on the simulator (`millrace-sim`), and reports the paper's figures
//! beside ours. An experiment fails unless the order of the baselines is the paper's, and each figure is
//! inside its declared band or has a stated cause.
//!
//! | module | experiments |
//! |---|---|
//! | [`lalb`] | H01 to H06 and SM utilisation: one dispatch domain of 12 GPUs, and 3 nodes of 4 |
//! | [`torpor`] | H07 to H16 and figures of the text: a node of four V100, six nodes, one link, a day's bills |
//! | [`faastube`] | H18 to H26 and figures of the text: data between the functions of workflows |
//! | [`overload`] | `unified` against every other policy in overload |
//! | [`tenants`] | a tenant's latency beside a noisy tenant with caps |
//! | [`batching`] | throughput and latency of batched requests |
//! | [`hostlinks`] | copies of models over the PCIe links of neighbouring GPUs |
//! | [`slices`] | slices of GPUs, without a simulated cluster |

pub mod batching;
pub mod faastube;
pub mod figures;
pub mod hostlinks;
pub mod lalb;
pub mod overload;
pub mod report;
pub mod seeds;
pub mod slices;
pub mod tenants;
pub mod torpor;
pub mod versus;

use anyhow::Result;

use crate::report::ExperimentReport;

/// The extent of a run of experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// The number of seeds, from 1.
    pub seeds: u64,
    /// Whether only a part of each workload runs, as in CI. Figures are then not judged.
    pub short: bool,
}

impl Effort {
    /// Ten seeds of the whole workload.
    pub const FULL: Self = Self { seeds: 10, short: false };
    /// One seed of a part of the workload.
    pub const SHORT: Self = Self { seeds: 1, short: true };
}

/// An experiment.
pub struct Experiment {
    /// The name: the row of the paper's result (docs/experiments.md).
    pub id: &'static str,
    /// The title of the experiment's section.
    pub title: &'static str,
    /// Runs the experiment.
    pub run: fn(Effort) -> Result<ExperimentReport>,
}

/// Returns every experiment, in the order of the modules.
#[must_use]
pub fn all() -> Vec<Experiment> {
    lalb::EXPERIMENTS
        .into_iter()
        .chain(torpor::EXPERIMENTS)
        .chain(faastube::EXPERIMENTS)
        .chain(overload::EXPERIMENTS)
        .chain(tenants::EXPERIMENTS)
        .chain(batching::EXPERIMENTS)
        .chain(hostlinks::EXPERIMENTS)
        .chain(slices::EXPERIMENTS)
        .collect()
}
