//! The papers' workloads as far as their text gives them, and one more: all functions equal and
//! more offered than can be served.

use std::time::Duration;

use millrace_policy::dispatch::{GpuConfig, PeerLink};
use millrace_types::{Bytes, GpuIndex};

use crate::world::{Function, Model, Scenario, gb, mix};

const SECOND: u64 = 1_000_000_000;
const MS: u64 = 1_000_000;

/// Table I of the LALB paper: size in MB, loading and inference in hundredths of a second.
const TABLE_I: [(u64, u64, u64); 22] = [
    (1269, 241, 128),
    (1313, 252, 125),
    (1357, 260, 125),
    (1435, 232, 133),
    (1437, 281, 125),
    (1555, 264, 129),
    (1601, 249, 128),
    (1631, 256, 130),
    (1665, 267, 140),
    (1701, 267, 128),
    (1757, 295, 130),
    (1827, 310, 131),
    (1919, 275, 132),
    (2157, 442, 163),
    (2191, 351, 133),
    (2903, 394, 129),
    (3611, 316, 131),
    (3831, 391, 132),
    (3887, 398, 130),
    (3907, 404, 127),
    (3907, 403, 126),
    (3947, 407, 133),
];

/// Table 4 of Torpor: weights in MB (of the public models), then milliseconds of a run, with a load
/// from the host and with a copy from a peer.
const TABLE_4: [(u64, u64, u64, u64); 8] = [
    (57, 25, 27, 26),
    (80, 28, 30, 30),
    (108, 14, 17, 16),
    (50, 12, 13, 13),
    (102, 9, 13, 11),
    (178, 14, 22, 16),
    (241, 17, 25, 20),
    (1340, 43, 144, 45),
];

/// How requests spread over the functions of the LALB paper's trace (L19).
#[derive(Debug, Clone, Copy)]
pub(crate) enum Reading {
    /// Zipf over all 46,413 functions, of which the first are kept.
    Steep,
    /// Zipf over those kept, the first 15 with 56%, or as near as that gets.
    Flat,
}

struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }

    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }

    /// Exponential with mean 1.
    fn gap(&mut self) -> f64 {
        let unit = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        -(1.0 - unit).ln()
    }
}

/// 12 GPUs of 8 GB, six minutes of `per_minute` requests over `kept` functions (L19).
pub(crate) fn lalb(kept: usize, reading: Reading, per_minute: u64, seed: u64) -> Scenario {
    let mut draws = Draws(seed << 32);
    let exponent = match (reading, kept) {
        (Reading::Steep, _) => 1.22,
        (Reading::Flat, ..30) => 0.0,
        (Reading::Flat, _) => 0.32,
    };
    let weights: Vec<f64> = (1..=kept).map(|rank| (rank as f64).powf(-exponent)).collect();
    let sum: f64 = weights.iter().sum();
    let mut arrivals = Vec::new();
    for minute in 0..6 {
        let mut owed = 0.0;
        let mut minute_of: Vec<u32> = Vec::new();
        for (function, weight) in weights.iter().enumerate() {
            owed += weight / sum * per_minute as f64;
            while minute_of.len() < owed.round() as usize {
                minute_of.push(function as u32);
            }
        }
        let at = |draws: &mut Draws| minute * 60 * SECOND + draws.below(60 * SECOND);
        arrivals.extend(minute_of.into_iter().map(|function| (at(&mut draws), function)));
    }
    arrivals.sort_unstable();
    let model = |index: usize| {
        // Sizes spread over ranks: 7 and 22 share no factor.
        let (mb, load, run) = TABLE_I[(index * 7 + seed as usize) % TABLE_I.len()];
        let (load, run) = (load * 10 * MS, run * 10 * MS);
        let memory = Bytes(mb * 1_000_000);
        // PyTorch loads a model and then runs it.
        Model { memory, weights: memory, load, run, with_load: load + run, with_copy: None }
    };
    let function = |index| Function { model: index, objective: None };
    Scenario {
        gpus: vec![GpuConfig::new(Bytes(8_000_000_000), gb(1)); 12],
        switches: Vec::new(),
        peers: Vec::new(),
        models: (0..kept).map(model).collect(),
        functions: (0..kept as u32).map(function).collect(),
        light_first: false,
        arrivals,
    }
}

