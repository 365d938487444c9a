//! The control thread: receives commands in the order in which they were sent, carries out the quick
//! ones, and hands copies and runs to their threads.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_device::{Device as _, DeviceLoss, InjectedFault, monotonic_now};
use millrace_engine::Engine;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{
    self as wire_messages, AddPeer, Copy, CopyFailure, CopyOut, Grant, InjectFault, LoadProgram, Map,
    MapFailed, PlaceObject, ProgramFailed, ProgramLoaded, Revoke, Run, RunCancelled, RunFailure,
};
use millrace_slices::tokens::TokenId;

use crate::copies::copy_batch::{self, CopyBatch, GpuTarget, GrantError};
use crate::copies::copy_thread::{COPIES_QUEUED_MAX, CopyWork};
use crate::copies::host_copies::{self, CopyToHost, GrantedHostCopies, ImmediateHostCopy};
use crate::copies::peers::PeerTable;
use crate::error::Error;
use crate::memory::executor_state::ExecutorState;
use crate::memory::object_reports;
use crate::memory::objects::ObjectTable;
use crate::programs::loaded_program::LoadedProgram;
use crate::queue::WorkQueue;
use crate::runs::run_error;
use crate::runs::run_thread::{self, QueuedRun, RUNS_QUEUED_MAX};
use crate::runs::seats::RunSeats;
use crate::socket::conversions::{self, FrameDescriptors};
use crate::socket::events::clip;

/// Most programs loaded at a time. Each program has a descriptor and a few mappings.
pub const PROGRAMS_MAX: usize = 4096;

/// Whether injected faults are carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FaultPolicy {
    Obeyed,
    Refused,
}

/// Whether the executor continues after a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ControlFlow {
    Continue,
    End,
}

#[derive(Debug)]
pub(super) struct ControlThread<E: Engine> {
    shared: Arc<ExecutorState<E>>,
    faults: FaultPolicy,
    programs: BTreeMap<u64, Arc<LoadedProgram<E>>>,
    objects: ObjectTable<E>,
    peers: PeerTable<E>,
    /// Copies to the host that proceed under grants.
    granted: GrantedHostCopies<E>,
    copies: Arc<WorkQueue<CopyWork<E>>>,
    copies_out: Arc<WorkQueue<CopyWork<E>>>,
    seats: RunSeats<E>,
}

impl<E: Engine> ControlThread<E> {
    pub(super) fn new(shared: Arc<ExecutorState<E>>, faults: FaultPolicy) -> Result<Self, Error> {
        let copies = || Arc::new(WorkQueue::new(COPIES_QUEUED_MAX));
        let seats = RunSeats::new(Arc::clone(&shared))?;
        Ok(Self {
            shared,
            faults,
            programs: BTreeMap::new(),
            objects: ObjectTable::new(),
            peers: PeerTable::new(),
            granted: GrantedHostCopies::new(),
            copies: copies(),
            copies_out: copies(),
            seats,
        })
    }

    /// Returns the queue of copies to the GPU.
    pub(super) fn copies(&self) -> Arc<WorkQueue<CopyWork<E>>> {
        Arc::clone(&self.copies)
    }

    /// Returns the queue of copies to the host.
    pub(super) fn copies_out(&self) -> Arc<WorkQueue<CopyWork<E>>> {
        Arc::clone(&self.copies_out)
    }

