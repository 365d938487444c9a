//! The papers' experiments. Each runs on the simulator (`millrace-sim`), and reports the paper's figures
//! beside ours. One rule gives the band of each figure ([`figures`]), and a run must have the recorded status of
//! each ([`statuses`]).
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
//! | [`goals`] | goals of our own for the default policy |
//! | [`slices`] | slices of GPUs, without a simulated cluster |

pub mod batching;
mod effort;
mod experiment;
pub mod faastube;
pub mod figures;
pub mod goals;
pub mod hostlinks;
pub mod lalb;
pub mod overload;
pub mod report;
pub mod seeds;
pub mod slices;
pub mod statuses;
pub mod tenants;
pub mod torpor;
pub mod versus;

pub use effort::Effort;
pub use experiment::Experiment;

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
        .chain(goals::EXPERIMENTS)
        .collect()
}
