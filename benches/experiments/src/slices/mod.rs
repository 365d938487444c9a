//! GPU sharing after FaST-GShare: packing slices (`PACK`, `CHURN`), giving tokens (`TOKENS`) and capping time
//! (`CAP`) run the cores of `millrace_slices` themselves, without a simulated cluster. Keeping functions apart
//! (`FAST-FIG9`, `ATTACK`) and the rate that slices serve (`CAPACITY`) are simulated with whole workers.

mod cap;
mod capacity;
mod churn;
mod isolation;
mod pack;
mod setup;
mod tokens;

use crate::Experiment;

pub const EXPERIMENTS: [Experiment; 7] = [
    Experiment { id: "PACK", title: "FaST-GShare: eight pods in each order of arrival", run: pack::pack },
    Experiment {
        id: "TOKENS",
        title: "FaST-GShare: requests met by the order of tokens",
        run: tokens::tokens,
    },
    Experiment { id: "CHURN", title: "FaST-GShare: GPUs in use while pods come and go", run: churn::churn },
    Experiment {
        id: "FAST-FIG9",
        title: "FaST-GShare: slices with and without SMs of their own",
        run: isolation::figure9,
    },
    Experiment { id: "ATTACK", title: "The owner of a slice beside a flood", run: isolation::attack },
    Experiment {
        id: "CAPACITY",
        title: "The rate that slices serve within an objective, predicted and simulated",
        run: capacity::capacity,
    },
    Experiment { id: "CAP", title: "FaST-GShare: the tail under a window and under a bucket", run: cap::cap },
];
