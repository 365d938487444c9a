//! Properties for any links and flows: no link carries more than it can, every flow that fits is
//! admitted, idle rates go to the tightest flow, and batches follow the rates.

mod batches;

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::runs::run;
use super::tests::{GB, MB, machine, next_batch};
use super::*;

#[derive(Debug, Clone)]
enum Step {
    Begin(RatedFlow),
    End(u64),
    Measured { flow: u64, bytes: u64, window_ms: u64 },
}

fn objective() -> impl Strategy<Value = Option<TransferObjective>> {
    let ms = Duration::from_millis;
    let some = (0..60u64, 0..20u64)
        .prop_map(move |(slo, infer)| TransferObjective { slo: ms(slo), infer: ms(infer) });
    prop_oneof![1 => Just(None), 5 => some.prop_map(Some)]
}

fn flow(links: u32) -> impl Strategy<Value = RatedFlow> {
    let some = prop::collection::vec((0..links).prop_map(LinkId), 1..5);
    (0..8u64, 1..200 * MB, some, objective()).prop_map(|(id, bytes, links, objective)| {
        let id = FlowId(id);
        let bytes = Bytes(bytes);
        RatedFlow { id, bytes, links, objective }
    })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => flow(4).prop_map(Step::Begin),
        2 => (0..8u64).prop_map(Step::End),
        2 => (0..8u64, 0..30 * MB, 1..20u64)
            .prop_map(|(flow, bytes, window_ms)| Step::Measured { flow, bytes, window_ms }),
    ]
}

/// Returns four GPUs, with two uplinks or none.
fn topology() -> impl Strategy<Value = Topology> {
    let rate = || (1..200u64).prop_map(|rate| rate * 100 * MB + 7);
    (prop::collection::vec(rate(), 4), prop::collection::vec(rate(), 2), any::<bool>())
        .prop_map(|(links, uplinks, shared)| machine(&links, if shared { &uplinks } else { &[] }))
}

/// Returns the rate that some links carry together.
fn capacity(topology: &Topology, links: &BTreeSet<LinkId>) -> u64 {
    let rate = |link: LinkId| topology.links[link.0 as usize].rate.0;
    let mut under: BTreeMap<LinkId, u64> = BTreeMap::new();
    for link in links {
        let path = &topology.gpus[link.0 as usize].host_path;
        *under.entry(*path.last().unwrap()).or_default() += rate(*link);
    }
    under.into_iter().map(|(uplink, sum)| sum.min(rate(uplink))).sum()
}

/// Whether rates fit beside each other by Hall's theorem: every subset of the flows needs no more
/// than the links that it may use can carry.
fn fits(topology: &Topology, flows: &[(u64, BTreeSet<LinkId>)]) -> bool {
    (1..1u32 << flows.len()).all(|chosen| {
        let some = || flows.iter().enumerate().filter(|(place, _)| chosen >> place & 1 == 1);
        let links = some().flat_map(|(_, (_, links))| links.iter().copied()).collect();
        some().map(|(_, (least, _))| u128::from(*least)).sum::<u128>()
            <= u128::from(capacity(topology, &links))
    })
}

fn least(guarantee: RateGuarantee) -> Option<BytesPerSec> {
    match guarantee {
        RateGuarantee::Admitted { least }
        | RateGuarantee::Crowded { least }
        | RateGuarantee::Late { least } => Some(least),
        RateGuarantee::Unpromised | RateGuarantee::Infeasible(_) => None,
    }
}

/// The caller's knowledge: the changes that were reported.
#[derive(Default)]
struct Told {
    rates: BTreeMap<FlowId, Vec<(LinkId, BytesPerSec)>>,
    guarantees: BTreeMap<FlowId, RateGuarantee>,
    flows: BTreeMap<FlowId, (Timestamp, RatedFlow)>,
}

