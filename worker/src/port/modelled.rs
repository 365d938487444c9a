//! Ports to modelled executors, for simulations and tests. The actors on the worker's side of the port are
//! the real ones, and the clock decides whether time is real or virtual.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes as Buffer;
use millrace_proto::convert::sm_share;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::event::Event;
use millrace_proto::executor::{
    CopiedOut, Copy, CopyDone, CopyFailed, CopyFailure, CopyOut, ObjectPlaced, ProgramLoaded, Ready, Run,
    RunCancelled, RunDone, RunFailed, RunFailure, Shorten, Tensor, TokenAsked, TokenSpent, Withdraw,
    copy_out::Source, tensor::Contents,
};
use millrace_proto::{BUILD, PROTOCOL_VERSION, executor as wire};
use millrace_slices::gate::{GateEvent, SeatToken};
use millrace_slices::tokens::TokenId;
use millrace_transfers::paths::{HostDirection, RouteHops};
use millrace_types::topology::Topology;
use millrace_types::{Bytes, GpuIndex, Incarnation, Timestamp};

use super::links::SharedLinks;
use super::model::{
    CopiedObject, CopyCommand, CopyPath, CopyRefusal, ExecutorBehaviour, ModelledCommand, ModelledEvent,
    ModelledExecutor, ModelledTokens,
};
use super::{Descriptor, ExecutorPort, PortEvent, PortEventKind, PortFactory, PortSink};
use crate::clock::Clock;

/// A machine whose executors are modelled. Clones share the machine: the node owns a clone, and a test
/// keeps another clone to kill executors.
#[derive(Clone)]
pub struct ModelledMachine {
    clock: Arc<dyn Clock>,
    inside: Arc<Mutex<MachineState>>,
}

struct MachineState {
    places: Vec<ExecutorSlot>,
    links: Option<SharedLinks>,
}

/// The slot of a GPU's executor.
struct ExecutorSlot {
    behaviour: ExecutorBehaviour,
    model: ModelledExecutor,
    incarnation: Incarnation,
    sink: Option<PortSink>,
    armed: Option<Timestamp>,
}

impl ModelledMachine {
    /// Returns a machine with an executor for each behaviour, in the order of the GPUs. The executors'
    /// copies do not share links.
    #[must_use]
    pub fn new(clock: Arc<dyn Clock>, behaviours: Vec<ExecutorBehaviour>) -> Self {
        let place = |(gpu, behaviour): (GpuIndex, ExecutorBehaviour)| {
            let model = ModelledExecutor::new(gpu, behaviour.clone());
            ExecutorSlot { behaviour, model, incarnation: Incarnation(0), sink: None, armed: None }
        };
        let places = (0..).map(GpuIndex).zip(behaviours).map(place).collect();
        Self { clock, inside: Arc::new(Mutex::new(MachineState { places, links: None })) }
    }

    /// Returns the machine with links that the copies under way share.
    #[must_use]
    pub fn with_links(self, topology: &Topology) -> Self {
        self.inside().links = Some(SharedLinks::new(topology));
        self
    }

    /// Kills a GPU's executor, as `kill -9` does.
    pub fn kill(&self, gpu: GpuIndex) {
        self.with(gpu, |place, now| place.model.kill(now));
    }

    /// Returns the time that a forwarded copy needs beyond the time on the slowest link; zero on a machine
    /// without links.
    fn fill(&self, copy: &CopyCommand) -> Duration {
        let inside = self.inside();
        inside.links.as_ref().map_or(Duration::ZERO, |links| links.fill(copy.way(), copy.size))
    }

    fn inside(&self) -> MutexGuard<'_, MachineState> {
        // The state is consistent whenever the lock is released, so a poisoned lock is still usable.
        self.inside.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the slot of a GPU, and arms the timers of all executors whose next event may have moved.
    fn with<T>(&self, gpu: GpuIndex, change: impl FnOnce(&mut ExecutorSlot, Timestamp) -> T) -> T {
        let now = self.clock.now();
        let inside = &mut *self.inside();
        inside.advance(now);
        let result = change(&mut inside.places[gpu.0 as usize], now);
        inside.share(now, gpu);
        if inside.links.is_some() {
            // The rates of other GPUs' copies may have changed, and so the ends of the copies.
            for (gpu, place) in (0..).map(GpuIndex).zip(&mut inside.places) {
                self.arm(place, gpu, now);
            }
        } else {
            self.arm(&mut inside.places[gpu.0 as usize], gpu, now);
        }
        result
    }

