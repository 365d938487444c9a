//! An applied resource of any kind, for waiting and printing.

use millrace_client::{Admin, messages as wire};
use millrace_proto::convert::function_key;
use millrace_types::FunctionKey;
use millrace_types::manifest::POLICY;
use serde::Serialize;

use crate::failure::CommandFailure;
use crate::output::{documents, policies, tenants};

/// A function, a workflow or a rule, as the server has it.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
pub(crate) enum AppliedResource {
    Function(wire::Function),
    Workflow(wire::Workflow),
    Tenant(wire::Tenant),
    Policy(wire::Policy),
}

/// The document of a resource.
#[derive(Debug, Serialize)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
pub(crate) enum ResourceDocument {
    Function(documents::FunctionDocument),
    Workflow(documents::WorkflowDocument),
    Tenant(tenants::TenantDocument),
    Policy(policies::PolicyDocument),
}

impl AppliedResource {
    /// Returns the name for people, such as `function/digits`.
    pub(crate) fn title(&self) -> String {
        let (kind, name) = match self {
            Self::Function(it) => ("function", it.spec.as_ref().map(|spec| spec.name.as_str())),
            Self::Workflow(it) => ("workflow", it.spec.as_ref().map(|spec| spec.name.as_str())),
            Self::Tenant(it) => ("tenant", Some(it.name.as_str())),
            Self::Policy(_) => ("policy", Some(POLICY)),
        };
        format!("{kind}/{}", name.unwrap_or_default())
    }

    /// Returns the command that shows the awaited condition.
    pub(crate) fn look(&self) -> String {
        match self {
            Self::Function(_) | Self::Workflow(_) => format!("millrace describe {}", self.title()),
            Self::Tenant(_) => "millrace get tenants".to_owned(),
            Self::Policy(_) => "millrace get policies".to_owned(),
        }
    }

    /// Reads the resource again.
    pub(crate) async fn again(self, admin: &Admin) -> Result<Self, CommandFailure> {
        Ok(match self {
            Self::Function(it) => {
                let spec = it.spec.unwrap_or_default();
                Self::Function(admin.function(&key(&spec.tenant, &spec.name)?).await?)
            }
            Self::Workflow(it) => {
                let spec = it.spec.unwrap_or_default();
                Self::Workflow(admin.workflow(&key(&spec.tenant, &spec.name)?).await?)
            }
            // Caps are ready at once, so they are not read again.
            Self::Tenant(it) => Self::Tenant(it),
            Self::Policy(_) => Self::Policy(admin.policy().await?),
        })
    }

    pub(crate) fn document(self) -> ResourceDocument {
        match self {
            Self::Function(it) => ResourceDocument::Function(it.into()),
            Self::Workflow(it) => ResourceDocument::Workflow(it.into()),
            Self::Tenant(it) => ResourceDocument::Tenant(it.into()),
            Self::Policy(it) => ResourceDocument::Policy(it.into()),
        }
    }
}

fn key(tenant: &str, name: &str) -> Result<FunctionKey, CommandFailure> {
    function_key(tenant, name).map_err(|failure| {
        CommandFailure::failed(format!("the server's response is malformed: {}", failure.message))
    })
}
