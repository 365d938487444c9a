//! The latest log lines of all processes, merged. Each process keeps its lines in memory
//! (`proto::logs`), and the controller that gets a request asks all others. The page token has a
//! position per process, so that a reader can continue at any controller.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use millrace_proto::admin as api;
use millrace_proto::log::{Line, Page, Query};
use millrace_proto::logs::{self, PAGE_MAX};
use millrace_proto::pages::PageBudget;
use millrace_types::{Failure, NodeName, Reason};

use super::positions::{Positions, PositionsByProcess, read_token, token};
use super::{AdminService, wait};
use crate::fleet::AttachedWorker;
use crate::peers::{self, PeerAnswer};
use crate::raft::PeerClient;

/// The interval between two look-ups while a request waits.
const LOOK_EVERY: Duration = Duration::from_millis(250);

impl AdminService {
    pub(super) async fn list_logs(
        &self,
        request: api::ListLogsRequest,
    ) -> Result<api::ListLogsResponse, Failure> {
        let wait = wait("wait", request.wait.as_ref())?;
        let max = if request.page_size == 0 { PAGE_MAX } else { request.page_size.min(PAGE_MAX) };
        let mut positions = read_token(&request.after)?;
        self.check_names(&request.of)?;
        let until = tokio::time::Instant::now() + wait;
        let mut left_out = 0;
        let query = Query { after: Vec::new(), filter: request.filter.clone(), lines_max: max };
        loop {
            let told = PositionsByProcess::new(&positions, self.names());
            let given = self.ask(&request.of, &told, &query).await;
            let mut found = put_together(given, &mut positions, max as usize);
            found.missing.extend(self.away(&request.of));
            left_out += found.left_out;
            // A server that stops ends the wait at once.
            let over = self.stop.is_cancelled() || tokio::time::Instant::now() >= until;
            if over || !found.lines.is_empty() {
                let next = token(&positions, &found.answered);
                let MergedLogs { lines, missing, more, .. } = found;
                return Ok(api::ListLogsResponse { lines, next, left_out, missing, more });
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Refuses unknown names, which would never return lines. A known node that is detached may come
    /// back.
    fn check_names(&self, of: &[String]) -> Result<(), Failure> {
        let is_name = self.names();
        match of.iter().find(|name| !is_name(name.as_str())) {
            None => Ok(()),
            Some(name) => {
                let message = format!(
                    "no node or controller is named {name:?}: controllers have names like controller-1; see 'millrace get nodes' and 'millrace cluster status'"
                );
                Err(Failure::new(Reason::NodeNotFound, message))
            }
        }
    }

    /// Returns a test whether a node or controller has a name.
    fn names(&self) -> impl Fn(&str) -> bool {
        let state = self.replica.state();
        let node = move |name: &str| NodeName::new(name).is_ok_and(|name| state.node(&name).is_some());
        let controllers: BTreeSet<_> =
            self.replica.membership().nodes().map(|(&id, _)| controller(id)).collect();
        move |name| node(name) || controllers.contains(name) || self.is_attached(name)
    }

    fn is_attached(&self, name: &str) -> bool {
        NodeName::new(name).is_ok_and(|name| self.fleet.worker(&name).is_some())
    }

    fn is_controller(&self, name: &str) -> bool {
        self.replica.membership().nodes().any(|(&id, _)| controller(id) == name)
    }

    /// Returns the requested names that are not attached.
    fn away(&self, of: &[String]) -> Vec<String> {
        let away = of.iter().filter(|name| !self.is_attached(name) && !self.is_controller(name));
        away.map(|name| format!("{name}: not attached")).collect()
    }

    /// Asks the requested processes, each for the lines after the reader's position.
    async fn ask(
        &self,
        of: &[String],
        told: &PositionsByProcess,
        query: &Query,
    ) -> Vec<PeerAnswer<Option<Page>>> {
        let asked = |name: &str| {
            let is_wanted = of.is_empty() || of.iter().any(|it| it == name);
            is_wanted.then(|| Query { after: told.to(name), ..query.clone() })
        };
        let from_controller = |peer: PeerClient| {
            let query = asked(&controller(peer.id()));
            async move {
                let Some(query) = query else { return Ok(None) };
                peers::logs::ask(&peer, &query).await.map(Some)
            }
        };
        let from_worker = |worker: Arc<AttachedWorker>| {
            let query = asked(worker.name.as_str());
            async move {
                let Some(query) = query else { return Ok(tonic::Response::new(None)) };
                Ok(worker.calls.get_logs(tonic::Request::new(query)).await?.map(Some))
            }
        };
        let mut given = self.traces.everyone.ask(from_controller, from_worker).await;
        if let Some(query) = asked(&controller(self.replica.id().0)) {
            given.push(Ok(Some(logs::local_page(&query))));
        }
        given
    }
}

fn controller(id: u64) -> String {
    format!("controller-{id}")
}

/// The merged lines of all processes.
#[derive(Debug, Default, PartialEq)]
struct MergedLogs {
    lines: Vec<Line>,
    left_out: u64,
    missing: Vec<String>,
    /// The processes that answered.
    answered: BTreeSet<String>,
    /// Whether more lines are stored after the returned lines.
    more: bool,
}

/// Merges the lines of all processes by time, at most `max` and at most a page, and updates the
/// reader's positions. Processes that share a log store return the same lines several times.
fn put_together(given: Vec<PeerAnswer<Option<Page>>>, positions: &mut Positions, max: usize) -> MergedLogs {
    let mut together = MergedLogs::default();
    let mut pages = BTreeMap::new();
    for part in given {
        match part {
            Ok(Some(Page { next: Some(next), lines, left_out, from, left_out_before, more })) => {
                together.more |= more;
                let read = Read { from, left_out_before, end: (next.seq, left_out) };
                pages.insert(next.ring, (read, lines));
            }
            Ok(_) => {}
            Err(why) => together.missing.push(why),
        }
    }
    // Sort by time across processes, but keep the order within a process even if the clock jumped.
    let mut lines = Vec::new();
    for (ring, (_, of_ring)) in &mut pages {
        let mut latest = None;
        for line in std::mem::take(of_ring) {
            latest = latest.max(line.time.as_ref().map(|it| (it.seconds, it.nanos)));
            lines.push((latest, ring.clone(), line));
        }
    }
    lines.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
    let mut room = PageBudget::default();
    let fit = lines.iter().take(max).take_while(|(_, _, line)| room.take(line)).count();
    let cut = lines.split_off(fit);
    together.more |= !cut.is_empty();
    let cut: BTreeSet<&String> = cut.iter().map(|(_, ring, _)| ring).collect();
    let mut taken: BTreeMap<&String, (usize, u64)> = BTreeMap::new();
    for (_, ring, line) in &lines {
        let taken = taken.entry(ring).or_default();
        *taken = (taken.0 + 1, line.seq);
    }
    for (ring, (read, _)) in &pages {
        let (seq, left_out) = match cut.contains(ring) {
            true => read.after(taken.get(ring).copied()),
            false => read.end,
        };
        together.left_out += left_out;
        positions.insert(ring.clone(), seq);
    }
    together.lines = lines.into_iter().map(|(_, _, line)| line).collect();
    together.answered = pages.into_keys().collect();
    together
}

/// The range of a process's lines that a query covered.
struct Read {
    from: u64,
    left_out_before: Vec<u64>,
    /// The last covered line, and the number of earlier lines that were overwritten.
    end: (u64, u64),
}

impl Read {
    /// Returns the position of a reader that took only the given number of lines, up to the given
    /// position. The next query covers the remaining lines and the overwritten lines again.
    fn after(&self, taken: Option<(usize, u64)>) -> (u64, u64) {
        let Some((count, seq)) = taken else { return (self.from, 0) };
        (seq, self.left_out_before.get(count - 1).copied().unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use millrace_proto::log::Position;
    use millrace_proto::logs::{LINES_MAX, LogRing};

    use super::*;

    fn line(seq: u64, seconds: i64, message: &str) -> Line {
        let time = Some(prost_types::Timestamp { seconds, nanos: 0 });
        Line { seq, time, message: message.into(), ..Line::default() }
    }

    fn page(ring: &str, seq: u64, lines: Vec<Line>) -> PeerAnswer<Option<Page>> {
        let next = Some(Position { ring: ring.into(), seq });
        Ok(Some(Page { next, left_out_before: vec![0; lines.len()], lines, ..Page::default() }))
    }

    fn texts(of: &MergedLogs) -> Vec<&str> {
        of.lines.iter().map(|it| it.message.as_str()).collect()
    }

    #[test]
    fn lines_are_merged_by_time_and_the_reader_continues_with_the_cut_lines() {
        let a = || page("a", 9, vec![line(2, 10, "a2"), line(8, 30, "a8")]);
        let b = || page("b", 1, vec![line(1, 20, "b1")]);
        let mut positions = Positions::from([("gone".to_owned(), 3)]);
        let given = vec![a(), Err("w: no answer".into()), Ok(None), b(), a()];
        let first = put_together(given, &mut positions, 2);
        assert_eq!((texts(&first), first.missing.len()), (vec!["a2", "b1"], 1));
        let next = token(&positions, &first.answered);
        assert_eq!(next, "a:2,b:1,gone:3");
        assert_eq!(read_token(&next).unwrap(), positions);
        let rest = put_together(vec![page("a", 9, vec![line(8, 30, "a8")])], &mut positions, 2);
        assert_eq!((texts(&rest), positions["a"]), (vec!["a8"], 9));
    }

    /// Lines are overwritten before a read, at processes with lines that were cut for others' lines.
    #[test]
    fn every_line_is_read_once_or_counted_as_left_out() {
        let rings = ["a", "b", "c"].map(|name| LogRing::new(name, name.into()));
        let mut written = 0;
        let mut write = |count: usize| {
            for ring in &rings {
                for _ in 0..count {
                    written += 1;
                    let time = Some(prost_types::Timestamp { seconds: written, nanos: 0 });
                    ring.store_line(Line { time, ..Line::default() });
                }
            }
            u64::try_from(written).unwrap()
        };
        let mut positions = Positions::new();
        let mut seen = BTreeSet::new();
        let mut left_out = 0;
        let mut look = |max: usize| {
            let after = positions.iter().map(|(ring, &seq)| Position { ring: ring.clone(), seq }).collect();
            let query = Query { after, filter: None, lines_max: u32::try_from(max).unwrap() };
            let given = rings.iter().map(|ring| Ok(Some(ring.page(&query)))).collect();
            let page = put_together(given, &mut positions, max);
            left_out += page.left_out;
            let fresh = page.lines.iter().all(|line| seen.insert((line.process.clone(), line.seq)));
            assert!(fresh, "a line was returned twice");
            (page.lines.len(), seen.len() as u64 + left_out)
        };
        write(10);
        // The page has some lines of "a" and none of "b" and "c". Then the rings overwrite all lines.
        assert_eq!(look(7), (7, 7));
        let all = write(LINES_MAX + 5);
        while look(1_000).0 > 0 {}
        assert_eq!(look(1_000), (0, all));
    }
}
