//! H14: the gain of each part of a swap (Fig 7). Weights are cut by `model`'s own rule and granted by the
//! real fabric, over a modelled link. The times of the link and of the launches are modelled. The pieces of
//! a copy, and the pieces that each launch waits for, are those of production.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroUsize;
use std::time::Duration;

use anyhow::{Context as _, Result};
use millrace_core::Core as _;
use millrace_core::ids::{Generation, TransferId};
use millrace_memory::chunks_for;
use millrace_model::elbow::{Throughput, elbow};
use millrace_model::synth::{self, Encoder};
use millrace_model::{CompiledModel, Grouping};
use millrace_sim::models;
use millrace_sim::workload::random;
use millrace_transfers::fabric::{Action, BatchGrant, Event, LinkScheduler, TransferCargo, WeightsCargo};
use millrace_types::topology::{LinkId, LinkKind, Topology, TopologyGpu, TopologyLink};
use millrace_types::{Bytes, BytesPerSec, GpuIndex, ModelId, Timestamp};
use rand::Rng as _;

use super::setup::GPU_MEMORY;
use crate::effort::Effort;
use crate::figures::{Bound, Claim, Figure, PolicyOrder, SeedValues, Unit};
use crate::report::ExperimentReport;

/// The assumed machine, drawn by the seed.
#[derive(Debug, Clone, Copy)]
struct DrawnMachine {
    /// The rate of a copy out of pinned memory.
    pinned: BytesPerSec,
    /// The rate of a copy out of pageable memory.
    pageable: BytesPerSec,
    /// The time of each copy besides its bytes: its set-up, and the event that its reader waits for.
    each: Duration,
}

impl DrawnMachine {
    fn of(seed: u64) -> Self {
        let mut rng = random(seed, 14);
        let pinned = rng.random_range(10e9..12e9);
        let pageable = pinned * rng.random_range(0.45..0.60);
        let each = Duration::from_nanos(rng.random_range(8_000..20_000));
        let rate = |rate: f64| BytesPerSec(rate as u64);
        Self { pinned: rate(pinned), pageable: rate(pageable), each }
    }

    fn copies(self, bytes: u64) -> Duration {
        self.each + self.pinned.time_for(Bytes(bytes))
    }

    /// Returns the size of a group that the rule of `model` finds on this machine (T09).
    fn elbow(self) -> Option<u64> {
        let point = |power: u32| {
            let bytes = 1u64 << power;
            let bytes_per_s = (bytes as f64 / self.copies(bytes).as_secs_f64()) as u64;
            Throughput { bytes, bytes_per_s }
        };
        elbow(&(14..=25).map(point).collect::<Vec<_>>())
    }
}

/// A network of a model's shape.
struct SwappedNetwork {
    name: &'static str,
    onnx: bytes::Bytes,
    /// The time of a run without a copy, by table 4.
    run: Duration,
    /// The compiled network, by the size of a group. Size 0 stands for a worker's cut.
    cuts: BTreeMap<u64, CompiledModel>,
}

/// The arrived bytes of the weights, counted from the first byte, and the times of their arrival.
type Arrivals = Vec<(u64, Duration)>;

impl SwappedNetwork {
    fn new(name: &'static str, onnx: Vec<u8>, run: Duration) -> Self {
        Self { name, onnx: onnx.into(), run, cuts: BTreeMap::new() }
    }

    fn cut(&mut self, bytes: u64, grouping: Grouping) -> Result<&CompiledModel> {
        if !self.cuts.contains_key(&bytes) {
            let compiled = millrace_model::compile_grouped(&self.onnx, grouping)
                .with_context(|| format!("cannot compile the network like {}", self.name))?;
            self.cuts.insert(bytes, compiled);
        }
        Ok(&self.cuts[&bytes])
    }

    /// Returns the times of the five [`WAYS`] on this machine.
    fn swaps(&mut self, machine: DrawnMachine) -> Result<[Duration; 5]> {
        let run = self.run;
        let whole = self.cut(0, Grouping::default())?;
        let weights = Bytes(whole.summary.weights_bytes);
        let granted = ends(whole, run, &granted(weights, machine)?);
        let unpinned = machine.each + machine.pageable.time_for(weights) + run;
        let pinned = machine.copies(weights.0) + run;
        let finest = self.cut(1, Grouping::PER_PARAMETER)?;
        let each = finest.weights.iter().map(|weight| weight.offset + weight.bytes);
        let pipelined = ends(finest, run, &one_by_one(each, machine));
        let bytes = machine.elbow().context("the drawn link has no throughput")?;
        let groups = self.cut(bytes, Grouping { bytes, launches_max: NonZeroUsize::MAX })?;
        let each = groups.launches.iter().map(needs);
        let grouped = ends(groups, run, &one_by_one(each, machine));
        Ok([unpinned, pinned, pipelined, grouped, granted])
    }
}

