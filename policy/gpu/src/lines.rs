//! The requests of a GPU: a line for each seat that has requests. The first request of a line runs,
//! and the requests behind it are queued. A request is in one line only.
//!
//! Lines have no fixed order among each other. If lines compete for memory or for a link, the line
//! of the more urgent request has precedence.

use millrace_core::ids::{RequestKey, RunId, SeatIndex};
use millrace_core::{GPU_REQUESTS_MAX, SEATS_MAX};
use millrace_types::ModelId;

use super::executor_seat::ExecutorSeat;
use super::slots::{AssignedRequest, RequestQueue, RequestStage};

/// The place of a request. Valid until a request enters or leaves a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct LinePlace {
    /// The line, in the order of the seats.
    line: usize,
    /// Number of requests ahead in the line.
    ahead: usize,
}

impl LinePlace {
    /// Returns the place of the first request in a line.
    pub(super) fn first_in(line: usize) -> Self {
        Self { line, ahead: 0 }
    }

    /// Returns the place behind this place.
    pub(super) fn behind(self) -> Self {
        Self { ahead: self.ahead + 1, ..self }
    }

    /// Whether the request is the first in its line.
    pub(super) fn is_first(self) -> bool {
        self.ahead == 0
    }
}

#[derive(Debug)]
struct SeatLine {
    seat: SeatIndex,
    /// The seat's number in the executor, which no other line has.
    number: ExecutorSeat,
    queue: RequestQueue,
}

/// At most [`SEATS_MAX`] lines of at most [`SLOTS_MAX`](millrace_core::SLOTS_MAX) requests each, in
/// the order of their seats. An empty line stays until another seat needs its place, so that a GPU
/// with one seat does not build a new line for each request.
#[derive(Debug, Default)]
pub(super) struct Lines(Vec<SeatLine>);

impl Lines {
    /// Adds a request at the end of a seat's line.
    pub(super) fn push(&mut self, seat: SeatIndex, request: AssignedRequest) {
        assert!(self.len() < GPU_REQUESTS_MAX, "the dispatcher gave {} to a GPU that is full", request.key);
        debug_assert!(self.place_of(request.key).is_none(), "{} is on the GPU already", request.key);
        let found = self.0.binary_search_by_key(&seat, |line| line.seat);
        let line = found.unwrap_or_else(|_| self.add_line(seat));
        self.0[line].queue.push(request);
    }

    fn add_line(&mut self, seat: SeatIndex) -> usize {
        if self.0.len() >= SEATS_MAX {
            self.0.retain(|line| line.queue.len() > 0);
            assert!(self.0.len() < SEATS_MAX, "all seats of the GPU are taken: there is none for {seat}");
        }
        let line = self.0.partition_point(|line| line.seat < seat);
        let is_free = |number: &ExecutorSeat| self.0.iter().all(|line| line.number != *number);
        let number = (0..SEATS_MAX as u8).map(ExecutorSeat).find(is_free).expect("there is a free place");
        self.0.insert(line, SeatLine { seat, number, queue: RequestQueue::default() });
        line
    }

    /// Returns the number in the executor of the seat of a place.
    pub(super) fn seat(&self, place: LinePlace) -> ExecutorSeat {
        self.0[place.line].number
    }

    /// Returns the line of a seat of the executor.
    pub(super) fn line_of(&self, seat: ExecutorSeat) -> Option<usize> {
        self.0.iter().position(|line| line.number == seat)
    }

    /// Returns the requests with a run in the executor, each with its seat.
    pub(super) fn sent_by_seat(&self) -> impl Iterator<Item = (ExecutorSeat, &AssignedRequest)> {
        let requests = self.0.iter().flat_map(|line| line.queue.iter().map(|request| (line.number, request)));
        requests.filter(|(_, request)| request.run().is_some())
    }

    fn sent(&self, seat: ExecutorSeat) -> impl Iterator<Item = &AssignedRequest> {
        let line = self.0.iter().find(|line| line.number == seat);
        let requests = line.into_iter().flat_map(|line| line.queue.iter());
        requests.filter(|request| request.run().is_some())
    }

    /// Returns the number of a seat's runs in the executor.
    pub(super) fn sent_runs(&self, seat: ExecutorSeat) -> usize {
        self.sent(seat).count()
    }

    /// Whether a seat has a run of a model in the executor.
    pub(super) fn sends(&self, seat: ExecutorSeat, model: ModelId) -> bool {
        self.sent(seat).any(|request| request.model == model)
    }

    /// Whether another seat has a run of a model in the executor.
    pub(super) fn others_send(&self, seat: ExecutorSeat, model: ModelId) -> bool {
        let others = self.0.iter().filter(|line| line.number != seat);
        let mut requests = others.flat_map(|line| line.queue.iter());
        requests.any(|request| request.model == model && request.run().is_some())
    }

    pub(super) fn len(&self) -> usize {
        self.queues().map(RequestQueue::len).sum()
    }

