//! Translates each core's actions into the messages that actors would send to the other cores.

use std::time::Duration;

use millrace_core::attempts::AttemptProgress;
use millrace_core::ids::{BatchId, FunctionIndex, RequestKey, RunId, TransferId};
use millrace_core::trace::CoreId;
use millrace_gpu::lifecycle;
use millrace_gpu::{ExecutorSeat, RunFailure};
use millrace_scheduling::admission;
use millrace_scheduling::dispatch;
use millrace_slices::gate::GateEvent;
use millrace_transfers::fabric::{self, BatchFailure, BatchGrant, TransferCargo, WeightsCargo, link};
use millrace_transfers::rates::TransferObjective;
use millrace_types::topology::LinkId;
use millrace_types::{GpuIndex, Incarnation, ModelId, Priority, SloCounts};
use millrace_worker::port::model::{
    CopiedObject, CopyCommand, CopyRefusal, ModelledCommand, ModelledEvent, ModelledTokens,
};

use super::{Node, request_of};
use crate::scenario::Ending;
use crate::world::OBJECTIVE;

/// A message in transit.
pub(super) enum Mail {
    Admission(FunctionIndex, admission::Event),
    Completed(RequestKey, millrace_gpu::GpuTimes, GpuIndex),
    Dispatch(dispatch::Event),
    Fabric(fabric::Event),
    /// A GPU's action on a transfer, and the request that waits for it.
    Transfer(GpuIndex, millrace_gpu::Action, Option<RequestKey>),
    Down(GpuIndex, Vec<(RequestKey, AttemptProgress)>),
    Gpu(GpuIndex, millrace_gpu::Event),
    Life(GpuIndex, lifecycle::Event),
    Link(LinkId, link::Event),
    Order(GpuIndex, Incarnation, ModelledCommand),
    Grant(BatchGrant),
    Revoke(GpuIndex, TransferId, BatchId),
    Word(GpuIndex, Incarnation, ModelledEvent),
}

/// The actor that owns a mailbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Actor {
    Function(FunctionIndex),
    Node,
    Gpu(GpuIndex),
    Executor(GpuIndex),
    Link(LinkId),
}

