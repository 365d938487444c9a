//! The GPU's part of a snapshot.

use millrace_gpu::ExecutorHealth;
use millrace_types::{ModelId, Timestamp};

use super::actor::GpuActor;
use crate::messages::gpu::ModelUsers;
use crate::snapshot::{GpuHealth, GpuSnapshot, ResidentModel, RunningRequest, SnapshotPart, SnapshotSender};

impl GpuActor {
    pub(super) fn report(&self, now: Timestamp, parts: &SnapshotSender, users: &ModelUsers) {
        let core = &self.core.core;
        let totals = core.totals();
        let blocks = |blocks: u32| core.memory().block().bytes(blocks);
        let resident = |(model, region): (ModelId, &millrace_memory::ModelRegion)| {
            Some(ResidentModel {
                digest: self.models.get(&model)?.digest,
                functions: users.get(&model).cloned().unwrap_or_default(),
                bytes: blocks(region.blocks()),
                loaded: core.loaded(model),
                idle: now.since(region.last_used()),
                executor_pid: self.loaded.get(&model).copied().flatten().or(self.pid),
            })
        };
        let mut models: Vec<_> = core.memory().regions().filter_map(resident).collect();
        models.sort_by_key(|model| model.digest);
        let running = |key| {
            let function = self.entries.get(&key)?.work().invocation.revision.clone();
            Some(RunningRequest { function, sms: core.sms_of(key) })
        };
        let part = SnapshotPart::Gpu(GpuSnapshot {
            index: self.index(),
            gpu_type: self.hardware.gpu_type.clone(),
            health: match core.health() {
                ExecutorHealth::Starting => GpuHealth::Starting,
                ExecutorHealth::Up => GpuHealth::Up,
                ExecutorHealth::Restarting => GpuHealth::Restarting,
                ExecutorHealth::Unhealthy => GpuHealth::Unhealthy,
            },
            memory: blocks(core.memory().total_blocks()),
            used: blocks(core.memory().used_blocks()),
            models,
            running: core.running().filter_map(running).collect(),
            sm_violations: self.sm_violations(),
            slices: core.slice_uses(now).collect(),
            incarnation: self.incarnation,
            executor_pid: self.pid,
            executor_pids: self.pid.into_iter().chain(self.loaded.values().copied().flatten()).collect(),
            restarts: totals.restarts,
            swaps: totals.swaps,
            peer_swaps: totals.peer_swaps,
            evictions: totals.evictions,
            busy: totals.busy,
            data: self.data_report(),
        });
        // The reader of the snapshot may have given up.
        parts.send(part).unwrap_or_default();
    }
}
