//! Tests of placement against trying every assignment (D19).

use proptest::prelude::*;

use super::*;

fn edge((a, b, weight): (usize, usize, u32)) -> DataEdge {
    DataEdge { a, b, weight }
}

fn score(topology: &Topology, edges: &[DataEdge], gpus: &[GpuIndex]) -> u128 {
    let rates = matrix::rates(topology).unwrap();
    let rate =
        |edge: &DataEdge| rates[gpus[edge.a].0 as usize * topology.gpus.len() + gpus[edge.b].0 as usize];
    edges.iter().map(|edge| u128::from(edge.weight) * u128::from(rate(edge))).sum()
}

/// Returns the best score of all assignments.
fn best(topology: &Topology, functions: usize, edges: &[DataEdge], free: &[GpuIndex]) -> u128 {
    fn all(
        placed: &mut Vec<GpuIndex>,
        functions: usize,
        free: &[GpuIndex],
        see: &mut dyn FnMut(&[GpuIndex]),
    ) {
        if placed.len() == functions {
            return see(placed);
        }
        for &gpu in free {
            if !placed.contains(&gpu) {
                placed.push(gpu);
                all(placed, functions, free, see);
                placed.pop();
            }
        }
    }
    let mut best = 0;
    all(&mut Vec::new(), functions, free, &mut |gpus| best = best.max(score(topology, edges, gpus)));
    best
}

/// Edges as source, destination and weight.
type Edges = Vec<(usize, usize, u32)>;

/// Returns the GPU functions of Table 1's workflows, and the data that they pass.
fn workflows() -> Vec<(&'static str, usize, Edges)> {
    vec![
        ("traffic: decode, detect, then pedestrians or vehicles", 4, vec![(0, 1, 4), (1, 2, 2), (1, 3, 1)]),
        ("driving: a sequence", 4, vec![(0, 1, 1), (1, 2, 1), (2, 3, 1)]),
        (
            "video: three face detectors into one",
            5,
            vec![(0, 1, 2), (0, 2, 2), (0, 3, 2), (1, 4, 1), (2, 4, 1), (3, 4, 1)],
        ),
        (
            "image: one into several, and together again",
            6,
            vec![(0, 1, 3), (0, 2, 3), (0, 3, 3), (0, 4, 3), (1, 5, 1), (2, 5, 1), (3, 5, 1), (4, 5, 1)],
        ),
        ("social: read text, then judge it if there is any", 3, vec![(0, 1, 2), (1, 2, 1)]),
        ("yelp: two in sequence", 2, vec![(0, 1, 1)]),
    ]
}

#[test]
fn the_workflows_of_table_1_are_placed_optimally() {
    let topology = dgx_v100();
    let busy: [&[u32]; 3] = [&[], &[1], &[1, 3]];
    for (name, functions, edges) in workflows() {
        let edges: Vec<_> = edges.into_iter().map(edge).collect();
        for busy in busy {
            let free: Vec<_> = (0..8).filter(|gpu| !busy.contains(gpu)).map(GpuIndex).collect();
            let placed = super::super::place(&topology, functions, &edges, &free).unwrap();
            assert_eq!(
                score(&topology, &edges, &placed),
                best(&topology, functions, &edges, &free),
                "{name}"
            );
        }
    }
}

#[test]
fn impossible_placements_are_refused() {
    let topology = dgx_v100();
    let free = [GpuIndex(0), GpuIndex(1)];
    let place = |functions, edges: &[DataEdge], free: &[GpuIndex]| {
        super::super::place(&topology, functions, edges, free)
    };
    assert_eq!(place(3, &[], &free), Err(Error::TooFewGpus { functions: 3, free: 2 }));
    assert_eq!(place(2, &[edge((0, 2, 1))], &free), Err(Error::UnknownFunction(2)));
    assert_eq!(place(1, &[], &[GpuIndex(8)]), Err(Error::UnknownGpu(GpuIndex(8))));
    assert_eq!(place(0, &[], &[]), Ok(vec![]));
    assert_eq!(place(2, &[], &free), Ok(free.to_vec()), "equal assignments keep the order of `free`");
}

#[test]
fn the_worst_case_of_eight_functions_is_within_the_limit() {
    // Every function passes data to every other, so hardly any assignment is pruned.
    let weight = |a, b| (a * 3 + b * 5) as u32 % 7 + 1;
    let edges: Vec<_> = (0..8).flat_map(|b| (0..b).map(move |a| edge((a, b, weight(a, b))))).collect();
    let free: Vec<_> = (0..8).map(GpuIndex).collect();
    let topology = dgx_v100();
    let placed = super::super::place(&topology, 8, &edges, &free).unwrap();
    assert_eq!(score(&topology, &edges, &placed), best(&topology, 8, &edges, &free));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_workflow_is_placed_optimally(
        links in prop::collection::vec((0..7u32, 0..7u32, 1..5u64), 0..16),
        functions in 1..6usize,
        edges in prop::collection::vec((0..6usize, 0..6usize, 0..9u32), 0..9),
    ) {
        let topology = machine(7, &links);
        let known = |edge: &(usize, usize, u32)| edge.0.max(edge.1) < functions;
        let edges: Vec<_> = edges.into_iter().filter(known).map(edge).collect();
        let free: Vec<_> = (1..7).map(GpuIndex).collect();
        let placed = super::super::place(&topology, functions, &edges, &free).unwrap();
        prop_assert_eq!(score(&topology, &edges, &placed), best(&topology, functions, &edges, &free));
    }
}
