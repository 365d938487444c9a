//! What the papers say of their models, and what has to be assumed beyond that.
//!
//! **LALB** (table I): memory at batch 32, loading time, inference time. Loading is the start of a
//! process of the model's own with its upload (L05, L06); nothing overlaps it. How many bytes of it
//! cross the PCIe link is not said and makes no difference at a loading time of seconds.
//!
//! **Torpor** (table 4): run times with GPU remoting, and with a swap over PCIe. Sizes of the weights
//! are those of the published models (single precision), and what a model holds: with one run at a
//! time, activations need room once for all models, in the 7 GB that are not for them. How much of a run is left when the last weights arrive is what makes
//! the swap as long as table 4 says at [`TORPOR_PCIE`].

use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec};

/// What a simulation has to know of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelFigures {
    /// The network's name.
    pub name: String,
    /// What is copied.
    pub weights: Bytes,
    /// What it holds on a GPU.
    pub memory: Bytes,
    /// How long it computes.
    pub run: Duration,
    /// How much of that is left when the last weights arrive, at least.
    pub tail: Duration,
    /// The start of its own process, before which it cannot run. Zero in a shared one.
    pub start: Duration,
}

/// The rate of a PCIe link at which a swap of Bert-qa takes what table 4 says.
pub const TORPOR_PCIE: BytesPerSec = BytesPerSec::gb(10);

/// Table I of the LALB paper: memory (MB), loading and inference (ms).
const LALB: [(&str, u64, u64, u64); 22] = [
    ("squeezenet1.1", 1269, 2410, 1280),
    ("resnet18", 1313, 2520, 1250),
    ("resnet34", 1357, 2600, 1250),
    ("squeezenet1.0", 1435, 2320, 1330),
    ("alexnet", 1437, 2810, 1250),
    ("resnext50.32x4d", 1555, 2640, 1290),
    ("densenet121", 1601, 2490, 1280),
    ("densenet169", 1631, 2560, 1300),
    ("densenet201", 1665, 2670, 1400),
    ("resnet50", 1701, 2670, 1280),
    ("resnet101", 1757, 2950, 1300),
    ("resnet152", 1827, 3100, 1310),
    ("densenet161", 1919, 2750, 1320),
    ("inception.v3", 2157, 4420, 1630),
    ("resnext101.32x8d", 2191, 3510, 1330),
    ("vgg11", 2903, 3940, 1290),
    ("wide_resnet50_2", 3611, 3160, 1310),
    ("wide_resnet101_2", 3831, 3910, 1320),
    ("vgg13", 3887, 3980, 1300),
    ("vgg16", 3907, 4040, 1270),
    ("vgg16.bn", 3907, 4030, 1260),
    ("vgg19", 3947, 4070, 1330),
];

/// Bytes of a LALB model that cross the link.
const LALB_WEIGHTS: Bytes = Bytes::mib(64);

/// The models of the LALB paper, in the order of their sizes.
#[must_use]
pub fn lalb() -> Vec<ModelFigures> {
    let figures = |&(name, megabytes, load, run): &(&'static str, u64, u64, u64)| {
        let run = Duration::from_millis(run);
        ModelFigures {
            name: name.to_owned(),
            weights: LALB_WEIGHTS,
            memory: Bytes(megabytes * 1_000_000),
            run,
            tail: run,
            start: Duration::from_millis(load),
        }
    };
    LALB.iter().map(figures).collect()
}

/// Table 4 of the Torpor paper: run with GPU remoting and swap over PCIe (ms); weights (MB).
const TORPOR: [(&str, u64, u64, u64); 8] = [
    ("densenet-169", 25, 27, 57),
    ("densenet-201", 28, 30, 80),
    ("inception-v3", 14, 17, 109),
    ("efficientnet", 12, 13, 21),
    ("resnet-50", 9, 13, 102),
    ("resnet-101", 14, 22, 178),
    ("resnet-152", 17, 25, 241),
    ("bert-qa", 43, 144, 1340),
];

/// The models of the Torpor paper.
#[must_use]
pub fn torpor() -> Vec<ModelFigures> {
    let figures = |&(name, run, swapped, megabytes): &(&'static str, u64, u64, u64)| {
        let (run, weights) = (Duration::from_millis(run), Bytes(megabytes * 1_000_000));
        let tail = Duration::from_millis(swapped).saturating_sub(TORPOR_PCIE.time_for(weights)).min(run);
        let memory = weights;
        ModelFigures { name: name.to_owned(), weights, memory, run, tail, start: Duration::ZERO }
    };
    TORPOR.iter().map(figures).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One swap alone on its link: the first bytes, then the longer of the run and the load, and the rest
    /// of the run after the load.
    fn swap_alone(model: &ModelFigures, rate: BytesPerSec) -> Duration {
        let first = rate.time_for(model.weights.min(Bytes::mib(10)));
        let load = rate.time_for(model.weights);
        (first + model.run).max(load + model.tail).max(model.start + model.run)
    }

    #[test]
    fn swaps_over_pcie_take_what_table_4_says() {
        for ((name, _, swapped, _), model) in TORPOR.iter().zip(torpor()) {
            let (takes, told) = (swap_alone(&model, TORPOR_PCIE), Duration::from_millis(*swapped));
            let off = takes.abs_diff(told);
            assert!(off <= Duration::from_millis(2), "{name}: {takes:?} and not {told:?}");
        }
    }

    #[test]
    fn a_lalb_miss_is_its_load_and_its_run() {
        let vgg19 = lalb().pop().unwrap();
        assert_eq!(swap_alone(&vgg19, BytesPerSec::gb(12)), Duration::from_millis(4070 + 1330));
    }
}
