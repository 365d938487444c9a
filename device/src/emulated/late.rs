//! A thread that carries out a stream's work late, as a GPU does: a call returns before its work has
//! finished. A program that does not wait for the right event then fails, because it reads bytes
//! that are not loaded yet.
#![allow(clippy::disallowed_methods, reason = "this thread exists to delay work, and does no other work")]

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use crate::emulated::event::EmulatedEvent;
use crate::error::Error;

/// The longest time by which a piece of work is delayed.
const DELAY_MAX: Duration = Duration::from_micros(500);

/// Work of a stream. The argument is the stream's buffer.
pub(super) type QueuedWork = Box<dyn FnOnce(&mut Vec<u8>) -> Result<(), Error> + Send>;

/// The queue of a stream that finishes its work late. Dropping the queue lets the thread finish the
/// rest.
#[derive(Debug)]
pub(super) struct LateQueue(mpsc::Sender<Step>);

enum Step {
    /// Carries out work, and then reaches the event.
    Work(QueuedWork, EmulatedEvent),
    /// Reaches an event that was recorded.
    Record(EmulatedEvent),
}

impl LateQueue {
    /// Starts the thread. The seed decides the delays.
    pub(super) fn start(seed: u64) -> Result<Self, Error> {
        let (queue, steps) = mpsc::channel();
        let thread = thread::Builder::new().name("late work".to_owned());
        thread.spawn(move || serve(&steps, seed)).map_err(Error::io("start a stream's thread"))?;
        Ok(Self(queue))
    }

    /// Queues work. The event is reached when the work has finished.
    pub(super) fn push(&self, work: QueuedWork, event: EmulatedEvent) -> Result<(), Error> {
        self.send(Step::Work(work, event))
    }

    /// Returns an event after the work that is queued so far.
    pub(super) fn record(&self) -> Result<EmulatedEvent, Error> {
        let event = EmulatedEvent::awaited();
        self.send(Step::Record(event.clone()))?;
        Ok(event)
    }

    fn send(&self, step: Step) -> Result<(), Error> {
        self.0.send(step).map_err(|_| Error::Lost("the thread of a stream has ended".to_owned()))
    }
}

fn serve(steps: &mpsc::Receiver<Step>, seed: u64) {
    let mut delays = Delays(seed | 1);
    let mut buffer = Vec::new();
    // The first failure since the last recorded event.
    let mut failed = None;
    for step in steps {
        match step {
            Step::Work(work, event) => {
                thread::sleep(delays.next());
                let outcome = work(&mut buffer);
                failed = failed.or_else(|| outcome.as_ref().err().cloned());
                event.reach(outcome);
            }
            Step::Record(event) => event.reach(failed.take().map_or(Ok(()), Err)),
        }
    }
}

/// Pseudorandom delays (xorshift64).
struct Delays(u64);

impl Delays {
    fn next(&mut self) -> Duration {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        // The remainder is below the nanoseconds of DELAY_MAX, which fit a u64.
        Duration::from_nanos(self.0 % DELAY_MAX.as_nanos() as u64)
    }
}
