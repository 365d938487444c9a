//! The papers' experiments, each run on the twin (`millrace-sim`) with the paper's figure beside
//! ours. An experiment fails unless the order of the baselines is the paper's and each figure is
//! inside its declared band or has a written cause.
//!
//! | module | experiments |
//! |---|---|
//! | [`lalb`] | H01 to H06 and SM utilisation: one dispatch domain of 12 GPUs, and 3 nodes of 4 |
//! | [`torpor`] | H07 to H16 and the text's: a node of four V100, six of them, one link, a day's bills |
//! | [`faastube`] | H18 to H26 and the text's: data between the functions of workflows |
//! | [`ours`] | what `unified` has to hold against every other policy |
//! | [`tenants`] | what tenants' caps hold |
//! | [`batching`] | what running requests together gains |
//! | [`hostlinks`] | what models gain that come over neighbours' links |

pub mod batching;
pub mod faastube;
pub mod figures;
pub mod hostlinks;
pub mod lalb;
pub mod ours;
pub mod report;
pub mod seeds;
pub mod tenants;
pub mod torpor;
pub mod versus;

use anyhow::Result;

use crate::report::Report;

/// How much is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// How many seeds.
    pub seeds: u64,
    /// A part of each workload only: what CI has time for. Figures are not judged then.
    pub short: bool,
}

impl Effort {
    /// Ten seeds of everything.
    pub const FULL: Self = Self { seeds: 10, short: false };
    /// One seed of a part.
    pub const SHORT: Self = Self { seeds: 1, short: true };
}

/// One experiment.
pub struct Experiment {
    /// What it is called: the paper's result by its row (MECHANISMS section 3).
    pub id: &'static str,
    /// What it shows.
    pub title: &'static str,
    /// Runs it.
    pub run: fn(Effort) -> Result<Report>,
}

/// Every experiment, in the order of their names.
#[must_use]
pub fn all() -> Vec<Experiment> {
    lalb::EXPERIMENTS
        .into_iter()
        .chain(torpor::EXPERIMENTS)
        .chain(faastube::EXPERIMENTS)
        .chain(ours::EXPERIMENTS)
        .chain(tenants::EXPERIMENTS)
        .chain(batching::EXPERIMENTS)
        .chain(hostlinks::EXPERIMENTS)
        .collect()
}
