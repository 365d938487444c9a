//! The port of a GPU in isolation: each model (a "program" in the executor protocol) has an executor process
//! of its own (L05). One
//! [`ExecutorPort`] stands in front of many ports. All processes share one device memory, which outlives
//! each process.
//!
//! ```text
//!                  ┌ LoadProgram ─► starts a process            ┐
//! Executor actor ──┤ Map, Copy, Run, … ─► the program's process ├─► processes
//!    ▲             └ AddPeer, Shutdown ─► all processes         ┘       │
//!    └─ filter_event() ◄─ the actor's mailbox ◄─ event of process 7 ◄───┘
//! ```
//! Loading a program starts its process, and unloading the program kills the process. Only one process at
//! a time has runs (`turns`). When a process ends, its program is lost
//! ([`ProgramLost`](PortEventKind::ProgramLost)), and the port answers the process's outstanding
//! commands. The port reports its own end after it was killed and all processes have ended. The Executor
//! actor decides whether and when a program is loaded again.
//!
//! The number of programs, at most [`PROCESSES_MAX`](millrace_gpu::PROCESSES_MAX), and the
//! processes that are ending bound the state.

mod turns;

use std::collections::BTreeMap;

use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{
    AddPeer, Copy, CopyFailed, CopyFailure, LoadProgram, ProgramFailed, Ready, Run, RunCancelled, RunFailed,
    RunFailure,
};
use millrace_proto::{BUILD, PROTOCOL_VERSION};
use millrace_types::Incarnation;

use self::turns::{CancelledRun, RunOrder};
use super::{Descriptor, ExecutorPort, PortEvent, PortEventKind, PortSink, ProcessId, SharedDeviceMemory};

/// The factory of an isolating port's device memory and of the ports of its processes.
pub trait IsolatedProcessFactory: 'static {
    /// Returns fresh device memory, which no process has used.
    ///
    /// # Errors
    /// The reason why no memory could be allocated, as text for people.
    fn memory(&mut self) -> Result<SharedDeviceMemory, String>;

    /// Returns the port of a process over this memory, not yet started.
    fn part(&mut self, memory: &SharedDeviceMemory, program: &str, sink: PortSink) -> Box<dyn ExecutorPort>;
}

/// The port of a GPU whose programs have a process each.
pub struct IsolatingPort<P> {
    parts: P,
    sink: PortSink,
    last_part: ProcessId,
    place: Option<PortIncarnation>,
}

/// One incarnation of the port.
struct PortIncarnation {
    incarnation: Incarnation,
    memory: SharedDeviceMemory,
    /// The processes, each until the reported end.
    alive: BTreeMap<ProcessId, IsolatedProcess>,
    /// The process of each program.
    programs: BTreeMap<u64, ProcessId>,
    turns: RunOrder<ProcessId, (Run, Vec<Descriptor>)>,
    /// The process of each outstanding copy, by transfer and batch.
    copies: BTreeMap<(u64, u64), ProcessId>,
    /// The memory of the neighbours, for processes that are started later.
    peers: BTreeMap<u32, (AddPeer, Vec<Descriptor>)>,
    ending: bool,
}

struct IsolatedProcess {
    program: u64,
    port: Box<dyn ExecutorPort>,
}

impl PortIncarnation {
    fn part(&mut self, program: u64) -> Option<(ProcessId, &mut IsolatedProcess)> {
        let id = *self.programs.get(&program)?;
        Some((id, self.alive.get_mut(&id)?))
    }

    fn send_to(&mut self, program: u64, command: Command, descriptors: Vec<Descriptor>) {
        if let Some((_, part)) = self.part(program) {
            part.port.send(command, descriptors);
        }
    }

    fn send_to_all(&mut self, command: &Command, descriptors: &[Descriptor]) {
        for part in self.alive.values_mut() {
            part.port.send(command.clone(), descriptors.to_vec());
        }
    }

