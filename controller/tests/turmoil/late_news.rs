//! Late proposals for nodes without workers, of the current epoch or, like delayed messages, of an
//! ended epoch. Each controller makes such proposals, for the same node names. Real streams seldom
//! deliver messages that late.

use std::rc::Rc;
use std::time::Duration;

use millrace_cluster_state::{CommandEffect, StateCommand};
use millrace_controller::sim::SimMember;
use millrace_types::{Bytes, DataId, Epoch, NodeDelta, NodeName, Reason, SyncBatch, SyncPart, SyncPortion};
use rand::Rng as _;
use rand::rngs::StdRng;
use tokio::time::sleep;

use crate::group::Outside;
use crate::history::NodeAnswer;

/// The number of nodes.
const NODES: u64 = 2;
/// Processes that claim the same name.
const INSTANCES: u64 = 2;
/// The time between two proposals of a controller, in milliseconds.
const APART_MS: std::ops::Range<u64> = 50..800;

/// Proposes commands until the run is calm.
pub(crate) async fn work(mut rng: StdRng, member: Rc<SimMember>, outside: Rc<Outside>) {
    outside.formed().await;
    while !outside.is_calm() {
        sleep(Duration::from_millis(rng.random_range(APART_MS))).await;
        let command = draw(&mut rng, &outside);
        let call = outside.nodes.begin(command.clone());
        let answer = match member.propose(command.clone()).await {
            Ok(applied) => NodeAnswer::Applied(applied),
            Err(failure) if failure.may_have_executed => continue,
            Err(failure) if matches!(failure.reason, Reason::Fenced | Reason::NodeNameTaken) => {
                NodeAnswer::Refused
            }
            Err(_) => NodeAnswer::NotProposed,
        };
        outside.nodes.end(call, answer);
        if let (
            StateCommand::RegisterNode { name, .. },
            NodeAnswer::Applied(
                CommandEffect::Registered { epoch } | CommandEffect::AlreadyRegistered { epoch },
            ),
        ) = (command, answer)
        {
            outside.epochs.borrow_mut().entry(name).or_default().insert(epoch);
        }
    }
}

fn draw(rng: &mut StdRng, outside: &Outside) -> StateCommand {
    let name = NodeName::new(&format!("late-{}", rng.random_range(0..NODES))).unwrap();
    let epochs = outside.epochs.borrow();
    let known: Vec<Epoch> = epochs.get(&name).into_iter().flatten().copied().collect();
    let Some(&latest) = known.last() else { return registration(rng, name) };
    // A late proposal may be of any earlier epoch.
    let epoch = if rng.random_ratio(2, 3) { latest } else { known[rng.random_range(0..known.len())] };
    match rng.random_range(0..10) {
        0..3 => registration(rng, name),
        3..5 => StateCommand::NodeLost { name, epoch },
        _ => {
            let seq = outside.moments.next();
            let held = DataId { home: name.clone(), epoch, counter: seq };
            let delta = NodeDelta { entries: vec![(held, Bytes(seq))], ..NodeDelta::default() };
            let part = SyncPart::Full(SyncPortion::Only);
            StateCommand::SyncNode { node: name, batch: SyncBatch { epoch, seq, part, delta } }
        }
    }
}

fn registration(rng: &mut StdRng, name: NodeName) -> StateCommand {
    StateCommand::RegisterNode {
        name,
        instance: format!("process-{}", rng.random_range(0..INSTANCES)),
        address: "worker:7080".to_owned(),
        gpus: Vec::new(),
        topology: "stub".to_owned(),
        host_memory: Bytes::gib(1),
        seen: Epoch(0),
    }
}