    fn arm(&self, place: &mut ExecutorSlot, gpu: GpuIndex, now: Timestamp) {
        let Some(at) = place.model.next_wake().filter(|&at| place.armed.is_none_or(|armed| at < armed))
        else {
            return;
        };
        place.armed = Some(at);
        let machine = self.clone();
        let sleep = self.clock.sleep_for(at.since(now));
        actix_rt::spawn(async move {
            tokio::time::sleep(sleep).await;
            machine.fire(gpu, at);
        });
    }

    fn fire(&self, gpu: GpuIndex, armed: Timestamp) {
        let said = self.with(gpu, |place, now| {
            if place.armed != Some(armed) {
                return None;
            }
            place.armed = None;
            let word = place.model.wake(now)?;
            let event =
                PortEvent { incarnation: place.incarnation, kind: translate(word, place.incarnation) };
            Some((place.sink.clone()?, event))
        });
        if let Some((sink, event)) = said {
            sink.deliver(event);
        }
    }
}

impl MachineState {
    /// Advances all copies that share links to the present, event by event, each at its own exact time:
    /// when one copy ends, the others get the freed share from that time on.
    fn advance(&mut self, now: Timestamp) {
        if self.links.is_none() {
            return;
        }
        loop {
            let places = (0..).map(GpuIndex).zip(&self.places);
            let next = places.filter_map(|(gpu, place)| Some((place.model.next_copy()?, gpu))).min();
            let Some((at, gpu)) = next.filter(|&(at, _)| at <= now) else { break };
            self.places[gpu.0 as usize].model.advance(at);
            self.share(at, gpu);
        }
    }

    /// Updates the rates after a change of a GPU's copies. The GPU's own copies always get their rates,
    /// also if a copy follows another over the same links. The rates of other GPUs change only if the
    /// load of the links has changed.
    fn share(&mut self, at: Timestamp, gpu: GpuIndex) {
        let Some(links) = &mut self.links else { return };
        let place = &self.places[gpu.0 as usize];
        let mut news = false;
        // The links may still count forwarded copies that were under way when the process ended.
        let before = links.forwarding(gpu);
        let own = HostDirection::BOTH.into_iter().map(CopyPath::Own);
        for way in own.chain(before).chain(place.model.forwarded()) {
            let copying = place.model.copying(way).map(|copy| copy.from);
            news |= links.set((gpu, way), copying);
        }
        for ((other, way), rate) in links.rates().filter(|&((other, _), _)| news || other == gpu) {
            self.places[other.0 as usize].model.set_copy_rate(at, way, rate);
        }
    }
}

impl PortFactory for ModelledMachine {
    fn port(&mut self, gpu: GpuIndex, sink: PortSink) -> Box<dyn ExecutorPort> {
        self.with(gpu, |place, _| {
            place.model = ModelledExecutor::new(gpu, place.behaviour.clone());
            place.sink = Some(sink);
        });
        Box::new(ModelledPort { machine: self.clone(), gpu })
    }
}

struct ModelledPort {
    machine: ModelledMachine,
    gpu: GpuIndex,
}

impl ExecutorPort for ModelledPort {
    fn start(&mut self, incarnation: Incarnation) {
        self.machine.with(self.gpu, |place, now| {
            place.incarnation = incarnation;
            place.model.start(now);
        });
    }

    fn send(&mut self, command: Command, descriptors: Vec<Descriptor>) {
        if let (Command::CopyOut(copy), Some(to)) = (&command, descriptors.first()) {
            make_room(copy, to);
        }
        if let Some(mut order) = order(command) {
            if let ModelledCommand::Copy(copy) = &mut order {
                copy.fill = self.machine.fill(copy);
            }
            self.machine.with(self.gpu, |place, now| place.model.order(now, order));
        }
    }

    fn kill(&mut self) {
        self.machine.kill(self.gpu);
    }
}

