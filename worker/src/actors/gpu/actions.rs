//! The actions of the GPU's core, translated into messages to the other actors.

use std::sync::Arc;

use millrace_core::attempts::ReturnReason;
use millrace_gpu::Action;
use millrace_proto::executor::command::Command;
use millrace_proto::executor::{Cancel, LoadProgram, Map, UnloadProgram, Unmap};
use millrace_transfers::fabric::{self, TransferCargo};
use millrace_types::{ModelId, Reason, Timestamp};

use super::actor::{GpuActor, GpuPayload};
use super::requests::RunPlace;
use crate::actors::extents;
use crate::messages::request_update::RequestUpdate;
use crate::messages::{executor, node};
use crate::object_handle::TransferReader;

impl GpuActor {
    pub(super) fn carry_out(&mut self, now: Timestamp, action: Action, carried: &mut GpuPayload) {
        let gpu = self.index();
        match action {
            Action::LoadProgram { model } => {
                self.loaded.insert(model, None);
                self.load_program(model);
            }
            Action::UnloadProgram { model } => {
                self.loaded.remove(&model);
                self.send(Command::UnloadProgram(UnloadProgram { program: model.0.into() }), Vec::new());
            }
            Action::Map { model, generation, blocks } => {
                let extents = extents::of_blocks(&blocks, self.block());
                let map = Map { program: model.0.into(), generation: generation.0, extents };
                self.send(Command::Map(map), Vec::new());
                self.peers.directory.changed();
            }
            Action::Unmap { model, generation } => {
                let unmap = Unmap { program: model.0.into(), generation: generation.0 };
                self.send(Command::Unmap(unmap), Vec::new());
                self.peers.directory.changed();
            }
            Action::Run { run, key, model, generation, seat, tokens } => {
                tokens.into_iter().for_each(|tokens| self.periods.begin(seat, tokens));
                let place = RunPlace { generation, seat, shared: tokens.is_some() };
                self.run(now, run, key, model, place);
            }
            Action::Grant { seat, token } => self.grant(seat, token),
            Action::Shorten { seat, token, busy } => self.shorten(seat, token, busy),
            Action::Withdraw { seat, token } => self.withdraw(seat, token),
            Action::CancelRun { run } => {
                if !self.cancel_waiting_run(run) {
                    self.send(Command::Cancel(Cancel { run: run.0 }), Vec::new());
                }
            }
            Action::Data(action) => self.carry_out_data(action),
            Action::EndProgram { model } => {
                let incarnation = self.incarnation;
                self.peers.executor.post(executor::Message::EndProgram { incarnation, model });
            }
            Action::Replace => self.peers.executor.post(executor::Message::Replace),
            Action::Transfer { transfer, weights, chunks, from } => {
                let evicted = self.evicted;
                let waiting = self.entries.values_mut().filter(|entry| entry.work().model == weights.model);
                waiting.for_each(|entry| entry.spans.swap_begins(transfer, weights, from, evicted));
                let reader = TransferReader::run(self.core.core.reader_of(weights.model));
                let cargo = TransferCargo::Weights(weights);
                self.peers.node.post(node::Message::Transfer { gpu, transfer, cargo, chunks, from, reader });
            }
            Action::Hasten { transfer, key } => {
                self.peers.node.post(node::Message::Hasten { transfer, reader: key });
            }
            Action::Locked { transfer, peer } => self.tell_fabric(fabric::Event::Locked { transfer, peer }),
            Action::LockLost { transfer } => self.tell_fabric(fabric::Event::LockLost { transfer }),
            Action::NotLocked { transfer } => self.tell_fabric(fabric::Event::NotLocked { transfer }),
            Action::CancelTransfer { transfer } => {
                self.peers.node.post(node::Message::CancelTransfer(transfer))
            }
            Action::Completed { key, spent } => self.completed(key, spent, carried),
            Action::Failed { key, reason, may_have_executed } => {
                if let Some(entry) = self.entries.get(&key) {
                    entry.spans.fail(reason);
                    let detail = if let GpuPayload::Detail(detail) = carried {
                        Some(std::mem::take(detail))
                    } else {
                        None
                    };
                    if entry.works.len() > 1 && matches!(reason, Reason::ModelFailed | Reason::DataLost) {
                        // A single request may have made the whole batch fail, so each runs again alone.
                        return self.peers.node.post(node::Message::Split(key));
                    }
                    for work in &entry.works {
                        work.home.post(RequestUpdate::Failed {
                            key: work.key,
                            reason,
                            may_have_executed,
                            detail: detail.clone(),
                        });
                    }
                }
            }
            Action::Up { incarnation } => {
                self.peers.node.post(node::Message::Up { gpu, incarnation });
                self.peers.directory.changed();
            }
            Action::Down { lost } => {
                self.entries.values().for_each(|entry| entry.spans.fail("the executor was lost"));
                self.entries.clear();
                let lost = self.correct_progress(lost);
                self.mark_data_lost();
                self.unfinished_swaps.clear();
                self.periods.clear();
                self.pid = None;
                self.loaded.clear();
                self.peers.node.post(node::Message::Down { gpu, lost });
                self.peers.directory.changed();
            }
            Action::Ended { key, ran } => {
                self.forget_run(key);
                if let Some(mut entry) = self.entries.remove(&key) {
                    entry.release_inputs(&mut self.data);
                    self.unfinished_swaps.extend(entry.spans.into_unfinished());
                }
                self.peers.node.post(node::Message::RunEnded { gpu, key, ran });
            }
            Action::RequestReturned { key, why } => {
                self.forget_run(key);
                if let Some(mut entry) = self.entries.remove(&key) {
                    entry.release_inputs(&mut self.data);
                    match why {
                        ReturnReason::Recalled => entry.spans.recalled(),
                        ReturnReason::Failed(_) => entry.spans.fail("the GPU could not run the request"),
                        ReturnReason::Died(_) => entry.spans.fail("the model's executor was lost"),
                    }
                }
                self.peers.node.post(node::Message::RequestReturned { gpu, key, why });
            }
            Action::Evicted { models } => self.peers.node.post(node::Message::Evicted { gpu, models }),
            Action::ModelForgotten { model } => {
                self.models.remove(&model);
            }
        }
    }

    fn load_program(&self, model: ModelId) {
        let Some(prepared) = self.models.get(&model) else { return };
        let load = LoadProgram {
            program: model.0.into(),
            name: prepared.name.clone(),
            graph_fd: 0,
            graph_bytes: prepared.graph_bytes.0,
            weights_fd: 1,
            weights_bytes: prepared.weights_bytes.0,
            launches: prepared.launches.clone(),
            inputs: prepared.inputs.clone(),
            outputs: prepared.outputs.clone(),
            weights_pageable: false,
            group_bytes: prepared.group_bytes.0,
        };
        let descriptors = vec![Arc::clone(&prepared.graph), Arc::clone(&prepared.weights)];
        self.send(Command::LoadProgram(load), descriptors);
    }
}
