//! A loaded model: its launches, and the memory under it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use millrace_device::{Device as _, Error as DeviceError, HostAccess, HostRegion};
use millrace_engine::{Engine, Error as EngineError, ModelCode};
use millrace_proto::executor::LoadProgram;
use millrace_types::Bytes;

use crate::memory::executor_state::ExecutorState;
use crate::memory::mapping::{MappingOwner, RegionMapping};
use crate::programs::launch_plan::{self, LaunchPlan};
use crate::socket::conversions::{self, DeclaredTensor, FrameDescriptors};

/// Longest time of a run on the control thread; waking another thread takes about as long.
const QUICK_MAX: Duration = Duration::from_micros(50);

/// A loaded program, shared by the control thread and by copies and runs.
#[derive(Debug)]
pub(crate) struct LoadedProgram<E: Engine> {
    pub(crate) name: String,
    /// Plan of the launches, with numbered values.
    pub(crate) plan: LaunchPlan,
    pub(crate) module: E::Module,
    pub(crate) whole: E::Kernel,
    pub(crate) kernels: Vec<E::Kernel>,
    pub(crate) inputs: Vec<DeclaredTensor>,
    pub(crate) outputs: Vec<DeclaredTensor>,
    pub(crate) mapping: Arc<RegionMapping<E>>,
    /// Size bound in bytes: runs with fewer bytes of inline inputs are likely to be quick. 0 until a
    /// run was quick.
    pub(crate) quick_inputs: AtomicUsize,
    /// Device time of the last run, in nanoseconds; 0 before.
    compute_ns: AtomicU64,
    /// Authoritative copy of the program's weights (T10).
    pub(crate) host: HostRegion,
    /// Most bytes that are copied before waiting launches are woken.
    pub(crate) group: u64,
}

/// Reason why a program could not be loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    #[error(transparent)]
    Message(#[from] conversions::Error),
    #[error(transparent)]
    Launches(#[from] launch_plan::Error),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl<E: Engine> LoadedProgram<E> {
    /// Loads a model's graph against a region of its own.
    pub(crate) fn load(
        shared: Arc<ExecutorState<E>>,
        message: LoadProgram,
        mut descriptors: FrameDescriptors,
    ) -> Result<Self, LoadError> {
        let device = shared.device();
        let graph = descriptors.take(message.graph_fd)?;
        let graph = device.import_host(graph, Bytes(message.graph_bytes), HostAccess::Direct)?;
        let weights: OwnedFd = descriptors.take(message.weights_fd)?;
        let access = if message.weights_pageable { HostAccess::Buffered } else { HostAccess::Direct };
        let host = device.import_host(weights, Bytes(message.weights_bytes), access)?;
        let inputs = message.inputs.into_iter().map(conversions::declared).collect::<Result<Vec<_>, _>>()?;
        let outputs =
            message.outputs.into_iter().map(conversions::declared).collect::<Result<Vec<_>, _>>()?;
        let launches = message.launches.into_iter().map(conversions::launch).collect::<Result<_, _>>()?;
        let names =
            |values: &[DeclaredTensor]| values.iter().map(|value| value.name.clone()).collect::<Vec<_>>();
        let plan = LaunchPlan::new(&names(&inputs), &names(&outputs), launches)?;

        let region = device.reserve(host.bytes())?;
        let code = ModelCode {
            graph: graph.as_slice().to_vec(),
            weights_name: millrace_model::WEIGHTS_FILE,
            weights: &host,
        };
        let module = shared.engine.load(&region, code)?;
        let whole = shared.engine.kernel(&module, &plan.whole.spec)?;
        let kernels = plan
            .steps
            .iter()
            .map(|step| shared.engine.kernel(&module, &step.spec))
            .collect::<Result<_, _>>()?;
        let copy_max = device.capabilities().copy_max.get();
        let group = if message.group_bytes == 0 { copy_max } else { message.group_bytes.min(copy_max) };
        let mapping = RegionMapping::new(shared, MappingOwner::Program(message.program), region);
        Ok(Self {
            name: message.name,
            plan,
            module,
            whole,
            kernels,
            inputs,
            outputs,
            mapping: Arc::new(mapping),
            quick_inputs: AtomicUsize::new(0),
            compute_ns: AtomicU64::new(0),
            host,
            group,
        })
    }

    /// Returns the device time of the last run; `None` before the first.
    pub(crate) fn compute_time(&self) -> Option<Duration> {
        let nanos = self.compute_ns.load(Ordering::Relaxed);
        (nanos > 0).then_some(Duration::from_nanos(nanos))
    }

    pub(crate) fn record_compute_time(&self, time: Duration) {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.compute_ns.store(nanos, Ordering::Relaxed);
    }

    /// Updates the bound for quick runs. A quick run raises the bound above the size of the run; a slower run
    /// lowers the bound to the size of the run.
    pub(crate) fn record_run_time(&self, inline_bytes: Option<usize>, time: Duration) {
        match inline_bytes {
            Some(bytes) if time <= QUICK_MAX => {
                self.quick_inputs.fetch_max(bytes.saturating_add(1), Ordering::Relaxed);
            }
            Some(bytes) => {
                self.quick_inputs.fetch_min(bytes, Ordering::Relaxed);
            }
            None => {}
        }
    }
}
