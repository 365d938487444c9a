//! The session of a verb that calls a cluster.

use millrace_client::{Admin, Endpoints, Inference};
use millrace_types::{FunctionKey, FunctionName};

use crate::config::Config;
use crate::failure::CommandFailure;

/// The settings, and the clients made from them.
pub(crate) struct ClusterSession {
    pub(crate) config: Config,
    pub(crate) admin: Admin,
    endpoints: Endpoints,
}

impl ClusterSession {
    /// Creates the clients without connecting. Must be called within a tokio runtime.
    pub(crate) fn new(config: Config) -> Result<Self, CommandFailure> {
        let endpoints = Endpoints::new(config.endpoints.clone())?;
        Ok(Self { admin: Admin::new(endpoints.clone()), endpoints, config })
    }

    /// Returns an inference client for the tenant of the settings.
    pub(crate) fn inference(&self) -> Inference {
        Inference::new(self.endpoints.clone()).with_tenant(self.config.tenant.clone())
    }

    /// Returns the key of a function of the settings' tenant.
    pub(crate) fn key(&self, name: &FunctionName) -> FunctionKey {
        FunctionKey { tenant: self.config.tenant.clone(), name: name.clone() }
    }
}
