//! H13: what a call over a socket costs an inference (Fig 6): messages are counted by layer and each
//! has a price. No message is sent: Millrace's executor is given a run as one, so there is nothing of
//! ours to measure but that.

use std::time::Duration;

use anyhow::Result;
use millrace_sim::models;
use millrace_sim::workload::random;
use rand::Rng as _;

use crate::Effort;
use crate::figures::{Figure, Order, Spread, Unit};
use crate::report::Report;

/// Layers of one kind in a network, and the calls that a framework makes for each.
struct Layers {
    what: &'static str,
    count: u32,
    calls: u32,
}

const fn layers(what: &'static str, count: u32, calls: u32) -> Layers {
    Layers { what, count, calls }
}

/// A model's calls in one inference.
struct Net {
    name: &'static str,
    run: Duration,
    layers: Vec<Layers>,
    /// Calls that the host waits for, whoever sends them: the output's copy, and its synchronisation.
    waits: u32,
}

impl Net {
    fn calls(&self) -> u32 {
        self.layers.iter().map(|it| it.count * it.calls).sum()
    }
}

fn nets() -> [Net; 2] {
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
        Net { name: "ResNet-152", run: table[6].run, layers: resnet, waits: 2 },
        Net { name: "Bert-qa", run: table[7].run, layers: bert, waits: 3 },
    ]
}

/// What messages cost, one set a seed.
#[derive(Debug, Clone, Copy)]
struct Prices {
    /// There and back, with a wake-up at either end.
    round_trip: Duration,
    /// One way, while nobody waits for it.
    message: Duration,
    /// Packing a call into a message and unpacking it.
    call: Duration,
    /// Calls in a message.
    batch: u32,
}

impl Prices {
    fn of(seed: u64) -> Self {
        let mut rng = random(seed, 13);
        let mut micros = |from: f64, to: f64| Duration::from_secs_f64(rng.random_range(from..to) / 1e6);
        let (round_trip, message, call) = (micros(25.0, 45.0), micros(6.0, 10.0), micros(0.3, 0.7));
        Self { round_trip, message, call, batch: rng.random_range(8..=32) }
    }
}

/// How much of a run the GPU does while calls are on their way, where each is waited for.
#[derive(Debug, Clone, Copy)]
enum Reading {
    /// A call comes back when the GPU has done it.
    InTurn,
    /// It comes back when the GPU was told: the next is on its way meanwhile.
    Overlapped,
}

/// One inference of a model, by who sends its calls and how.
fn gvirtus(net: &Net, prices: Prices, reading: Reading) -> Duration {
    let calls = prices.round_trip * net.calls();
    let waits = prices.round_trip * net.waits;
    match reading {
        Reading::InTurn => calls + net.run + waits,
        Reading::Overlapped => calls.max(net.run) + waits,
    }
}

fn unbatched(net: &Net, prices: Prices) -> Duration {
    (prices.message * net.calls()).max(net.run) + prices.round_trip * net.waits
}

fn batched(net: &Net, prices: Prices) -> Duration {
    let sending = prices.message * net.calls().div_ceil(prices.batch) + prices.call * net.calls();
    sending.max(net.run) + prices.round_trip * net.waits
}

/// The run, and its answer: two messages, whatever the model.
fn whole(net: &Net, prices: Prices) -> Duration {
    net.run + prices.round_trip
}

