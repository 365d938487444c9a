//! H13: the cost of calls over a socket for an inference (Fig 6). Messages are counted by layer, and each
//! message has a price. No message is sent: Millrace sends a whole run to the executor in one message, so
//! there are no calls to measure.

use std::time::Duration;

use anyhow::Result;
use millrace_sim::models;
use millrace_sim::workload::random;
use rand::Rng as _;

use crate::effort::Effort;
use crate::figures::{Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;

/// The layers of one kind in a network.
struct Layers {
    what: &'static str,
    count: u32,
    /// The number of calls that a framework makes for each layer.
    calls: u32,
}

const fn layers(what: &'static str, count: u32, calls: u32) -> Layers {
    Layers { what, count, calls }
}

/// The calls of one inference of a model.
struct RemotedModel {
    name: &'static str,
    run: Duration,
    layers: Vec<Layers>,
    /// The number of calls that the host waits for in every system: the copies of the outputs, and the
    /// synchronisation.
    waits: u32,
}

impl RemotedModel {
    fn calls(&self) -> u32 {
        self.layers.iter().map(|it| it.count * it.calls).sum()
    }
}

fn nets() -> [RemotedModel; 2] {
    let table = models::torpor();
    let resnet = vec![
        layers("convolution", 155, 14),
        layers("batch normalisation", 155, 8),
        layers("ReLU", 151, 1),
        layers("sum", 50, 1),
        layers("pooling", 2, 1),
        layers("dense", 1, 5),
        layers("copy of the input", 1, 1),
    ];
    let bert = vec![
        layers("dense", 24 * 6 + 1, 5),
        layers("product of two activations", 24 * 2, 5),
        layers("softmax", 24, 1),
        layers("layer normalisation", 24 * 2 + 1, 1),
        layers("other kernel (scale, mask, GELU, sums, transposes)", 24 * 8 + 5, 1),
        layers("copy of an input", 3, 1),
    ];
    [
        RemotedModel { name: "ResNet-152", run: table[6].run, layers: resnet, waits: 2 },
        RemotedModel { name: "Bert-qa", run: table[7].run, layers: bert, waits: 3 },
    ]
}

/// The prices of messages, drawn by the seed.
#[derive(Debug, Clone, Copy)]
struct Prices {
    /// The time of a message and its answer, with a wake-up at either end.
    round_trip: Duration,
    /// The time of a message without an answer.
    message: Duration,
    /// The time of packing a call into a message and unpacking the call.
    call: Duration,
    /// The number of calls in a message.
    batch: u32,
}

impl Prices {
    fn of(seed: u64) -> Self {
        let mut rng = random(seed, 13);
        let mut micros = |from: f64, to: f64| Duration::from_secs_f64(rng.random_range(from..to) / 1e6);
        // The order of the draws is part of the recorded figures.
        let round_trip = micros(25.0, 45.0);
        let message = micros(6.0, 10.0);
        let call = micros(0.3, 0.7);
        Self { round_trip, message, call, batch: rng.random_range(8..=32) }
    }
}

/// A reading of the overlap of computation and synchronous calls.
#[derive(Debug, Clone, Copy)]
enum OverlapReading {
    /// A call returns when the GPU has executed the call.
    InTurn,
    /// A call returns when the GPU has received the call, so that the next call overlaps with the execution.
    Overlapped,
}

/// Returns the time of an inference under GVirtuS, where each call is a round trip.
fn gvirtus(net: &RemotedModel, prices: Prices, reading: OverlapReading) -> Duration {
    let calls = prices.round_trip * net.calls();
    let waits = prices.round_trip * net.waits;
    match reading {
        OverlapReading::InTurn => calls + net.run + waits,
        OverlapReading::Overlapped => calls.max(net.run) + waits,
    }
}

/// Returns the time of an inference under Torpor with a message for each call.
fn unbatched(net: &RemotedModel, prices: Prices) -> Duration {
    (prices.message * net.calls()).max(net.run) + prices.round_trip * net.waits
}

/// Returns the time of an inference under Torpor with batches of calls.
fn batched(net: &RemotedModel, prices: Prices) -> Duration {
    let sending = prices.message * net.calls().div_ceil(prices.batch) + prices.call * net.calls();
    sending.max(net.run) + prices.round_trip * net.waits
}

/// Returns the time of an inference under Millrace: the run and its answer are two messages for every model.
fn whole(net: &RemotedModel, prices: Prices) -> Duration {
    net.run + prices.round_trip
}

fn assumed() -> Vec<String> {
    [
        "This is a model of messages, not a measurement: the GPU computes for the time of table 4 with GPU remoting, and each call costs the price of a message. The paper states neither the number nor the price of calls.",
        "Calls are counted by layer, as a framework over cuDNN and cuBLAS makes them (table 6): a convolution 14 (a stream, five descriptors made and set, grouping, math type, the forward call, four descriptors destroyed), a batch normalisation 8, a dense layer 5 (a kernel for the bias, stream, math mode twice, the product), any other kernel 1. Calls that make handles or pick algorithms occur only in the first inference; results that do not change are cached (T04).",
        "A seed draws the prices uniformly from ranges: a round trip takes 25 to 45 µs, a message without an answer 6 to 10 µs, a call in a batch 0.3 to 0.7 µs, and a batch has 8 to 32 calls. The ranges were chosen so that ResNet-152 fits; the result for Bert-qa then follows from the model.",
        "The paper does not state whether a synchronous call returns when the GPU has received the call (*overlapped*) or has executed the call (*in turn*).",
        "Millrace sends no calls: a run is one message and its answer another (`executor`), so the last row is the price of these two messages in the same model.",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Compares GVirtuS, Torpor without batches, and Torpor.
pub(super) fn calls(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport { assumed: assumed(), ..ExperimentReport::default() };
    let mut counts = Vec::new();
    let mut rows = Vec::new();
    let mut gains = Vec::new();
    for net in nets() {
        let spread = |of: &dyn Fn(Prices) -> Duration| {
            SeedValues(effort.each_seed().map(|seed| of(Prices::of(seed)).as_secs_f64() * 1e3).collect())
        };
        let in_turn = spread(&|prices| gvirtus(&net, prices, OverlapReading::InTurn));
        let overlapped = spread(&|prices| gvirtus(&net, prices, OverlapReading::Overlapped));
        let unbatched = spread(&|prices| unbatched(&net, prices));
        let batched = spread(&|prices| batched(&net, prices));
        let whole = spread(&|prices| whole(&net, prices));
        counts.extend(net.layers.iter().map(|it| {
            let of = [it.count, it.calls, it.count * it.calls].map(|number| number.to_string());
            [net.name.to_owned(), it.what.to_owned()].into_iter().chain(of).collect()
        }));
        let ways = [
            ("GVirtuS, in turn", net.calls() + net.waits, &in_turn),
            ("GVirtuS, overlapped", net.calls() + net.waits, &overlapped),
            ("Torpor, no batches", net.calls() + net.waits, &unbatched),
            ("Torpor", net.calls().div_ceil(20) + net.waits, &batched),
            ("Millrace", 2, &whole),
        ];
        for (way, messages, ms) in ways {
            let time =
                format!("{} ± {}", Unit::Millis.show(ms.mean()), Unit::Millis.show(ms.half_interval()));
            rows.push(vec![net.name.to_owned(), way.to_owned(), messages.to_string(), time]);
        }
        let below = batched.reduction_from(&in_turn);
        let figure = |what: &str, paper: &str, ours: SeedValues| Figure {
            what: format!("{}, {what}", net.name),
            claim: Claim::not_judged(format!("{paper}: ours is the counted messages at assumed prices")),
            ours,
            unit: Unit::Percent,
            cause: None,
        };
        if net.name == "ResNet-152" {
            report.figures.push(figure("Torpor below GVirtuS (in turn)", "-88%", below.clone()));
            let without = unbatched.reduction_from(&in_turn);
            report.figures.push(figure("without batches (in turn)", "-79%", without));
            let batches = batched.reduction_from(&unbatched);
            report.figures.push(figure("batches below that", "-41%", batches));
        } else {
            report.figures.push(figure("Torpor below GVirtuS (in turn)", "-37%", below.clone()));
            let overlap = batched.reduction_from(&overlapped);
            report.figures.push(Figure {
                cause: Some(
                    "if calls overlap with the computation, Bert-qa's run hides its calls: the paper's figure lies between the two readings",
                ),
                ..figure("Torpor below GVirtuS (overlapped)", "-37%", overlap)
            });
        }
        gains.push(below);
        let what = format!("{}: Torpor at most Torpor without batches", net.name);
        report.orders.push(PolicyOrder { what, by: unbatched.differences(&batched), cause: None });
    }
    if let [resnet, bert] = &gains[..] {
        let what = "ResNet-152 gains more than Bert-qa".to_owned();
        report.orders.push(PolicyOrder { what, by: resnet.differences(bert), cause: None });
    }
    let header = ["model", "layer", "of these", "calls each", "calls"].map(String::from).to_vec();
    report.tables.push(("Calls in one inference, as counted:".to_owned(), header, counts));
    let header = ["model", "way", "messages (Torpor's in batches of 20)", "one inference"].map(String::from);
    report.tables.push(("Times of one inference:".to_owned(), header.to_vec(), rows));
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_messages_never_take_longer_and_no_system_is_faster_than_the_gpu() {
        for net in nets() {
            for seed in 1..=20 {
                let prices = Prices::of(seed);
                let times = [
                    gvirtus(&net, prices, OverlapReading::InTurn),
                    gvirtus(&net, prices, OverlapReading::Overlapped),
                    unbatched(&net, prices),
                    batched(&net, prices),
                    whole(&net, prices),
                ];
                assert!(times.is_sorted_by(|a, b| a >= b), "{}: {times:?}", net.name);
                assert!(times[4] > net.run, "{}: {times:?}", net.name);
            }
        }
    }
}
