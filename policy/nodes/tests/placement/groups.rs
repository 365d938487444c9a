//! Placement of a workflow's functions on one node (D19): in tables, and compared with every
//! possible assignment.

use millrace_nodes::placement::{DataFlow, DesiredReplicas, FunctionPlacement, GpuLoad, PlacementPhase};
use millrace_types::{Bytes, NodeState};
use proptest::prelude::*;

use crate::world::{World, function, key, name, node, place, unplace};

fn flow(from: &str, to: &str, bytes: u64) -> DataFlow {
    DataFlow { from: key(from), to: key(to), bytes: Bytes(bytes), is_critical: true }
}

fn chain(names: &[&str]) -> Vec<DataFlow> {
    names.windows(2).map(|ends| flow(ends[0], ends[1], 1 << 20)).collect()
}

fn nodes(world: &World) -> Vec<Vec<String>> {
    world.view.nodes.iter().map(|it| world.on(it.name.as_str())).collect()
}

/// Returns a chain of three functions of 10 MiB, and three nodes of 100 MiB.
fn three(replicas: u32) -> World {
    let functions = ["f", "g", "h"].map(|it| function(it, replicas, 10));
    let mut world = World::new(functions.to_vec(), ["a", "b", "c"].map(|it| node(it, 100)).to_vec());
    world.view.flows = chain(&["f", "g", "h"]);
    world
}

#[test]
fn a_workflows_functions_are_placed_on_one_node_and_others_are_spread() {
    let mut world = three(1);
    world.settle();
    assert_eq!(nodes(&world), [vec!["f", "g", "h"], vec![], vec![]]);
    world.view.functions.push(function("alone", 1, 10));
    assert_eq!(world.settle(), [place("alone", "b")]);
    let mut spread = three(1);
    spread.view.flows.clear();
    spread.settle();
    assert_eq!(nodes(&spread), [["f"], ["g"], ["h"]]);
}

#[test]
fn more_copies_follow_their_group_and_removals_keep_a_group_together() {
    let mut world = three(2);
    world.settle();
    assert_eq!(nodes(&world), [vec!["f", "g", "h"], vec!["f", "g", "h"], vec![]]);
    world.view.functions.iter_mut().for_each(|it| it.replicas = 1);
    assert_eq!(world.settle().len(), 3);
    let left: Vec<_> = nodes(&world).into_iter().filter(|on| !on.is_empty()).collect();
    assert_eq!(left, [["f", "g", "h"]], "all three stay on one node");
}

#[test]
fn functions_of_a_lost_or_draining_node_are_placed_together_again() {
    for state in [NodeState::Lost, NodeState::Draining] {
        let mut world = three(1);
        world.settle();
        world.node_mut("a").state = state;
        world.settle();
        assert_eq!(nodes(&world), [vec![], vec!["f", "g", "h"], vec![]], "{state:?}");
    }
}

#[test]
fn a_workflow_that_comes_later_moves_nothing_that_ran() {
    let mut world = three(1);
    let flows = std::mem::take(&mut world.view.flows);
    world.settle();
    world.view.flows = flows;
    assert_eq!(world.settle(), []);
    // A copy that has to be placed anyway is placed with its group.
    world.node_mut("c").state = NodeState::Lost;
    assert_eq!(world.settle(), [place("h", "b"), unplace("h", "c")]);
}

#[test]
fn functions_that_never_ran_move_to_their_group() {
    let mut world = three(1);
    world.view.functions.iter_mut().for_each(|it| it.ran = false);
    let flows = std::mem::take(&mut world.view.flows);
    world.settle();
    world.view.flows = flows;
    assert_eq!(
        world.round().steps,
        [place("f", "b"), place("h", "b")],
        "both move to the node with most of the traffic"
    );
    world.settle();
    assert_eq!(nodes(&world), [vec![], vec!["f", "g", "h"], vec![]]);
}

#[test]
fn a_group_that_fits_no_node_is_split_where_traffic_is_least() {
    let functions = ["f", "g", "h", "i"].map(|it| function(it, 1, 30));
    let mut world = World::new(functions.to_vec(), ["a", "b"].map(|it| node(it, 70)).to_vec());
    world.view.flows = vec![flow("f", "g", 5), flow("g", "h", 3), flow("h", "i", 4)];
    world.settle();
    assert_eq!(nodes(&world), [["f", "g"], ["h", "i"]]);
}

