//! Tests of a single rule each, in small clusters.

use millrace_nodes::placement::{
    FUNCTIONS_PER_NODE_MAX, FunctionPlacement, GpuLoad, PlacementChange, PlacementPhase, PlacementPlan,
    PlanLimits, Unplaced, UnplacedReason,
};
use millrace_types::{Bytes, NodeState};

use crate::world::{World, function, key, model, name, node, place, unplace};

/// Returns two nodes, with one function on the first.
fn one_of_two() -> World {
    let mut world = World::new(vec![function("f", 1, 10)], vec![node("a", 100), node("b", 100)]);
    assert_eq!(world.settle(), [place("f", "a")]);
    world
}

#[test]
fn a_cluster_with_nothing_to_do_has_no_steps() {
    assert_eq!(World::default().plan(), Default::default());
    let mut world = one_of_two();
    assert_eq!(world.settle(), []);
    assert_eq!(world.plan(), Default::default());
}

#[test]
fn copies_are_placed_on_distinct_nodes_only() {
    let mut world = World::new(vec![function("f", 3, 10)], vec![node("a", 100), node("b", 100)]);
    assert_eq!(world.settle(), [place("f", "a"), place("f", "b")]);
    let why = UnplacedReason::TooFewNodes { nodes: 2 };
    assert_eq!(world.plan().unplaced, [Unplaced { function: key("f"), copies: 2, missing: 1, why }]);
}

#[test]
fn each_shortage_is_reported_with_a_remedy() {
    let large = |gib| {
        let mut large = function("f", 1, 10);
        large.gpu = Bytes::gib(gib);
        large
    };
    let cordoned = || {
        let mut cordoned = node("a", 100);
        cordoned.state = NodeState::Cordoned;
        cordoned
    };
    let check = |wanted, nodes, why: UnplacedReason| {
        let mut world = World::new(vec![wanted], nodes);
        assert_eq!(world.settle(), [], "{why}");
        assert_eq!(world.plan().unplaced, [Unplaced { function: key("f"), copies: 0, missing: 1, why }]);
    };
    check(function("f", 1, 10), vec![], UnplacedReason::NoNode);
    check(function("f", 1, 10), vec![cordoned()], UnplacedReason::NoNode);
    let needs = Bytes::gib(20);
    let largest = Bytes::gib(16);
    check(large(20), vec![node("a", 100)], UnplacedReason::GpuMemory { needs, largest });
    let needs = Bytes::mib(200);
    let free = Bytes::mib(100);
    check(
        function("f", 1, 200),
        vec![node("a", 60), node("b", 100)],
        UnplacedReason::HostMemory { needs, free },
    );
}

#[test]
fn a_node_with_the_most_functions_takes_none_more() {
    let named = |number: usize| format!("f{number:05}");
    // The functions share a model, so that memory is no bound.
    let sharing = |number| {
        let mut sharing = function(&named(number), 1, 0);
        sharing.models = vec![model("shared", 10)];
        sharing
    };
    let mut world = World::new((0..=FUNCTIONS_PER_NODE_MAX).map(sharing).collect(), vec![node("a", 100)]);
    let placed = |number| FunctionPlacement {
        function: key(&named(number)),
        node: name("a"),
        phase: PlacementPhase::Ready,
    };
    world.view.placements = (0..FUNCTIONS_PER_NODE_MAX).map(placed).collect();
    let last = key(&named(FUNCTIONS_PER_NODE_MAX));
    let why = UnplacedReason::NodesFull { nodes: 1, max: FUNCTIONS_PER_NODE_MAX };
    let unplaced = Unplaced { function: last.clone(), copies: 0, missing: 1, why };
    assert_eq!(world.plan(), PlacementPlan { steps: vec![], unplaced: vec![unplaced], more: false });
    world.view.nodes.push(node("b", 100));
    assert_eq!(world.plan().steps, [PlacementChange::Place { function: last, node: name("b") }]);
    world.view.nodes.pop();
    world.view.placements.pop();
    let steps = world.plan().steps;
    assert!(matches!(steps.as_slice(), [PlacementChange::Place { .. }]), "{steps:?}");
}

#[test]
fn every_function_has_one_copy_before_any_has_two() {
    let functions = vec![function("f", 2, 50), function("g", 2, 50), function("h", 2, 50)];
    let mut world = World::new(functions, vec![node("a", 100), node("b", 100)]);
    world.settle();
    let copies: Vec<_> = world.serving().into_values().collect();
    assert_eq!(copies, [2, 1, 1]);
    let short: Vec<_> = world.plan().unplaced.into_iter().map(|it| (it.function, it.missing)).collect();
    assert_eq!(short, [(key("g"), 1), (key("h"), 1)]);
}

#[test]
fn a_spare_copy_makes_room_for_a_function_without_any() {
    let mut world = World::new(vec![function("f", 2, 60)], vec![node("a", 100), node("b", 100)]);
    world.settle();
    world.view.functions.push(function("g", 1, 60));
    let steps = world.settle();
    assert_eq!(steps.len(), 2, "{steps:?}");
    assert_eq!(world.serving().into_values().collect::<Vec<_>>(), [1, 1]);
}

