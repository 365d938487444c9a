//! Random clusters with random events.

use millrace_nodes::placement::{
    DataFlow, DesiredReplicas, GpuLoad, PlacementNode, PlanLimits, Unplaced, UnplacedReason, plan,
};
use millrace_types::{Bytes, NodeName, NodeState};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::world::{World, function, key, model, node};

#[derive(Debug, Clone)]
enum Event {
    /// A number of plans; the flag says whether nodes prepare placements in between.
    Rounds(usize, bool),
    State(Index, NodeState),
    Join(PlacementNode),
    Host(Index, u64),
    Apply(DesiredReplicas),
    Delete(Index),
    Disable(Index),
    Replicas(Index, u32),
    Load(Index, u64),
    /// Two functions start to pass this many bytes.
    Pass(Index, Index, u64, bool),
    /// A flow ends, because its workflow is deleted.
    Part(Index),
}

fn any_node() -> impl Strategy<Value = PlacementNode> {
    (0..8u8, 50..400u64, 1..4u32, prop::bool::weighted(0.2)).prop_map(|(number, mib, gpus, small)| {
        let mut any = node(&format!("n{number}"), mib);
        any.gpus = gpus;
        any.gpu = if small { Bytes::mib(60) } else { any.gpu };
        any
    })
}

fn any_function() -> impl Strategy<Value = DesiredReplicas> {
    // Few distinct models, so that functions share some.
    let models = prop::collection::btree_set(0..14u64, 1..3);
    let any = (0..3u8, 0..16u8, 0..4u32, models, 0..3000u64, any::<bool>(), prop::bool::weighted(0.2));
    any.prop_map(|(tenant, number, replicas, models, load, ran, keeps_state)| {
        let mut any = function(&format!("t{tenant}/f{number}"), replicas, 0);
        let sizes = |number: u64| 10 + number * 37 % 90;
        any.models = models.iter().map(|&number| model(&format!("m{number}"), sizes(number))).collect();
        any.gpu = models.iter().map(|&number| Bytes::mib(sizes(number))).max().unwrap_or_default();
        any.load = GpuLoad(load);
        any.ran = ran;
        any.keeps_state = keeps_state;
        any
    })
}

fn any_event() -> impl Strategy<Value = Event> {
    let state = prop_oneof![
        3 => Just(NodeState::Schedulable),
        1 => Just(NodeState::Cordoned),
        2 => Just(NodeState::Draining),
        2 => Just(NodeState::Lost),
    ];
    prop_oneof![
        8 => (0..4usize, any::<bool>()).prop_map(|(rounds, prepared)| Event::Rounds(rounds, prepared)),
        4 => (any::<Index>(), state).prop_map(|(which, state)| Event::State(which, state)),
        2 => any_node().prop_map(Event::Join),
        1 => (any::<Index>(), 50..400u64).prop_map(|(which, mib)| Event::Host(which, mib)),
        6 => any_function().prop_map(Event::Apply),
        1 => any::<Index>().prop_map(Event::Delete),
        1 => any::<Index>().prop_map(Event::Disable),
        2 => (any::<Index>(), 0..5u32).prop_map(|(which, replicas)| Event::Replicas(which, replicas)),
        1 => (any::<Index>(), 0..3000u64).prop_map(|(which, load)| Event::Load(which, load)),
        6 => (any::<Index>(), any::<Index>(), 1..100u64, any::<bool>())
            .prop_map(|(from, to, bytes, critical)| Event::Pass(from, to, bytes, critical)),
        1 => any::<Index>().prop_map(Event::Part),
    ]
}

fn happen(world: &mut World, event: Event) {
    let view = &mut world.view;
    match event {
        Event::Rounds(rounds, prepared) => {
            for _ in 0..rounds {
                world.round();
                if prepared {
                    world.prepare();
                }
            }
        }
        Event::Join(node) => {
            if view.nodes.iter().all(|it| it.name != node.name) {
                view.nodes.push(node);
            }
        }
        Event::Apply(function) => {
            view.functions.retain(|it| it.key != function.key);
            view.functions.push(function);
        }
        Event::State(which, state) if !view.nodes.is_empty() => which.get_mut(&mut view.nodes).state = state,
        Event::Host(which, mib) if !view.nodes.is_empty() => {
            which.get_mut(&mut view.nodes).host = Bytes::mib(mib);
        }
        _ if view.functions.is_empty() => {}
        Event::Delete(which) => drop(view.functions.remove(which.index(view.functions.len()))),
        Event::Disable(which) => which.get_mut(&mut view.functions).enabled ^= true,
        Event::Replicas(which, replicas) => which.get_mut(&mut view.functions).replicas = replicas,
        Event::Load(which, load) => which.get_mut(&mut view.functions).load = GpuLoad(load),
        Event::Pass(from, to, bytes, is_critical) => {
            let [from, to] = [from, to].map(|which| which.get(&view.functions).key.clone());
            view.flows.push(DataFlow { from, to, bytes: Bytes(bytes), is_critical });
        }
        Event::Part(which) if !view.flows.is_empty() => {
            drop(view.flows.remove(which.index(view.flows.len())));
        }
        Event::State(..) | Event::Host(..) | Event::Part(_) => {}
    }
}