    /// Carries out a command.
    ///
    /// `launches` is the control thread's own queue of launches, on which short runs execute.
    pub(super) fn on_command(
        &mut self,
        command: Command,
        descriptors: FrameDescriptors,
        launches: &mut E::Queue,
    ) -> Result<ControlFlow, Error> {
        match command {
            Command::Hello(_) => return Err(Error::Protocol("a second Hello")),
            Command::LoadProgram(load) => self.load(load, descriptors),
            Command::UnloadProgram(unload) => self.unload(unload.program),
            Command::Map(map) => self.map(map),
            Command::Unmap(unmap) => {
                if let Some(program) = self.programs.get(&unmap.program) {
                    program.mapping.unmap(unmap.generation);
                    // A copy to this mapping that waits for its window is stale now, so the queue
                    // must check again.
                    self.copies.reconsider();
                }
            }
            Command::AddPeer(peer) => self.add_peer(&peer, descriptors),
            Command::ForgetPeer(peer) => self.peers.forget(peer.gpu),
            Command::Copy(copy) => self.copy(copy),
            Command::Revoke(revoke) => {
                let Revoke { transfer, batch } = revoke;
                let mut queues = [&self.copies, &self.copies_out].into_iter();
                if queues.any(|queue| queue.remove(|work| work.is_batch(transfer, batch)).is_some()) {
                    self.say(copy_batch::refused(
                        transfer,
                        batch,
                        CopyFailure::Revoked,
                        "the grant was revoked",
                    ));
                }
            }
            Command::Run(run) => self.run(run, descriptors, launches)?,
            Command::Cancel(cancel) => {
                if self.seats.cancel(cancel.run) {
                    self.say(Event::RunCancelled(RunCancelled { run: cancel.run }));
                }
            }
            Command::Grant(grant) => self.grant(grant)?,
            Command::Shorten(it) => {
                if let Some(gate) = self.seats.gate(it.seat) {
                    gate.shorten(TokenId(it.token), Duration::from_nanos(it.busy_ns), &self.shared.events);
                }
            }
            Command::Withdraw(it) => {
                if let Some(gate) = self.seats.gate(it.seat) {
                    gate.withdraw(TokenId(it.token), &self.shared.events);
                }
            }
            Command::PlaceObject(place) => self.place(place, descriptors),
            Command::CopyOut(copy) => self.copy_out(copy, descriptors),
            Command::EndCopyOut(copy) => self.granted.end(copy.copy),
            Command::FreeObject(free) => {
                self.objects.free(&self.shared, free.object);
                self.copies.reconsider();
            }
            Command::DropOutputs(outputs) => self.shared.kept.remove(outputs.run),
            Command::InjectFault(fault) => self.inject(fault),
            Command::Shutdown(_) => return Ok(ControlFlow::End),
        }
        Ok(ControlFlow::Continue)
    }

    fn say(&self, event: Event) {
        self.shared.events.send(event);
    }

    fn load(&mut self, message: LoadProgram, descriptors: FrameDescriptors) {
        let id = message.program;
        let started = monotonic_now();
        let failed = |message| Event::ProgramFailed(ProgramFailed { program: id, message: clip(message) });
        if self.programs.contains_key(&id) {
            return self.say(failed(format!("program {id} is loaded already")));
        }
        if self.programs.len() >= PROGRAMS_MAX {
            return self.say(failed(format!("{PROGRAMS_MAX} programs are loaded: unload one first")));
        }
        match LoadedProgram::load(Arc::clone(&self.shared), message, descriptors) {
            Ok(program) => {
                tracing::debug!(program = id, name = program.name, "loaded");
                self.programs.insert(id, Arc::new(program));
                let took = monotonic_now().since(started).as_nanos();
                let took_ns = u64::try_from(took).unwrap_or(u64::MAX);
                self.say(Event::ProgramLoaded(ProgramLoaded { program: id, took_ns }));
            }
            Err(error) => self.say(failed(error.to_string())),
        }
    }

    /// Unloads a program. Copies and runs that use the program keep it alive until they are done.
    fn unload(&mut self, id: u64) {
        if let Some(program) = self.programs.remove(&id) {
            program.mapping.unmap_any();
            self.copies.reconsider();
        }
    }

    fn map(&self, message: Map) {
        let Map { program: id, generation, extents } = message;
        let failed =
            |message| Event::MapFailed(MapFailed { program: id, generation, message: clip(message) });
        let Some(program) = self.programs.get(&id) else {
            return self.say(failed(format!("program {id} is not loaded")));
        };
        if let Err(error) =
            program.mapping.map(generation, extents.into_iter().map(conversions::extent).collect())
        {
            self.say(failed(error.to_string()));
        }
    }