#[test]
fn a_model_that_functions_share_counts_once() {
    let functions = ["f", "g", "h"].map(|text| {
        let mut sharing = function(text, 1, 90);
        sharing.models = vec![model("shared", 90)];
        sharing
    });
    let mut world = World::new(functions.to_vec(), vec![node("a", 100)]);
    world.settle();
    assert_eq!(world.on("a"), ["f", "g", "h"]);
    assert_eq!(world.used(&name("a")), Bytes::mib(90));
    assert_eq!(world.plan().unplaced, []);
}

#[test]
fn a_drain_moves_first_and_lets_go_once_the_new_copy_is_ready() {
    let mut world = one_of_two();
    world.node_mut("a").state = NodeState::Draining;
    assert_eq!(world.round().steps, [place("f", "b")]);
    assert_eq!(world.round().steps, [], "the new copy is on its way");
    world.prepare();
    assert_eq!(world.round().steps, [unplace("f", "a")]);
    assert_eq!(world.settle(), []);
    assert_eq!((world.on("a"), world.on("b")), (vec![], vec!["f".to_owned()]));
}

#[test]
fn a_function_with_state_is_never_served_by_two_copies() {
    let mut world = one_of_two();
    world.view.functions[0].keeps_state = true;
    world.node_mut("a").state = NodeState::Draining;
    assert_eq!(world.round().steps, [place("f", "b"), unplace("f", "a")]);
    assert_eq!(world.settle(), []);
    assert_eq!((world.on("a"), world.on("b")), (vec![], vec!["f".to_owned()]));
    world.node_mut("b").state = NodeState::Draining;
    assert_eq!(world.settle(), [], "the copy stays until another node can take it");
    assert_eq!(world.on("b"), ["f"]);
}

#[test]
fn a_function_with_state_is_not_moved_for_balance() {
    let names = ["f", "g", "h", "i"];
    let functions = || names.map(|name| function(name, 1, 20)).to_vec();
    let mut world = World::new(functions(), vec![node("a", 100)]);
    world.settle();
    world.view.functions.iter_mut().for_each(|function| function.keeps_state = true);
    world.view.nodes.push(node("b", 100));
    assert_eq!(world.settle(), []);
    world.view.functions.iter_mut().for_each(|function| function.keeps_state = false);
    assert!(!world.settle().is_empty());
}

#[test]
fn a_drain_without_another_node_keeps_the_last_copy_and_reports_why() {
    let mut world = World::new(vec![function("f", 1, 10)], vec![node("a", 100)]);
    world.settle();
    world.node_mut("a").state = NodeState::Draining;
    assert_eq!(world.settle(), []);
    assert_eq!(world.on("a"), ["f"]);
    let unplaced = Unplaced { function: key("f"), copies: 0, missing: 1, why: UnplacedReason::NoNode };
    assert_eq!(world.plan().unplaced, [unplaced]);
}

#[test]
fn a_drain_ends_with_fewer_copies_if_no_node_takes_more() {
    let mut world = World::new(vec![function("f", 2, 10)], vec![node("a", 100), node("b", 100)]);
    world.settle();
    world.node_mut("a").state = NodeState::Draining;
    assert_eq!(world.settle(), [unplace("f", "a")]);
    assert_eq!(world.on("b"), ["f"]);
}

#[test]
fn a_cordoned_node_keeps_its_copies() {
    let mut world = one_of_two();
    world.node_mut("a").state = NodeState::Cordoned;
    world.view.functions.push(function("g", 2, 10));
    assert_eq!(world.settle(), [place("g", "b")]);
    assert_eq!(world.on("a"), ["f"]);
}

#[test]
fn copies_of_a_lost_node_are_placed_again() {
    let mut world = one_of_two();
    world.node_mut("a").state = NodeState::Lost;
    assert_eq!(world.settle(), [place("f", "b"), unplace("f", "a")]);
}

#[test]
fn the_copy_of_a_node_that_returns_in_time_counts_again() {
    let mut world = one_of_two();
    world.node_mut("a").state = NodeState::Lost;
    assert_eq!(world.round().steps, [place("f", "b")]);
    world.node_mut("a").state = NodeState::Schedulable;
    let steps = world.settle();
    assert_eq!(steps.len(), 1, "one of the two copies is too many: {steps:?}");
    assert_eq!(world.serving()[&key("f")], 1);
}

#[test]
fn a_function_that_nodes_cannot_prepare_is_tried_on_three_nodes_only() {
    let nodes: Vec<_> = ["a", "b", "c", "d", "e"].iter().map(|text| node(text, 100)).collect();
    let mut world = World::new(vec![function("f", 1, 10)], nodes);
    world.failing = world.view.nodes.iter().map(|node| (key("f"), node.name.clone())).collect();
    let steps = world.settle();
    assert_eq!(steps, [place("f", "a"), place("f", "b"), place("f", "c")]);
    let why = UnplacedReason::Failing { nodes: 3 };
    assert_eq!(world.plan().unplaced, [Unplaced { function: key("f"), copies: 0, missing: 1, why }]);
}