    fn send_runs(&mut self, runs: Vec<(ProcessId, (Run, Vec<Descriptor>))>) {
        for (id, (run, descriptors)) in runs {
            if let Some(part) = self.alive.get_mut(&id) {
                part.port.send(Command::Run(run), descriptors);
            }
        }
    }

    /// Reports the outstanding copies and runs of a process that has ended as failed, and sends the next
    /// process its runs.
    fn answer_for(&mut self, id: ProcessId, say: impl Fn(Event)) {
        let mut lost = Vec::new();
        self.copies.retain(|&copy, &mut part| {
            if part == id {
                lost.push(copy);
            }
            part != id
        });
        for (transfer, batch) in lost {
            say(refused(transfer, batch));
        }
        let (lost, next) = self.turns.leave(id);
        for run in lost {
            say(not_run(run));
        }
        self.send_runs(next);
    }
}

/// Returns the failure of a copy whose process has ended. The copy counts as revoked, because nothing is
/// wrong with the copy itself.
fn refused(transfer: u64, batch: u64) -> Event {
    let message = "the program's process has ended".to_owned();
    Event::CopyFailed(CopyFailed { transfer, batch, failure: CopyFailure::Revoked.into(), message })
}

fn not_run(run: u64) -> Event {
    let message = "the program's process has ended".to_owned();
    Event::RunFailed(RunFailed { run, failure: RunFailure::UnknownProgram.into(), message })
}

impl<P: IsolatedProcessFactory> IsolatingPort<P> {
    /// Returns a port without processes. The events of all processes are delivered to `sink`, and the
    /// owner of the sink has to pass the events to [`filter_event`](ExecutorPort::filter_event).
    pub fn new(parts: P, sink: PortSink) -> Self {
        Self { parts, sink, last_part: ProcessId(0), place: None }
    }

    fn say(&self, incarnation: Incarnation, event: Event) {
        self.sink.deliver(PortEvent { incarnation, kind: PortEventKind::Event(event, Vec::new()) });
    }

    fn load(&mut self, load: LoadProgram, descriptors: Vec<Descriptor>) {
        self.end(load.program);
        let Some(place) = &mut self.place else { return };
        self.last_part = ProcessId(self.last_part.0 + 1);
        let id = self.last_part;
        let program = load.program;
        let incarnation = place.incarnation;
        let up = self.sink.clone();
        let sink = PortSink::new(move |PortEvent { incarnation, kind }| {
            up.deliver(PortEvent { incarnation, kind: PortEventKind::Part(id, Box::new(kind)) });
        });
        let mut port = self.parts.part(&place.memory, &load.name, sink);
        // Commands may be sent at once: the process reads commands when ready, and a failed start is
        // reported as an event.
        port.start(incarnation);
        for (peer, memory) in place.peers.values() {
            port.send(Command::AddPeer(*peer), memory.clone());
        }
        port.send(Command::LoadProgram(load), descriptors);
        place.alive.insert(id, IsolatedProcess { program, port });
        place.programs.insert(program, id);
    }

    /// Kills a program's process, if there is one. The program's end is not reported to the actor, which
    /// asked for it or has been told of the failure.
    fn end(&mut self, program: u64) {
        let Some(place) = &mut self.place else { return };
        let sink = &self.sink;
        let incarnation = place.incarnation;
        let Some(id) = place.programs.remove(&program) else { return };
        if let Some(part) = place.alive.get_mut(&id) {
            part.port.kill();
        }
        place.answer_for(id, |event| {
            sink.deliver(PortEvent { incarnation, kind: PortEventKind::Event(event, Vec::new()) });
        });
    }

    fn copy(&mut self, copy: Copy) {
        let Some(place) = &mut self.place else { return };
        let transfer = copy.transfer;
        let batch = copy.batch;
        let incarnation = place.incarnation;
        match place.part(copy.program) {
            Some((id, part)) => {
                part.port.send(Command::Copy(copy), Vec::new());
                place.copies.insert((transfer, batch), id);
            }
            None => self.say(incarnation, refused(transfer, batch)),
        }
    }