const P98: u32 = 980_000_000;

fn torpor_model(index: usize) -> Model {
    let (mb, run, with_load, with_copy) = TABLE_4[index % TABLE_4.len()];
    let memory = Bytes(mb * 1_000_000);
    let load = gb(12).time_for(memory).as_nanos() as u64;
    let with_load = (with_load * MS).max(load);
    Model { memory, weights: memory, load, run: run * MS, with_load, with_copy: Some(with_copy * MS) }
}

/// Four V100s of 32 GB, two under each PCIe switch, joined by NVLinks (T22).
fn server(models: Vec<Model>, functions: Vec<Function>, arrivals: Vec<(u64, u32)>) -> Scenario {
    let peer = |(a, b, rate)| PeerLink { a: GpuIndex(a), b: GpuIndex(b), rate: gb(rate) };
    let links = [(0, 3, 48), (1, 2, 48), (2, 3, 48), (0, 1, 24), (0, 2, 24), (1, 3, 24)];
    Scenario {
        gpus: vec![GpuConfig::new(Bytes(32_000_000_000), gb(12)); 4],
        switches: vec![vec![GpuIndex(0), GpuIndex(1)], vec![GpuIndex(2), GpuIndex(3)]],
        peers: links.map(peer).to_vec(),
        models,
        functions,
        light_first: true,
        arrivals,
    }
}

fn poisson(rates: &[f64], seconds: u64, draws: &mut Draws) -> Vec<(u64, u32)> {
    let mut arrivals = Vec::new();
    for (function, rate) in rates.iter().enumerate() {
        let mut at = 0.0;
        loop {
            at += draws.gap() / rate;
            if at >= seconds as f64 {
                break;
            }
            arrivals.push(((at * SECOND as f64) as u64, function as u32));
        }
    }
    arrivals.sort_unstable();
    arrivals
}

/// Torpor's node (7.3): functions over the eight models in turn, from `from` to `to` requests a
/// minute each, 98% within 80 ms, or 200 ms for Bert.
pub(crate) fn torpor(functions: usize, (from, to): (u64, u64), seconds: u64, seed: u64) -> Scenario {
    let mut draws = Draws(seed << 32);
    let rates: Vec<f64> =
        (0..functions).map(|_| (from * 100 + draws.below((to - from) * 100 + 1)) as f64 / 6000.0).collect();
    let arrivals = poisson(&rates, seconds, &mut draws);
    let function = |index: usize| {
        let deadline = Duration::from_millis(if index % TABLE_4.len() == 7 { 200 } else { 80 });
        Function { model: index as u32, objective: Some((deadline, P98)) }
    };
    let models = (0..functions).map(torpor_model).collect();
    server(models, (0..functions).map(function).collect(), arrivals)
}

/// Equal functions of ResNet-152 on the same node, with so much offered of what it could serve if
/// every model were where it is wanted, in percent.
pub(crate) fn equal(functions: usize, percent: u64, held: bool, seconds: u64, seed: u64) -> Scenario {
    let mut draws = Draws(seed << 32);
    let model = torpor_model(6);
    let rate = 4.0 * SECOND as f64 / model.run as f64 * percent as f64 / 100.0 / functions as f64;
    let arrivals = poisson(&vec![rate; functions], seconds, &mut draws);
    let objective = held.then_some((Duration::from_millis(80), P98));
    let function = |index| Function { model: index, objective };
    server(vec![model; functions], (0..functions as u32).map(function).collect(), arrivals)
}
