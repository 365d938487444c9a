//! What the front door serves from: the replicated state says which models there are, the fleet
//! says where they are ready, and the router picks a worker.
//!
//! | module | holds |
//! |---|---|
//! | [`catalog`] | the models as the protocol shows them, made once per change |
//! | [`dispatch`] | one request on its way to a worker, and to another when that one is lost |
//! | [`route`] | what the router is told of each worker |
//! | [`runs`] | how long runs take, by what was seen |

mod catalog;
mod dispatch;
mod route;
mod runs;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use millrace_cluster_state::{Caller, Command};
use millrace_gateway::auth;
use millrace_gateway::backend::{Backend, Completion, Intent, Invocation, Model};
use millrace_types::{Failure, FunctionKey, Reason, Revision, RevisionKey, TenantName};

use crate::fleet::Fleet;
use crate::fleet::readiness::{self, Readiness};
use crate::raft::Replica;
use catalog::Catalog;
use dispatch::Dispatch;
use runs::Runs;

/// How long a load waits for the function to get ready.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// The front door's backend.
#[derive(Debug)]
pub(crate) struct Serving {
    replica: Replica,
    fleet: Fleet,
    catalog: Catalog,
    runs: Runs,
}

impl Serving {
    pub(crate) fn new(replica: Replica, fleet: Fleet) -> Self {
        Self { replica, fleet, catalog: Catalog::default(), runs: Runs::default() }
    }

    /// Waits until the newest revision is ready somewhere, or cannot be.
    async fn ready(&self, key: &FunctionKey) -> Result<(), Failure> {
        let mut fleet = self.fleet.changes();
        let mut state = self.replica.changes();
        loop {
            let now = self.replica.state();
            let function = now.function(key).ok_or_else(|| catalog::not_found(key))?;
            match readiness::of_revision(function, function.latest(), &self.fleet.workers()) {
                Readiness::Prepared(_) => return Ok(()),
                Readiness::Disabled => {
                    return Err(Failure::new(
                        Reason::FunctionDisabled,
                        format!("{key} was unloaded meanwhile"),
                    ));
                }
                Readiness::PrepareFailed(why) => return Err(Failure::new(Reason::FunctionNotReady, why)),
                Readiness::Preparing | Readiness::NoWorker => {}
            }
            let changed = tokio::select! {
                changed = fleet.changed() => changed,
                changed = state.changed() => changed,
            };
            changed.map_err(|_| Failure::new(Reason::ShuttingDown, "this controller is going down"))?;
        }
    }
}

#[async_trait]
impl Backend for Serving {
    fn ready(&self) -> bool {
        !self.fleet.workers().is_empty()
    }

    fn resolve(&self, function: &FunctionKey, revision: Option<Revision>) -> Result<Arc<Model>, Failure> {
        self.catalog.resolve(&self.replica.state(), &self.fleet, function, revision)
    }

    fn index(&self, tenant: &TenantName) -> Vec<Arc<Model>> {
        self.catalog.index(&self.replica.state(), &self.fleet, tenant)
    }

    async fn set_intent(
        &self,
        function: &FunctionKey,
        intent: Intent,
        caller: &auth::Caller,
    ) -> Result<(), Failure> {
        let caller = Caller(caller.as_str().into());
        let command = Command::SetFunctionEnabled { key: function.clone(), enabled: intent == Intent::Serve };
        self.replica.propose(caller, None, command).await?;
        if intent == Intent::Refuse {
            return Ok(());
        }
        tokio::time::timeout(LOAD_TIMEOUT, self.ready(function)).await.unwrap_or_else(|_| {
            let message =
                format!("{function} is loaded and not ready after {LOAD_TIMEOUT:?}: look at its conditions");
            Err(Failure::new(Reason::FunctionNotReady, message))
        })
    }

    async fn invoke(&self, model: &Model, invocation: Invocation) -> Result<Completion, Failure> {
        let key = RevisionKey { function: model.key.clone(), revision: model.revision };
        let state = self.replica.state();
        let digest = state.function(&key.function).and_then(|function| function.revision(key.revision));
        let digest = digest.map(|revision| revision.digest);
        let run = self.runs.of(&key);
        Dispatch::new(&self.fleet, model, digest, &run, invocation).run().await
    }
}
