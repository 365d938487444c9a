//! Simulates whole flows on links that carry one batch after the other, and a workflow with a tight
//! deadline.

use super::tests::{GB, MB, best_effort, gb, machine, next_batch};
use super::*;

/// Returns the speed of the batch that enters by a link. Links and uplinks are shared equally by
/// the batches that cross them.
fn speed(topology: &Topology, out: &[Option<(u128, RatedBatch)>], link: usize) -> u128 {
    let path = |link: usize| &topology.gpus[link].host_path;
    let crossing =
        |on: &LinkId| (0..out.len()).filter(|&at| out[at].is_some() && path(at).contains(on)).count();
    let share = |on: &LinkId| u128::from(topology.links[on.0 as usize].rate.0) / crossing(on).max(1) as u128;
    path(link).iter().map(share).min().unwrap()
}

/// Returns the time at which each flow has crossed, on links that carry a batch at a time. A flow
/// is measured whenever a batch of it ends.
pub(super) fn run(
    topology: &Topology,
    sharing: TransferSharing,
    flows: &[(u64, RatedFlow)],
) -> BTreeMap<FlowId, u64> {
    let mut rates = RateAllocator::new(topology, Config { sharing }).unwrap();
    // The batch that crosses by each link, with its remaining bytes times nanoseconds per second,
    // because rates are per second.
    let mut out: Vec<Option<(u128, RatedBatch)>> = topology.gpus.iter().map(|_| None).collect();
    let mut before = 0;
    let mut left: BTreeMap<_, _> = flows.iter().map(|(_, flow)| (flow.id, flow.bytes.0)).collect();
    let mut seen: BTreeMap<_, _> = flows.iter().map(|(at, flow)| (flow.id, *at)).collect();
    let mut ends = BTreeMap::new();
    let mut coming: Vec<_> = flows.iter().collect();
    coming.sort_by_key(|(at, flow)| (std::cmp::Reverse(*at), std::cmp::Reverse(flow.id)));
    loop {
        let speeds: Vec<_> = (0..out.len()).map(|link| speed(topology, &out, link)).collect();
        let ends_in = |(crossing, speed): (&Option<(u128, RatedBatch)>, &u128)| {
            crossing.as_ref().map(|(left, _)| before + u64::try_from(left.div_ceil(*speed)).unwrap())
        };
        let ended = out.iter().zip(&speeds).filter_map(ends_in).min();
        let Some(now) = coming.last().map(|(at, _)| *at).into_iter().chain(ended).min() else { break };
        let took = u128::from(now - std::mem::replace(&mut before, now));
        for (link, speed) in out.iter_mut().zip(speeds) {
            link.iter_mut().for_each(|(left, _)| *left = left.saturating_sub(speed * took));
            let Some((_, batch)) = link.take_if(|(left, _)| *left == 0) else { continue };
            let window = Duration::from_nanos(now - seen.insert(batch.flow, now).unwrap());
            rates.measured(Timestamp(now), batch.flow, batch.bytes, window).unwrap();
            let left = left.get_mut(&batch.flow).unwrap();
            *left -= batch.bytes.0;
            if *left == 0 {
                rates.end(Timestamp(now), batch.flow).unwrap();
                ends.insert(batch.flow, now);
            }
        }
        while let Some((_, flow)) = coming.pop_if(|(at, _)| *at == now) {
            rates.begin(Timestamp(now), flow).unwrap();
        }
        for (link, out) in (0..).map(LinkId).zip(&mut out) {
            if out.is_none() {
                let left = |batch: &RatedBatch| u128::from(batch.bytes.0) * NANOS_PER_SEC;
                *out = next_batch(&mut rates, link).map(|batch| (left(&batch), batch));
            }
        }
    }
    ends
}

/// The shape of H20. Objectives are 1.5 times the time alone, as in §9.2.2; sizes and inference
/// times are ours. All flows use four links of 12 GB/s.
#[test]
fn driving_is_in_time_beside_video_only_when_shared_by_objective() {
    const MS: u64 = 1_000_000;
    let topology = machine(&[12 * GB; 4], &[]);
    let alone = |id: u64, megabytes: u64, infer_ms: u64| {
        let infer = Duration::from_millis(infer_ms);
        let runtime = gb(480).time_for(Bytes(megabytes * MB)) + infer;
        let objective = Some(TransferObjective { slo: runtime + runtime / 2, infer });
        RatedFlow { objective, ..best_effort(id, megabytes, &[0, 1, 2, 3]) }
    };
    let driving = |start: u64| (start, alone(1, 192, 8));
    let video = (2..5).map(|id| (0, alone(id, 480, 80)));
    let beside_video: Vec<_> = video.chain([driving(MS)]).collect();
    let latency = |sharing, flows: &[_]| run(&topology, sharing, flows)[&FlowId(1)] - MS + 8 * MS;
    let slo = u64::try_from(beside_video[3].1.objective.unwrap().slo.as_nanos()).unwrap();
    let native = latency(TransferSharing::Fair, &beside_video);
    let ours = latency(TransferSharing::FaasTube, &beside_video);
    assert!(native > slo && ours <= slo, "objective {slo} ns, native {native} ns, ours {ours} ns");
    assert!(ours * 100 <= native * 80, "native {native} ns, ours {ours} ns");
    for (_, flow) in &beside_video[..3] {
        let slack = flow.objective.unwrap().slack().unwrap().as_nanos();
        assert!(
            u128::from(run(&topology, TransferSharing::FaasTube, &beside_video)[&flow.id]) <= slack,
            "{}",
            flow.id
        );
    }
    // Beside an image, which has ended when the driving flow begins, both sharings are the same.
    let beside_image = [(0, alone(2, 30, 5)), driving(MS)];
    assert_eq!(
        latency(TransferSharing::Fair, &beside_image),
        latency(TransferSharing::FaasTube, &beside_image)
    );
}
