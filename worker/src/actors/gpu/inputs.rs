//! Runs and the objects that they read. A run that waits for an input also holds back the runs behind it on
//! its seat, because the executor must get the runs of a seat in the core's order. The copy of the run's model
//! goes on meanwhile.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Write as _};
use std::sync::Arc;

use millrace_core::attempts::AttemptProgress;
use millrace_core::ids::ObjectKey;
use millrace_core::ids::{RequestKey, RunId};
use millrace_gpu::{Event, RunFailure};
use millrace_memory::elastic::{self};
use millrace_proto::executor::tensor::Contents;
use millrace_proto::executor::{ObjectPart, Run};
use millrace_proto::worker::FetchMethod;
use millrace_transfers::paths::RouteHops;
use millrace_types::Timestamp;

use super::actor::GpuActor;
use super::object_table::WaitingRun;
use crate::actor_runtime::Mailbox;
use crate::messages::gpu::Message;
use crate::object_handle::{HandleLocation, HostBytes, ObjectLost, Reply, TransferReader};
use crate::objects::{Contents as Held, memory, size_of_memory};
use crate::port::Descriptor;
use crate::request::InputTransfer;

impl GpuActor {
    /// Sends a run to the executor once all its inputs are available.
    pub(super) fn start_run(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        run: Run,
        descriptors: Vec<Descriptor>,
    ) {
        if let Some(entry) = self.entries.get(&key).filter(|_| !run.kept.is_empty()) {
            self.data.push_store_event(elastic::Event::Requested { function: entry.work().function });
        }
        let mut waiting = WaitingRun { key, run, descriptors, missing: Vec::new(), began: now };
        if self.find_inputs(now, &mut waiting) {
            self.data.waiting.push_back(waiting);
            self.send_ready();
        } else {
            let run = RunId(waiting.run.run);
            self.drop_inputs(run);
            self.data.pending_events.push_back(input_lost(run));
        }
    }

    /// Reserves a run's objects on this GPU and asks for copies of the others. Returns false if an object
    /// is lost.
    fn find_inputs(&mut self, now: Timestamp, waiting: &mut WaitingRun) -> bool {
        let Some(entry) = self.entries.get(&waiting.key) else { return false };
        let objects = entry.works.iter().flat_map(|work| &work.invocation.on_gpus.objects);
        let objects: BTreeMap<_, _> = objects.map(|object| (object.key.0, Arc::clone(object))).collect();
        for place in 0..waiting.run.inputs.len() {
            let Some(Contents::Object(part)) = waiting.run.inputs[place].contents else { continue };
            let (Some(object), Some(own)) = (objects.get(&part.object), self.peers.own.mailbox()) else {
                return false;
            };
            match object.place() {
                HandleLocation::Lost => return false,
                HandleLocation::Gpu(incarnation)
                    if object.gpu == self.index() && incarnation == self.incarnation =>
                {
                    self.data.reserve(object.key);
                    self.record_fetch(now, waiting.key, place, FetchMethod::IntraGpu, &[], now);
                }
                HandleLocation::Gpu(_) if part.bytes > 0 && self.can_bring(object) => {
                    self.start_input_copy(waiting, place, object, part);
                }
                HandleLocation::Coming | HandleLocation::Gpu(_) | HandleLocation::Host(_) => {
                    waiting.missing.push(place);
                    let run = RunId(waiting.run.run);
                    let ObjectPart { offset, bytes, .. } = part;
                    let reply = Reply::new(move |found| post_fetched_input(found, bytes, own, run, place));
                    object.ask(offset, bytes, TransferReader::Run(waiting.key), reply);
                }
            }
        }
        true
    }

    /// Records the fetch of input number `place` of a run, for the request's trace and its answer.
    pub(super) fn record_fetch(
        &mut self,
        now: Timestamp,
        key: RequestKey,
        place: usize,
        method: FetchMethod,
        routes: &[RouteHops],
        began: Timestamp,
    ) {
        let Some(entry) = self.entries.get_mut(&key) else { return };
        let inputs = entry.works.iter().flat_map(|work| {
            let inputs = work.invocation.inputs.iter();
            inputs.map(move |input| (work.key, input))
        });
        let Some((work, input)) = inputs.into_iter().nth(place) else { return };
        let Some(Contents::Object(part)) = &input.contents else { return };
        let object = ObjectKey(part.object);
        let bytes = part.bytes;
        let took = now.since(began);
        let input = input.name.clone();
        entry.spans.fetched(method, routes, &input, bytes, took);
        if method == FetchMethod::IntraGpu {
            entry.reserved.push(object);
        }
        entry.fetches.push((work, InputTransfer { input, method, bytes, took }));
    }

    /// Handles the result of a fetch over the host: the input arrived in host memory, or is lost.
    pub(super) fn input_fetched(&mut self, now: Timestamp, run: RunId, place: usize, found: HostBytes) {
        let Some(at) = self.data.waiting.iter().position(|it| it.run.run == run.0) else { return };
        match found {
            // The descriptor holds the tensor's bytes and no others, because `post_fetched_input` cuts them out.
            Ok((fd, _)) => {
                let waiting = &mut self.data.waiting[at];
                waiting.missing.retain(|&missing| missing != place);
                let number = u32::try_from(waiting.descriptors.len()).unwrap_or(u32::MAX);
                waiting.descriptors.push(fd);
                waiting.run.inputs[place].contents = Some(Contents::ContentsFd(number));
                let key = waiting.key;
                let began = waiting.began;
                self.record_fetch(now, key, place, FetchMethod::Host, &[], began);
            }
            Err(ObjectLost) => {
                self.data.waiting.remove(at);
                self.drop_inputs(run);
                self.data.pending_events.push_back(input_lost(run));
            }
        }
        self.send_ready();
    }