    /// Adds a peer. A failure only prevents copies from this peer.
    fn add_peer(&mut self, message: &AddPeer, mut descriptors: FrameDescriptors) {
        let added = match descriptors.take(message.memory_fd) {
            Ok(memory) => {
                self.peers.add(self.shared.device(), message, memory).map_err(|error| error.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(error) = added {
            tracing::warn!(
                gpu = message.gpu,
                error,
                "cannot read another GPU's memory: models are copied from the host"
            );
        }
    }

    fn copy(&self, mut message: Copy) {
        let transfer = message.transfer;
        let batch = message.batch;
        let id = message.program;
        let refuse =
            |failure, message: String| self.say(copy_batch::refused(transfer, batch, failure, message));
        if message.copy_out != 0 {
            let copy = message.copy_out;
            return match self.granted.get(copy) {
                None => refuse(CopyFailure::NotMapped, format!("copy {copy} to the host is not under way")),
                Some(bytes) => {
                    let job = CopyBatch::to_host(message, bytes, self.shared.device());
                    queue_batch(&self.copies_out, job, refuse);
                }
            };
        }
        let to = match message.object {
            0 => match self.programs.get(&id) {
                Some(program) => GpuTarget::Program(program),
                None => return refuse(CopyFailure::NotMapped, format!("program {id} is not loaded")),
            },
            object => match self.objects.get(object) {
                Ok(object) => GpuTarget::Object(object),
                Err(error) => return refuse(CopyFailure::NotMapped, error.to_string()),
            },
        };
        let peer = match message.peer.take() {
            None => None,
            Some(source) => match self.peers.source(source) {
                Some(source) => Some(source),
                None => {
                    return refuse(
                        CopyFailure::Peer,
                        "this executor does not know the peer's memory".to_owned(),
                    );
                }
            },
        };
        let job = CopyBatch::to_gpu(message, to, peer, self.shared.device());
        queue_batch(&self.copies, job, refuse);
    }

    fn place(&mut self, message: PlaceObject, descriptors: FrameDescriptors) {
        let id = message.object;
        match self.objects.place(&self.shared, message, descriptors) {
            Err(error) => self.say(object_reports::refused(id, error)),
            Ok(None) => self.say(object_reports::placed(id)),
            Ok(Some(filling)) => {
                if let Err(CopyWork::Filling(filling)) = self.copies.push(CopyWork::Filling(filling)) {
                    filling.fail(format!("the queue of {COPIES_QUEUED_MAX} copies is full"));
                }
            }
        }
    }

    fn copy_out(&mut self, message: CopyOut, descriptors: FrameDescriptors) {
        let copy = message.copy;
        let granted = message.granted;
        let begun = match CopyToHost::new(message, &self.shared, &self.objects, descriptors) {
            Err(error) => Err(error.to_string()),
            Ok(bytes) if granted => self.granted.begin(copy, bytes).map_err(|error| error.to_string()),
            Ok(bytes) => {
                let queued = self.copies_out.push(CopyWork::Out(ImmediateHostCopy { copy, bytes }));
                queued.map_err(|_| format!("the queue of {COPIES_QUEUED_MAX} copies is full"))
            }
        };
        if let Err(why) = begun {
            self.say(host_copies::refused(copy, why));
        }
    }

    /// Starts a run. The control thread carries out a short run itself if the run waits for nothing
    /// and no other run is ahead, because waking the run thread would take longer.
    fn run(
        &mut self,
        message: Run,
        descriptors: FrameDescriptors,
        launches: &mut E::Queue,
    ) -> Result<(), Error> {
        let run = message.run;
        let id = message.program;
        let seat = message.seat as usize;
        let events = &self.shared.events;
        let fail = |failure, message: String| events.send(run_error::failed(run, failure, message));
        let no_seats_busy = self.seats.are_idle();
        let seat = match self.seats.start(seat) {
            Ok(seat) => seat,
            Err(error) => {
                fail(RunFailure::Device, error.to_string());
                return Ok(());
            }
        };
        if let Some(tokens) = message.tokens.filter(|tokens| tokens.anew) {
            seat.gate.begin(tokens.first.map(conversions::token).transpose()?);
        }
        let Some(program) = self.programs.get(&id) else {
            fail(RunFailure::UnknownProgram, format!("program {id} is not loaded"));
            return Ok(());
        };
        match QueuedRun::new(message, Arc::clone(program), &self.objects, descriptors) {
            Err(error) => fail(error.kind(), error.to_string()),
            Ok(job) if job.is_quick() && no_seats_busy => {
                run_thread::carry_out_and_report(&self.shared, &seat.gate, job, launches)
            }
            Ok(job) => {
                if seat.runs.push(job).is_err() {
                    fail(RunFailure::Device, format!("the queue of {RUNS_QUEUED_MAX} runs is full"));
                }
            }
        }
        Ok(())
    }

    /// Gives a seat a token. A seat that has had no run has not asked for one.
    fn grant(&self, Grant { seat, token }: Grant) -> Result<(), Error> {
        let token = token.ok_or(Error::Protocol("a grant without a token"))?;
        if let Some(gate) = self.seats.gate(seat) {
            gate.grant(conversions::token(token)?);
        }
        Ok(())
    }

    fn inject(&self, message: InjectFault) {
        if self.faults == FaultPolicy::Refused {
            tracing::warn!("refused to inject a fault: the worker did not allow faults");
            return;
        }
        let device = self.shared.device();
        let injected = match message.fault() {
            wire_messages::Fault::FailNextCopy => device.inject(InjectedFault::FailNextCopy),
            wire_messages::Fault::FailNextMap => device.inject(InjectedFault::FailNextMap),
            wire_messages::Fault::Xid => {
                let lost = device.inject(InjectedFault::Lose);
                let message = "an Xid was injected: the GPU is lost";
                self.shared.events.device_failed(DeviceLoss::Gpu, message);
                self.programs.values().for_each(|program| program.mapping.lose(message));
                self.objects.lose(message);
                self.copies.reconsider();
                lost
            }
            wire_messages::Fault::CorruptDevice => match self.programs.get(&message.program) {
                Some(program) => device.inject(InjectedFault::Corrupt(&program.mapping.region)),
                None => Ok(()),
            },
            wire_messages::Fault::AbortOnRun => {
                self.shared.abort_on_run.store(true, Ordering::Relaxed);
                Ok(())
            }
            wire_messages::Fault::OffTheBus => device.inject(InjectedFault::Lose),
            wire_messages::Fault::LoseContext => device.inject(InjectedFault::LoseContext),
            wire_messages::Fault::OutOfMemory => device.inject(InjectedFault::ExhaustNextLaunch),
            wire_messages::Fault::LosePeers => device.inject(InjectedFault::LosePeers),
            wire_messages::Fault::Unspecified => Ok(()),
        };
        if let Err(error) = injected {
            tracing::warn!(%error, "cannot inject a fault");
        }
    }
}

/// Queues a valid batch for its copy thread, and refuses an invalid batch.
fn queue_batch<E: Engine>(
    queue: &WorkQueue<CopyWork<E>>,
    job: Result<CopyBatch<E>, GrantError>,
    refuse: impl FnOnce(CopyFailure, String),
) {
    match job {
        Err(error) => refuse(CopyFailure::Device, error.to_string()),
        Ok(job) => {
            if queue.push(CopyWork::Batch(job)).is_err() {
                refuse(CopyFailure::Device, format!("the queue of {COPIES_QUEUED_MAX} copies is full"));
            }
        }
    }
}
