//! What is done to one process's machine: to a controller's through its fault service, to a worker's
//! GPUs through the worker, to its memory by the system.

use std::time::Duration;

use anyhow::Context as _;
use millrace_proto::executor::Fault as DeviceFault;
use millrace_proto::fault::fault_client::FaultClient;
use millrace_proto::fault::{ClearRequest, SetClockOffsetRequest, StallDiskRequest};
use millrace_proto::worker::InjectFaultRequest;
use millrace_proto::worker::worker_client::WorkerClient;
use millrace_transport::channel::{ChannelConfig, endpoint};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tonic::Request;
use tonic::transport::Channel;

use super::{Cluster, Process};

/// How long the fault service may take to answer: it waits for no disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether controllers serve the fault service.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Injection {
    /// They do not.
    #[default]
    Off,
    /// They do.
    On,
}

impl Injection {
    /// What a controller is started with for it.
    pub(super) fn words(self) -> Vec<String> {
        match self {
            Self::Off => Vec::new(),
            Self::On => vec!["--enable-fault-injection".to_owned()],
        }
    }
}

impl Cluster {
    /// Moves the wall clock of a controller.
    ///
    /// # Errors
    /// When its fault service does not take it.
    pub async fn move_clock(&self, id: u64, offset_ms: i64) -> anyhow::Result<()> {
        let by = Duration::from_millis(offset_ms.unsigned_abs());
        let side = if offset_ms < 0 { "back" } else { "ahead" };
        self.timeline.fault(format!("set the clock of controller {id} {side} by {by:?}"));
        let moved = self.faults(id)?.set_clock_offset(request(SetClockOffsetRequest { offset_ms })).await;
        moved.map(|_| ()).with_context(|| format!("the clock of controller {id} cannot be moved"))
    }

    /// Makes each sync of a controller's log take longer, for so long.
    ///
    /// # Errors
    /// When its fault service does not take it.
    pub async fn stall_disk(&self, id: u64, each_sync: Duration, lasts: Duration) -> anyhow::Result<()> {
        self.timeline.fault(format!("the disk of controller {id} takes {each_sync:?} longer for each sync"));
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let stall = StallDiskRequest { each_sync_ms: millis(each_sync), for_ms: millis(lasts) };
        let stalled = self.faults(id)?.stall_disk(request(stall)).await;
        stalled.map(|_| ()).with_context(|| format!("the disk of controller {id} cannot be stalled"))
    }

    /// Has a GPU of a worker fail.
    ///
    /// # Errors
    /// When the worker does not take it.
    pub async fn fail_device(&self, name: &str, gpu: u32, fault: DeviceFault) -> anyhow::Result<()> {
        self.timeline.fault(format!("GPU {gpu} of {name} fails: {fault:?}"));
        let worker = self.workers.get(name).with_context(|| format!("there is no {name}"))?;
        let endpoint = endpoint(&worker.listen.to_string(), ChannelConfig::default())?;
        let fault = u32::try_from(i32::from(fault)).context("faults are numbered from 0")?;
        let failed = InjectFaultRequest { gpu, fault, function: String::new() };
        let failed = WorkerClient::new(endpoint.connect_lazy()).inject_fault(request(failed)).await;
        failed.map(|_| ()).with_context(|| format!("{name} takes no fault of a GPU"))
    }

    /// Gives a worker no more memory than it has.
    ///
    /// # Errors
    /// When it does not run, or the system does not allow it.
    pub fn starve_worker(&self, name: &str) -> anyhow::Result<()> {
        let pid = self.worker_pid(name)?;
        let has = address_space(pid)?;
        self.timeline.fault(format!("{name} (pid {pid}) gets no more memory than its {} MiB", has >> 20));
        limit(pid, Some(has))
    }

    /// Gives a worker memory again, or starts it again where it has ended for want of it.
    ///
    /// # Errors
    /// When it runs and the system does not allow it.
    pub fn feed_worker(&mut self, name: &str) -> anyhow::Result<()> {
        let process = Process::Worker(name.to_owned());
        if self.ended(&process).is_some() {
            return self.begin_start(&process);
        }
        let Ok(pid) = self.worker_pid(name) else { return Ok(()) };
        self.timeline.did(format!("{name} (pid {pid}), which goes on, gets memory again"));
        limit(pid, None)
    }

    /// Ends what is wrong with a controller's machine.
    ///
    /// # Errors
    /// When its fault service does not take it.
    pub async fn clear_faults(&self, id: u64) -> anyhow::Result<()> {
        self.timeline.did(format!("the machine of controller {id} is well again"));
        let cleared = self.faults(id)?.clear(request(ClearRequest {})).await;
        cleared.map(|_| ()).with_context(|| format!("the faults of controller {id} do not end"))
    }

    /// Past any proxy: that is for what controllers say to each other.
    fn faults(&self, id: u64) -> anyhow::Result<FaultClient<Channel>> {
        let internal = self.controller(id)?.house.internal.to_string();
        let endpoint = endpoint(&internal, ChannelConfig::default())?;
        Ok(FaultClient::new(endpoint.connect_lazy()))
    }
}

fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(ANSWER_TIMEOUT);
    request
}

/// The bytes of a process's address space.
fn address_space(pid: u32) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm"));
    let text = text.with_context(|| format!("process {pid} ended"))?;
    let pages = text.split_whitespace().next().and_then(|it| it.parse::<u64>().ok());
    Ok(pages.context("/proc shows no size")? * rustix::param::page_size() as u64)
}

/// Bounds a process's address space, and those of the children that it starts from then on.
fn limit(pid: u32, bytes: Option<u64>) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid.cast_signed()).context("a process id is positive")?;
    match prlimit(Some(pid), Resource::As, Rlimit { current: bytes, maximum: None }) {
        // It has ended meanwhile.
        Ok(_) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error).context("a process's memory cannot be bounded"),
    }
}
