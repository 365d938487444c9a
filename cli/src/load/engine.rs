//! The two loops: clients that wait for their answers, and a clock that waits for nobody.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use millrace_client::Tensor;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::clock;
use crate::failure::Failure;
use crate::load::schedule::Schedule;
use crate::load::sequence::{Place, Sequence, Sequences};
use crate::load::stats::{Answer, Problem, Stats};
use crate::load::target::{Protocol, Target};
use crate::load::timer::Timer;
use crate::load::{Args, Arrival, grpc, http};

/// How long a client waits after a connection failed, so that it does not spin.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(10);
/// Requests an open loop that is late sends before it lets answers be read.
const BURST: u32 = 32;

/// What sends the requests.
pub(super) enum Client {
    Grpc(grpc::Sender),
    Http(http::Sender),
}

/// How requests are sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub(super) pace: Pace,
    /// How long an answer is waited for.
    pub(super) timeout: Duration,
    /// Which sequences each client's requests are of, if they are of any. Closed loop only.
    pub(super) sequences: Option<Sequences>,
}

/// What decides when the next request goes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pace {
    /// The answer to the one before, of each of so many clients.
    Closed { concurrency: usize },
    /// A clock.
    Open { rate: f64, arrival: Arrival, max_in_flight: usize },
}

/// When sending ends.
#[derive(Debug, Clone, Copy)]
pub(super) enum Until {
    Elapsed(Duration),
    Sent(u64),
}

impl Client {
    pub(super) async fn connect(
        target: &Target,
        tensors: &[Tensor],
        args: &Args,
    ) -> Result<Rc<Self>, Failure> {
        Ok(Rc::new(match target.protocol {
            Protocol::Grpc => {
                Self::Grpc(grpc::Sender::connect(target, tensors, args.connections(target)).await?)
            }
            Protocol::Http => Self::Http(http::Sender::connect(target, tensors, args.wire()).await?),
        }))
    }

    pub(super) fn request_bytes(&self) -> usize {
        match self {
            Self::Grpc(sender) => sender.request_bytes(),
            Self::Http(sender) => sender.request_bytes(),
        }
    }

    /// Sends one request; `slot` spreads requests over connections, `place` is where it is in its
    /// sequence.
    async fn send(&self, slot: usize, place: Option<Place>, timeout: Duration) -> Result<Answer, Problem> {
        let sent = async {
            match self {
                Self::Grpc(sender) => sender.send(slot, place).await,
                Self::Http(sender) => sender.send(place).await,
            }
        };
        match tokio::time::timeout(timeout, sent).await {
            Ok(outcome) => outcome,
            Err(_) => Err(Problem::new(
                "timed out",
                format!("no answer within {}", humantime::format_duration(timeout)),
            )),
        }
    }
}

/// Sends requests until the end, waits for the last answers, and tells what came of it. Within a
/// `LocalSet`.
pub(super) async fn run(client: &Rc<Client>, plan: &Plan, until: Until, seed: u64) -> Result<Stats, Failure> {
    let stats = Rc::new(RefCell::new(Stats::new()));
    let (start, cpu) = (clock::now(), processor_time());
    let mut open = Vec::new();
    match plan.pace {
        Pace::Closed { concurrency } => {
            open = closed_loop(client, plan, Gate::new(start, until), concurrency, &stats).await;
        }
        Pace::Open { rate, arrival, max_in_flight } => {
            let schedule = Schedule::new(rate, arrival, seed);
            open_loop(client, plan, Gate::new(start, until), schedule, max_in_flight, &stats).await?;
        }
    }
    let mut stats = stats.replace(Stats::new());
    stats.elapsed = clock::now().duration_since(start);
    stats.cpu = processor_time().saturating_sub(cpu);
    cut(client, open, plan.timeout).await;
    Ok(stats)
}

/// Decides whether one more request is sent.
struct Gate {
    start: Instant,
    until: Until,
    sent: Cell<u64>,
}

impl Gate {
    fn new(start: Instant, until: Until) -> Self {
        Self { start, until, sent: Cell::new(0) }
    }

    fn admits(&self, moment: Instant) -> bool {
        let open = match self.until {
            Until::Elapsed(span) => moment < self.start + span,
            Until::Sent(count) => self.sent.get() < count,
        };
        if open {
            self.sent.set(self.sent.get() + 1);
        }
        open
    }
}

