//! A GPU's place in which each program has a process of its own (L05): one [`ExecutorPort`] in front
//! of many, over one device memory, which outlives each of them.
//!
//! ```text
//!                  ┌ LoadProgram ─► starts a process          ┐
//! Executor actor ──┤ Map, Copy, Run, … ─► the one it is about  ├─► processes
//!    ▲             └ AddPeer, Shutdown ─► all                 ┘       │
//!    └─ heard() ◄─ the actor's mailbox ◄─ "process 7 said …" ◄────────┘
//! ```
//! Loading a program starts its process and unloading it kills it. Runs go out one process at a time
//! (`turns`). A process that ends takes its program with it
//! ([`ProgramLost`](PortEventKind::ProgramLost)), and what was asked of it is answered here; the place
//! itself ends when it is killed and all have gone. Whether and when a program is loaded again is not
//! decided here. Bounded by the number of programs: [`PROCESSES_MAX`](millrace_policy::gpu::PROCESSES_MAX),
//! and those that are ending.

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

use self::turns::{Found, Turns};
use super::{Descriptor, ExecutorPort, Lent, PortEvent, PortEventKind, PortSink};

/// Names a process of an isolated place, and never another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct PartId(u64);

/// What an isolated place is made of.
pub trait Parts: 'static {
    /// Device memory that no process has seen.
    ///
    /// # Errors
    /// Why there is none, for people.
    fn memory(&mut self) -> Result<Lent, String>;

    /// A process over that memory, not yet started.
    fn part(&mut self, memory: &Lent, program: &str, sink: PortSink) -> Box<dyn ExecutorPort>;
}

/// A GPU's place whose programs have a process each.
pub struct IsolatingPort<P> {
    parts: P,
    sink: PortSink,
    last_part: PartId,
    place: Option<Place>,
}

/// One incarnation of it.
struct Place {
    incarnation: Incarnation,
    memory: Lent,
    /// Until each was heard to have ended.
    alive: BTreeMap<PartId, Part>,
    /// The process of each program.
    programs: BTreeMap<u64, PartId>,
    turns: Turns<PartId, (Run, Vec<Descriptor>)>,
    /// The process that each copy was given to.
    copies: BTreeMap<(u64, u64), PartId>,
    /// For those that are started later.
    peers: BTreeMap<u32, (AddPeer, Vec<Descriptor>)>,
    ending: bool,
}

struct Part {
    program: u64,
    port: Box<dyn ExecutorPort>,
}

