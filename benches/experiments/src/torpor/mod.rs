//! The Torpor paper's experiments: a node of four V100 (two under each PCIe switch, with NVLinks between
//! the GPUs), and six such nodes.
//!
//! | module | experiments |
//! |---|---|
//! | [`allocation`] | Fig 13: the time of allocating memory |
//! | [`early`] | H07, H12, H15: against functions that are bound to GPUs |
//! | [`compliance`] | H08 to H10: against Torpor without one of its parts |
//! | [`kinds`] | H11 and figures of the text: one GPU, heavy and light models |
//! | [`remoting`] | H13: messages of GPU remoting |
//! | [`pipeline`] | H14: the gain of each part of a swap |
//! | [`pilot`] | H16: bills and GPUs of the pilot |

mod allocation;
mod compliance;
mod early;
mod kinds;
mod pilot;
mod pipeline;
mod remoting;
mod setup;

use crate::experiment::Experiment;

pub use self::setup::{ComparedSystem, mixed, named};
pub(crate) use self::setup::{PERCENTILE, assumed, v100};

pub const EXPERIMENTS: [Experiment; 11] = [
    Experiment {
        id: "H07",
        title: "Torpor against early binding: functions that run and that comply",
        run: early::early,
    },
    Experiment {
        id: "H08-H09",
        title: "Torpor: functions that meet their objectives on one node",
        run: compliance::compliance,
    },
    Experiment {
        id: "H10",
        title: "Torpor: by required request count or by age",
        run: compliance::deadlines,
    },
    Experiment { id: "H11", title: "Torpor: low-frequency functions on one GPU", run: kinds::one_gpu },
    Experiment {
        id: "H12",
        title: "Torpor: load balancing of high-frequency functions",
        run: early::balance,
    },
    Experiment {
        id: "H13",
        title: "Torpor: GPU remoting against GVirtuS, by messages",
        run: remoting::calls,
    },
    Experiment { id: "H14", title: "Torpor: the gain of each part of a swap", run: pipeline::swap },
    Experiment { id: "H15", title: "Torpor: six nodes and 1000 functions", run: early::cluster },
    Experiment { id: "H16", title: "Torpor: the pilot's bills and GPUs", run: pilot::bills },
    Experiment { id: "T7.3", title: "Torpor: heavy and light models", run: kinds::heaviness },
    Experiment { id: "FIG13", title: "Torpor: the time of allocating memory", run: allocation::allocation },
];
