//! Faults in the machine of one process: of a controller through its fault service, of a worker's
//! GPUs through the worker, and of a worker's memory through the operating system.

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

use super::cluster_process::ClusterProcess;
use super::test_cluster::TestCluster;

/// Maximum wait for an answer of the fault service, which waits for no disk.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

impl TestCluster {
    /// Moves the wall clock of a controller.
    ///
    /// # Errors
    /// If the fault service refuses the offset.
    pub async fn move_clock(&self, id: u64, offset_ms: i64) -> anyhow::Result<()> {
        let by = Duration::from_millis(offset_ms.unsigned_abs());
        let side = if offset_ms < 0 { "back" } else { "ahead" };
        self.timeline.fault(format!("set the clock of controller {id} {side} by {by:?}"));
        let moved = self.faults(id)?.set_clock_offset(request(SetClockOffsetRequest { offset_ms })).await;
        moved.map(|_| ()).with_context(|| format!("the clock of controller {id} cannot be moved"))
    }

    /// Delays each sync of a controller's log by `each_sync`, for the time `lasts`.
    ///
    /// # Errors
    /// If the fault service refuses the delay.
    pub async fn stall_disk(&self, id: u64, each_sync: Duration, lasts: Duration) -> anyhow::Result<()> {
        self.timeline.fault(format!("the disk of controller {id} takes {each_sync:?} longer for each sync"));
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let stall = StallDiskRequest { each_sync_ms: millis(each_sync), for_ms: millis(lasts) };
        let stalled = self.faults(id)?.stall_disk(request(stall)).await;
        stalled.map(|_| ()).with_context(|| format!("the disk of controller {id} cannot be stalled"))
    }

    /// Makes a GPU of a worker fail.
    ///
    /// # Errors
    /// If the worker refuses the fault.
    pub async fn fail_device(&self, name: &str, gpu: u32, fault: DeviceFault) -> anyhow::Result<()> {
        self.timeline.fault(format!("GPU {gpu} of {name} fails: {fault:?}"));
        let worker = self.workers.get(name).with_context(|| format!("there is no {name}"))?;
        let endpoint = endpoint(&worker.listen.to_string(), ChannelConfig::default())?;
        let fault = u32::try_from(i32::from(fault)).context("faults are numbered from 0")?;
        let failed = InjectFaultRequest { gpu, fault, function: String::new() };
        let failed = WorkerClient::new(endpoint.connect_lazy()).inject_fault(request(failed)).await;
        failed.map(|_| ()).with_context(|| format!("{name} refuses the fault of a GPU"))
    }

    /// Limits a worker's memory to its present amount.
    ///
    /// # Errors
    /// If the worker does not run, or the system does not allow the limit.
    pub fn limit_worker_memory(&self, name: &str) -> anyhow::Result<()> {
        let pid = self.worker_pid(name)?;
        let has = address_space(pid)?;
        self.timeline.fault(format!("{name} (pid {pid}) gets no more memory than its {} MiB", has >> 20));
        limit(pid, Some(has))
    }

    /// Removes the limit from a worker's memory, or restarts a worker that ended for lack of
    /// memory.
    ///
    /// # Errors
    /// If the worker runs and the system does not allow the change.
    pub fn lift_worker_memory_limit(&mut self, name: &str) -> anyhow::Result<()> {
        let process = ClusterProcess::Worker(name.to_owned());
        if self.ended(&process).is_some() {
            return self.begin_start(&process);
        }
        let Ok(pid) = self.worker_pid(name) else { return Ok(()) };
        self.timeline.did(format!("{name} (pid {pid}) still runs and gets memory again"));
        limit(pid, None)
    }

    /// Ends all faults in a controller's machine.
    ///
    /// # Errors
    /// If the fault service fails.
    pub async fn clear_faults(&self, id: u64) -> anyhow::Result<()> {
        self.timeline.did(format!("ended the faults in the machine of controller {id}"));
        let cleared = self.faults(id)?.clear(request(ClearRequest {})).await;
        cleared.map(|_| ()).with_context(|| format!("cannot end the faults of controller {id}"))
    }

    /// Returns a client of the fault service. The client bypasses the proxies, which are for the
    /// traffic between controllers.
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

/// Returns the bytes of a process's address space.
fn address_space(pid: u32) -> anyhow::Result<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/statm"));
    let text = text.with_context(|| format!("process {pid} ended"))?;
    let pages = text.split_whitespace().next().and_then(|it| it.parse::<u64>().ok());
    Ok(pages.context("/proc shows no size")? * rustix::param::page_size() as u64)
}

/// Limits the address space of a process, and of the children that it starts afterwards.
fn limit(pid: u32, bytes: Option<u64>) -> anyhow::Result<()> {
    let pid = Pid::from_raw(pid.cast_signed()).context("a process id is positive")?;
    match prlimit(Some(pid), Resource::As, Rlimit { current: bytes, maximum: None }) {
        // The process has ended meanwhile.
        Ok(_) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(error).context("cannot limit the memory of a process"),
    }
}