impl Drop for ModelledPort {
    fn drop(&mut self) {
        let gpu = self.gpu;
        self.machine.with(gpu, |place, _| {
            place.sink = None;
            place.model = ModelledExecutor::new(gpu, place.behaviour.clone());
        });
    }
}

/// Sets the size of the memory that a copy to the host fills. The contents do not matter in a model.
fn make_room(copy: &CopyOut, to: &Descriptor) {
    let bytes = match &copy.source {
        Some(Source::Object(part)) => part.bytes,
        Some(Source::Output(part)) => part.bytes,
        None => 0,
    };
    if let Err(error) = rustix::fs::ftruncate(to, bytes) {
        tracing::error!(%error, "cannot allocate memory for a modelled copy");
    }
}

/// Returns an input of one row, which makes requests batchable. Modelled executors do not read the input.
#[must_use]
pub fn row() -> Tensor {
    let contents = Some(Contents::Inline(Buffer::from_static(&[0; 4])));
    Tensor { name: "input".to_owned(), datatype: "FP32".to_owned(), shape: vec![1, 1], contents }
}

/// Translates a command for the model. Returns `None` for commands without a meaning in the model: for
/// example faults, and shutdown, which a kill follows.
fn order(command: Command) -> Option<ModelledCommand> {
    Some(match command {
        Command::LoadProgram(load) => ModelledCommand::Load {
            program: load.program,
            name: load.name,
            weights: Bytes(load.weights_bytes),
        },
        Command::UnloadProgram(unload) => ModelledCommand::Unload { program: unload.program },
        Command::Map(map) => ModelledCommand::Map { program: map.program, generation: map.generation },
        Command::Unmap(unmap) => {
            ModelledCommand::Unmap { program: unmap.program, generation: unmap.generation }
        }
        Command::Copy(copy) => ModelledCommand::Copy(copy_order(&copy)),
        Command::Revoke(revoke) => ModelledCommand::Revoke { transfer: revoke.transfer, batch: revoke.batch },
        Command::Run(run) => {
            let Run { run, program, generation, members, kept, seat, tokens, .. } = run;
            let tokens = tokens.map(|it| ModelledTokens { anew: it.anew, first: it.first.and_then(token) });
            ModelledCommand::Run {
                run,
                program,
                generation,
                members: members.max(1),
                keeps: !kept.is_empty(),
                seat,
                tokens,
            }
        }
        Command::Grant(grant) => ModelledCommand::Grant { seat: grant.seat, token: token(grant.token?)? },
        Command::Shorten(Shorten { seat, token, busy_ns }) => {
            let busy = Duration::from_nanos(busy_ns);
            ModelledCommand::Shorten { seat, token: TokenId(token), busy }
        }
        Command::Withdraw(Withdraw { seat, token }) => {
            ModelledCommand::Withdraw { seat, token: TokenId(token) }
        }
        Command::Cancel(cancel) => ModelledCommand::Cancel { run: cancel.run },
        // A copy takes the same time whatever memory it reads, so the model needs no memory of peers.
        Command::AddPeer(_) | Command::ForgetPeer(_) => return None,
        Command::PlaceObject(place) => ModelledCommand::Place { object: place.object },
        Command::FreeObject(free) => ModelledCommand::Free { object: free.object },
        Command::CopyOut(CopyOut { copy, granted, .. }) => ModelledCommand::CopyOut { copy, granted },
        Command::EndCopyOut(end) => ModelledCommand::EndCopyOut { copy: end.copy },
        // Kept outputs need no memory in the model.
        Command::DropOutputs(_) => return None,
        Command::Hello(_) | Command::InjectFault(_) | Command::Shutdown(_) => return None,
    })
}

