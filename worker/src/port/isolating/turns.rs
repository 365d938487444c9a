//! The order of runs on a GPU with several executor processes. Only one process runs at a time (L05), in
//! the order in which the runs were sent. A process serialises its own runs, so further runs of the same
//! process are sent ahead. A run of another process waits here until all earlier runs have ended. The
//! code is pure.

use std::collections::VecDeque;

/// The runs of a GPU in order. `O` identifies a process, `T` is the data of a run that is sent to a
/// process.
#[derive(Debug)]
pub(super) struct RunOrder<O, T> {
    /// The process that runs, with its runs that were sent and have not ended.
    turn: Option<(O, Vec<u64>)>,
    waiting: VecDeque<(u64, O, T)>,
}

/// The place of a run that was to be cancelled.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CancelledRun<O> {
    /// The run waited here, and was dropped.
    Waiting,
    /// The run was sent to this process.
    Sent(O),
    /// The run has ended, or never existed.
    Nowhere,
}

impl<O, T> Default for RunOrder<O, T> {
    fn default() -> Self {
        Self { turn: None, waiting: VecDeque::new() }
    }
}

impl<O: Copy + Eq, T> RunOrder<O, T> {
    /// Accepts a run. Returns its data if the run is to be sent at once, and `None` if the run waits.
    pub(super) fn ask(&mut self, run: u64, owner: O, what: T) -> Option<T> {
        match &mut self.turn {
            Some((turn, sent)) if *turn == owner && self.waiting.is_empty() => sent.push(run),
            Some(_) => {
                self.waiting.push_back((run, owner, what));
                return None;
            }
            None => self.turn = Some((owner, vec![run])),
        }
        Some(what)
    }

    /// Notes that a run ended. Returns the runs to send now, in order.
    pub(super) fn ended(&mut self, run: u64) -> Vec<(O, T)> {
        if let Some((_, sent)) = &mut self.turn {
            sent.retain(|&other| other != run);
        }
        self.next()
    }

    /// Drops a run that waits here, and returns the place of the run.
    pub(super) fn cancel(&mut self, run: u64) -> CancelledRun<O> {
        if let Some((owner, _)) = self.turn.as_ref().filter(|(_, sent)| sent.contains(&run)) {
            return CancelledRun::Sent(*owner);
        }
        match self.waiting.iter().position(|&(waiting, ..)| waiting == run) {
            Some(place) => {
                self.waiting.remove(place);
                CancelledRun::Waiting
            }
            None => CancelledRun::Nowhere,
        }
    }

    /// Removes a process that has ended. Returns the runs that are lost with it, and the runs to send now.
    pub(super) fn leave(&mut self, owner: O) -> (Vec<u64>, Vec<(O, T)>) {
        let mut lost = match self.turn.take_if(|(turn, _)| *turn == owner) {
            Some((_, sent)) => sent,
            None => Vec::new(),
        };
        self.waiting.retain(|&(run, other, _)| {
            if other == owner {
                lost.push(run);
            }
            other != owner
        });
        (lost, self.next())
    }

    fn next(&mut self) -> Vec<(O, T)> {
        if self.turn.as_ref().is_some_and(|(_, sent)| !sent.is_empty()) {
            return Vec::new();
        }
        self.turn = None;
        let mut next = Vec::new();
        while let Some(&(run, owner, _)) = self.waiting.front() {
            match &mut self.turn {
                Some((turn, _)) if *turn != owner => break,
                Some((_, sent)) => sent.push(run),
                None => self.turn = Some((owner, vec![run])),
            }
            next.extend(self.waiting.pop_front().map(|(_, owner, what)| (owner, what)));
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns() -> RunOrder<char, u64> {
        RunOrder::default()
    }

    #[test]
    fn runs_of_one_process_are_sent_ahead_and_runs_of_another_wait_for_all_earlier_runs() {
        let mut turns = turns();
        assert_eq!(turns.ask(1, 'a', 1), Some(1));
        assert_eq!(turns.ask(2, 'a', 2), Some(2));
        assert_eq!(turns.ask(3, 'b', 3), None);
        assert_eq!(turns.ask(4, 'a', 4), None, "run 4 waits behind run 3");
        assert_eq!(turns.ended(1), []);
        assert_eq!(turns.ended(2), [('b', 3)]);
        assert_eq!(turns.ask(5, 'a', 5), None);
        assert_eq!(turns.ended(3), [('a', 4), ('a', 5)]);
        assert_eq!(turns.ended(5), [], "run 4 has not ended");
        assert_eq!(turns.ended(4), []);
        assert_eq!(turns.ask(6, 'b', 6), Some(6));
    }

    #[test]
    fn cancelling_drops_a_waiting_run_and_names_the_process_of_a_sent_run() {
        let mut turns = turns();
        turns.ask(1, 'a', 1);
        turns.ask(2, 'b', 2);
        assert_eq!(turns.cancel(1), CancelledRun::Sent('a'));
        assert_eq!(turns.cancel(2), CancelledRun::Waiting);
        assert_eq!(turns.cancel(2), CancelledRun::Nowhere);
        assert_eq!(turns.ended(1), []);
    }

    #[test]
    fn an_ended_process_loses_its_runs_and_the_next_process_gets_its_turn() {
        let mut turns = turns();
        turns.ask(1, 'a', 1);
        turns.ask(2, 'b', 2);
        turns.ask(3, 'a', 3);
        turns.ask(4, 'c', 4);
        assert_eq!(turns.leave('b'), (vec![2], vec![]), "process b had no turn");
        assert_eq!(turns.leave('a'), (vec![1, 3], vec![('c', 4)]));
        assert_eq!(turns.ended(1), [], "a late event of the ended process changes nothing");
        assert_eq!(turns.ended(4), []);
    }

    /// Two processes never run on a GPU at once (L05), in whatever order runs end and processes die.
    #[test]
    fn two_processes_never_have_runs_at_once_and_no_run_is_forgotten() {
        for seed in 0..200 {
            let mut state: u64 = seed;
            let mut draw = |below: u64| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) % below
            };
            let mut turns = RunOrder::<u64, u64>::default();
            let mut sent = Vec::new();
            let mut asked = Vec::new();
            for run in 0..400 {
                let next = match draw(6) {
                    0..=2 => {
                        let owner = draw(3);
                        asked.push((run, owner));
                        turns.ask(run, owner, run).map(|run| (owner, run)).into_iter().collect()
                    }
                    3 | 4 if !sent.is_empty() => {
                        let (_, run) = sent.remove(0);
                        asked.retain(|&(other, _)| other != run);
                        turns.ended(run)
                    }
                    5 if draw(3) == 0 => {
                        let gone = draw(3);
                        sent.retain(|&(owner, _)| owner != gone);
                        let (lost, next) = turns.leave(gone);
                        let mut due: Vec<u64> =
                            asked.extract_if(.., |(_, owner)| *owner == gone).map(|(run, _)| run).collect();
                        let mut lost = lost;
                        lost.sort_unstable();
                        due.sort_unstable();
                        assert_eq!(lost, due, "seed {seed}");
                        next
                    }
                    _ => Vec::new(),
                };
                sent.extend(next);
                assert!(sent.windows(2).all(|pair| pair[0].0 == pair[1].0), "seed {seed}: {sent:?}");
                assert!(sent.is_sorted_by_key(|&(_, run)| run), "seed {seed}: {sent:?}");
                assert_eq!(
                    sent.is_empty(),
                    asked.is_empty(),
                    "seed {seed}: a run waits although none was sent"
                );
            }
        }
    }
}
