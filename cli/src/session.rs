//! What a verb that talks to a cluster has in hand.

use millrace_client::{Admin, Endpoints, Inference};
use millrace_types::{FunctionKey, FunctionName};

use crate::config::Config;
use crate::failure::Failure;

/// The settings and the clients made from them.
pub(crate) struct Session {
    pub(crate) config: Config,
    pub(crate) admin: Admin,
    endpoints: Endpoints,
}

impl Session {
    /// Makes the clients. Nothing is connected yet. Within a runtime.
    pub(crate) fn new(config: Config) -> Result<Self, Failure> {
        let endpoints = Endpoints::new(config.endpoints.clone())?;
        Ok(Self { admin: Admin::new(endpoints.clone()), endpoints, config })
    }

    /// The inference client, for the tenant that is meant.
    pub(crate) fn inference(&self) -> Inference {
        Inference::new(self.endpoints.clone()).with_tenant(self.config.tenant.clone())
    }

    /// A function of the tenant that is meant.
    pub(crate) fn key(&self, name: &FunctionName) -> FunctionKey {
        FunctionKey { tenant: self.config.tenant.clone(), name: name.clone() }
    }
}
