//! The `FaaSTube` paper's experiments, on the simulation of flows (`millrace_sim::passing`): a server of
//! eight V100, a server of eight A100, four servers of eight V100, and a server of four A10.
//!
//! | module | experiments |
//! |---|---|
//! | [`overall`] | the text's shares of data passing, and H18: against the three baselines |
//! | [`parts`] | H19 to H21 and the text's interference: the gain of each part |
//! | [`memory`] | H22, H23: the elastic store and its pool |
//! | [`scale`] | H24 to H26: four nodes, no NVLink, and the topology |

mod measurements;
mod memory;
mod overall;
mod parts;
mod scale;
mod setup;

use crate::experiment::Experiment;

pub const EXPERIMENTS: [Experiment; 11] = [
    Experiment { id: "F2.2", title: "FaaSTube: the share of data passing in INFless+", run: overall::shares },
    Experiment {
        id: "F3.2",
        title: "FaaSTube: the loads of driving beside video, on DeepPlan+",
        run: parts::interference,
    },
    Experiment { id: "H18", title: "FaaSTube against its baselines", run: overall::overall },
    Experiment { id: "H19", title: "FaaSTube: its parts, one by one", run: parts::ablation },
    Experiment { id: "H20", title: "FaaSTube: PCIe scheduling", run: parts::isolation },
    Experiment { id: "H21", title: "FaaSTube: NVLink scheduling", run: parts::nvlink },
    Experiment { id: "H22", title: "FaaSTube: the elastic store's parts", run: memory::store },
    Experiment { id: "H23", title: "FaaSTube: pools", run: memory::pools },
    Experiment { id: "H24", title: "FaaSTube: four nodes", run: scale::nodes },
    Experiment { id: "H25", title: "FaaSTube: four A10 without NVLink", run: scale::without_nvlink },
    Experiment { id: "H26", title: "FaaSTube: the topology of DGX-V100", run: scale::topology },
];