    pub(super) fn get(&self, place: LinePlace) -> Option<&AssignedRequest> {
        self.0.get(place.line)?.queue.get(place.ahead)
    }

    pub(super) fn get_mut(&mut self, place: LinePlace) -> Option<&mut AssignedRequest> {
        self.0.get_mut(place.line)?.queue.get_mut(place.ahead)
    }

    fn queues(&self) -> impl Iterator<Item = &RequestQueue> {
        self.0.iter().map(|line| &line.queue)
    }

    /// Returns all requests, in the order of the seats and in each line from the first.
    pub(super) fn iter(&self) -> impl Iterator<Item = &AssignedRequest> {
        self.queues().flat_map(RequestQueue::iter)
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut AssignedRequest> {
        self.0.iter_mut().flat_map(|line| line.queue.iter_mut())
    }

    /// Returns all requests with their places, in the order of [`Self::iter`].
    pub(super) fn places(&self) -> impl Iterator<Item = (LinePlace, &AssignedRequest)> {
        self.queues().enumerate().flat_map(|(line, queue)| {
            queue.iter().enumerate().map(move |(ahead, request)| (LinePlace { line, ahead }, request))
        })
    }

    /// Returns the first request of each line, in the order of the seats.
    pub(super) fn heads(&self) -> impl Iterator<Item = &AssignedRequest> {
        self.queues().filter_map(|queue| queue.get(0))
    }

    /// Returns the lines that have requests, in the order of the urgency of their first requests.
    pub(super) fn visiting_order(&self) -> impl Iterator<Item = usize> + use<> {
        let mut order = [0; SEATS_MAX];
        let mut count = 0;
        for (line, queue) in (0..).zip(self.queues()) {
            if queue.len() > 0 {
                order[count] = line;
                count += 1;
            }
        }
        if count > 1 {
            let head = |&line: &u8| self.0[usize::from(line)].queue.get(0).map(AssignedRequest::urgency);
            order[..count].sort_unstable_by_key(head);
        }
        order.into_iter().take(count).map(usize::from)
    }

    /// Returns, for each line, the first request that matches. Matching requests behind it run later,
    /// so they have no claim of their own.
    pub(super) fn first_of_each(
        &self,
        matches: impl Fn(&&AssignedRequest) -> bool,
    ) -> impl Iterator<Item = &AssignedRequest> {
        self.queues().filter_map(move |queue| queue.iter().find(&matches))
    }

    /// Returns the most urgent of [`Self::first_of_each`].
    pub(super) fn most_urgent(
        &self,
        matches: impl Fn(&&AssignedRequest) -> bool,
    ) -> Option<&AssignedRequest> {
        self.first_of_each(matches).min_by_key(|request| request.urgency())
    }

    /// Does the same as [`Self::most_urgent`], for a request that is to be changed.
    pub(super) fn most_urgent_mut(
        &mut self,
        matches: impl Fn(&&mut AssignedRequest) -> bool,
    ) -> Option<&mut AssignedRequest> {
        let lines = self.0.iter_mut();
        lines.filter_map(|line| line.queue.iter_mut().find(&matches)).min_by_key(|request| request.urgency())
    }

    pub(super) fn place_of(&self, key: RequestKey) -> Option<LinePlace> {
        self.find(|queue| queue.place_of(key))
    }

    pub(super) fn place_of_run(&self, run: RunId) -> Option<LinePlace> {
        self.find(|queue| queue.place_of_run(run))
    }

    fn find(&self, place: impl Fn(&RequestQueue) -> Option<usize>) -> Option<LinePlace> {
        let found = |(line, queue)| Some(LinePlace { line, ahead: place(queue)? });
        self.queues().enumerate().find_map(found)
    }

    pub(super) fn remove(&mut self, place: LinePlace) -> AssignedRequest {
        self.0[place.line].queue.remove(place.ahead)
    }

    pub(super) fn clear(&mut self) {
        self.0.iter_mut().for_each(|line| line.queue.clear());
    }

    /// Sets the stage of a request that has to be sent again, and moves it behind the requests of
    /// its line that the executor has.
    pub(super) fn requeue(&mut self, place: LinePlace, stage: RequestStage) {
        if let Some(line) = self.0.get_mut(place.line) {
            line.queue.requeue(place.ahead, stage);
        }
    }

    /// Moves the marked requests behind the others of their line. There is a mark for each request,
    /// in the order of [`Self::iter`].
    pub(super) fn set_back(&mut self, marked: &[bool]) {
        let mut rest = marked;
        for line in &mut self.0 {
            let (marked, others) = rest.split_at(line.queue.len());
            line.queue.set_back(marked);
            rest = others;
        }
    }

    /// Lets starved requests of a model be sent again.
    pub(super) fn feed(&mut self, model: ModelId) {
        self.0.iter_mut().for_each(|line| line.queue.feed(model));
    }

    pub(super) fn uses(&self, model: ModelId) -> bool {
        self.queues().any(|queue| queue.uses(model))
    }
}
