//! A reader's positions in the log lines of each process: the page token with all positions, and the
//! positions sent to each process.

use std::collections::{BTreeMap, BTreeSet};

use millrace_cluster_state::NODES_MAX;
use millrace_proto::log::Position;
use millrace_proto::logs::{SHARED, process_of};
use millrace_types::Failure;

/// Processes without an answer that a token still includes: most have ended permanently.
const SILENT_MAX: usize = 512;
/// Processes in a token. All processes that answered fit.
const POSITIONS_MAX: usize = NODES_MAX + CONTROLLERS_MAX + SILENT_MAX;
/// An upper bound on the controllers of a group, by far.
const CONTROLLERS_MAX: usize = 64;

/// A reader's position by process.
pub(super) type Positions = BTreeMap<String, u64>;

/// Returns the token: the name and number of each process. Processes that answered take precedence over
/// silent ones.
pub(super) fn token(positions: &Positions, answered: &BTreeSet<String>) -> String {
    let (live, silent): (Vec<_>, Vec<_>) = positions.iter().partition(|(ring, _)| answered.contains(*ring));
    let kept = live.into_iter().chain(silent.into_iter().take(SILENT_MAX)).take(POSITIONS_MAX);
    kept.map(|(ring, seq)| format!("{ring}:{seq}")).collect::<Vec<_>>().join(",")
}

pub(super) fn read_token(text: &str) -> Result<Positions, Failure> {
    let position = |part: &str| {
        let (ring, seq) = part.rsplit_once(':')?;
        Some((ring.to_owned(), seq.parse().ok()?))
    };
    let parts = text.split(',').filter(|part| !part.is_empty()).take(POSITIONS_MAX);
    let read: Option<_> = parts.map(position).collect();
    read.ok_or_else(|| Failure::malformed("`after` is not a token of this API: omit the field"))
}

/// The positions by receiver. Each process gets only the positions in its own lines: sending all
/// positions to all processes with every query would grow quadratically.
#[derive(Debug, Default)]
pub(super) struct PositionsByProcess {
    /// Positions by node or controller, including positions of earlier processes.
    by_name: BTreeMap<String, Vec<Position>>,
    /// Positions that every process is sent. The positions belong to processes with a shared name, such
    /// as `millrace up` with a worker in the same process, or to nodes that were removed.
    to_all: Vec<Position>,
}

impl PositionsByProcess {
    /// Groups positions by receiver. `is_name` tests whether a node or controller has a name.
    pub(super) fn new(positions: &Positions, is_name: impl Fn(&str) -> bool) -> Self {
        let mut told = Self::default();
        for (ring, &seq) in positions {
            let position = Position { ring: ring.clone(), seq };
            match process_of(ring).filter(|name| is_name(name) && !SHARED.contains(name)) {
                Some(name) => told.by_name.entry(name.to_owned()).or_default().push(position),
                None => told.to_all.push(position),
            }
        }
        told
    }

    /// Returns the positions for the node or controller `name`.
    pub(super) fn to(&self, name: &str) -> Vec<Position> {
        let own = self.by_name.get(name).into_iter().flatten();
        own.chain(&self.to_all).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use millrace_proto::logs::{UP, ring_name};

    use super::*;

    #[test]
    fn a_token_keeps_answering_processes_and_drops_silent_ones() {
        let gone = (0..2 * SILENT_MAX).map(|n| (format!("a{n}"), 1));
        let positions: Positions = gone.chain((0..NODES_MAX).map(|n| (format!("z{n}"), 7))).collect();
        let answered = (0..NODES_MAX).map(|n| format!("z{n}")).collect();
        let read = read_token(&token(&positions, &answered)).unwrap();
        assert_eq!(read.len(), NODES_MAX + SILENT_MAX);
        assert!(answered.iter().all(|ring| read.contains_key(ring)));
    }

    #[test]
    fn malformed_tokens_are_refused() {
        assert_eq!(read_token("").unwrap(), Positions::new());
        for bad in ["a", "a:", "a:x", "a:1,b"] {
            assert!(read_token(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn positions_sent_to_all_processes_grow_linearly() {
        let sent = |nodes: u32| {
            let names: Vec<_> = (0..nodes).map(|node| format!("node.{node}")).collect();
            let rings = names.iter().map(|name| (ring_name(name, 7, 9), 3));
            let told = PositionsByProcess::new(&rings.collect(), |name| names.iter().any(|it| it == name));
            names.iter().map(|name| told.to(name).len()).sum::<usize>()
        };
        assert_eq!((sent(10), sent(200)), (10, 200));
    }

    #[test]
    fn a_process_gets_positions_of_all_its_runs_and_of_shared_names() {
        let [before, now, other] =
            [("w", 1), ("w", 2), ("w.1", 3)].map(|(name, pid)| ring_name(name, pid, 5));
        let up = ring_name("up", 4, 5);
        let removed = "of no process".to_owned();
        let all = [&before, &now, &other, &up, &removed].map(|ring| (ring.clone(), 1));
        let told = PositionsByProcess::new(&all.into(), |name| ["w", "w.1", "new"].contains(&name));
        let rings = |name: &str| told.to(name).into_iter().map(|it| it.ring).collect::<BTreeSet<_>>();
        let these = |rings: &[&String]| rings.iter().copied().cloned().collect::<BTreeSet<_>>();
        assert_eq!(rings("w"), these(&[&before, &now, &up, &removed]));
        assert_eq!(rings("w.1"), these(&[&other, &up, &removed]));
        assert_eq!(rings("new"), these(&[&up, &removed]));
    }

    #[test]
    fn a_worker_may_have_the_name_of_a_shared_process() {
        let [of_all, of_worker] = [4, 5].map(|pid| ring_name(UP, pid, 5));
        let all = [&of_all, &of_worker].map(|ring| (ring.clone(), 1));
        let told =
            PositionsByProcess::new(&all.into(), |name| ["worker-1", "controller-1", UP].contains(&name));
        for name in ["worker-1", "controller-1", UP] {
            let rings: Vec<_> = told.to(name).into_iter().map(|it| it.ring).collect();
            assert_eq!(rings, [of_all.clone(), of_worker.clone()], "{name}");
        }
    }
}
