//! A controller of a group, which can be killed and started again.

use std::net::SocketAddr;
use std::sync::Arc;

use millrace_cluster_state::{ControllerId, State};
use millrace_controller::{Controller, ControllerConfig, JoinAs, Start, Tcp};
use millrace_proto::admin::admin_client::AdminClient;
use millrace_types::Digest;
use tempfile::TempDir;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

use crate::support::{channel, config, soon};

/// One controller in a runtime of its own, so that it can be killed like a process, on a port that
/// stays its own.
pub(crate) struct Member {
    /// `None` while it is down.
    pub(super) up: Option<(Runtime, Controller)>,
    pub(crate) config: ControllerConfig,
    client: SocketAddr,
    _dir: Arc<TempDir>,
}

fn runtime() -> Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

impl Member {
    pub(crate) async fn start(id: u64, start: Start) -> Self {
        Self::try_start(id, start, |_| {}).await.unwrap()
    }

    pub(crate) async fn try_start(
        id: u64,
        start: Start,
        edit: impl FnOnce(&mut ControllerConfig),
    ) -> Result<Self, millrace_controller::StartError> {
        let dir = Arc::new(tempfile::tempdir().unwrap());
        let mut config = ControllerConfig { id: ControllerId(id), start, ..config(dir.path()) };
        edit(&mut config);
        let (runtime, controller) = run(&config).await?;
        config.client_listen = controller.client_addr();
        config.internal_listen = controller.internal_addr();
        let client = controller.client_addr();
        Ok(Self { up: Some((runtime, controller)), config, client, _dir: dir })
    }

    pub(crate) fn admin(&self) -> AdminClient<Channel> {
        AdminClient::new(channel(self.client.to_string()))
    }

    pub(crate) fn internal(&self) -> String {
        self.config.internal_listen.to_string()
    }

    pub(crate) fn joining(&self, role: JoinAs) -> Start {
        Start::Join { at: vec![self.internal()], role }
    }

    pub(super) fn id(&self) -> u64 {
        self.config.id.0
    }

    /// Ends it like kill -9: its tasks end wherever they are.
    pub(crate) fn kill(&mut self) {
        let (runtime, controller) = self.up.take().unwrap();
        std::mem::forget(controller);
        runtime.shutdown_background();
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

    /// The replicated state, as this one has it.
    pub(crate) fn state(&self) -> State {
        self.up.as_ref().unwrap().1.state()
    }

    pub(crate) fn file(&self, model: &[u8]) -> std::path::PathBuf {
        self.config.data_dir.join("artifacts").join(Digest::of(model).hex())
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        if let Some((runtime, controller)) = self.up.take() {
            drop(controller);
            runtime.shutdown_background();
        }
    }
}

/// Starts a controller in a runtime of its own. A directory that was just killed may be locked for a
/// moment: its runtime ends in the background.
pub(super) async fn run(
    config: &ControllerConfig,
) -> Result<(Runtime, Controller), millrace_controller::StartError> {
    soon("the directory and the ports of the one that was killed are free", async {
        loop {
            let runtime = runtime();
            let started = runtime.spawn(millrace_controller::start(config.clone(), Arc::new(Tcp)));
            match started.await.unwrap() {
                Ok(controller) => return Ok((runtime, controller)),
                Err(error) => {
                    runtime.shutdown_background();
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
