//! The two load loops: a closed loop of clients that each wait for a response, and an open loop
//! that follows a clock.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use millrace_client::Tensor;
use rustix::time::{ClockId, clock_gettime};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::clock;
use crate::failure::CommandFailure;
use crate::load::args::{Args, ArrivalPattern};
use crate::load::schedule::SendSchedule;
use crate::load::sequence::{ClientSequence, ClientSequences, SequencePosition};
use crate::load::stats::{LoadResponse, LoadStats, Problem};
use crate::load::target::{LoadTarget, Protocol};
use crate::load::timer::Timer;
use crate::load::{grpc, http};

/// The pause of a client after a failed request, so that the client does not spin.
const PAUSE_AFTER_FAILURE: Duration = Duration::from_millis(10);
/// The number of requests that a late open loop sends before it yields, so that responses are read.
const BURST: u32 = 32;

/// The client that sends the requests.
pub(super) enum LoadClient {
    Grpc(grpc::GrpcSender),
    Http(http::HttpSender),
}

/// The configuration of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct LoadPlan {
    pub(super) pace: LoadLoop,
    /// The timeout of a request.
    pub(super) timeout: Duration,
    /// The sequences of the clients, if the function keeps state. Closed loop only.
    pub(super) sequences: Option<ClientSequences>,
}

/// The rule that decides when the next request is sent.
#[derive(Debug, Clone, Copy)]
pub(super) enum LoadLoop {
    /// A client sends its next request when the previous response arrives. The number of clients is
    /// fixed.
    Closed { concurrency: usize },
    /// Requests are sent by a clock, at a rate per second.
    Open { rate: f64, arrival: ArrivalPattern, max_in_flight: usize },
}

/// The end of a run.
#[derive(Debug, Clone, Copy)]
pub(super) enum LoadEnd {
    Elapsed(Duration),
    Sent(u64),
}

impl LoadClient {
    pub(super) async fn connect(
        target: &LoadTarget,
        tensors: &[Tensor],
        args: &Args,
    ) -> Result<Rc<Self>, CommandFailure> {
        Ok(Rc::new(match target.protocol {
            Protocol::Grpc => {
                let connections = args.connections(target.addresses.len());
                Self::Grpc(grpc::GrpcSender::connect(target, tensors, connections).await?)
            }
            Protocol::Http => Self::Http(http::HttpSender::connect(target, tensors, args.wire()).await?),
        }))
    }

    pub(super) fn request_bytes(&self) -> usize {
        match self {
            Self::Grpc(sender) => sender.request_bytes(),
            Self::Http(sender) => sender.request_bytes(),
        }
    }

    /// Sends a request. `slot` spreads requests over connections. `place` is the request's position
    /// in a sequence.
    async fn send(
        &self,
        slot: usize,
        place: Option<SequencePosition>,
        timeout: Duration,
    ) -> Result<LoadResponse, Problem> {
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
                format!("no response within {}", humantime::format_duration(timeout)),
            )),
        }
    }
}

/// Sends requests until the end, waits for the last responses, and returns the statistics. Must be
/// called within a `LocalSet`.
pub(super) async fn run(
    client: &Rc<LoadClient>,
    plan: &LoadPlan,
    until: LoadEnd,
    seed: u64,
) -> Result<LoadStats, CommandFailure> {
    let stats = Rc::new(RefCell::new(LoadStats::new()));
    let start = clock::now();
    let cpu = processor_time();
    let mut open = Vec::new();
    match plan.pace {
        LoadLoop::Closed { concurrency } => {
            open = closed_loop(client, plan, RequestGate::new(start, until), concurrency, &stats).await;
        }
        LoadLoop::Open { rate, arrival, max_in_flight } => {
            let schedule = SendSchedule::new(rate, arrival, seed);
            open_loop(client, plan, RequestGate::new(start, until), schedule, max_in_flight, &stats).await?;
        }
    }
    let mut stats = stats.replace(LoadStats::new());
    stats.elapsed = clock::now().duration_since(start);
    stats.cpu = processor_time().saturating_sub(cpu);
    end_open_sequences(client, open, plan.timeout).await;
    Ok(stats)
}