impl Told {
    fn take(&mut self, change: RateChange) {
        for allocation in change.allocations {
            let before = self.rates.insert(allocation.flow, allocation.rates.clone());
            assert_ne!(before, Some(allocation.rates), "reported without a change");
        }
        for (flow, guarantee) in change.guarantees {
            let before = self.guarantees.insert(flow, guarantee);
            assert_ne!(before, Some(guarantee), "reported without a change");
            // D16: rates do not oscillate. The least rate of a flow only rises, until the flow is
            // late for good.
            match (before.and_then(least), least(guarantee)) {
                (Some(before), Some(now)) => assert!(before <= now, "{flow} from {before:?} to {now:?}"),
                (before, _) => assert_eq!(before, None, "{flow}"),
            }
            assert!(!matches!(before, Some(RateGuarantee::Late { .. })), "{flow} was late");
        }
    }

    fn rate(&self, flow: FlowId) -> u64 {
        self.rates.get(&flow).into_iter().flatten().map(|(_, rate)| rate.0).sum()
    }

    fn crossing(&self, topology: &Topology, link: LinkId) -> u64 {
        let crosses = |by: &LinkId| topology.gpus[by.0 as usize].host_path.contains(&link);
        self.rates.values().flatten().filter(|(by, _)| crosses(by)).map(|(_, rate)| rate.0).sum()
    }

    fn links(&self, flow: FlowId) -> BTreeSet<LinkId> {
        self.flows[&flow].1.links.iter().copied().collect()
    }

    fn check(&self, topology: &Topology) {
        for (place, link) in (0..).map(LinkId).zip(&topology.links) {
            assert!(self.crossing(topology, place) <= link.rate.0, "{place:?}");
        }
        self.check_infeasible(topology);
        self.check_admission(topology);
        self.check_idle(topology);
    }

    /// Checks that exactly the infeasible flows are reported as such.
    fn check_infeasible(&self, topology: &Topology) {
        for (&id, (_, flow)) in &self.flows {
            let links = capacity(topology, &self.links(id));
            let slack = flow.objective.map(|it| it.slo.saturating_sub(it.infer).as_nanos());
            let needed = |slack: u128| (u128::from(flow.bytes.0) * NANOS_PER_SEC).div_ceil(slack);
            let expected = match slack {
                None => None,
                Some(0) => Some(Infeasible::NoSlack),
                Some(slack) if needed(slack) > u128::from(links) => {
                    let least = BytesPerSec(u64::try_from(needed(slack)).unwrap());
                    Some(Infeasible::BeyondLinks { least, links: BytesPerSec(links) })
                }
                Some(_) => None,
            };
            let told = match self.guarantees[&id] {
                RateGuarantee::Infeasible(why) => Some(why),
                _ => None,
            };
            assert_eq!(told, expected, "{id}");
        }
    }

    /// Checks that flows are admitted in the order of their deadlines, each flow that fits.
    fn check_admission(&self, topology: &Topology) {
        let mut in_time: Vec<_> = self
            .guarantees
            .iter()
            .filter_map(|(&id, &guarantee)| {
                let (began, flow) = &self.flows[&id];
                let deadline = *began + flow.objective?.slack()?;
                match guarantee {
                    RateGuarantee::Admitted { least } => Some((deadline, id, least, true)),
                    RateGuarantee::Crowded { least } => Some((deadline, id, least, false)),
                    _ => None,
                }
            })
            .collect();
        in_time.sort_unstable();
        let mut fitted = Vec::new();
        for (_, id, least, admitted) in in_time {
            fitted.push((least.0, self.links(id)));
            assert_eq!(fits(topology, &fitted), admitted, "{id}");
            if admitted {
                assert!(self.rate(id) >= least.0, "{id}");
            } else {
                fitted.pop();
                assert!(self.rate(id) < least.0, "{id}");
            }
        }
    }

