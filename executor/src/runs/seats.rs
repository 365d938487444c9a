//! The seats of an executor. The runs of a seat execute one after another on the seat's thread; the runs of
//! different seats execute at the same time.

use std::sync::Arc;

use millrace_engine::{Engine, LaunchThreads};

use crate::error::Error;
use crate::memory::executor_state::ExecutorState;
use crate::queue::WorkQueue;
use crate::runs::gate::LaunchGate;
use crate::runs::run_thread::{self, QueuedRun, RUNS_QUEUED_MAX};
use crate::thread::spawn;

/// Most seats of an executor: each has a thread.
pub const SEATS_MAX: usize = 24;

/// A seat.
#[derive(Debug)]
pub(crate) struct RunSeat<E: Engine> {
    pub(crate) runs: Arc<WorkQueue<QueuedRun<E>>>,
    pub(crate) gate: Arc<LaunchGate>,
}

/// The seats that have had a run. Dropping this value closes the queues, so each thread ends after its
/// current run.
#[derive(Debug)]
pub(crate) struct RunSeats<E: Engine> {
    shared: Arc<ExecutorState<E>>,
    seats: [Option<RunSeat<E>>; SEATS_MAX],
}

impl<E: Engine> RunSeats<E> {
    /// Returns the seats, the first with its thread started.
    pub(crate) fn new(shared: Arc<ExecutorState<E>>) -> Result<Self, Error> {
        let mut seats = Self { shared, seats: Default::default() };
        seats.start(0)?;
        Ok(seats)
    }

    /// Returns a seat. The first call for a seat starts its thread.
    pub(crate) fn start(&mut self, seat: usize) -> Result<&RunSeat<E>, Error> {
        let entry = self.seats.get_mut(seat).ok_or(Error::Seat(seat))?;
        match entry {
            Some(started) => Ok(started),
            None => Ok(entry.insert(start(&self.shared, seat)?)),
        }
    }

    /// Returns the gate of a seat that has had a run.
    pub(crate) fn gate(&self, seat: u32) -> Option<&LaunchGate> {
        Some(&*self.seats.get(seat as usize)?.as_ref()?.gate)
    }

    fn started(&self) -> impl Iterator<Item = &RunSeat<E>> {
        self.seats.iter().flatten()
    }

    /// Whether no run is under way or queued.
    pub(crate) fn are_idle(&self) -> bool {
        self.started().all(|seat| seat.runs.is_idle())
    }

    /// Removes a run that has not begun. Returns false if there is none of this number.
    pub(crate) fn cancel(&self, run: u64) -> bool {
        self.started().any(|seat| seat.runs.remove(|job| job.run == run).is_some())
    }
}

fn start<E: Engine>(shared: &Arc<ExecutorState<E>>, seat: usize) -> Result<RunSeat<E>, Error> {
    let runs = Arc::new(WorkQueue::new(RUNS_QUEUED_MAX));
    let gate = Arc::new(LaunchGate::new(seat as u32));
    let launches = shared.engine.queue(LaunchThreads::Whole)?;
    spawn(&format!("runs of seat {seat}"), {
        let shared = Arc::clone(shared);
        let runs = Arc::clone(&runs);
        let gate = Arc::clone(&gate);
        move || shared.engine.enter(launches, |launches| run_thread::serve(&shared, &runs, &gate, launches))
    })?;
    Ok(RunSeat { runs, gate })
}

impl<E: Engine> Drop for RunSeats<E> {
    fn drop(&mut self) {
        self.started().for_each(|seat| seat.runs.close());
    }
}