#[test]
fn a_failure_is_remembered_until_the_node_gets_better() {
    let mut world = one_of_two();
    world.view.functions.push(function("g", 1, 10));
    world.failing.insert((key("g"), name("b")));
    assert_eq!(world.settle(), [place("g", "b"), place("g", "a")]);
    world.view.nodes[1].host = Bytes::gib(1);
    assert_eq!(world.settle(), [], "the emptier node is not tried again");
    world.failing.clear();
    assert_eq!(world.settle(), [unplace("g", "a")]);
}

#[test]
fn a_function_with_state_stays_although_a_failed_node_recovers() {
    let mut world = one_of_two();
    world.view.functions.push(function("g", 1, 10));
    world.view.functions[1].keeps_state = true;
    world.failing.insert((key("g"), name("b")));
    assert_eq!(world.settle(), [place("g", "b"), place("g", "a"), unplace("g", "b")]);
    world.failing.clear();
    assert_eq!(world.settle(), []);
    assert_eq!(world.on("a"), ["f", "g"]);
}

#[test]
fn unwanted_placements_are_removed() {
    let mut world = one_of_two();
    world.view.functions[0].enabled = false;
    assert_eq!(world.settle(), [unplace("f", "a")]);
    let unknown = |function: &str, node: &str| FunctionPlacement {
        function: key(function),
        node: name(node),
        phase: PlacementPhase::Ready,
    };
    world.view.placements = vec![unknown("gone", "a"), unknown("f", "never")];
    assert_eq!(world.settle(), [unplace("f", "never"), unplace("gone", "a")]);
}

#[test]
fn a_lower_replica_count_removes_the_copy_on_the_fullest_node() {
    let mut world = World::new(vec![function("f", 2, 10)], vec![node("a", 100), node("b", 100)]);
    world.settle();
    world.view.functions.push(function("g", 1, 10));
    assert_eq!(world.settle(), [place("g", "a")]);
    world.view.functions[0].replicas = 1;
    assert_eq!(world.settle(), [unplace("f", "a")]);
}

#[test]
fn an_overfull_node_moves_only_as_much_as_needed() {
    let functions = vec![function("f", 1, 60), function("g", 1, 30)];
    let mut world = World::new(functions, vec![node("a", 100)]);
    world.settle();
    world.node_mut("a").host = Bytes::mib(80);
    world.view.nodes.push(node("b", 100));
    assert_eq!(world.settle(), [place("g", "b"), unplace("g", "a")]);
}

#[test]
fn a_tenants_functions_and_busy_ones_are_spread() {
    let check = |functions: Vec<_>, expected: [&[&str]; 2]| {
        let mut world = World::new(functions, vec![node("a", 1000), node("b", 1000)]);
        world.settle();
        assert_eq!([world.on("a"), world.on("b")], expected.map(|on| on.to_vec()));
    };
    let tenants = ["x/f", "x/g", "y/h", "y/i"].map(|text| function(text, 1, 10));
    check(tenants.to_vec(), [&["f", "h"], &["g", "i"]]);
    let mut busy = ["f", "g", "h", "i"].map(|text| function(text, 1, 10));
    let one_gpu = GpuLoad(1000);
    busy[0].load = one_gpu;
    busy[1].load = one_gpu;
    check(busy.to_vec(), [&["f", "h"], &["g", "i"]]);
}

#[test]
fn a_node_that_joins_takes_its_share_and_nothing_else_moves() {
    let functions: Vec<_> = (0..20).map(|number| function(&format!("f{number:02}"), 1, 10)).collect();
    let mut world = World::new(functions, vec![node("a", 110), node("b", 110)]);
    world.settle();
    assert_eq!([world.on("a").len(), world.on("b").len()], [10, 10]);
    world.view.nodes.push(node("c", 110));
    let steps = world.settle();
    let elsewhere =
        |step: &PlacementChange| matches!(step, PlacementChange::Place { node, .. } if *node != name("c"));
    assert!(!steps.iter().any(elsewhere), "{steps:?}");
    let moved = world.on("c").len();
    assert!((4..=7).contains(&moved), "{moved} of 20 moved");
    assert_eq!(steps.len(), 2 * moved, "each moved once");
}

#[test]
fn plans_are_bounded_and_report_that_steps_are_left() {
    let functions: Vec<_> = (0..5).map(|number| function(&format!("f{number}"), 1, 10)).collect();
    let mut world = World::new(functions, vec![node("a", 100)]);
    world.limits = PlanLimits { steps_max: 2 };
    let plan = world.round();
    assert_eq!((plan.steps.len(), plan.more), (2, true));
    assert_eq!(world.settle().len(), 3);
    assert_eq!(world.on("a").len(), 5);
}
