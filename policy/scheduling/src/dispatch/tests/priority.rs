//! Priorities under every policy.

use super::*;

fn ask(node: &mut Node, key: u64, model: ModelId, level: u64) -> Vec<Action> {
    let key = RequestKey(key);
    let attempts = AttemptRecord::new(3, Idempotence::Yes);
    let priority = Priority::new(level).unwrap();
    let function = FunctionIndex(level as u32);
    node.step(Event::Enqueue(QueuedRequest {
        key,
        function,
        model,
        attempts,
        priority,
        inputs: InputLocations::NONE,
    }))
}

fn assigned(actions: &[Action]) -> Vec<(u32, u64)> {
    let assigned = |action: &Action| match *action {
        Action::Assign { gpu, key, .. } => Some((gpu.0, key.0)),
        _ => None,
    };
    actions.iter().filter_map(assigned).collect()
}

/// Returns the policies that bind late.
fn late() -> impl Iterator<Item = (&'static str, PolicyConfig)> {
    POLICIES.into_iter().filter(|(_, policy)| !policy.binds_early())
}

#[test]
fn the_oldest_request_of_the_highest_priority_goes_first() {
    for (name, policy) in late() {
        let mut node = node_with(policy, &[64]);
        assert_eq!(assigned(&ask(&mut node, 1, LARGE, 4)), [(0, 1)], "{name}");
        // Some policies assign these requests to the busy GPU, where they stay.
        let ahead = assigned(&ask(&mut node, 2, LARGE, 8)).len();
        let ahead = ahead + assigned(&ask(&mut node, 3, LARGE, 1)).len();
        let ahead = ahead + assigned(&ask(&mut node, 4, LARGE, 1)).len();
        let mut order = vec![1];
        let mut on: Vec<u64> = (1..=1 + ahead as u64).collect();
        while let Some(&key) = on.first() {
            on.remove(0);
            let given = assigned(&node.ended(0, key, 5));
            on.extend(given.iter().map(|&(_, key)| key));
            order.extend(given.iter().map(|&(_, key)| key));
        }
        let place = |key: u64| order.iter().position(|&at| at == key);
        if ahead == 0 {
            assert_eq!(order, [1, 3, 4, 2], "{name}");
        } else {
            assert!(place(3) < place(4), "{name}: {order:?}");
        }
    }
}

#[test]
fn a_priority_without_a_decision_does_not_delay_lower_ones() {
    for (name, policy) in late() {
        let mut node = node_with(policy, &[64, 16]);
        assert_eq!(assigned(&ask(&mut node, 1, LARGE, 1)), [(0, 1)], "{name}");
        ask(&mut node, 2, LARGE, 1);
        assert_eq!(assigned(&ask(&mut node, 3, A, 8)), [(1, 3)], "{name}: only the large GPU is busy");
    }
}

#[test]
fn a_priority_level_created_later_has_objectives_and_scores() {
    for (name, policy) in late().filter(|(_, policy)| policy.uses_scores()) {
        let mut node = node_with(policy, &[64]);
        for function in [1, 8] {
            let objective = LatencyObjective::from_billionths(900_000_000);
            node.step(Event::Objective { function: FunctionIndex(function), objective });
            let counts = SloCounts { m: 3, n: 9 };
            node.step(Event::SloCountsChanged { function: FunctionIndex(function), counts });
        }
        for key in 1..4 {
            ask(&mut node, key, A, if key % 2 == 0 { 8 } else { 1 });
        }
        for key in [1, 3, 2] {
            node.ended(0, key, 5);
        }
        assert_eq!(node.dispatch.in_flight(), 0, "{name}");
    }
}