#[test]
fn equal_flows_are_grouped_along_the_critical_path_first() {
    let functions = ["f", "g", "h"].map(|it| function(it, 1, 30));
    let mut world = World::new(functions.to_vec(), ["a", "b"].map(|it| node(it, 70)).to_vec());
    world.view.flows = vec![DataFlow { is_critical: false, ..flow("f", "g", 5) }, flow("g", "h", 5)];
    world.settle();
    assert_eq!(nodes(&world), [vec!["g", "h"], vec!["f"]]);
}

#[test]
fn a_function_does_not_join_a_group_without_gpu_time_left() {
    let busy = |it: &str, load| DesiredReplicas { load: GpuLoad(load), ..function(it, 1, 10) };
    // The limit of 2 GPUs is a load of 1,500 thousandths.
    let functions = vec![busy("f", 900), busy("g", 500), busy("h", 400)];
    let mut world = World::new(functions, ["a", "b"].map(|it| node(it, 100)).to_vec());
    world.view.flows = vec![flow("f", "g", 9), flow("g", "h", 5)];
    world.settle();
    assert_eq!(nodes(&world), [vec!["f", "g"], vec!["h"]]);
    assert_eq!(world.settle(), []);
}

#[test]
fn a_grouped_copy_moves_only_from_a_node_without_gpu_time() {
    let mut world = three(1);
    world.settle();
    world.node_mut("a").host = Bytes::mib(40);
    assert_eq!(world.settle(), [], "a fuller node is no reason");
    // The load is now 1,800 of at most 1,500 thousandths.
    world.view.functions.iter_mut().for_each(|it| it.load = GpuLoad(600));
    assert_eq!(world.settle(), [place("h", "b"), unplace("h", "a")]);
}

#[test]
fn a_group_on_the_fullest_node_does_not_stop_other_moves() {
    let group = ["f", "g", "h"].map(|it| function(it, 1, 30));
    let others = ["i0", "i1", "i2", "i3", "i4", "i5", "i6", "i7"].map(|it| function(it, 1, 10));
    let on = |node: &'static str| move |it: &DesiredReplicas| (it.key.clone(), name(node));
    let placed = group.iter().map(on("a")).chain(others.iter().map(on("b")));
    let ready = |(function, node)| FunctionPlacement { function, node, phase: PlacementPhase::Ready };
    let placements = placed.map(ready).collect();
    let nodes_of_100 = ["a", "b", "c"].map(|it| node(it, 100)).to_vec();
    let mut world = World::new([group.to_vec(), others.to_vec()].concat(), nodes_of_100);
    world.view.placements = placements;
    world.view.flows = chain(&["f", "g", "h"]);
    world.settle();
    assert_eq!(
        nodes(&world),
        [vec!["f", "g", "h"], vec!["i3", "i4", "i5", "i6", "i7"], vec!["i0", "i1", "i2"]]
    );
}

/// Name, functions with their MiB, and flows in KiB between function indexes.
type Workflow = (&'static str, Vec<(&'static str, u64)>, Vec<(usize, usize, u64)>);

/// Returns the workflows of `examples/workflows`, with the tensor sizes of their pictures.
fn workflows() -> Vec<Workflow> {
    vec![
        (
            "traffic-monitor",
            vec![("decode", 1), ("pre", 1), ("detect", 40), ("post", 1), ("people", 45), ("vehicles", 45)],
            vec![(0, 1, 1200), (1, 2, 4800), (1, 3, 4800), (2, 3, 100), (3, 4, 300), (3, 5, 200)],
        ),
        (
            "auto-driving",
            vec![("decode", 1), ("denoise", 2), ("segment", 45), ("blur", 1)],
            vec![(0, 1, 1200), (1, 2, 4800), (1, 3, 4800), (2, 3, 1600)],
        ),
        (
            "video-editing",
            vec![("decode", 1), ("pre", 1), ("faces", 30), ("recognise", 45)],
            vec![(0, 1, 2400), (1, 2, 9600), (2, 3, 600)],
        ),
        (
            "image-editing",
            vec![("decode", 1), ("denoise", 2), ("resnet", 100), ("alexnet", 230), ("vote", 1)],
            vec![(0, 1, 150), (1, 2, 600), (1, 3, 600), (2, 4, 4), (3, 4, 4)],
        ),
        (
            "social-media",
            vec![("decode", 1), ("pre", 1), ("read", 30), ("judge", 420)],
            vec![(0, 1, 1200), (1, 2, 400), (2, 3, 2)],
        ),
        ("yelp", vec![("filter", 420), ("reply", 420)], vec![(0, 1, 300)]),
    ]
}

