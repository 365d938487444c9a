//! A group of controllers in this process, each with separate runtimes.

#[path = "../../tests/controller/group/threads.rs"]
mod threads;

use std::path::Path;
use std::time::Duration;

use millrace_cluster_state::ControllerId;
use millrace_controller::{ClusterStart, ControllerConfig, JoinAs, RunningController};
use millrace_proto::admin as api;
use millrace_proto::admin::admin_client::AdminClient;
use tonic::transport::Channel;

use self::threads::Threads;

pub(crate) struct Member {
    pub(crate) config: ControllerConfig,
    pub(crate) up: Option<(Threads, RunningController)>,
}

pub(crate) async fn run(config: &ControllerConfig) -> (Threads, RunningController) {
    loop {
        let threads = Threads::new();
        match threads.start(config).await {
            Ok(controller) => return (threads, controller),
            Err(error) => {
                // The killed controller still holds the lock of the directory.
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
        config.start = ClusterStart::Join { at: vec![at.internal_listen.to_string()], role: JoinAs::Voter };
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

/// Writes to the log without changing the state, by deleting a function that does not exist.
pub(crate) async fn write(admin: &mut AdminClient<Channel>) -> bool {
    let request = api::DeleteFunctionRequest { name: "none".into(), ..Default::default() };
    admin.delete_function(request).await.is_err_and(|status| status.code() == tonic::Code::NotFound)
}

/// Starts three voters, with the first as leader.
pub(crate) async fn three(dir: &Path) -> [Member; 3] {
    let first = start(dir, 1, None).await;
    let second = start(dir, 2, Some(&first.config)).await;
    let third = start(dir, 3, Some(&first.config)).await;
    [first, second, third]
}

/// Ends all controllers without waiting.
pub(crate) fn end(members: [Member; 3]) {
    for mut member in members {
        let (threads, controller) = member.up.take().unwrap();
        drop(controller);
        threads.end();
    }
}