    fn run(&mut self, run: Run, descriptors: Vec<Descriptor>) {
        let Some(place) = &mut self.place else { return };
        let name = run.run;
        let incarnation = place.incarnation;
        let Some(&id) = place.programs.get(&run.program) else {
            return self.say(incarnation, not_run(name));
        };
        if let Some(now) = place.turns.ask(name, id, (run, descriptors)) {
            place.send_runs(vec![(id, now)]);
        }
    }

    fn cancel(&mut self, run: u64, command: Command) {
        let Some(place) = &mut self.place else { return };
        let incarnation = place.incarnation;
        match place.turns.cancel(run) {
            CancelledRun::Sent(id) => {
                if let Some(part) = place.alive.get_mut(&id) {
                    part.port.send(command, Vec::new());
                }
            }
            CancelledRun::Waiting => self.say(incarnation, Event::RunCancelled(RunCancelled { run })),
            CancelledRun::Nowhere => {}
        }
    }

    /// Translates an event of a process into an event of the port, if the actor has to hear of it.
    fn translate_event(&mut self, id: ProcessId, kind: PortEventKind) -> Option<PortEventKind> {
        let place = self.place.as_mut()?;
        let program = place.alive.get(&id)?.program;
        // A process that was told to end only matters for its end.
        let current = place.programs.get(&program) == Some(&id) && !place.ending;
        match kind {
            PortEventKind::Exited { status } => {
                let lost = PortEventKind::ProgramLost { program, status };
                return self.part_ended(id).or_else(|| current.then_some(lost));
            }
            PortEventKind::SpawnFailed { message } => {
                let message = format!("cannot start the program's executor: {message}");
                let failed = Event::ProgramFailed(ProgramFailed { program, message });
                let failed = PortEventKind::Event(failed, Vec::new());
                return self.part_ended(id).or_else(|| current.then_some(failed));
            }
            _ if !current => return None,
            PortEventKind::Event(Event::Ready(ready), _) => {
                return Some(PortEventKind::ProgramUp { program, pid: ready.pid });
            }
            PortEventKind::Event(Event::ProgramFailed(_), _) => self.end(program),
            PortEventKind::Event(Event::CopyDone(ref done), _) => {
                place.copies.remove(&(done.transfer, done.batch));
            }
            PortEventKind::Event(Event::CopyFailed(ref failed), _) => {
                place.copies.remove(&(failed.transfer, failed.batch));
            }
            PortEventKind::Event(Event::RunDone(ref done), _) => run_ended(place, done.run),
            PortEventKind::Event(Event::RunFailed(ref failed), _) => run_ended(place, failed.run),
            PortEventKind::Event(Event::RunCancelled(ref cancelled), _) => run_ended(place, cancelled.run),
            _ => {}
        }
        Some(kind)
    }

    /// Removes a process that has ended. Returns the end of the port, if the port is ending and this was
    /// its last process.
    fn part_ended(&mut self, id: ProcessId) -> Option<PortEventKind> {
        let place = self.place.as_mut()?;
        let part = place.alive.remove(&id)?;
        if place.programs.get(&part.program) == Some(&id) {
            place.programs.remove(&part.program);
            let sink = &self.sink;
            let incarnation = place.incarnation;
            place.answer_for(id, |event| {
                sink.deliver(PortEvent { incarnation, kind: PortEventKind::Event(event, Vec::new()) });
            });
        }
        let last = place.ending && place.alive.is_empty();
        if last {
            self.place = None;
        }
        last.then(|| PortEventKind::Exited { status: "all processes have ended".to_owned() })
    }
}

fn run_ended(place: &mut PortIncarnation, run: u64) {
    let next = place.turns.ended(run);
    place.send_runs(next);
}

