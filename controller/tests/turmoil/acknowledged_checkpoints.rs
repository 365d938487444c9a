//! Invariant: every acknowledged checkpoint is in the state, unless the epoch ended (the
//! leader commits, then acknowledges).
//!
//! - An acknowledged checkpoint is in the log as made by the worker.
//! - At the end, the state has at least the acknowledged checkpoints of every live registration.
//! - If a worker has no checkpoint left to send, the state has exactly the data that the worker holds.

use std::collections::{BTreeMap, BTreeSet};

use millrace_cluster_state::{CommandEffect, NodeCheckpoint, NodeStatus, State, StateCommand};
use millrace_types::{Epoch, NodeName, SyncBatch};

use crate::history::{Acknowledged, History, Verdict, WorkerEnd};
use crate::replay;

pub(crate) fn check(history: &History) -> Verdict {
    let mut taken: BTreeMap<(NodeName, Epoch, u64), SyncBatch> = BTreeMap::new();
    replay::each(history, |_, (_, outcomes), _| {
        for (proposal, outcome) in outcomes {
            if let (StateCommand::SyncNode { node, batch }, Ok(CommandEffect::Synced { seq })) =
                (&proposal.command, outcome)
            {
                taken.insert((node.clone(), batch.epoch, *seq), batch.clone());
            }
        }
        Ok(())
    })?;
    for acknowledged in &history.acknowledged {
        let Acknowledged { node, epoch, seq } = acknowledged;
        let key = (node.clone(), *epoch, *seq);
        match (taken.get(&key), history.sent.get(&key)) {
            (Some(taken), Some(sent)) if *taken == **sent => {}
            (Some(taken), sent) => {
                return Err(format!("{acknowledged:?} was made as {sent:?} and taken as {taken:?}").into());
            }
            (None, _) => return Err(format!("{acknowledged:?} was never taken").into()),
        }
    }
    for state in history.ends.values() {
        ends(state, &history.acknowledged, &history.workers)?;
    }
    Ok(())
}

fn ends(state: &State, acknowledged: &[Acknowledged], workers: &[WorkerEnd]) -> Verdict {
    let current = |node: &NodeName, epoch| {
        state.node(node).is_some_and(|it| it.epoch == epoch && it.status == NodeStatus::Live)
    };
    for it in acknowledged.iter().filter(|it| current(&it.node, it.epoch)) {
        if state.checkpoint(&it.node).is_none_or(|checkpoint| checkpoint.seq < it.seq) {
            return Err(format!("{it:?} is not in the state at the end").into());
        }
    }
    for worker in workers.iter().filter(|worker| worker.settled) {
        let Some(epoch) = worker.epoch.filter(|&epoch| current(&worker.node, epoch)) else { continue };
        match state.checkpoint(&worker.node) {
            Some(checkpoint) if checkpoint.epoch == epoch => same(worker, checkpoint)?,
            other => return Err(format!("{worker:?} ends with {other:?}").into()),
        }
    }
    Ok(())
}

fn same(worker: &WorkerEnd, checkpoint: &NodeCheckpoint) -> Verdict {
    let everything = &worker.everything;
    let models: BTreeSet<_> = checkpoint.models.iter().map(|(copy, bytes)| (*copy, *bytes)).collect();
    let entries: BTreeSet<_> = checkpoint.entries.iter().map(|(id, bytes)| (id.clone(), *bytes)).collect();
    let differs = models != everything.models.iter().copied().collect()
        || entries != everything.entries.iter().cloned().collect()
        || Some(checkpoint.overflow) != everything.overflow
        || Some(&checkpoint.alphas) != everything.alphas.as_ref();
    if differs {
        return Err(format!(
            "{worker:?} has an acknowledgement for all of this, but the state has {checkpoint:?}"
        )
        .into());
    }
    Ok(())
}

#[test]
fn every_acknowledged_checkpoint_is_in_the_state() {
    crate::runs::hold("acknowledged checkpoints");
}

mod planted {
    use std::sync::Arc;

    use millrace_cluster_state::StateCommand;
    use millrace_types::{Bytes, DataId, Epoch, NodeDelta, SyncBatch, SyncPart, SyncPortion};

    use super::check;
    use crate::history::{Acknowledged, History, WorkerEnd};
    use crate::planted::{applied, commands, init, name, registration};
    use crate::replay;

    fn delta(counter: u64) -> NodeDelta {
        let id = DataId { home: name("n1"), epoch: Epoch(1), counter };
        NodeDelta { entries: vec![(id, Bytes(1))], ..NodeDelta::default() }
    }

    fn batch(seq: u64) -> SyncBatch {
        SyncBatch { epoch: Epoch(1), seq, part: SyncPart::Full(SyncPortion::Only), delta: delta(seq) }
    }

    /// Returns a history in which a node's batch 1 was committed, and the worker sent batches 1 and 2.
    fn history(acknowledged: u64) -> History {
        let sync = StateCommand::SyncNode { node: name("n1"), batch: batch(1) };
        let entries = vec![commands(1, 0, vec![init()]), commands(1, 1, vec![registration("n1"), sync])];
        let mut history = History { applied: applied(entries), ..History::default() };
        for seq in [1, 2] {
            history.sent.insert((name("n1"), Epoch(1), seq), Arc::new(batch(seq)));
        }
        let acknowledged = Acknowledged { node: name("n1"), epoch: Epoch(1), seq: acknowledged };
        history.acknowledged.push(acknowledged);
        let mut last = None;
        replay::each(&history, |_, _, state| {
            last = Some(state.clone());
            Ok(())
        })
        .unwrap();
        history.ends = [(1, last.unwrap())].into();
        history
    }

    #[test]
    fn an_acknowledgement_without_a_committed_checkpoint_is_detected() {
        assert!(check(&history(1)).is_ok());
        assert!(check(&history(2)).is_err());
        let mut other = history(1);
        other.sent.insert((name("n1"), Epoch(1), 1), Arc::new(batch(3)));
        assert!(check(&other).is_err(), "another batch with the same number");
    }

    #[test]
    fn a_state_without_an_acknowledged_checkpoint_is_detected() {
        let mut lost = history(1);
        let mut before = None;
        replay::each(&lost, |index, _, state| {
            before = before.take().or((index == 0).then(|| state.clone()));
            Ok(())
        })
        .unwrap();
        lost.ends = [(1, before.unwrap())].into();
        assert!(check(&lost).is_ok(), "the node is not registered");
        let holds = |counter| {
            let everything =
                NodeDelta { alphas: Some(Default::default()), overflow: Some(0), ..delta(counter) };
            let worker = WorkerEnd {
                node: name("n1"),
                epoch: Some(Epoch(1)),
                settled: true,
                everything,
                serves: [].into(),
            };
            check(&History { workers: vec![worker], ..history(1) }).is_ok()
        };
        assert!(holds(1));
        assert!(!holds(2));
    }
}