/// Checks that at rest every function has its copies, or is reported as unplaced with a reason.
fn check_rest(world: &World) {
    let plan = world.plan();
    let keeps = |name: &NodeName| {
        let node = world.view.nodes.iter().find(|node| node.name == *name);
        node.is_some_and(|it| matches!(it.state, NodeState::Schedulable | NodeState::Cordoned))
    };
    for function in &world.view.functions {
        let wanted = world.wanted(&function.key);
        let serving = world.serving().get(&function.key).copied().unwrap_or(0);
        let told = plan.unplaced.iter().find(|it| it.function == function.key);
        match told {
            None => assert_eq!(serving, wanted, "{} lacks copies and is not reported", function.key),
            Some(told) => {
                assert!(told.copies < wanted, "{told:?} of {wanted}");
                assert!(serving >= told.copies, "{told:?} and {serving} serve");
            }
        }
        let staying =
            world.view.placements.iter().filter(|it| it.function == function.key && keeps(&it.node)).count();
        let failed = world.failing.iter().filter(|(key, _)| *key == function.key).count();
        // A copy that cannot be replaced is kept.
        assert!(
            told.is_some() || staying <= wanted as usize + failed,
            "{} has {staying} of {wanted}",
            function.key
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// After any events, carrying out plans leads to rest within
    /// [`ROUNDS_MAX`](crate::world::ROUNDS_MAX). The world checks every plan on the way: memory,
    /// one copy per node, the last ready copy.
    #[test]
    fn every_cluster_comes_to_rest(
        events in prop::collection::vec(any_event(), 0..60),
        failing in prop::collection::btree_set((0..3u8, 0..16u8, 0..8u8), 0..20),
        steps_max in prop_oneof![Just(512usize), 1..6usize],
    ) {
        let mut world = World { limits: PlanLimits { steps_max }, ..World::default() };
        world.failing = failing
            .into_iter()
            .map(|(tenant, function, at)| (key(&format!("t{tenant}/f{function}")), node(&format!("n{at}"), 0).name))
            .collect();
        for event in events {
            happen(&mut world, event);
        }
        world.settle();
        check_rest(&world);
    }

    #[test]
    fn plans_do_not_depend_on_the_order_of_the_view(
        events in prop::collection::vec(any_event(), 0..40),
        seed in any::<u64>(),
    ) {
        let mut world = World::default();
        for event in events {
            happen(&mut world, event);
        }
        let mut shuffled = world.view.clone();
        shuffle(&mut shuffled.functions, seed);
        shuffle(&mut shuffled.nodes, seed);
        shuffle(&mut shuffled.placements, seed);
        shuffle(&mut shuffled.flows, seed);
        prop_assert_eq!(plan(&shuffled, &world.limits), world.plan());
    }

    /// With models of one size, no function lacks a copy while another has two.
    #[test]
    fn no_function_has_two_copies_while_another_has_none(
        nodes in prop::collection::vec(50..200u64, 1..6),
        batches in prop::collection::vec(prop::collection::vec(1..5u32, 1..12), 1..4),
    ) {
        let nodes = nodes.into_iter().enumerate().map(|(number, mib)| node(&format!("n{number}"), mib));
        let mut world = World::new(Vec::new(), nodes.collect());
        for batch in batches {
            for replicas in batch {
                let name = format!("f{}", world.view.functions.len());
                world.view.functions.push(function(&name, replicas, 20));
            }
            world.settle();
            let serving = world.serving();
            if serving.len() < world.view.functions.len() {
                prop_assert!(serving.values().all(|&copies| copies == 1), "{:?}", serving);
                let plan = world.plan();
                let homeless = |key| !serving.contains_key(key);
                let told = plan.unplaced.iter().filter(|it| homeless(&it.function));
                let for_memory = |it: &Unplaced| matches!(it.why, UnplacedReason::HostMemory { .. });
                prop_assert!(told.clone().all(for_memory));
                prop_assert_eq!(told.count(), world.view.functions.len() - serving.len());
            }
        }
    }
}

/// Shuffles items by a seed.
fn shuffle<T>(items: &mut [T], mut seed: u64) {
    for last in (1..items.len()).rev() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        items.swap(last, (seed >> 33) as usize % (last + 1));
    }
}