/// Returns the number of bytes from the first that a launch waits for. Weights lie in the order of first use.
fn needs(launch: &millrace_model::Launch) -> u64 {
    launch.reads.iter().map(|range| range.end).max().unwrap_or(0)
}

/// Returns the arrivals of copies that end at these bytes, one after the other.
fn one_by_one(ends: impl Iterator<Item = u64>, machine: DrawnMachine) -> Arrivals {
    let mut at = 0;
    let mut now = Duration::ZERO;
    let mut arrivals = Vec::new();
    for end in ends.filter(|&end| end > 0) {
        if end > at {
            now += machine.copies(end - at);
            at = end;
        }
        arrivals.push((at, now));
    }
    arrivals
}

/// Returns the arrivals of copies that the fabric grants: paced batches of chunks, one running and one
/// queued.
fn granted(weights: Bytes, machine: DrawnMachine) -> Result<Arrivals> {
    let gpu = GpuIndex(0);
    let transfer = TransferId(1);
    let start = Timestamp(1);
    let gpu_memory = TopologyGpu {
        index: gpu,
        gpu_type: "V100".to_owned(),
        memory: GPU_MEMORY,
        host_path: vec![LinkId(0)],
    };
    let links = vec![TopologyLink { kind: LinkKind::Pcie, rate: machine.pinned }];
    let mut fabric = LinkScheduler::new(&Topology { name: "one".to_owned(), gpus: vec![gpu_memory], links });
    let cargo =
        TransferCargo::Weights(WeightsCargo { model: ModelId(0), generation: Generation(1), bytes: weights });
    let chunks = std::iter::once(0..chunks_for(weights)).collect();
    let mut actions = Vec::new();
    let mut grants = VecDeque::<BatchGrant>::new();
    let mut arrivals = Vec::new();
    let mut free = start;
    let alone = Event::Start { transfer, gpu, cargo, chunks, from: None, objective: None };
    fabric.on_event(start, alone, &mut actions);
    loop {
        for action in actions.drain(..) {
            match action {
                Action::Grant { grant } => grants.push_back(grant),
                Action::Ended { .. } => return Ok(arrivals),
                _ => {}
            }
        }
        let grant = grants.pop_front().context("the fabric stopped granting before the transfer ended")?;
        let (offset, size) = cargo.span(&grant.chunks);
        free = free.max(grant.not_before) + machine.copies(size.0);
        arrivals.push((offset.0 + size.0, free.since(start)));
        fabric.on_event(free, Event::Done { transfer, batch: grant.batch }, &mut actions);
    }
}

/// Returns the end of a run in which each launch waits for the bytes that the launch reads. The run time is
/// spread evenly over the parameters: a launch takes the time of the parameters that it is the first to
/// read.
fn ends(compiled: &CompiledModel, run: Duration, arrivals: &[(u64, Duration)]) -> Duration {
    let share = run.div_f64(compiled.weights.len().max(1) as f64);
    let mut now = Duration::ZERO;
    let mut read = 0;
    for launch in &compiled.launches {
        let needs = needs(launch);
        let there = arrivals.partition_point(|&(bytes, _)| bytes < needs);
        let there = arrivals.get(there).map_or(Duration::ZERO, |&(_, at)| at);
        let upto = compiled.weights.partition_point(|weight| weight.offset < needs).max(read);
        now = now.max(there) + share * (upto - read) as u32;
        read = upto;
    }
    now
}

const WAYS: [&str; 5] = [
    "unpinned, then run",
    "pinned, then run",
    "pipelined per parameter",
    "grouped at the elbow",
    "a worker's cut and grants",
];

fn nets(effort: Effort) -> Vec<SwappedNetwork> {
    let table = models::torpor();
    let resnet = table[6].run;
    let bert = table[7].run;
    if effort.short {
        let small = SwappedNetwork::new("ResNet-152", synth::tiny_cnn(), resnet);
        return vec![small, SwappedNetwork::new("Bert-qa", synth::bert_like(Encoder::TINY), bert)];
    }
    vec![
        SwappedNetwork::new("ResNet-152", synth::resnet152_like(), resnet),
        SwappedNetwork::new("Bert-qa", synth::bert_like(Encoder::LARGE), bert),
    ]
}

fn assumed() -> Vec<String> {
    [
        "One V100, with no other transfer on its link. Networks of the models' shapes (`model::synth`: 60 million parameters like ResNet-152, 335 million like BERT-large) are cut into launches by `model`'s own rule. Runs last as long as in table 4 with GPU remoting.",
        "A seed draws the machine uniformly from ranges: pinned memory is copied at 10 to 12 GB/s (PCIe 3.0; the swaps of table 4 need 10), pageable memory at 45% to 60% of that rate, and each copy costs 8 to 20 µs besides its bytes (its set-up and the event that its reader waits for). None of these figures is from the paper.",
        "*Unpinned* and *pinned* copy all weights at once and then run. *Per parameter* copies each parameter separately, and each layer waits for its own parameters. *Grouped* copies groups of whole parameters, of the size that the elbow's rule finds on the drawn machine. A run's time is spread evenly over the parameters.",
        "*A worker's cut and grants*: at most 64 launches, and the real fabric's grants of 10 MiB, one running and one queued.",
    ]
    .map(str::to_owned)
    .to_vec()
}