impl Node<'_> {
    pub(super) fn actor_of(&self, mail: &Mail) -> Actor {
        match *mail {
            Mail::Admission(function, _) => Actor::Function(function),
            Mail::Completed(key, ..) => Actor::Function(self.function_of(key)),
            Mail::Dispatch(_) | Mail::Fabric(_) | Mail::Transfer(..) | Mail::Down(..) => Actor::Node,
            Mail::Gpu(gpu, _) => Actor::Gpu(gpu),
            Mail::Grant(ref grant) => Actor::Executor(grant.gpu),
            Mail::Life(gpu, _) | Mail::Order(gpu, ..) | Mail::Revoke(gpu, ..) | Mail::Word(gpu, ..) => {
                Actor::Executor(gpu)
            }
            Mail::Link(link, _) => Actor::Link(link),
        }
    }

    pub(super) fn handle(&mut self, mail: Mail) {
        let now = self.now;
        match mail {
            Mail::Admission(function, event) => self.admission(function, event, None),
            Mail::Completed(key, spent, gpu) => {
                let event = admission::Event::Completed { key, billed: spent.billed };
                self.admission(self.function_of(key), event, Some(gpu));
            }
            Mail::Dispatch(event) => self.dispatch(event),
            Mail::Fabric(event) => self.fabric(event),
            Mail::Transfer(gpu, action, reader) => self.transfer(gpu, action, reader),
            Mail::Down(gpu, lost) => {
                self.fabric(fabric::Event::Down { gpu });
                self.moving.retain(|_, (to, _)| *to != gpu);
                let topology = &self.scenario.topology;
                let nvlinks = topology.nvlinks_of(gpu).map(|(link, _)| link);
                for link in topology.gpus[gpu.0 as usize].host_path.iter().copied().chain(nvlinks) {
                    self.mail.push_back(Mail::Link(link, link::Event::Down(gpu)));
                }
                self.dispatch(dispatch::Event::Down { gpu, lost });
            }
            Mail::Gpu(gpu, event) => self.gpu(gpu, event),
            Mail::Life(gpu, event) => self.life(gpu, event),
            Mail::Link(link, event) => self.link(link, event),
            Mail::Order(gpu, incarnation, order) => {
                let place = &mut self.places[gpu.0 as usize];
                if place.up && incarnation == place.life.incarnation() {
                    place.port.order(now, order);
                }
            }
            Mail::Grant(grant) => self.copy(&grant),
            Mail::Revoke(gpu, transfer, batch) => {
                let place = &mut self.places[gpu.0 as usize];
                if place.up {
                    place.port.order(now, ModelledCommand::Revoke { transfer: transfer.0, batch: batch.0 });
                }
            }
            Mail::Word(gpu, incarnation, word) => self.word(gpu, incarnation, word),
        }
    }

    pub(super) fn function_of(&self, key: RequestKey) -> FunctionIndex {
        FunctionIndex(self.requests[&key].function as u32)
    }

    fn admission(&mut self, function: FunctionIndex, event: admission::Event, gpu: Option<GpuIndex>) {
        let mut actions = Vec::new();
        let core = &mut self.admissions[function.0 as usize];
        let counts = |core: &admission::Admission| {
            let score = core.score();
            SloCounts { m: score.in_time, n: score.scored }
        };
        let before = counts(core);
        self.trace.step(CoreId::Admission(function), core, self.now, event, &mut actions);
        let counts = counts(core);
        if self.dispatch.uses_scores() && counts != before {
            self.mail.push_back(Mail::Dispatch(dispatch::Event::SloCountsChanged { function, counts }));
        }
        for action in actions {
            match action {
                admission::Action::Enqueue { key, attempts } => {
                    let model = ModelId(function.0);
                    let priority = Priority::default();
                    let inputs = dispatch::InputLocations::NONE;
                    let request =
                        dispatch::QueuedRequest { key, function, model, attempts, priority, inputs };
                    self.mail.push_back(Mail::Dispatch(dispatch::Event::Enqueue(request)));
                }
                admission::Action::Answer { key } => {
                    let gpu = gpu.unwrap();
                    let attempts = self.requests[&key].attempt;
                    self.endings.insert(request_of(key), Ending::Answered { gpu, attempts });
                }
                admission::Action::Fail { key, reason, may_have_executed } => {
                    self.endings.insert(request_of(key), Ending::Failed { reason, may_have_executed });
                }
                admission::Action::Withdraw { key } => {
                    self.mail.push_back(Mail::Dispatch(dispatch::Event::Withdraw { key }));
                }
                admission::Action::Retired => unreachable!("nothing is retired"),
            }
        }
    }

    fn dispatch(&mut self, event: dispatch::Event) {
        let mut actions = Vec::new();
        self.trace.step(CoreId::Dispatch, &mut self.dispatch, self.now, event, &mut actions);
        for action in actions {
            match action {
                dispatch::Action::Assign { gpu, seat, key, model, incarnation, attempt, from } => {
                    self.requests.get_mut(&key).unwrap().attempt = attempt;
                    let function = self.function_of(key);
                    self.mail.push_back(Mail::Admission(function, admission::Event::Dispatched { key }));
                    let deadline = Some(self.requests[&key].accepted + OBJECTIVE);
                    self.mail.push_back(Mail::Gpu(
                        gpu,
                        millrace_gpu::Event::Assign {
                            seat,
                            key,
                            model,
                            incarnation,
                            from,
                            deadline,
                            right: millrace_gpu::ComputeRight::Free,
                        },
                    ));
                }
                dispatch::Action::Prefetch { gpu, model } => {
                    self.mail.push_back(Mail::Gpu(gpu, millrace_gpu::Event::Prefetch { model }));
                }
                dispatch::Action::SetEvictionRank { gpu, model, candidate } => {
                    self.mail.push_back(Mail::Gpu(
                        gpu,
                        millrace_gpu::Event::CandidateChanged { model, candidate },
                    ));
                }
                dispatch::Action::SetWarmCopy { .. } => unreachable!("no function keeps warm copies"),
                dispatch::Action::Prewarm { .. } => unreachable!("no request carries hints"),
                dispatch::Action::Pin { gpu, model } => {
                    self.mail.push_back(Mail::Gpu(gpu, millrace_gpu::Event::Pin { model }));
                }
                dispatch::Action::Unpin { gpu, model } => {
                    self.mail.push_back(Mail::Gpu(gpu, millrace_gpu::Event::Unpin { model }));
                }
                dispatch::Action::Recall { gpu, key } => {
                    self.mail.push_back(Mail::Gpu(gpu, millrace_gpu::Event::Recall { key }));
                }
                dispatch::Action::Cancel { gpu, key } => {
                    self.mail.push_back(Mail::Gpu(gpu, millrace_gpu::Event::Cancel { key }));
                }
                dispatch::Action::Fail { key, reason, may_have_executed } => {
                    let event = admission::Event::Failed { key, reason, may_have_executed };
                    self.mail.push_back(Mail::Admission(self.function_of(key), event));
                }
            }
        }
    }

    fn fabric(&mut self, event: fabric::Event) {
        let mut actions = Vec::new();
        let mut arrived = Vec::new();
        if let fabric::Event::Start { transfer, gpu, cargo, .. } = event {
            self.moving.insert(transfer, (gpu, weights(cargo).model));
        }
        self.trace.step(CoreId::Fabric, &mut self.fabric, self.now, event, &mut actions);
        for action in actions {
            self.mail.push_back(match action {
                fabric::Action::Grant { grant } => Mail::Link(grant.link, link::Event::Grant(grant)),
                fabric::Action::Lock { gpu, transfer, cargo } => {
                    let model = weights(cargo).model;
                    Mail::Gpu(gpu, millrace_gpu::Event::Lock { transfer, model })
                }
                fabric::Action::Unlock { gpu, transfer } => {
                    Mail::Gpu(gpu, millrace_gpu::Event::Unlock { transfer })
                }
                fabric::Action::Revoke { link, gpu, transfer, batch } => {
                    Mail::Link(link, link::Event::Revoke { gpu, transfer, batch })
                }
                fabric::Action::Carried { link, direction, size } => {
                    Mail::Link(link, link::Event::Carried(direction, size))
                }
                fabric::Action::Arrived { gpu, cargo, chunks } => {
                    let WeightsCargo { model, generation, .. } = weights(cargo);
                    Mail::Gpu(gpu, millrace_gpu::Event::Arrived { model, generation, chunks })
                }
                fabric::Action::Ended { gpu, transfer, outcome, from, .. } => {
                    let moved = self.moving.remove(&transfer).map(|(gpu, model)| (gpu, model, from));
                    arrived.extend(moved.filter(|_| outcome == fabric::TransferOutcome::Complete));
                    Mail::Gpu(gpu, millrace_gpu::Event::TransferEnded { transfer, outcome, from })
                }
            });
        }
        for (gpu, model, from) in arrived {
            self.dispatch(dispatch::Event::ModelLoaded { gpu, model, from });
        }
    }

    /// Returns the deadline of the copies for a request.
    fn objective(&self, reader: RequestKey) -> Option<TransferObjective> {
        let request = self.requests.get(&reader).filter(|_| self.dispatch.holds(reader))?;
        let infer = self.dispatch.predicted_run(ModelId(request.function as u32), 1).unwrap_or_default();
        Some(TransferObjective { slo: (request.accepted + OBJECTIVE).since(self.now), infer })
    }

    fn transfer(&mut self, gpu: GpuIndex, action: millrace_gpu::Action, reader: Option<RequestKey>) {
        let objective = reader.and_then(|reader| self.objective(reader));
        match (action, objective) {
            (millrace_gpu::Action::Transfer { transfer, weights, chunks, from }, objective) => {
                let cargo = TransferCargo::Weights(weights);
                self.fabric(fabric::Event::Start { transfer, gpu, cargo, chunks, from, objective });
            }
            (millrace_gpu::Action::Hasten { transfer, .. }, Some(objective)) => {
                self.fabric(fabric::Event::Hasten { transfer, objective });
            }
            _ => {}
        }
    }

    fn gpu(&mut self, index: GpuIndex, event: millrace_gpu::Event) {
        let mut actions = Vec::new();
        let place = &mut self.places[index.0 as usize];
        if let millrace_gpu::Event::Up { incarnation } = event {
            place.told = incarnation;
        }
        self.trace.step(CoreId::Gpu(index), &mut place.gpu, self.now, event, &mut actions);
        let told = place.told;
        for action in actions {
            let mail = match action {
                millrace_gpu::Action::Replace => Mail::Life(index, lifecycle::Event::Kill),
                millrace_gpu::Action::Transfer { weights, .. } => {
                    let reader = self.places[index.0 as usize].gpu.reader_of(weights.model);
                    Mail::Transfer(index, action, reader)
                }
                millrace_gpu::Action::Hasten { key, .. } => Mail::Transfer(index, action, Some(key)),
                millrace_gpu::Action::Locked { transfer, peer } => {
                    Mail::Fabric(fabric::Event::Locked { transfer, peer })
                }
                millrace_gpu::Action::NotLocked { transfer } => {
                    Mail::Fabric(fabric::Event::NotLocked { transfer })
                }
                millrace_gpu::Action::CancelTransfer { transfer } => {
                    Mail::Fabric(fabric::Event::Cancel { transfer })
                }
                millrace_gpu::Action::Completed { key, spent } => Mail::Completed(key, spent, index),
                millrace_gpu::Action::Failed { key, reason, may_have_executed } => {
                    let event = admission::Event::Failed { key, reason, may_have_executed };
                    Mail::Admission(self.function_of(key), event)
                }
                millrace_gpu::Action::Up { incarnation } => {
                    Mail::Dispatch(dispatch::Event::Up { gpu: index, incarnation })
                }
                millrace_gpu::Action::Down { lost } => Mail::Down(index, lost),
                millrace_gpu::Action::Ended { key, ran } => {
                    Mail::Dispatch(dispatch::Event::RequestEnded { gpu: index, key, ran })
                }
                millrace_gpu::Action::RequestReturned { key, why } => {
                    Mail::Dispatch(dispatch::Event::RequestReturned { gpu: index, key, why })
                }
                millrace_gpu::Action::Evicted { models } => {
                    Mail::Dispatch(dispatch::Event::ModelsEvicted { gpu: index, models })
                }
                millrace_gpu::Action::EndProgram { .. } | millrace_gpu::Action::LockLost { .. } => {
                    unreachable!("the models share one executor")
                }
                millrace_gpu::Action::ModelForgotten { .. } => unreachable!("nothing is removed"),
                command => Mail::Order(index, told, self.order(command)),
            };
            self.mail.push_back(mail);
        }
    }

    /// Translates a GPU's command for the modelled executor.
    fn order(&self, command: millrace_gpu::Action) -> ModelledCommand {
        let program = |model: ModelId| u64::from(model.0);
        match command {
            millrace_gpu::Action::LoadProgram { model } => {
                let weights = self.scenario.functions[model.0 as usize].weights;
                ModelledCommand::Load {
                    program: program(model),
                    name: crate::scenario::model_name(model.0),
                    weights,
                }
            }
            millrace_gpu::Action::UnloadProgram { model } => {
                ModelledCommand::Unload { program: program(model) }
            }
            millrace_gpu::Action::Map { model, generation, .. } => {
                ModelledCommand::Map { program: program(model), generation: generation.0 }
            }
            millrace_gpu::Action::Unmap { model, generation } => {
                ModelledCommand::Unmap { program: program(model), generation: generation.0 }
            }
            millrace_gpu::Action::Run { run, model, generation, seat, tokens, .. } => ModelledCommand::Run {
                run: run.0,
                program: program(model),
                generation: generation.0,
                members: 1,
                keeps: false,
                seat: seat.0.into(),
                tokens: tokens.map(|it| ModelledTokens { anew: it.anew, first: it.first }),
            },
            millrace_gpu::Action::Grant { seat, token } => {
                ModelledCommand::Grant { seat: seat.0.into(), token }
            }
            millrace_gpu::Action::Shorten { seat, token, busy } => {
                ModelledCommand::Shorten { seat: seat.0.into(), token, busy }
            }
            millrace_gpu::Action::Withdraw { seat, token } => {
                ModelledCommand::Withdraw { seat: seat.0.into(), token }
            }
            millrace_gpu::Action::CancelRun { run } => ModelledCommand::Cancel { run: run.0 },
            other => unreachable!("{other:?} is not for the executor"),
        }
    }

    fn life(&mut self, index: GpuIndex, event: lifecycle::Event) {
        let mut actions = Vec::new();
        let place = &mut self.places[index.0 as usize];
        self.trace.step(CoreId::Executor(index), &mut place.life, self.now, event, &mut actions);
        for action in actions {
            match action {
                lifecycle::Action::Spawn { incarnation } => {
                    place.started = incarnation;
                    place.port.start(self.now);
                }
                lifecycle::Action::Kill => {
                    place.up = false;
                    place.out.clear();
                    place.port.kill(self.now);
                }
                lifecycle::Action::Up { incarnation } => {
                    place.up = true;
                    self.mail.push_back(Mail::Gpu(index, millrace_gpu::Event::Up { incarnation }));
                }
                lifecycle::Action::Down { .. } => {
                    place.up = false;
                    place.out.clear();
                    self.mail.push_back(Mail::Gpu(index, millrace_gpu::Event::Down));
                }
                lifecycle::Action::Stopped => unreachable!("nothing is stopped"),
            }
        }
    }

    fn link(&mut self, id: LinkId, event: link::Event) {
        let mut actions = Vec::new();
        let core = self.links.get_mut(&id).unwrap();
        self.trace.step(CoreId::Link(id), core, self.now, event, &mut actions);
        for action in actions {
            self.mail.push_back(match action {
                link::Action::Copy(grant) => Mail::Grant(grant),
                link::Action::Revoke { gpu, transfer, batch } => Mail::Revoke(gpu, transfer, batch),
                link::Action::Done { transfer, batch } => {
                    Mail::Fabric(fabric::Event::Done { transfer, batch })
                }
                link::Action::Failed { transfer, batch, why } => {
                    Mail::Fabric(fabric::Event::Failed { transfer, batch, why })
                }
            });
        }
    }

    fn copy(&mut self, grant: &BatchGrant) {
        let place = &mut self.places[grant.gpu.0 as usize];
        if !place.up {
            return;
        }
        place.out.insert((grant.transfer, grant.batch), grant.link);
        let WeightsCargo { model, generation, .. } = weights(grant.cargo);
        let order = CopyCommand {
            transfer: grant.transfer.0,
            batch: grant.batch.0,
            of: CopiedObject::Program { program: model.0.into(), generation: generation.0 },
            // Copies in this model do not share links.
            from: None,
            via: None,
            fill: Duration::ZERO,
            size: grant.cargo.span(&grant.chunks).1,
            not_before: grant.not_before,
            not_after: grant.not_after,
        };
        place.port.order(self.now, ModelledCommand::Copy(order));
    }

    fn word(&mut self, index: GpuIndex, incarnation: Incarnation, word: ModelledEvent) {
        let place = &mut self.places[index.0 as usize];
        let mail = match word {
            ModelledEvent::Ready => Mail::Life(index, lifecycle::Event::Ready { incarnation }),
            ModelledEvent::Exited => Mail::Life(index, lifecycle::Event::Exited { incarnation }),
            _ if !place.up || incarnation != place.life.incarnation() => return,
            ModelledEvent::Loaded { program } => {
                Mail::Gpu(index, millrace_gpu::Event::ProgramLoaded { model: ModelId(program as u32) })
            }
            ModelledEvent::CopyDone { transfer, batch, started, finished, .. } => {
                let transfer = TransferId(transfer);
                let batch = BatchId(batch);
                let Some(link) = place.out.remove(&(transfer, batch)) else { return };
                Mail::Link(link, link::Event::Done { transfer, batch, started, finished })
            }
            ModelledEvent::CopyFailed { transfer, batch, why } => {
                let why = match why {
                    CopyRefusal::NotBegun => BatchFailure::NotBegun,
                    CopyRefusal::NotMapped | CopyRefusal::Device => BatchFailure::Faulty,
                };
                let transfer = TransferId(transfer);
                let batch = BatchId(batch);
                let Some(link) = place.out.remove(&(transfer, batch)) else { return };
                Mail::Link(link, link::Event::Failed { transfer, batch, why })
            }
            ModelledEvent::RunDone { run, started, finished, waited, held, sm, token, .. } => {
                let run = RunId(run);
                let done = millrace_gpu::Event::RunDone { run, started, finished, waited, held, sm, token };
                Mail::Gpu(index, done)
            }
            ModelledEvent::Token { seat, event } => {
                let seat = ExecutorSeat(seat as u8);
                let event = match event {
                    GateEvent::Asked => millrace_gpu::Event::TokenAsked { seat },
                    GateEvent::Spent { token, busy, more } => {
                        millrace_gpu::Event::TokenSpent { seat, token, busy, more }
                    }
                };
                Mail::Gpu(index, event)
            }
            ModelledEvent::RunFailed { run } => failed(index, run, RunFailure::Model),
            ModelledEvent::RunNotThere { run } => failed(index, run, RunFailure::NotThere),
            ModelledEvent::RunCancelled { run } => {
                Mail::Gpu(index, millrace_gpu::Event::RunCancelled { run: RunId(run) })
            }
            ModelledEvent::Placed { .. } | ModelledEvent::CopiedOut { .. } => panic!("no objects here"),
        };
        // The Executor actor handles events of its own core at once.
        match mail {
            Mail::Life(..) => self.handle(mail),
            other => self.mail.push_back(other),
        }
    }
}

fn failed(gpu: GpuIndex, run: u64, why: RunFailure) -> Mail {
    Mail::Gpu(gpu, millrace_gpu::Event::RunFailed { run: RunId(run), why })
}

/// Returns the weights of a cargo; the scenario transfers nothing else.
fn weights(cargo: TransferCargo) -> WeightsCargo {
    let TransferCargo::Weights(weights) = cargo else { panic!("{cargo:?}") };
    weights
}
