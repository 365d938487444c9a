//! Applies and repairs the faults of a run.

use millrace_cluster_state::ControllerId;
use rand::Rng as _;

use super::notes::log;
use super::{Machine, PEOPLE, Run, host};
use crate::faults::Fault;
use crate::history::Log;
use crate::workers;

/// The maximum pause between restarts, in milliseconds, after all controllers crashed.
const BACK_ONE_BY_ONE_MS: u64 = 1_500;

impl Run {
    pub(super) fn begin(&mut self, fault: &Fault) {
        self.note(&format!("{fault:?}"));
        let index = |id: u64| usize::try_from(id - 1).unwrap();
        match fault {
            Fault::Crash(id) => self.crash(index(*id)),
            Fault::PowerCut(id) => {
                if self.machines[index(*id)].up {
                    self.machines[index(*id)].disk.cut_soon();
                }
            }
            Fault::CrashAll => (0..self.machines.len()).for_each(|machine| self.crash(machine)),
            Fault::Split(one, other) => {
                for (a, b) in pairs(one, other) {
                    self.sim.partition(host(a), host(b));
                }
            }
            Fault::OneWay(from, to) => self.sim.partition_oneway(host(*from), host(*to)),
            Fault::Late(a, b) => self.sim.hold(host(*a), host(*b)),
            Fault::CutOff(id) => self.sim.partition(PEOPLE, host(*id)),
            Fault::WorkerCrash(machine) => {
                self.outside.processes.borrow_mut().remove(machine);
                self.sim.crash(workers::host(*machine));
            }
            Fault::WorkerLeaves(machine) => {
                self.outside.leaving.borrow_mut().insert(*machine);
            }
            Fault::WorkerStalls(machine) => {
                self.outside.stalling.borrow_mut().insert(*machine);
            }
            Fault::WorkerCutOff(machine, controllers) => {
                for id in controllers {
                    self.sim.partition(workers::host(*machine), host(*id));
                }
            }
            Fault::WorkerUnheard(machine, id) => {
                self.sim.partition_oneway(workers::host(*machine), host(*id));
            }
            Fault::WorkerLate(machine, id) => self.sim.hold(workers::host(*machine), host(*id)),
        }
    }

    pub(super) fn repair(&mut self, fault: &Fault) {
        self.note(&format!("over: {fault:?}"));
        let index = |id: u64| usize::try_from(id - 1).unwrap();
        match fault {
            Fault::Crash(id) | Fault::PowerCut(id) => self.start(index(*id)),
            Fault::CrashAll => {
                for machine in 0..self.machines.len() {
                    for _ in 0..self.rng.random_range(0..BACK_ONE_BY_ONE_MS) {
                        self.step();
                    }
                    self.start(machine);
                }
            }
            Fault::Split(one, other) => {
                for (a, b) in pairs(one, other) {
                    self.sim.repair(host(a), host(b));
                }
            }
            Fault::OneWay(from, to) => self.sim.repair_oneway(host(*from), host(*to)),
            Fault::Late(a, b) => self.sim.release(host(*a), host(*b)),
            Fault::CutOff(id) => self.sim.repair(PEOPLE, host(*id)),
            Fault::WorkerCrash(machine) => self.start_worker(*machine),
            Fault::WorkerLeaves(machine) => {
                self.outside.leaving.borrow_mut().remove(machine);
                self.start_worker(*machine);
            }
            Fault::WorkerStalls(machine) => {
                self.outside.stalling.borrow_mut().remove(machine);
            }
            Fault::WorkerCutOff(machine, controllers) => {
                for id in controllers {
                    self.sim.repair(workers::host(*machine), host(*id));
                }
            }
            Fault::WorkerUnheard(machine, id) => {
                self.sim.repair_oneway(workers::host(*machine), host(*id));
            }
            Fault::WorkerLate(machine, id) => self.sim.release(workers::host(*machine), host(*id)),
        }
    }

    pub(super) fn start_worker(&mut self, machine: u64) {
        if !self.sim.is_host_running(workers::host(machine)) {
            self.sim.bounce(workers::host(machine));
        }
    }

    /// Kills a process, and reads the log left behind.
    pub(super) fn crash(&mut self, machine: usize) {
        let Machine { id, up, .. } = &mut self.machines[machine];
        if !std::mem::replace(up, false) {
            return;
        }
        let id = *id;
        self.outside.watches.borrow_mut().remove(&id);
        self.seen.remove(&id);
        self.heard.remove(&id);
        self.sim.crash(host(id));
        self.note(&format!("controller {id} is down"));
        let Machine { data_dir, disk, reader, .. } = &self.machines[machine];
        *reader.lock().unwrap() = None;
        disk.restore(&data_dir.join("log/db")).expect("the log's file is written");
        self.read_log(machine);
    }

    pub(super) fn start(&mut self, machine: usize) {
        let Machine { id, up, .. } = &mut self.machines[machine];
        let id = *id;
        if self.outside.retired.get() != Some(id) && !std::mem::replace(up, true) {
            self.note(&format!("controller {id} is started"));
            self.sim.bounce(host(id));
        }
    }

    fn read_log(&mut self, machine: usize) {
        let Machine { id, data_dir, .. } = &self.machines[machine];
        let id = *id;
        match log(data_dir) {
            Ok(entries) => {
                self.history.logs.push(Log { controller: ControllerId(id), entries });
            }
            Err(error) => self.fail(&format!("the log that controller {id} left is refused: {error}")),
        }
    }
}

fn pairs(one: &[u64], other: &[u64]) -> Vec<(u64, u64)> {
    one.iter().flat_map(|&a| other.iter().map(move |&b| (a, b))).collect()
}
