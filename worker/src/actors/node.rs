//! The Node actor, the root of a worker's actors: owns the node's queue, the fabric, and the installed
//! functions and models.
//!
//! In: requests from the Functions, events from the GPUs and links, commands from the service. Out:
//! requests to the GPUs, grants to the Links, refusals to the Functions. The dispatch core bounds the
//! queue and refuses a request that does not fit with `QUEUE_FULL`.

mod actor;
mod functions;
mod objectives;
mod policy;
mod queued_request;
mod slices;

use millrace_scheduling::{batching, dispatch};
use millrace_transfers::fabric;
use millrace_types::Timestamp;

pub(crate) use self::actor::NodeActor;

use crate::actor_runtime::ActorBehaviour;
use crate::messages::node::Message;
use crate::object_handle::TransferReader;

impl ActorBehaviour for NodeActor {
    type Message = Message;

    fn handle(&mut self, now: Timestamp, message: Message) {
        match message {
            Message::Enqueue { work, attempts } => self.enqueue(now, work, attempts),
            Message::PrewarmHints(work) => self.next(now, &work),
            Message::InputMoved(key) => self.moved(now, key),
            Message::Withdraw(key) => self.withdraw(now, key),
            Message::Up { gpu, incarnation } => self.dispatch(now, dispatch::Event::Up { gpu, incarnation }),
            Message::Down { gpu, lost } => self.down(now, gpu, dispatch::Event::Down { gpu, lost }),
            Message::GpuReset(gpu) => self.down(now, gpu, dispatch::Event::Reset { gpu }),
            Message::RunEnded { gpu, key, ran } => {
                self.record_departure(now, gpu, key, dispatch::Event::RequestEnded { gpu, key, ran });
            }
            Message::RequestReturned { gpu, key, why } => {
                self.record_departure(now, gpu, key, dispatch::Event::RequestReturned { gpu, key, why });
            }
            Message::Split(key) => self.dispatch(now, batching::Event::Split { key }),
            Message::SloCountsChanged { function, counts } => self.scored(now, function, counts),
            Message::ClusterSloCounts(scores) => self.scores(now, &scores),
            Message::Quotas(quotas) => {
                self.state.set_caps(quotas).into_iter().for_each(|event| self.dispatch(now, event));
            }
            Message::Slices(wanted) => self.set_slices(now, wanted),
            Message::Policy(wanted) => self.set_policy(now, &wanted),
            Message::AlphasCommitted(alphas) => {
                self.dispatch(now, dispatch::Event::AlphasCommitted(alphas));
            }
            Message::Evicted { gpu, models } => {
                self.dispatch(now, dispatch::Event::ModelsEvicted { gpu, models })
            }
            Message::Transfer { gpu, transfer, cargo, chunks, from, reader } => {
                self.transfers.insert(transfer, (gpu, cargo));
                let objective = match reader {
                    TransferReader::None => None,
                    TransferReader::Run(key) => self.objective(now, key),
                    TransferReader::Answer(work) => self.answer_objective(now, &work),
                    TransferReader::Inputs(asker) => self.inputs_objective(now, &asker),
                    TransferReader::Outside(asker) => self.outside_objective(now, &asker),
                    TransferReader::Elsewhere(by) => Some(objectives::of_elsewhere(now, by)),
                };
                self.fabric(now, fabric::Event::Start { transfer, gpu, cargo, chunks, from, objective });
            }
            Message::Hasten { transfer, reader } => {
                if let Some(objective) = self.objective(now, reader) {
                    self.fabric(now, fabric::Event::Hasten { transfer, objective });
                }
            }
            Message::CancelTransfer(transfer) => self.fabric(now, fabric::Event::Cancel { transfer }),
            Message::Fabric(event) => self.fabric(now, event),
            Message::Profiles { reply } => drop(reply.send(self.learned())),
            Message::Install { function, model, reply } => {
                let installed = self.install(now, function, model);
                drop(reply.send(installed));
            }
            Message::Host { function, program, processes, reply } => {
                self.functions.host(function, program, processes);
                reply.send(()).unwrap_or_default();
            }
            Message::Retire { key, reply } => {
                self.state.retire(&key);
                reply.send(()).unwrap_or_default();
            }
            Message::Retired(function) => self.retired(now, function),
            Message::FunctionReset(function) => self.function_reset(now, function),
            Message::Report { look, parts } => self.report(now, look, &parts),
            Message::Inject { gpu, fault, function, reply } => {
                drop(reply.send(self.inject(gpu, fault, function)));
            }
            Message::Shutdown { reply } => self.shutdown(reply),
            Message::ExecutorStopped(gpu) => {
                self.running_executors.retain(|&alive| alive != gpu);
                self.end_if_stopped();
            }
        }
    }

    fn tick(&mut self, now: Timestamp) {
        let due = |wake: Option<Timestamp>| wake.is_some_and(|at| at <= now);
        if due(self.dispatch.next_wake()) {
            self.dispatch(now, dispatch::Event::Tick);
        }
        if due(self.fabric.next_wake()) {
            self.fabric(now, fabric::Event::Tick);
        }
    }

    fn next_wake(&self) -> Option<Timestamp> {
        let wakes = [self.dispatch.next_wake(), self.fabric.next_wake()];
        wakes.into_iter().flatten().min()
    }
}
