//! Carries out the actions of cores: a message to another core is posted, and an executor obeys at
//! once.

use millrace_core::Core as _;
use millrace_memory::{BlockRun, BlockSize, CHUNK};
use millrace_transfers::fabric::{self, BatchFailure, BatchGrant, TransferCargo, WeightsCargo};
use millrace_types::GpuIndex;

use super::{FABRIC, Mail, Who, World, chunks};

impl World {
    pub(super) fn post(&mut self, from: Who, to: Who, mail: Mail) {
        self.channels.entry((from, to)).or_default().push_back(mail);
    }

    pub(super) fn fabric(&mut self, event: fabric::Event) {
        let mut actions = Vec::new();
        self.fabric.on_event(self.now, event, &mut actions);
        for action in actions {
            let (gpu, event) = match action {
                fabric::Action::Grant { grant } => {
                    self.places[grant.gpu.0 as usize].copies.push_back(grant);
                    continue;
                }
                fabric::Action::Revoke { gpu, transfer, batch, .. } => {
                    let place = &mut self.places[gpu.0 as usize];
                    let named = |grant: &BatchGrant| (grant.transfer, grant.batch) == (transfer, batch);
                    if let Some(found) = place.copies.iter().position(named) {
                        let grant = place.copies.remove(found).unwrap();
                        self.report(gpu.0 as usize, &grant, Some(BatchFailure::NotBegun));
                    }
                    continue;
                }
                fabric::Action::Carried { .. } => continue,
                fabric::Action::Lock {
                    gpu,
                    transfer,
                    cargo: TransferCargo::Weights(WeightsCargo { model, .. }),
                } => (gpu, millrace_gpu::Event::Lock { transfer, model }),
                fabric::Action::Unlock { gpu, transfer } => (gpu, millrace_gpu::Event::Unlock { transfer }),
                fabric::Action::Arrived { gpu, cargo: TransferCargo::Weights(weights), chunks } => {
                    let WeightsCargo { model, generation, .. } = weights;
                    (gpu, millrace_gpu::Event::Arrived { model, generation, chunks })
                }
                fabric::Action::Lock { .. } | fabric::Action::Arrived { .. } => panic!("no objects here"),
                fabric::Action::Ended { gpu, transfer, outcome, from, .. } => {
                    (gpu, millrace_gpu::Event::TransferEnded { transfer, outcome, from })
                }
            };
            let index = gpu.0 as usize;
            self.post(FABRIC, index, Mail::ToGpu(index, event));
        }
    }

    pub(super) fn gpu(&mut self, index: usize, event: millrace_gpu::Event) {
        let mut actions = Vec::new();
        self.places[index].core.on_event(self.now, event, &mut actions);
        for action in actions {
            self.carry_out(index, action);
        }
    }

    fn carry_out(&mut self, index: usize, action: millrace_gpu::Action) {
        let gpu = GpuIndex(index as u32);
        let to_fabric = match action {
            millrace_gpu::Action::Transfer { transfer, weights, chunks, from } => fabric::Event::Start {
                transfer,
                gpu,
                cargo: TransferCargo::Weights(weights),
                chunks,
                from,
                objective: None,
            },
            millrace_gpu::Action::CancelTransfer { transfer } => fabric::Event::Cancel { transfer },
            millrace_gpu::Action::Locked { transfer, peer } => fabric::Event::Locked { transfer, peer },
            millrace_gpu::Action::LockLost { transfer } => fabric::Event::LockLost { transfer },
            millrace_gpu::Action::NotLocked { transfer } => fabric::Event::NotLocked { transfer },
            millrace_gpu::Action::Down { lost } => {
                self.requests -= lost.len();
                fabric::Event::Down { gpu }
            }
            executor => return self.execute(index, executor),
        };
        self.post(index, FABRIC, Mail::ToFabric(to_fabric));
    }

    fn execute(&mut self, index: usize, action: millrace_gpu::Action) {
        let place = &mut self.places[index];
        match action {
            millrace_gpu::Action::LoadProgram { model } => {
                place.programs.insert(model);
                self.gpu(index, millrace_gpu::Event::ProgramLoaded { model });
            }
            millrace_gpu::Action::UnloadProgram { model } => {
                assert!(
                    place.runs.iter().all(|run| run.1 != model),
                    "a program with a run in progress is unloaded"
                );
                place.programs.remove(&model);
                place.mapped.remove(&model);
            }
            millrace_gpu::Action::Map { model, generation, blocks } => {
                let weights = chunks(model) as usize;
                let places: Vec<u32> = chunks_of(&blocks, self.block).take(weights).collect();
                assert_eq!(places.len(), weights, "the blocks do not hold the weights");
                // Old content of the mapped blocks counts as erased.
                let memory = self.memories.get_mut(&(index, place.incarnation)).unwrap();
                places.iter().for_each(|&place| memory[place as usize] = None);
                place.mapped.insert(model, (generation, places));
            }
            millrace_gpu::Action::Unmap { model, .. } => {
                place.mapped.remove(&model);
            }
            millrace_gpu::Action::Run { run, model, generation, .. } => {
                place.runs.push_back((run, model, generation))
            }
            millrace_gpu::Action::CancelRun { run } => {
                if let Some(found) = place.runs.iter().position(|waiting| waiting.0 == run) {
                    place.runs.remove(found);
                    self.gpu(index, millrace_gpu::Event::RunCancelled { run });
                }
            }
            millrace_gpu::Action::Replace => self.kill(index),
            millrace_gpu::Action::EndProgram { model } => self.kill_program(index, model),
            millrace_gpu::Action::Ended { .. } | millrace_gpu::Action::RequestReturned { .. } => {
                self.requests -= 1
            }
            _ => {}
        }
    }
}

/// Returns the places of all chunks of memory in some blocks.
pub(super) fn chunks_of(runs: &[BlockRun], block: BlockSize) -> impl Iterator<Item = u32> {
    let chunks = (block.get().0 / CHUNK.0) as u32;
    runs.iter().flat_map(move |run| run.start * chunks..run.end() * chunks)
}