fn token(token: wire::Token) -> Option<SeatToken> {
    let wire::Token { token, period, on, busy_ns } = token;
    let on = sm_share(on)?;
    let busy = (busy_ns > 0).then(|| Duration::from_nanos(busy_ns));
    Some(SeatToken { token: TokenId(token), period, on, busy })
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn copy_order(copy: &Copy) -> CopyCommand {
    CopyCommand {
        transfer: copy.transfer,
        batch: copy.batch,
        of: match (copy.copy_out, copy.object) {
            (0, 0) => CopiedObject::Program { program: copy.program, generation: copy.generation },
            (0, object) => CopiedObject::Object(object),
            (copy, _) => CopiedObject::CopyOut(copy),
        },
        from: copy.peer.as_ref().map(|peer| GpuIndex(peer.gpu)),
        via: (!copy.via.is_empty()).then(|| RouteHops::of(copy.via.iter().copied().map(GpuIndex))),
        // `ModelledPort::send` sets the value, because it depends on the machine's links.
        fill: Duration::ZERO,
        size: copy.ranges.iter().map(|range| Bytes(range.bytes)).sum(),
        not_before: Timestamp(copy.not_before_ns),
        not_after: Timestamp(copy.not_after_ns),
    }
}

fn translate(word: ModelledEvent, incarnation: Incarnation) -> PortEventKind {
    let event = match word {
        ModelledEvent::Exited => return PortEventKind::Exited { status: "killed".to_owned() },
        ModelledEvent::Ready => Event::Ready(Ready {
            protocol_version: PROTOCOL_VERSION,
            build: BUILD.to_owned(),
            // The incarnation stands in for a pid, so that each start has another one.
            pid: u32::try_from(incarnation.0).unwrap_or(u32::MAX),
            incarnation: incarnation.0,
            copy_rates: Vec::new(),
        }),
        ModelledEvent::Loaded { program } => Event::ProgramLoaded(ProgramLoaded { program, took_ns: 0 }),
        ModelledEvent::CopyDone { transfer, batch, started, finished, size } => Event::CopyDone(CopyDone {
            transfer,
            batch,
            started_ns: started.0,
            finished_ns: finished.0,
            bytes: size.0,
        }),
        ModelledEvent::CopyFailed { transfer, batch, why } => {
            let failure = match why {
                CopyRefusal::NotBegun => CopyFailure::Expired,
                CopyRefusal::NotMapped => CopyFailure::NotMapped,
                CopyRefusal::Device => CopyFailure::Device,
            };
            Event::CopyFailed(CopyFailed {
                transfer,
                batch,
                failure: failure.into(),
                message: format!("{why:?}"),
            })
        }
        ModelledEvent::Placed { object } => Event::ObjectPlaced(ObjectPlaced { object }),
        ModelledEvent::CopiedOut { copy } => Event::CopiedOut(CopiedOut { copy }),
        ModelledEvent::Token { seat, event: GateEvent::Asked } => Event::TokenAsked(TokenAsked { seat }),
        ModelledEvent::Token { seat, event: GateEvent::Spent { token, busy, more } } => {
            Event::TokenSpent(TokenSpent { seat, token: token.0, busy_ns: nanos(busy), more })
        }
        ModelledEvent::RunDone { run, started, finished, waited, kept, held, sm, token } => {
            Event::RunDone(RunDone {
                run,
                outputs: vec![answer(run, kept)],
                started_ns: started.0,
                finished_ns: finished.0,
                waited_ns: nanos(waited),
                launches: 1,
                launch_times: Vec::new(),
                token_wait_ns: nanos(held),
                sm_ns: nanos(sm),
                token: token.map(|(token, _)| token.0),
                token_busy_ns: token.map_or(0, |(_, busy)| nanos(busy)),
            })
        }
        ModelledEvent::RunFailed { run } => failed(run, RunFailure::Model, "the model failed"),
        ModelledEvent::RunNotThere { run } => failed(run, RunFailure::NotResident, "not resident"),
        ModelledEvent::RunCancelled { run } => Event::RunCancelled(RunCancelled { run }),
    };
    PortEventKind::Event(event, Vec::new())
}

fn failed(run: u64, failure: RunFailure, message: &str) -> Event {
    Event::RunFailed(RunFailed { run, failure: failure.into(), message: message.to_owned() })
}

/// Returns the output of a modelled run: the run's number, or a kept output of this many bytes.
fn answer(run: u64, kept: Option<Bytes>) -> Tensor {
    let number = || Contents::Inline(Buffer::copy_from_slice(&run.to_le_bytes()));
    let bytes = kept.map_or(size_of::<u64>() as u64, Bytes::get);
    Tensor {
        name: "run".to_owned(),
        datatype: "UINT8".to_owned(),
        shape: vec![bytes.cast_signed()],
        contents: Some(kept.map_or_else(number, |bytes| Contents::KeptBytes(bytes.get()))),
    }
}