impl Place {
    fn part(&mut self, program: u64) -> Option<(PartId, &mut Part)> {
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

    fn send_runs(&mut self, runs: Vec<(PartId, (Run, Vec<Descriptor>))>) {
        for (id, (run, descriptors)) in runs {
            if let Some(part) = self.alive.get_mut(&id) {
                part.port.send(Command::Run(run), descriptors);
            }
        }
    }

    /// Answers for a process that answers no more, and lets the next run.
    fn answer_for(&mut self, id: PartId, say: impl Fn(Event)) {
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

/// Nothing is wrong with a copy whose process is gone.
fn refused(transfer: u64, batch: u64) -> Event {
    let message = "its process has ended".to_owned();
    Event::CopyFailed(CopyFailed { transfer, batch, failure: CopyFailure::Revoked.into(), message })
}

fn not_run(run: u64) -> Event {
    let message = "its process has ended".to_owned();
    Event::RunFailed(RunFailed { run, failure: RunFailure::UnknownProgram.into(), message })
}

impl<P: Parts> IsolatingPort<P> {
    /// No process yet. What they say goes to `sink`, and has to be shown to
    /// [`heard`](ExecutorPort::heard) from there.
    pub fn new(parts: P, sink: PortSink) -> Self {
        Self { parts, sink, last_part: PartId(0), place: None }
    }

    fn say(&self, incarnation: Incarnation, event: Event) {
        self.sink.deliver(PortEvent { incarnation, kind: PortEventKind::Event(event, Vec::new()) });
    }

    fn load(&mut self, load: LoadProgram, descriptors: Vec<Descriptor>) {
        self.end(load.program);
        let Some(place) = &mut self.place else { return };
        self.last_part = PartId(self.last_part.0 + 1);
        let (id, program, incarnation) = (self.last_part, load.program, place.incarnation);
        let up = self.sink.clone();
        let sink = PortSink::new(move |PortEvent { incarnation, kind }| {
            up.deliver(PortEvent { incarnation, kind: PortEventKind::Part(id, Box::new(kind)) });
        });
        let mut port = self.parts.part(&place.memory, &load.name, sink);
        // It reads what it is sent once it is ready; a start that fails is heard of.
        port.start(incarnation);
        for (peer, memory) in place.peers.values() {
            port.send(Command::AddPeer(*peer), memory.clone());
        }
        port.send(Command::LoadProgram(load), descriptors);
        place.alive.insert(id, Part { program, port });
        place.programs.insert(program, id);
    }

    /// Ends a program's process, if it has one. Nobody is told.
    fn end(&mut self, program: u64) {
        let Some(place) = &mut self.place else { return };
        let (sink, incarnation) = (&self.sink, place.incarnation);
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
        let (transfer, batch, incarnation) = (copy.transfer, copy.batch, place.incarnation);
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
        let (name, incarnation) = (run.run, place.incarnation);
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
            Found::Sent(id) => {
                if let Some(part) = place.alive.get_mut(&id) {
                    part.port.send(command, Vec::new());
                }
            }
            Found::Waiting => self.say(incarnation, Event::RunCancelled(RunCancelled { run })),
            Found::Nowhere => {}
        }
    }

    /// What a process said becomes what the place says.
    fn part_said(&mut self, id: PartId, kind: PortEventKind) -> Option<PortEventKind> {
        let place = self.place.as_mut()?;
        let program = place.alive.get(&id)?.program;
        // Of one that was told to end only its end is still of interest.
        let current = place.programs.get(&program) == Some(&id) && !place.ending;
        match kind {
            PortEventKind::Exited { status } => {
                let lost = PortEventKind::ProgramLost { program, status };
                return self.part_ended(id).or_else(|| current.then_some(lost));
            }
            PortEventKind::SpawnFailed { message } => {
                let message = format!("no executor was started for it: {message}");
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

    /// A process is no more. Says so of the place, if that is ending and this was its last.
    fn part_ended(&mut self, id: PartId) -> Option<PortEventKind> {
        let place = self.place.as_mut()?;
        let part = place.alive.remove(&id)?;
        if place.programs.get(&part.program) == Some(&id) {
            place.programs.remove(&part.program);
            let (sink, incarnation) = (&self.sink, place.incarnation);
            place.answer_for(id, |event| {
                sink.deliver(PortEvent { incarnation, kind: PortEventKind::Event(event, Vec::new()) });
            });
        }
        let last = place.ending && place.alive.is_empty();
        if last {
            self.place = None;
        }
        last.then(|| PortEventKind::Exited { status: "all its processes have ended".to_owned() })
    }
}

fn run_ended(place: &mut Place, run: u64) {
    let next = place.turns.ended(run);
    place.send_runs(next);
}

impl<P: Parts> ExecutorPort for IsolatingPort<P> {
    /// There is no process before the first program; the place is ready as soon as it has memory.
    fn start(&mut self, incarnation: Incarnation) {
        let kind = match self.parts.memory() {
            Ok(memory) => {
                self.place = Some(Place {
                    incarnation,
                    memory,
                    alive: BTreeMap::new(),
                    programs: BTreeMap::new(),
                    turns: Turns::default(),
                    copies: BTreeMap::new(),
                    peers: BTreeMap::new(),
                    ending: false,
                });
                let (build, incarnation) = (BUILD.to_owned(), incarnation.0);
                let ready = Ready {
                    protocol_version: PROTOCOL_VERSION,
                    build,
                    pid: 0,
                    incarnation,
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
            // One that names no program here is meant for whoever is.
            Command::InjectFault(fault) if place.programs.contains_key(&fault.program) => {
                place.send_to(fault.program, command, descriptors);
            }
            Command::InjectFault(_) | Command::Shutdown(_) => place.send_to_all(&command, &descriptors),
            // Each process is greeted by its own port, and none would see another's objects: none are kept.
            Command::Hello(_)
            | Command::PlaceObject(_)
            | Command::CopyOut(_)
            | Command::EndCopyOut(_)
            | Command::FreeObject(_)
            | Command::DropOutputs(_) => {}
        }
    }

    fn memory(&self) -> Option<Lent> {
        Some(self.place.as_ref()?.memory.clone())
    }

    fn kill(&mut self) {
        let Some(place) = &mut self.place else { return };
        place.ending = true;
        place.alive.values_mut().for_each(|part| part.port.kill());
        if place.alive.is_empty() {
            let (incarnation, status) = (place.incarnation, "it had no process".to_owned());
            self.place = None;
            self.sink.deliver(PortEvent { incarnation, kind: PortEventKind::Exited { status } });
        }
    }

    fn kill_program(&mut self, program: u64) {
        if let Some((_, part)) = self.place.as_mut().and_then(|place| place.part(program)) {
            part.port.kill();
        }
    }

    fn heard(&mut self, event: PortEvent) -> Option<PortEvent> {
        let PortEvent { incarnation, kind } = event;
        let PortEventKind::Part(id, said) = kind else { return Some(PortEvent { incarnation, kind }) };
        Some(PortEvent { incarnation, kind: self.part_said(id, *said)? })
    }
}

#[cfg(test)]
mod tests;