/// Gives the clients that are within a sequence, each with the place of a request that ends it.
async fn closed_loop(
    client: &Rc<Client>,
    plan: &Plan,
    gate: Gate,
    concurrency: usize,
    stats: &Rc<RefCell<Stats>>,
) -> Vec<(usize, Place)> {
    let (gate, timeout) = (Rc::new(gate), plan.timeout);
    let mut clients = JoinSet::new();
    for slot in 0..concurrency {
        let (client, gate, stats) = (client.clone(), gate.clone(), stats.clone());
        let mut sequence = plan.sequences.map(|sequences| sequences.of(slot));
        clients.spawn_local(async move {
            let mut now = clock::now();
            while gate.admits(now) {
                let outcome = client.send(slot, sequence.as_ref().map(Sequence::next), timeout).await;
                let (sent, failed) = (now, outcome.is_err());
                now = clock::now();
                stats.borrow_mut().record(now.duration_since(sent), outcome);
                if let Some(sequence) = &mut sequence {
                    let ended = &mut stats.borrow_mut().sequences;
                    if failed { sequence.failed(ended) } else { sequence.answered(ended) }
                }
                if failed {
                    tokio::time::sleep(PAUSE_AFTER_FAILURE).await;
                    now = clock::now();
                }
            }
            Some((slot, sequence?.cut()?))
        });
    }
    clients.join_all().await.into_iter().flatten().collect()
}

/// Ends the sequences that are under way as the time is over, so that the server need not keep their
/// state until it is idle for too long. Nothing of it is measured.
async fn cut(client: &Rc<Client>, open: Vec<(usize, Place)>, timeout: Duration) {
    let mut clients = JoinSet::new();
    for (slot, place) in open {
        let client = client.clone();
        clients.spawn_local(async move {
            // One that fails is over by itself, in the server's time.
            drop(client.send(slot, Some(place), timeout).await);
        });
    }
    clients.join_all().await;
}

/// Requests under way.
#[derive(Default)]
struct InFlight {
    count: Cell<usize>,
    one_less: Notify,
}

async fn open_loop(
    client: &Rc<Client>,
    plan: &Plan,
    gate: Gate,
    schedule: Schedule,
    max_in_flight: usize,
    stats: &Rc<RefCell<Stats>>,
) -> Result<(), Failure> {
    let timer = Timer::new()?;
    let in_flight = Rc::new(InFlight::default());
    let timeout = plan.timeout;
    let mut burst = 0;
    for (slot, offset) in schedule.enumerate() {
        let meant = gate.start + offset;
        if !gate.admits(meant) {
            break;
        }
        timer
            .sleep_until(meant)
            .await
            .map_err(|error| Failure::failed(format!("the timer failed: {error}")))?;
        stats.borrow_mut().lag.record(clock::now().duration_since(meant));
        if in_flight.count.get() >= max_in_flight {
            let example = format!("{max_in_flight} requests were under way (--max-in-flight)");
            stats.borrow_mut().record(Duration::ZERO, Err(Problem::new("not sent", example)));
        } else {
            in_flight.count.set(in_flight.count.get() + 1);
            let (client, stats, in_flight) = (client.clone(), stats.clone(), in_flight.clone());
            tokio::task::spawn_local(async move {
                let outcome = client.send(slot, None, timeout).await;
                // From when it was meant to be sent: waiting for a late generator or for a stalled
                // server is part of what a user would have seen.
                stats.borrow_mut().record(clock::now().duration_since(meant), outcome);
                in_flight.count.set(in_flight.count.get() - 1);
                in_flight.one_less.notify_one();
            });
        }
        burst += 1;
        if burst >= BURST {
            burst = 0;
            tokio::task::yield_now().await;
        }
    }
    while in_flight.count.get() > 0 {
        in_flight.one_less.notified().await;
    }
    Ok(())
}

/// What all threads of this process have spent of the processors.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_closes_after_its_time_or_its_count() {
        let start = clock::now();
        let timed = Gate::new(start, Until::Elapsed(Duration::from_secs(1)));
        assert!(timed.admits(start) && timed.admits(start + Duration::from_millis(999)));
        assert!(!timed.admits(start + Duration::from_secs(1)));
        let counted = Gate::new(start, Until::Sent(2));
        let later = start + Duration::from_secs(99);
        assert_eq!(
            [counted.admits(start), counted.admits(later), counted.admits(start)],
            [true, true, false]
        );
    }

    #[test]
    fn processor_time_goes_forward() {
        let before = processor_time();
        assert!(before > Duration::ZERO && processor_time() >= before);
    }
}
