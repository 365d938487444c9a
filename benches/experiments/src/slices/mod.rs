//! GPU sharing after FaST-GShare: packing slices (`PACK`, `CHURN`), giving tokens (`TOKENS`) and capping time
//! (`CAP`). The experiments run the cores of `millrace_slices` themselves, without a simulated cluster.

mod cap;
mod churn;
mod pack;
mod setup;
mod tokens;

use crate::Experiment;

pub const EXPERIMENTS: [Experiment; 4] = [
    Experiment { id: "PACK", title: "FaST-GShare: eight pods in each order of arrival", run: pack::pack },
    Experiment {
        id: "TOKENS",
        title: "FaST-GShare: requests met by the order of tokens",
        run: tokens::tokens,
    },
    Experiment { id: "CHURN", title: "FaST-GShare: GPUs in use while pods come and go", run: churn::churn },
    Experiment { id: "CAP", title: "FaST-GShare: the tail under a window and under a bucket", run: cap::cap },
];
