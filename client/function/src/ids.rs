//! Ids for data that nothing else in the cluster has (D02). A worker assigns each process a block
//! of counters, so that an id needs no message.

use std::sync::{Mutex, PoisonError};

use millrace_proto::function as wire;
use millrace_types::{DataId, Epoch, NodeName};

/// The rest of a block of ids.
#[derive(Debug)]
struct IdBlock {
    home: NodeName,
    epoch: Epoch,
    next: u64,
    end: u64,
}

/// The ids that this process may use.
#[derive(Debug, Default)]
pub(crate) struct Ids(Mutex<Option<IdBlock>>);

impl Ids {
    /// Returns the next id, if one is left.
    pub(crate) fn take(&self) -> Option<DataId> {
        let mut block = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let block = block.as_mut().filter(|block| block.next < block.end)?;
        let counter = block.next;
        block.next += 1;
        Some(DataId { home: block.home.clone(), epoch: block.epoch, counter })
    }

    /// Discards the remaining ids: their registration may be over.
    pub(crate) fn forget(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Replaces the remaining ids with another block.
    pub(crate) fn refill(&self, wire: wire::IdBlock) {
        let wire::IdBlock { home, epoch, first, count } = wire;
        let block = NodeName::new(&home).ok().map(|home| IdBlock {
            home,
            epoch: Epoch(epoch),
            next: first,
            end: first.saturating_add(count),
        });
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = block;
    }
}

/// Encodes an id for a message.
pub(crate) fn write(id: &DataId) -> wire::DataId {
    wire::DataId { home: id.home.to_string(), epoch: id.epoch.0, counter: id.counter }
}

/// Parses an id from text: home/epoch/counter.
pub(crate) fn parse(text: &str) -> Option<DataId> {
    let mut parts = text.split('/');
    let mut part = || parts.next();
    let home = part()?;
    let epoch = part()?.parse().ok()?;
    let counter = part()?.parse().ok()?;
    let id = DataId { home: NodeName::new(home).ok()?, epoch: Epoch(epoch), counter };
    parts.next().is_none().then_some(id)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::Arc;

    use super::*;

    fn block(home: &str, epoch: u64, first: u64, count: u64) -> wire::IdBlock {
        wire::IdBlock { home: home.into(), epoch, first, count }
    }

    #[test]
    fn a_block_yields_each_of_its_ids_once() {
        let ids = Ids::default();
        assert_eq!(ids.take(), None);
        ids.refill(block("w1", 2, 7, 2));
        let taken: Vec<_> = std::iter::from_fn(|| ids.take()).map(|id| id.to_string()).collect();
        assert_eq!(taken, ["w1/2/7", "w1/2/8"]);
    }

    #[test]
    fn a_data_id_round_trips_through_text() {
        let id = DataId { home: NodeName::new("w1").unwrap(), epoch: Epoch(3), counter: u64::MAX };
        assert_eq!(parse(&id.to_string()), Some(id));
        for text in ["", "w1", "w1/3", "w1/3/x", "w1/3/4/5", "W 1/3/4"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }

    /// D02: as many ids as the paper's row asks for, from threads of processes of four nodes.
    #[test]
    fn processes_of_four_nodes_never_share_an_id() {
        const PROCESSES: u64 = 2;
        const THREADS: usize = 2;
        const EACH: usize = 62_500;
        let mut threads = Vec::new();
        for node in 0..4 {
            for process in 0..PROCESSES {
                let ids = Arc::new(Ids::default());
                let count = (THREADS * EACH) as u64;
                ids.refill(block(&format!("w{node}"), 1, process * count, count));
                for _ in 0..THREADS {
                    let ids = Arc::clone(&ids);
                    threads.push(std::thread::spawn(move || {
                        std::iter::from_fn(|| ids.take()).take(EACH).collect::<Vec<_>>()
                    }));
                }
            }
        }
        let all: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(all.len(), 1_000_000);
        assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
    }
}