    /// Checks that no link is idle that a flow could use, and that a flow has more than the least
    /// rate only as the tightest flow on a link.
    fn check_idle(&self, topology: &Topology) {
        let full = |by: &LinkId| {
            let path = &topology.gpus[by.0 as usize].host_path;
            path.iter()
                .any(|&link| topology.links[link.0 as usize].rate.0 - self.crossing(topology, link) < 100)
        };
        let admitted = |id: &FlowId| match self.guarantees[id] {
            RateGuarantee::Admitted { least } => Some(least.0),
            _ => None,
        };
        let deadline = |id: &FlowId| self.flows[id].0 + self.flows[id].1.objective.unwrap().slack().unwrap();
        for &id in self.flows.keys() {
            assert!(self.links(id).iter().all(full), "{id} could go faster");
            let Some(least) = admitted(&id) else { continue };
            let tighter = |other: &&FlowId| {
                admitted(other).is_some() && (deadline(other), **other) < (deadline(&id), id)
            };
            let reach: BTreeSet<_> =
                self.flows.keys().filter(tighter).flat_map(|&other| self.links(other)).collect();
            if self.links(id).is_subset(&reach) {
                assert_eq!(self.rate(id), least, "{id} is the tightest nowhere");
            }
        }
    }
}

/// Returns flows of one link that fit beside each other.
fn feasible() -> impl Strategy<Value = Vec<RatedFlow>> {
    prop::collection::vec((5..300u64, 1..100u64), 1..8).prop_map(|wanted| {
        let weights: u64 = wanted.iter().map(|(_, weight)| weight).sum();
        let flow = |(id, (megabytes, weight)): (u64, (u64, u64))| {
            // The flow's part of 12 GB/s, rounded down.
            let rate = 12_000 * MB * weight / weights - 1;
            let slo = BytesPerSec(rate).time_for(Bytes(megabytes * MB));
            let objective = Some(TransferObjective { slo, infer: Duration::ZERO });
            RatedFlow { id: FlowId(id), bytes: Bytes(megabytes * MB), links: vec![LinkId(0)], objective }
        };
        (0..).zip(wanted).map(flow).collect()
    })
}

fn one_link() -> Topology {
    machine(&[12_000 * MB], &[])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn rates_fit_the_links_and_the_objectives(
        topology in topology(),
        steps in prop::collection::vec(step(), 1..20),
    ) {
        let mut rates = RateAllocator::new(&topology, Config::default()).unwrap();
        let mut told = Told::default();
        for (at, step) in steps.into_iter().enumerate() {
            let now = Timestamp::ZERO + Duration::from_millis(at as u64);
            let change = match step {
                Step::Begin(flow) => {
                    let change = rates.begin(now, &flow);
                    if change.is_ok() {
                        told.flows.insert(flow.id, (now, flow));
                    }
                    change
                }
                Step::End(flow) => {
                    let id = FlowId(flow);
                    told.flows.remove(&id);
                    told.rates.remove(&id);
                    told.guarantees.remove(&id);
                    rates.end(now, id)
                }
                Step::Measured { flow, bytes, window_ms } => {
                    rates.measured(now, FlowId(flow), Bytes(bytes), Duration::from_millis(window_ms))
                }
            };
            told.take(change.unwrap_or_default());
            told.check(&topology);
            for &id in told.flows.keys() {
                prop_assert_eq!(rates.rate(id), Some(BytesPerSec(told.rate(id))));
                prop_assert_eq!(rates.guarantee(id), Some(told.guarantees[&id]));
            }
        }
    }

    /// D15 to the letter, on a single link.
    #[test]
    fn the_tightest_flow_gets_the_whole_idle_rate(flows in feasible()) {
        let mut rates = RateAllocator::new(&one_link(), Config::default()).unwrap();
        for flow in &flows {
            rates.begin(Timestamp::ZERO, flow).unwrap();
        }
        let least = |flow: &RatedFlow| {
            let slack = flow.objective.unwrap().slo.as_nanos();
            u64::try_from((u128::from(flow.bytes.0) * NANOS_PER_SEC).div_ceil(slack)).unwrap()
        };
        let tightest = flows.iter().min_by_key(|flow| (flow.objective.unwrap().slo, flow.id)).unwrap().id;
        let idle = 12_000 * MB - flows.iter().map(least).sum::<u64>();
        for flow in &flows {
            let expected = least(flow) + if flow.id == tightest { idle } else { 0 };
            prop_assert_eq!(rates.rate(flow.id), Some(BytesPerSec(expected)));
        }
    }
}