fn assumed() -> Vec<String> {
    [
        "A model of messages, not a measurement: the GPU computes for what table 4 says with GPU remoting, and each call costs what a message costs. The paper says neither how many calls there are nor what one costs.",
        "Calls are counted by layer, as a framework over cuDNN and cuBLAS makes them (table 6): a convolution 14 (a stream, five descriptors made and set, grouping, math type, the forward call, four descriptors destroyed), a batch normalisation 8, a dense layer 5 (a kernel for the bias, stream, math mode twice, the product), any other kernel 1. Those that make handles or pick algorithms come with the first inference alone; results that do not change are cached (T04).",
        "A seed draws the prices, evenly between: a round trip 25 to 45 µs, a message that nobody waits for 6 to 10 µs, a call in a batch 0.3 to 0.7 µs, batches of 8 to 32 calls. The ranges were chosen so that ResNet-152 fits; what Bert-qa then comes to is the model's own.",
        "Whether a synchronous call comes back when the GPU was told or when it is done is not said: *overlapped* and *in turn*.",
        "Millrace sends no calls: a run is one message and its answer another (`executor`), so the last row is the same model's price of those two.",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// GVirtuS, Torpor without batches, Torpor.
pub(super) fn calls(effort: Effort) -> Result<Report> {
    let mut report = Report { assumed: assumed(), ..Report::default() };
    let (mut counts, mut rows, mut gains) = (Vec::new(), Vec::new(), Vec::new());
    for net in nets() {
        let spread = |of: &dyn Fn(Prices) -> Duration| {
            Spread((1..=effort.seeds).map(|seed| of(Prices::of(seed)).as_secs_f64() * 1e3).collect())
        };
        let in_turn = spread(&|prices| gvirtus(&net, prices, Reading::InTurn));
        let overlapped = spread(&|prices| gvirtus(&net, prices, Reading::Overlapped));
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
            let time = format!("{} ± {}", Unit::Millis.show(ms.mean()), Unit::Millis.show(ms.half()));
            rows.push(vec![net.name.to_owned(), way.to_owned(), messages.to_string(), time]);
        }
        let below = batched.reduction_from(&in_turn);
        let figure = |what: &str, paper: &str, ours: Spread, band| Figure {
            what: format!("{}, {what}", net.name),
            paper: paper.to_owned(),
            ours,
            unit: Unit::Percent,
            band,
            cause: None,
        };
        if net.name == "ResNet-152" {
            report.figures.push(figure("Torpor below GVirtuS (in turn)", "-88%", below.clone(), 0.80..=0.95));
            let without = unbatched.reduction_from(&in_turn);
            report.figures.push(figure("without batches (in turn)", "-79%", without, 0.65..=0.90));
            let batches = batched.reduction_from(&unbatched);
            report.figures.push(figure("batches below that", "-41%", batches, 0.25..=0.55));
        } else {
            report.figures.push(figure("Torpor below GVirtuS (in turn)", "-37%", below.clone(), 0.25..=0.55));
            let overlap = batched.reduction_from(&overlapped);
            report.figures.push(Figure {
                cause: Some(
                    "with the GPU at work meanwhile Bert-qa's calls are hidden behind its run: the paper's figure lies between the two readings",
                ),
                ..figure("Torpor below GVirtuS (overlapped)", "-37%", overlap, 0.25..=0.55)
            });
        }
        gains.push(below);
        let what = format!("{}: Torpor at most without batches", net.name);
        report.orders.push(Order { what, by: unbatched.less(&batched), cause: None });
    }
    if let [resnet, bert] = &gains[..] {
        let what = "ResNet-152 gains more than Bert-qa".to_owned();
        report.orders.push(Order { what, by: resnet.less(bert), cause: None });
    }
    let header = ["model", "layer", "of these", "calls each", "calls"].map(String::from).to_vec();
    report.tables.push(("Calls in one inference, as counted:".to_owned(), header, counts));
    let header = ["model", "way", "messages (Torpor's in batches of 20)", "one inference"].map(String::from);
    report.tables.push(("What they come to:".to_owned(), header.to_vec(), rows));
    Ok(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fewer_messages_are_never_slower_and_none_beat_the_gpu() {
        for net in nets() {
            for seed in 1..=20 {
                let prices = Prices::of(seed);
                let times = [
                    gvirtus(&net, prices, Reading::InTurn),
                    gvirtus(&net, prices, Reading::Overlapped),
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