impl<P: IsolatedProcessFactory> ExecutorPort for IsolatingPort<P> {
    /// Allocates the device memory. The port is ready as soon as memory is allocated; the first program
    /// starts the first process.
    fn start(&mut self, incarnation: Incarnation) {
        let kind = match self.parts.memory() {
            Ok(memory) => {
                self.place = Some(PortIncarnation {
                    incarnation,
                    memory,
                    alive: BTreeMap::new(),
                    programs: BTreeMap::new(),
                    turns: RunOrder::default(),
                    copies: BTreeMap::new(),
                    peers: BTreeMap::new(),
                    ending: false,
                });
                let ready = Ready {
                    protocol_version: PROTOCOL_VERSION,
                    build: BUILD.to_owned(),
                    pid: 0,
                    incarnation: incarnation.0,
                    copy_rates: Vec::new(),
                };
                PortEventKind::Event(Event::Ready(ready), Vec::new())
            }
            Err(message) => PortEventKind::SpawnFailed { message },
        };
        self.sink.deliver(PortEvent { incarnation, kind });
    }

    fn send(&mut self, command: Command, descriptors: Vec<Descriptor>) {
        let Some(place) = self.place.as_mut().filter(|place| !place.ending) else { return };
        match command {
            Command::LoadProgram(load) => self.load(load, descriptors),
            Command::UnloadProgram(unload) => self.end(unload.program),
            Command::Map(ref map) => place.send_to(map.program, command, descriptors),
            Command::Unmap(ref unmap) => place.send_to(unmap.program, command, descriptors),
            Command::Copy(copy) => self.copy(copy),
            Command::Revoke(revoke) => {
                let id = place.copies.get(&(revoke.transfer, revoke.batch));
                if let Some(part) = id.and_then(|id| place.alive.get_mut(id)) {
                    part.port.send(command, descriptors);
                }
            }
            Command::Run(run) => self.run(run, descriptors),
            Command::Cancel(cancel) => self.cancel(cancel.run, command),
            Command::AddPeer(peer) => {
                place.send_to_all(&command, &descriptors);
                place.peers.insert(peer.gpu, (peer, descriptors));
            }
            Command::ForgetPeer(peer) => {
                place.peers.remove(&peer.gpu);
                place.send_to_all(&command, &descriptors);
            }
            // A fault without a program on this GPU is injected into every process.
            Command::InjectFault(fault) if place.programs.contains_key(&fault.program) => {
                place.send_to(fault.program, command, descriptors);
            }
            Command::InjectFault(_) | Command::Shutdown(_) => place.send_to_all(&command, &descriptors),
            // A GPU with several processes is not shared: one process at a time has runs.
            Command::Grant(_) | Command::Shorten(_) | Command::Withdraw(_) => {}
            // Each process gets `Hello` from its own port. No process could read another's objects, so
            // objects are not kept on the GPU in isolation.
            Command::Hello(_)
            | Command::PlaceObject(_)
            | Command::CopyOut(_)
            | Command::EndCopyOut(_)
            | Command::FreeObject(_)
            | Command::DropOutputs(_) => {}
        }
    }

    fn memory(&self) -> Option<SharedDeviceMemory> {
        Some(self.place.as_ref()?.memory.clone())
    }

    fn kill(&mut self) {
        let Some(place) = &mut self.place else { return };
        place.ending = true;
        place.alive.values_mut().for_each(|part| part.port.kill());
        if place.alive.is_empty() {
            let incarnation = place.incarnation;
            let status = "the GPU had no process".to_owned();
            self.place = None;
            self.sink.deliver(PortEvent { incarnation, kind: PortEventKind::Exited { status } });
        }
    }

    fn kill_program(&mut self, program: u64) {
        if let Some((_, part)) = self.place.as_mut().and_then(|place| place.part(program)) {
            part.port.kill();
        }
    }

    fn filter_event(&mut self, event: PortEvent) -> Option<PortEvent> {
        let PortEvent { incarnation, kind } = event;
        let PortEventKind::Part(id, said) = kind else { return Some(PortEvent { incarnation, kind }) };
        Some(PortEvent { incarnation, kind: self.translate_event(id, *said)? })
    }
}

#[cfg(test)]
mod tests;
