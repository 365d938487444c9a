//! What was applied, whatever it is: for waiting and for printing.

use millrace_client::{Admin, messages as wire};
use millrace_proto::convert::function_key;
use millrace_types::FunctionKey;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::documents;

/// A function or workflow as the server has it.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
pub(super) enum Resource {
    Function(wire::Function),
    Workflow(wire::Workflow),
}

/// The document of either.
#[derive(Debug, Serialize)]
#[serde(untagged)]
#[allow(clippy::large_enum_variant, reason = "a handful at a time")]
pub(super) enum Document {
    Function(documents::Function),
    Workflow(documents::Workflow),
}

impl Resource {
    /// What people call it, such as `function/digits`.
    pub(super) fn title(&self) -> String {
        let (kind, name) = match self {
            Self::Function(it) => ("function", it.spec.as_ref().map(|spec| spec.name.as_str())),
            Self::Workflow(it) => ("workflow", it.spec.as_ref().map(|spec| spec.name.as_str())),
        };
        format!("{kind}/{}", name.unwrap_or_default())
    }

    pub(super) fn conditions(&self) -> &[wire::Condition] {
        match self {
            Self::Function(it) => &it.conditions,
            Self::Workflow(it) => &it.conditions,
        }
    }

    /// The same as it is now.
    pub(super) async fn again(&self, admin: &Admin) -> Result<Self, Failure> {
        Ok(match self {
            Self::Function(_) => Self::Function(admin.function(&self.key()?).await?),
            Self::Workflow(_) => Self::Workflow(admin.workflow(&self.key()?).await?),
        })
    }

    pub(super) fn document(self) -> Document {
        match self {
            Self::Function(it) => Document::Function(it.into()),
            Self::Workflow(it) => Document::Workflow(it.into()),
        }
    }

    fn key(&self) -> Result<FunctionKey, Failure> {
        let (tenant, name) = match self {
            Self::Function(it) => it.spec.as_ref().map(|spec| (&*spec.tenant, &*spec.name)),
            Self::Workflow(it) => it.spec.as_ref().map(|spec| (&*spec.tenant, &*spec.name)),
        }
        .unwrap_or_default();
        function_key(tenant, name).map_err(|failure| {
            Failure::failed(format!("the server's answer cannot be used: {}", failure.message))
        })
    }
}