    /// Sends the runs of each seat to the executor in their order, up to the first run of the seat that waits
    /// for an input.
    pub(super) fn send_ready(&mut self) {
        let waiting = self.data.waiting.iter().map(|it| (it.run.seat, it.missing.is_empty()));
        // Each removal moves the later runs up by one.
        for (removed, at) in sendable(waiting).into_iter().enumerate() {
            if let Some(WaitingRun { run, descriptors, .. }) = self.data.waiting.remove(at - removed) {
                self.send_run(run, descriptors);
            }
        }
        self.give_tokens_back();
    }

    /// Cancels a run that was not sent to the executor yet. Returns false if the run was sent.
    pub(super) fn cancel_waiting_run(&mut self, run: RunId) -> bool {
        let Some(at) = self.data.waiting.iter().position(|it| it.run.run == run.0) else { return false };
        self.data.waiting.remove(at);
        self.drop_inputs(run);
        self.send_ready();
        self.data.pending_events.push_back(Event::RunCancelled { run });
        true
    }

    /// Forgets the waiting run of a request that left without an event from the executor. Inputs that
    /// arrive for that run later are dropped. Above all such inputs must not reach a later run of the
    /// same request.
    pub(super) fn forget_run(&mut self, key: RequestKey) {
        let Some(at) = self.data.waiting.iter().position(|it| it.key == key) else { return };
        if let Some(waiting) = self.data.waiting.remove(at) {
            self.drop_inputs(RunId(waiting.run.run));
        }
    }

    /// Corrects the progress of lost requests: a request whose run waited for inputs was not yet sent to
    /// the executor.
    pub(super) fn correct_progress(
        &self,
        lost: Vec<(RequestKey, AttemptProgress)>,
    ) -> Vec<(RequestKey, AttemptProgress)> {
        let waits = |key| self.data.waiting.iter().any(|waiting| waiting.key == key);
        let told = |(key, progress)| (key, if waits(key) { AttemptProgress::Preparing } else { progress });
        lost.into_iter().map(told).collect()
    }
}

/// Posts the result of a fetch for a run. A part of a larger piece of memory is first copied out on a
/// blocking thread, because the copy would hold up the actor thread.
pub(super) fn post_fetched_input(
    found: HostBytes,
    bytes: u64,
    own: Mailbox<Message>,
    run: RunId,
    place: usize,
) {
    let exactly = |(fd, offset): &(Descriptor, u64)| {
        *offset == 0 && size_of_memory(fd).is_ok_and(|size| size as u64 == bytes)
    };
    match found {
        Ok((fd, offset)) if !exactly(&(Arc::clone(&fd), offset)) => {
            tokio::task::spawn_blocking(move || {
                let found = part_of(fd, offset, bytes).map_err(|error| {
                    tracing::warn!(%error, "cannot allocate memory for a part of an object");
                    ObjectLost
                });
                own.post(Message::InputFetched { run, place, found: found.map(|fd| (fd, 0)) });
            });
        }
        found => own.post(Message::InputFetched { run, place, found }),
    }
}

fn part_of(fd: Descriptor, offset: u64, bytes: u64) -> io::Result<Descriptor> {
    let whole = Held::Memory { bytes: size_of_memory(&fd)? as u64, fd };
    let mut file: File = memory("millrace-object")?;
    file.write_all(&whole.read(offset, usize::try_from(bytes).unwrap_or(usize::MAX))?)?;
    Ok(Descriptor::new(file.into()))
}

fn input_lost(run: RunId) -> Event {
    Event::RunFailed { run, why: RunFailure::InputLost }
}

/// Returns the indices of the runs that can be sent to the executor, in ascending order. `runs` has the
/// seat of each waiting run and whether the run has all of its inputs.
fn sendable(runs: impl Iterator<Item = (u32, bool)>) -> Vec<usize> {
    let mut blocked = BTreeSet::new();
    let free = runs.enumerate().filter(|&(_, (seat, complete))| {
        let sent = complete && !blocked.contains(&seat);
        if !sent {
            blocked.insert(seat);
        }
        sent
    });
    free.map(|(at, _)| at).collect()
}

#[cfg(test)]
mod tests {
    use millrace_core::SEATS_MAX;

    use super::*;

    #[test]
    fn a_run_that_waits_for_an_input_holds_back_the_later_runs_of_its_seat_alone() {
        let runs = [(0, true), (1, false), (1, true), (0, true), (2, false), (2, true), (3, true)];
        assert_eq!(sendable(runs.into_iter()), [0, 3, 6]);
        let all_seats = 1..u32::try_from(SEATS_MAX).unwrap();
        let runs = std::iter::once((0, false)).chain(all_seats.map(|seat| (seat, true)));
        assert_eq!(sendable(runs).len(), SEATS_MAX - 1);
    }
}