/// The gate that admits each request until the end of the run.
struct RequestGate {
    start: Instant,
    until: LoadEnd,
    sent: Cell<u64>,
}

impl RequestGate {
    fn new(start: Instant, until: LoadEnd) -> Self {
        Self { start, until, sent: Cell::new(0) }
    }

    fn admits(&self, moment: Instant) -> bool {
        let open = match self.until {
            LoadEnd::Elapsed(span) => moment < self.start + span,
            LoadEnd::Sent(count) => self.sent.get() < count,
        };
        if open {
            self.sent.set(self.sent.get() + 1);
        }
        open
    }
}

/// Runs the closed loop. Returns the clients that are within a sequence, each with the position of
/// a request that ends the sequence.
async fn closed_loop(
    client: &Rc<LoadClient>,
    plan: &LoadPlan,
    gate: RequestGate,
    concurrency: usize,
    stats: &Rc<RefCell<LoadStats>>,
) -> Vec<(usize, SequencePosition)> {
    let gate = Rc::new(gate);
    let timeout = plan.timeout;
    let mut clients = JoinSet::new();
    for slot in 0..concurrency {
        let client = client.clone();
        let gate = gate.clone();
        let stats = stats.clone();
        let mut sequence = plan.sequences.map(|sequences| sequences.of(slot));
        clients.spawn_local(async move {
            let mut now = clock::now();
            while gate.admits(now) {
                let outcome = client.send(slot, sequence.as_ref().map(ClientSequence::next), timeout).await;
                let sent = now;
                let failed = outcome.is_err();
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
            Some((slot, sequence?.end_early()?))
        });
    }
    clients.join_all().await.into_iter().flatten().collect()
}

/// Ends the sequences that are open at the end of the run, so that the server need not keep their
/// state until the idle timeout. These requests are not measured.
async fn end_open_sequences(
    client: &Rc<LoadClient>,
    open: Vec<(usize, SequencePosition)>,
    timeout: Duration,
) {
    let mut clients = JoinSet::new();
    for (slot, place) in open {
        let client = client.clone();
        clients.spawn_local(async move {
            // If the request fails, the server ends the sequence at its idle timeout.
            drop(client.send(slot, Some(place), timeout).await);
        });
    }
    clients.join_all().await;
}

/// The number of unanswered requests.
#[derive(Default)]
struct InFlight {
    count: Cell<usize>,
    one_less: Notify,
}

async fn open_loop(
    client: &Rc<LoadClient>,
    plan: &LoadPlan,
    gate: RequestGate,
    schedule: SendSchedule,
    max_in_flight: usize,
    stats: &Rc<RefCell<LoadStats>>,
) -> Result<(), CommandFailure> {
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
            .map_err(|error| CommandFailure::failed(format!("the timer failed: {error}")))?;
        stats.borrow_mut().lag.record(clock::now().duration_since(meant));
        if in_flight.count.get() >= max_in_flight {
            let example = format!("{max_in_flight} requests were in flight (--max-in-flight)");
            stats.borrow_mut().record(Duration::ZERO, Err(Problem::new("not sent", example)));
        } else {
            in_flight.count.set(in_flight.count.get() + 1);
            let client = client.clone();
            let stats = stats.clone();
            let in_flight = in_flight.clone();
            tokio::task::spawn_local(async move {
                let outcome = client.send(slot, None, timeout).await;
                // Measure from the planned send time: a user would also have waited for a late
                // generator or a stalled server.
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

/// Returns the processor time of all threads of this process.
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
        let timed = RequestGate::new(start, LoadEnd::Elapsed(Duration::from_secs(1)));
        assert!(timed.admits(start) && timed.admits(start + Duration::from_millis(999)));
        assert!(!timed.admits(start + Duration::from_secs(1)));
        let counted = RequestGate::new(start, LoadEnd::Sent(2));
        let later = start + Duration::from_secs(99);
        assert_eq!(
            [counted.admits(start), counted.admits(later), counted.admits(start)],
            [true, true, false]
        );
    }

    #[test]
    fn processor_time_never_decreases() {
        let before = processor_time();
        assert!(before > Duration::ZERO && processor_time() >= before);
    }
}