fn passed(at: impl Fn(usize) -> usize, edges: &[(usize, usize, u64)]) -> u64 {
    edges.iter().filter(|&&(from, to, _)| at(from) != at(to)).map(|(.., kib)| kib).sum()
}

/// Returns the least traffic between nodes of this size, over all assignments of functions to
/// nodes.
fn least(functions: &[(&str, u64)], edges: &[(usize, usize, u64)], nodes: usize, mib: u64) -> Option<u64> {
    let ways = 0..nodes.pow(functions.len() as u32);
    let at = |way: usize, function: usize| way / nodes.pow(function as u32) % nodes;
    let fits = |way: usize| {
        let mut used = vec![0; nodes];
        functions.iter().enumerate().for_each(|(number, (_, mib))| used[at(way, number)] += mib);
        used.iter().all(|&used| used <= mib)
    };
    ways.filter(|&way| fits(way)).map(|way| passed(|function| at(way, function), edges)).min()
}

/// Returns the traffic between nodes that the planner causes for a workflow that is known before
/// any function is placed. Critical paths are derived from the edges.
fn planned(functions: &[(&str, u64)], edges: &[(usize, usize, u64)], count: usize, mib: u64) -> u64 {
    let longest = |from: usize| {
        fn way(edges: &[(usize, usize, u64)], from: usize) -> u64 {
            let onward = edges.iter().filter(|edge| edge.0 == from);
            onward.map(|&(_, to, kib)| kib + way(edges, to)).max().unwrap_or(0)
        }
        way(edges, from)
    };
    let reached = |to: usize| {
        fn way(edges: &[(usize, usize, u64)], to: usize) -> u64 {
            let before = edges.iter().filter(|edge| edge.1 == to);
            before.map(|&(from, _, kib)| kib + way(edges, from)).max().unwrap_or(0)
        }
        way(edges, to)
    };
    let whole = (0..functions.len()).map(longest).max().unwrap_or(0);
    let placed = functions.iter().map(|(name, mib)| function(name, 1, *mib)).collect();
    let nodes = (0..count).map(|number| node(&format!("n{number}"), mib)).collect();
    let mut world = World::new(placed, nodes);
    let flows = edges.iter().map(|&(from, to, kib)| DataFlow {
        is_critical: reached(from) + kib + longest(to) == whole,
        ..flow(functions[from].0, functions[to].0, kib << 10)
    });
    world.view.flows = flows.collect();
    world.settle();
    let at = |function: usize| {
        let placed = world.view.placements.iter().find(|it| it.function == key(functions[function].0));
        let node = placed.unwrap_or_else(|| panic!("{} is not placed", functions[function].0)).node.clone();
        let number = (0..count).find(|number| node == name(&format!("n{number}")));
        number.unwrap_or_else(|| panic!("{node} is not a node of the cluster"))
    };
    passed(at, edges)
}

#[test]
fn the_example_workflows_pass_the_least_possible_bytes_between_nodes() {
    for (workflow, functions, edges) in workflows() {
        let whole: u64 = functions.iter().map(|(_, mib)| mib).sum();
        let largest = functions.iter().map(|(_, mib)| *mib).max().unwrap();
        for count in 1..=3 {
            assert_eq!(planned(&functions, &edges, count, whole), 0, "{workflow} on {count}");
            // Nodes with too little room for the whole workflow.
            for percent in [50, 60, 70, 80, 90] {
                let mib = (whole * percent / 100).max(largest + 2);
                let Some(least) = least(&functions, &edges, count, mib) else { continue };
                assert_eq!(
                    planned(&functions, &edges, count, mib),
                    least,
                    "{workflow} on {count} nodes of {mib} MiB"
                );
            }
        }
    }
}

proptest! {
    /// A whole workflow is placed on one node, if a node has enough room.
    #[test]
    fn a_workflow_that_fits_one_node_is_placed_on_one_node(
        mib in prop::collection::vec(1..40u64, 2..9),
        edges in prop::collection::vec((0..9usize, 0..9usize, 1..1000u64), 0..16),
        count in 1..4usize,
    ) {
        let names = ["a", "b", "c", "d", "e", "f", "g", "h", "i"];
        let functions: Vec<_> = names.into_iter().zip(mib).collect();
        let known = |edge: &(usize, usize, u64)| edge.1 < functions.len() && edge.0 < edge.1;
        let edges: Vec<_> = edges.into_iter().filter(known).collect();
        let whole = functions.iter().map(|(_, mib)| mib).sum();
        prop_assert_eq!(planned(&functions, &edges, count, whole), 0);
    }
}