/// Measures the reduction of each of the [`WAYS`] from the way before.
pub(super) fn swap(effort: Effort) -> Result<ExperimentReport> {
    let mut report = ExperimentReport { assumed: assumed(), ..ExperimentReport::default() };
    let mut rows = Vec::new();
    let mut grouping = Vec::new();
    for mut net in nets(effort) {
        let mut ways: [SeedValues; 5] = Default::default();
        for seed in effort.each_seed() {
            let swaps = net.swaps(DrawnMachine::of(seed))?;
            ways.iter_mut().zip(swaps).for_each(|(way, swap)| way.0.push(swap.as_secs_f64() * 1e3));
        }
        for (place, (name, way)) in WAYS.iter().zip(&ways).enumerate() {
            let before = &ways[place.saturating_sub(1)];
            let below = if place == 0 { String::new() } else { percent_below(way, before) };
            let ms =
                format!("{} ± {}", Unit::Millis.show(way.mean()), Unit::Millis.show(way.half_interval()));
            rows.push(vec![net.name.to_owned(), (*name).to_owned(), ms, below]);
        }
        let by = |place: usize| ways[place].reduction_from(&ways[place - 1]);
        let figure = |what: &str, paper: f64, place: usize| Figure {
            what: format!("{}, {what}", net.name),
            claim: Claim::paper(Unit::Percent.show(paper), Bound::About(paper)),
            ours: by(place),
            unit: Unit::Percent,
            cause: None,
        };
        report.figures.push(figure("pinned below unpinned", 0.35, 1));
        report.figures.push(figure("pipelined below pinned", 0.15, 2));
        if net.name == "ResNet-152" {
            report.figures.push(figure("grouped below pipelined", 0.22, 3));
        }
        for place in 1..=3 {
            let what = format!("{}: {} below {}", net.name, WAYS[place], WAYS[place - 1]);
            report.orders.push(PolicyOrder { what, by: by(place), cause: None });
        }
        grouping.push(by(3));
    }
    if let [resnet, bert] = &grouping[..] {
        let what = "grouping is worth more to ResNet-152 than to Bert-qa".to_owned();
        report.orders.push(PolicyOrder { what, by: resnet.differences(bert), cause: None });
    }
    let header = ["model", "way", "first byte to answer", "below the way before"].map(String::from);
    report.tables.push(("A swap and its run:".to_owned(), header.to_vec(), rows));
    Ok(report)
}

fn percent_below(way: &SeedValues, before: &SeedValues) -> String {
    let below = way.reduction_from(before);
    format!("{} ± {}", Unit::Percent.show(below.mean()), Unit::Percent.show(below.half_interval()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MACHINE: DrawnMachine = DrawnMachine {
        pinned: BytesPerSec::gb(10),
        pageable: BytesPerSec::gb(5),
        each: Duration::from_micros(10),
    };

    #[test]
    fn fabric_grants_every_byte_and_keeps_the_link_busy() -> Result<()> {
        let weights = Bytes::mib(101);
        let arrivals = granted(weights, MACHINE)?;
        let (bytes, at) = arrivals[arrivals.len() - 1];
        assert_eq!((arrivals.len(), bytes), (11, weights.0));
        let busy = MACHINE.pinned.time_for(weights) + MACHINE.each * 11;
        assert!(at.abs_diff(busy) < Duration::from_micros(1), "{at:?} instead of {busy:?}");
        Ok(())
    }

    #[test]
    fn a_launch_waits_only_for_the_bytes_that_it_reads() -> Result<()> {
        let compiled = millrace_model::compile_grouped(&synth::tiny_cnn().into(), Grouping::PER_PARAMETER)?;
        let run = Duration::from_millis(10);
        let all = compiled.summary.weights_bytes;
        let ms = Duration::from_millis;
        assert!(
            ends(&compiled, run, &[(all, ms(5))]).abs_diff(ms(15)) < ms(1),
            "all bytes arrive after 5 ms"
        );
        assert!(ends(&compiled, run, &[(all, ms(0))]).abs_diff(run) < ms(1), "all bytes are there at first");
        let first = needs(&compiled.launches[0]);
        let rest_later = ends(&compiled, run, &[(first, ms(0)), (all, ms(5))]);
        assert!(rest_later < ms(15) && rest_later > run, "the first launch did not overlap: {rest_later:?}");
        Ok(())
    }
}
