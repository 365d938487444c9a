//! Properties of batches: batches follow the rates, on a single link and on two links of an uplink,
//! and admitted flows meet the deadlines.

use super::*;

/// Returns two links of an uplink that carries no more than a single link.
fn pair() -> Topology {
    machine(&[12 * GB; 2], &[12 * GB])
}

/// Returns the flows with their links alternating between the two.
fn on_both(flows: Vec<RatedFlow>) -> Vec<RatedFlow> {
    let by = |(at, flow): (u32, RatedFlow)| RatedFlow { links: vec![LinkId(at % 2)], ..flow };
    (0..).zip(flows).map(by).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// D14: a flow is at most a batch short of the rate since the start, and at most two batches in
    /// any window.
    #[test]
    fn batches_follow_the_rates(flows in feasible()) {
        let mut rates = RateAllocator::new(&one_link(), Config::default()).unwrap();
        for flow in &flows {
            let endless = Bytes(1 << 50);
            let slack = flow.objective.unwrap().slo.as_nanos() * u128::from(endless.0);
            let slo = Duration::from_nanos_u128(slack / u128::from(flow.bytes.0));
            let objective = Some(TransferObjective { slo, infer: Duration::ZERO });
            rates.begin(Timestamp::ZERO, &RatedFlow { bytes: endless, objective, ..flow.clone() }).unwrap();
        }
        let mut crossed = vec![vec![0u64]; flows.len()];
        for _ in 0..400 {
            let batch = next_batch(&mut rates, LinkId(0)).unwrap();
            for (flow, crossed) in flows.iter().zip(&mut crossed) {
                let sent = if flow.id == batch.flow { batch.bytes.0 } else { 0 };
                crossed.push(crossed.last().unwrap() + sent);
            }
        }
        for (flow, crossed) in flows.iter().zip(&crossed) {
            let rate = u128::from(rates.rate(flow.id).unwrap().0);
            let share = |batches: usize| {
                u64::try_from(batches as u128 * u128::from(BATCH.0) * rate / u128::from(12_000 * MB)).unwrap()
            };
            for end in 0..crossed.len() {
                prop_assert!(crossed[end] + BATCH.0 >= share(end), "{} after {end}", flow.id);
                for start in 0..end {
                    let window = crossed[end] - crossed[start];
                    prop_assert!(window + 2 * BATCH.0 >= share(end - start), "{} {start}..{end}", flow.id);
                }
            }
        }
    }

    /// A flow ends within its slack plus a batch, which cannot be interrupted, and one more batch
    /// for each new flow.
    #[test]
    fn admitted_flows_are_in_time(flows in feasible(), starts in prop::collection::vec(0..50_000_000u64, 8)) {
        let batch = BytesPerSec(12_000 * MB).time_for(BATCH).as_nanos();
        let slack = |flow: &RatedFlow| flow.objective.unwrap().slo.as_nanos();
        let at_once: Vec<_> = flows.iter().map(|flow| (0, flow.clone())).collect();
        let ends = run(&one_link(), TransferSharing::FaasTube, &at_once);
        for flow in &flows {
            prop_assert!(u128::from(ends[&flow.id]) <= slack(flow) + batch, "{}", flow.id);
        }
        let at_times: Vec<_> = flows.iter().zip(starts).map(|(flow, start)| (start, flow.clone())).collect();
        let ends = run(&one_link(), TransferSharing::FaasTube, &at_times);
        for (start, flow) in &at_times {
            let newcomers = at_times.iter().filter(|(other, _)| other > start).count() as u128;
            let took = u128::from(ends[&flow.id] - start);
            prop_assert!(took <= slack(flow) + batch * (1 + newcomers), "{}", flow.id);
        }
    }

    /// Flows that enter by two links of a shared uplink follow the rates too, in any order of
    /// requests for batches.
    #[test]
    fn batches_follow_the_rates_under_an_uplink(
        flows in feasible(),
        asked in prop::collection::vec(0..2u32, 400),
    ) {
        let mut rates = RateAllocator::new(&pair(), Config::default()).unwrap();
        let flows = on_both(flows);
        for flow in &flows {
            let slo = flow.objective.unwrap().slo * 1_000_000;
            let objective = Some(TransferObjective { slo, infer: Duration::ZERO });
            let bytes = Bytes(flow.bytes.0 * 1_000_000);
            rates.begin(Timestamp::ZERO, &RatedFlow { bytes, objective, ..flow.clone() }).unwrap();
        }
        let mut crossed: BTreeMap<FlowId, u64> = BTreeMap::new();
        for link in asked {
            if let Some(batch) = next_batch(&mut rates, LinkId(link)) {
                *crossed.entry(batch.flow).or_default() += batch.bytes.0;
            }
            let all: u64 = crossed.values().sum();
            for flow in &flows {
                let rate = u128::from(rates.rate(flow.id).unwrap().0);
                let share = u64::try_from(u128::from(all) * rate / u128::from(12 * GB)).unwrap();
                let sent = crossed.get(&flow.id).copied().unwrap_or(0);
                prop_assert!(sent <= share + BATCH.0 + MB, "{}: {sent}, {share}", flow.id);
                prop_assert!(sent + BATCH.0 * flows.len() as u64 >= share, "{}: {sent}, {share}", flow.id);
            }
        }
    }

    /// A flow ends within its slack plus a batch for each flow that may be crossing by the other
    /// link.
    #[test]
    fn admitted_flows_are_in_time_under_an_uplink(flows in feasible()) {
        let batch = BytesPerSec(12 * GB).time_for(BATCH).as_nanos();
        let flows = on_both(flows);
        let at_once: Vec<_> = flows.iter().map(|flow| (0, flow.clone())).collect();
        let ends = run(&pair(), TransferSharing::FaasTube, &at_once);
        for flow in &flows {
            let allowed = flow.objective.unwrap().slo.as_nanos() + batch * flows.len().max(2) as u128;
            prop_assert!(u128::from(ends[&flow.id]) <= allowed, "{}: {} of {allowed}", flow.id, ends[&flow.id]);
        }
    }

    /// A batch that is given back leaves no trace, except that its flow is no longer new.
    #[test]
    fn a_batch_given_back_was_never_given_out(
        flows in feasible(),
        steps in prop::collection::vec((0..2u32, 0..3usize), 1..60),
    ) {
        let mut rates = RateAllocator::new(&pair(), Config::default()).unwrap();
        for flow in on_both(flows) {
            rates.begin(Timestamp::ZERO, &flow).unwrap();
        }
        let books = |rates: &RateAllocator| -> Vec<_> {
            rates.flows.values().map(|state| (state.granted, state.lead.clone())).collect()
        };
        let mut out = Vec::new();
        for (link, what) in steps {
            let before = books(&rates);
            let Some(batch) = next_batch(&mut rates, LinkId(link)) else { continue };
            match what {
                0 => {
                    rates.give_back(batch).unwrap();
                    prop_assert_eq!(books(&rates), before);
                }
                1 => out.push(batch),
                _ => {}
            }
            prop_assert_eq!(rates.flows.values().flat_map(|state| &state.lead).sum::<i128>(), 0);
        }
        for batch in out {
            rates.give_back(batch).unwrap();
            prop_assert_eq!(rates.flows.values().flat_map(|state| &state.lead).sum::<i128>(), 0);
        }
    }

    #[test]
    fn the_tightest_new_flow_waits_for_one_batch_at_most(flows in feasible(), before in 0..40usize) {
        let mut rates = RateAllocator::new(&one_link(), Config::default()).unwrap();
        for flow in &flows {
            rates.begin(Timestamp::ZERO, flow).unwrap();
        }
        for _ in 0..before {
            next_batch(&mut rates, LinkId(0));
        }
        let objective = Some(TransferObjective { slo: Duration::from_micros(200), infer: Duration::ZERO });
        let links = vec![LinkId(0)];
        let newcomer = RatedFlow { id: FlowId(100), bytes: Bytes(MB), links, objective };
        rates.begin(Timestamp::ZERO, &newcomer).unwrap();
        prop_assert_eq!(next_batch(&mut rates, LinkId(0)).unwrap().flow, newcomer.id);
    }
}
