//! A group of controllers in this process, each with runtimes of its own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use millrace_cluster_state::ControllerId;
use millrace_controller::{Controller, ControllerConfig, JoinAs, RaftRuntime, Start, Tcp};
use millrace_proto::admin as api;
use millrace_proto::admin::admin_client::AdminClient;
use tokio::runtime::Runtime;
use tonic::transport::Channel;

pub(crate) struct Member {
    pub(crate) config: ControllerConfig,
    pub(crate) up: Option<(Threads, Controller)>,
}

/// The threads of a controller, as a process has them.
pub(crate) struct Threads {
    requests: Runtime,
    raft: RaftRuntime,
}

impl Threads {
    fn start() -> Self {
        let mut builder = tokio::runtime::Builder::new_multi_thread();
        let requests = builder.worker_threads(1).enable_all().build().unwrap();
        Self { requests, raft: RaftRuntime::start().unwrap() }
    }

    /// Ends what runs there wherever it is.
    pub(crate) fn end(self) {
        self.requests.shutdown_background();
        drop(self.raft);
    }
}

pub(crate) async fn run(config: &ControllerConfig) -> (Threads, Controller) {
    loop {
        let threads = Threads::start();
        let config = ControllerConfig { raft_runtime: Some(threads.raft.handle()), ..config.clone() };
        let started = threads.requests.spawn(millrace_controller::start(config, Arc::new(Tcp)));
        match started.await.unwrap() {
            Ok(controller) => return (threads, controller),
            Err(error) => {
                // The one that was killed still holds the directory's lock.
                assert!(error.to_string().contains("in use"), "{error}");
                threads.end();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

pub(crate) async fn start(dir: &Path, id: u64, at: Option<&ControllerConfig>) -> Member {
    let mut config = ControllerConfig::new(dir.join(id.to_string()), id);
    config.id = ControllerId(id);
    config.client_listen.set_port(0);
    config.internal_listen.set_port(0);
    if let Some(at) = at {
        config.start = Start::Join { at: vec![at.internal_listen.to_string()], role: JoinAs::Voter };
    }
    let (threads, controller) = run(&config).await;
    config.client_listen = controller.client_addr();
    config.internal_listen = controller.internal_addr();
    Member { config, up: Some((threads, controller)) }
}

pub(crate) fn admin(member: &Member) -> AdminClient<Channel> {
    let address = format!("http://{}", member.config.client_listen);
    AdminClient::new(Channel::from_shared(address).unwrap().tcp_nodelay(true).connect_lazy())
}

/// A write that changes nothing but the log: a function that does not exist is deleted.
pub(crate) async fn write(admin: &mut AdminClient<Channel>) -> bool {
    let request = api::DeleteFunctionRequest { name: "none".into(), ..Default::default() };
    admin.delete_function(request).await.is_err_and(|status| status.code() == tonic::Code::NotFound)
}

/// Three voters; the first leads.
pub(crate) async fn three(dir: &Path) -> [Member; 3] {
    let first = start(dir, 1, None).await;
    let second = start(dir, 2, Some(&first.config)).await;
    let third = start(dir, 3, Some(&first.config)).await;
    [first, second, third]
}

/// Ends them without waiting.
pub(crate) fn end(members: [Member; 3]) {
    for mut member in members {
        let (threads, controller) = member.up.take().unwrap();
        drop(controller);
        threads.end();
    }
}
