//! What is done to one controller's machine through its fault service.

use std::time::Duration;

use anyhow::Context as _;
use millrace_proto::fault::fault_client::FaultClient;
use millrace_proto::fault::{ClearRequest, SetClockOffsetRequest, StallDiskRequest};
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

use super::Cluster;

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
        self.timeline.did(format!("set the clock of controller {id} {side} by {by:?}"));
        let moved = self.faults(id)?.set_clock_offset(request(SetClockOffsetRequest { offset_ms })).await;
        moved.map(|_| ()).with_context(|| format!("the clock of controller {id} cannot be moved"))
    }

    /// Makes each sync of a controller's log take longer, for so long.
    ///
    /// # Errors
    /// When its fault service does not take it.
    pub async fn stall_disk(&self, id: u64, each_sync: Duration, lasts: Duration) -> anyhow::Result<()> {
        self.timeline.did(format!("the disk of controller {id} takes {each_sync:?} longer for each sync"));
        let millis = |span: Duration| u64::try_from(span.as_millis()).unwrap_or(u64::MAX);
        let stall = StallDiskRequest { each_sync_ms: millis(each_sync), for_ms: millis(lasts) };
        let stalled = self.faults(id)?.stall_disk(request(stall)).await;
        stalled.map(|_| ()).with_context(|| format!("the disk of controller {id} cannot be stalled"))
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
        let endpoint = Endpoint::from_shared(format!("http://{}", self.controller(id)?.internal))?;
        Ok(FaultClient::new(endpoint.connect_lazy()))
    }
}

fn request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(ANSWER_TIMEOUT);
    request
}
