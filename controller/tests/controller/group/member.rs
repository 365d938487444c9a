//! A controller of a group, which a test can kill and restart.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::{ControllerId, State};
use millrace_controller::{ClusterStart, ControllerConfig, JoinAs, RunningController};
use millrace_proto::admin::admin_client::AdminClient;
use millrace_types::Digest;
use tempfile::TempDir;
use tonic::transport::Channel;

use super::threads::Threads;
use crate::support::{channel, config, soon};

/// A controller with separate runtimes, so that a test can kill the controller like a process. The
/// ports stay the same.
pub(crate) struct Member {
    /// The running controller; `None` while down.
    pub(super) up: Option<(Threads, RunningController)>,
    pub(crate) config: ControllerConfig,
    client: SocketAddr,
    _dir: Arc<TempDir>,
}

impl Member {
    pub(crate) async fn start(id: u64, start: ClusterStart) -> Self {
        Self::try_start(id, start, |_| {}).await.unwrap()
    }

    pub(crate) async fn try_start(
        id: u64,
        start: ClusterStart,
        edit: impl FnOnce(&mut ControllerConfig),
    ) -> Result<Self, millrace_controller::StartError> {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let mut config = ControllerConfig { id: ControllerId(id), start, ..config(dir.path()) };
        edit(&mut config);
        let (threads, controller) = run(&config).await?;
        config.client_listen = controller.client_addr();
        config.internal_listen = controller.internal_addr();
        let client = controller.client_addr();
        Ok(Self { up: Some((threads, controller)), config, client, _dir: dir })
    }

    pub(crate) fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(channel(self.client.to_string()))
    }

    pub(crate) fn internal(&self) -> String {
        self.config.internal_listen.to_string()
    }

    pub(crate) fn joining(&self, role: JoinAs) -> ClusterStart {
        ClusterStart::Join { at: vec![self.internal()], role }
    }

    pub(super) fn id(&self) -> u64 {
        self.config.id.0
    }

    /// Ends the controller like kill -9: the tasks end at any point.
    pub(crate) fn kill(&mut self) {
        let (threads, controller) = self.up.take().unwrap();
        std::mem::forget(controller);
        threads.end();
    }

    /// Blocks the only thread that serves clients, like decoding a large request on that thread.
    pub(crate) async fn block(&self, span: Duration) {
        let (threads, _) = self.up.as_ref().unwrap();
        let blocked = threads.requests.spawn(async move {
            let (_sender, nothing) = std::sync::mpsc::channel::<()>();
            nothing.recv_timeout(span)
        });
        blocked.await.unwrap().unwrap_err();
    }

    pub(crate) async fn restart(&mut self) {
        self.up = Some(run(&self.config).await.unwrap());
    }

    pub(crate) fn has_file(&self, model: &[u8]) -> bool {
        self.file(model).exists()
    }

    pub(crate) fn write_file(&self, model: &[u8], bytes: &[u8]) {
        std::fs::write(self.file(model), bytes).unwrap();
    }

    /// Returns this controller's copy of the replicated state.
    pub(crate) fn state(&self) -> State {
        self.up.as_ref().unwrap().1.state()
    }

    pub(crate) fn file(&self, model: &[u8]) -> std::path::PathBuf {
        self.config.data_dir.join("artifacts").join(Digest::of(model).hex())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some((threads, controller)) = self.up.take() {
            drop(controller);
            threads.end();
        }
    }
}

/// Starts a controller with separate runtimes. The directory of a killed controller may stay locked for
/// a moment, because the runtimes end in the background.
pub(super) async fn run(
    config: &ControllerConfig,
) -> Result<(Threads, RunningController), millrace_controller::StartError> {
    soon("the release of the killed controller's directory and ports", async {
        loop {
            let threads = Threads::new();
            match threads.start(config).await {
                Ok(controller) => return Ok((threads, controller)),
                Err(error) => {
                    threads.end();
                    let text = error.to_string();
                    if !text.contains("in use") {
                        return Err(error);
                    }
                }
            }
        }
    })
    .await
}
