//! The papers' figures of their models, and the assumptions beyond those figures.
//!
//! **LALB** (table I): memory at batch 32, loading time, inference time. Loading starts a process of the
//! model's own and uploads the weights (L05, L06); nothing overlaps with loading. The paper does not state
//! the bytes that cross the PCIe link. They make no difference at a loading time of seconds.
//!
//! **Torpor** (table 4): run times with GPU remoting, and with a swap over PCIe. The sizes of the weights are
//! those of the published models in single precision. A model's memory equals its weights: because a GPU has
//! one run at a time, all models share the memory of one run's activations, which is in the 7 GB reserved for
//! other uses. The tail of a run after the last weights is chosen so that a swap at [`TORPOR_PCIE`] lasts as
//! long as in table 4.
//!
//! **Shared GPUs:** only ResNet-50 and RNNT have figures of their speed on a part of the SMs, from FaST-GShare.
//! Every other model is as fast as its part is large, so that sharing gains nothing.

use std::time::Duration;

use millrace_types::{Bytes, BytesPerSec, ComputeCurve, Permille};

/// The sizes and times of a model in a simulation.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelFigures {
    /// The name of the network.
    pub name: String,
    /// The size of the weights, which a swap copies.
    pub weights: Bytes,
    /// The memory that the model occupies on a GPU.
    pub memory: Bytes,
    /// The computing time of a run.
    pub run: Duration,
    /// The least computing time that remains when the last weights arrive.
    pub tail: Duration,
    /// The start time of the model's own process, before which the model cannot run. Zero in a shared
    /// process.
    pub start: Duration,
    pub shared: SharedSpeed,
}

/// The speed of a model's runs on a shared GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SharedSpeed {
    /// The speed on a part of the SMs.
    pub curve: ComputeCurve,
    /// The part of the GPU's memory bandwidth that a run uses at full speed.
    pub demand: Permille,
}

impl SharedSpeed {
    /// A run that is as fast as its part of the SMs is large, so that sharing gains nothing.
    pub const PROPORTIONAL: Self = Self { curve: ComputeCurve::PROPORTIONAL, demand: Permille::ZERO };

    /// Returns the speed of ResNet-50, fitted to FaST-GShare: 24% of the SMs saturate the model (§5.2, figure 8),
    /// and eight pods on 12% each have 4.16 times the throughput of one pod on the whole GPU (figure 10).
    #[must_use]
    pub fn resnet() -> Self {
        let share = |thousandths| Permille::new(thousandths).unwrap_or(Permille::ALL);
        let curve = ComputeCurve::new(share(240), 0.38).unwrap_or(ComputeCurve::PROPORTIONAL);
        Self { curve, demand: share(240) }
    }

    /// Returns the speed of RNNT, fitted to FaST-GShare: about half of the SMs saturate the model (§5.2, figure 8),
    /// and eight pods on 12% each have 3.46 times the throughput of one pod on the whole GPU (figure 10).
    #[must_use]
    pub fn rnnt() -> Self {
        let share = |thousandths| Permille::new(thousandths).unwrap_or(Permille::ALL);
        let curve = ComputeCurve::new(share(500), 0.37).unwrap_or(ComputeCurve::PROPORTIONAL);
        Self { curve, demand: share(290) }
    }
}

/// The part of a V100's 32 GB that holds models in the Torpor paper (T12), as in the artifact.
pub const TORPOR_GPU_MEMORY: Bytes = Bytes::gib(25);
/// The memory of a GPU in the LALB paper, of which the sizes of models are decimal too (L19).
pub const LALB_GPU_MEMORY: Bytes = Bytes(8_000_000_000);

/// Returns the deadline of a function of this model in the Torpor paper (§7.1): 80 ms, and 200 ms for Bert-qa.
#[must_use]
pub fn torpor_deadline(model: &ModelFigures) -> Duration {
    Duration::from_millis(if model.name == "bert-qa" { 200 } else { 80 })
}

/// The rate of a PCIe link at which a swap of Bert-qa lasts as long as in table 4.
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

/// The assumed size of the weights of a LALB model, which the paper does not state.
const LALB_WEIGHTS: Bytes = Bytes::mib(64);

/// Returns the models of the LALB paper, in ascending order of their memory.
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
            shared: SharedSpeed::PROPORTIONAL,
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

/// Returns the models of the Torpor paper.
#[must_use]
pub fn torpor() -> Vec<ModelFigures> {
    let figures = |&(name, run, swapped, megabytes): &(&'static str, u64, u64, u64)| {
        let run = Duration::from_millis(run);
        let weights = Bytes(megabytes * 1_000_000);
        let tail = Duration::from_millis(swapped).saturating_sub(TORPOR_PCIE.time_for(weights)).min(run);
        let memory = weights;
        let shared = if name == "resnet-50" { SharedSpeed::resnet() } else { SharedSpeed::PROPORTIONAL };
        ModelFigures { name: name.to_owned(), weights, memory, run, tail, start: Duration::ZERO, shared }
    };
    TORPOR.iter().map(figures).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the duration of a swap that has its link alone. A run begins when the first bytes are there,
    /// and ends a tail after the load at the earliest.
    fn swap_alone(model: &ModelFigures, rate: BytesPerSec) -> Duration {
        let first = rate.time_for(model.weights.min(Bytes::mib(10)));
        let load = rate.time_for(model.weights);
        (first + model.run).max(load + model.tail).max(model.start + model.run)
    }

    #[test]
    fn torpor_swaps_over_pcie_last_as_long_as_in_table_4() {
        for ((name, _, swapped, _), model) in TORPOR.iter().zip(torpor()) {
            let takes = swap_alone(&model, TORPOR_PCIE);
            let told = Duration::from_millis(*swapped);
            let off = takes.abs_diff(told);
            assert!(off <= Duration::from_millis(2), "{name}: {takes:?} instead of {told:?}");
        }
    }

    #[test]
    fn a_lalb_miss_lasts_its_load_and_its_run() {
        let vgg19 = lalb().pop().unwrap();
        assert_eq!(swap_alone(&vgg19, BytesPerSec::gb(12)), Duration::from_millis(4070 + 1330));
    }
}
