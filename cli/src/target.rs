//! The target of a verb: a kind of resource, and optionally a name. Both `function digits` and
//! `function/digits` are accepted.

use std::fmt;
use std::str::FromStr;

use millrace_types::Reason;

use crate::failure::CommandFailure;

/// The kinds of resource.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ResourceKind {
    Function,
    Workflow,
    Node,
    Gpu,
    Slice,
    Profile,
    Tenant,
    Policy,
    Operation,
    Scaling,
}

/// A kind, and the name from the same word, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResourceTarget {
    pub(crate) kind: ResourceKind,
    name: Option<String>,
}

/// The error of a word that is not a kind.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a resource type: write functions, workflows, nodes, gpus, slices, profiles, tenants, policies, operations or scaling; a single function is function/NAME"
)]
pub(crate) struct UnknownKind(String);

impl FromStr for ResourceTarget {
    type Err = UnknownKind;
    fn from_str(text: &str) -> Result<Self, UnknownKind> {
        let (kind, name) = match text.split_once('/') {
            Some((kind, name)) => (kind, Some(name.to_owned())),
            None => (text, None),
        };
        let kind = match kind {
            "function" | "functions" | "fn" => ResourceKind::Function,
            "workflow" | "workflows" | "wf" => ResourceKind::Workflow,
            "node" | "nodes" | "no" => ResourceKind::Node,
            "gpu" | "gpus" => ResourceKind::Gpu,
            "slice" | "slices" => ResourceKind::Slice,
            "profile" | "profiles" => ResourceKind::Profile,
            "tenant" | "tenants" => ResourceKind::Tenant,
            "policy" | "policies" => ResourceKind::Policy,
            "operation" | "operations" | "op" | "ops" => ResourceKind::Operation,
            "scaling" => ResourceKind::Scaling,
            other => return Err(UnknownKind(other.to_owned())),
        };
        Ok(Self { kind, name })
    }
}

impl ResourceTarget {
    /// Returns the names: the separate words, or the name in the same word.
    pub(crate) fn names(self, words: Vec<String>) -> Result<Vec<String>, CommandFailure> {
        match self.name {
            None => Ok(words),
            Some(name) if words.is_empty() => Ok(vec![name]),
            Some(name) => {
                Err(CommandFailure::usage(format!("{name:?} and {:?} are both names", words.join(" ")))
                    .hint("write TYPE/NAME, or TYPE NAME"))
            }
        }
    }

    /// Returns the only name, if any.
    pub(crate) fn name(self, word: Option<String>) -> Result<Option<String>, CommandFailure> {
        Ok(self.names(word.into_iter().collect())?.pop())
    }
}

/// The kinds of model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ModelKind {
    Function,
    Workflow,
}

impl ModelKind {
    pub(crate) fn not_found(self) -> Reason {
        match self {
            Self::Function => Reason::FunctionNotFound,
            Self::Workflow => Reason::WorkflowNotFound,
        }
    }
}

impl fmt::Display for ModelKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Function => "function",
            Self::Workflow => "workflow",
        })
    }
}

/// Parses the name of a model: `digits`, `function/digits` or, for a workflow, `workflow/digits`.
/// Returns the kind, if named, and the name.
pub(crate) fn model_name(text: &str) -> Result<(Option<ModelKind>, &str), CommandFailure> {
    let Some((_, name)) = text.split_once('/') else { return Ok((None, text)) };
    let target: ResourceTarget = text.parse().map_err(|error| CommandFailure::usage(format!("{error}")))?;
    match target.kind {
        ResourceKind::Function => Ok((Some(ModelKind::Function), name)),
        ResourceKind::Workflow => Ok((Some(ModelKind::Workflow), name)),
        _ => Err(CommandFailure::usage(format!("{text:?} is neither a function nor a workflow"))
            .hint("write function/NAME, workflow/NAME, or the name alone")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_name_is_a_function_or_a_workflow() {
        for (text, kind) in [
            ("digits", None),
            ("function/digits", Some(ModelKind::Function)),
            ("fn/digits", Some(ModelKind::Function)),
            ("workflow/digits", Some(ModelKind::Workflow)),
            ("wf/digits", Some(ModelKind::Workflow)),
        ] {
            assert_eq!(model_name(text), Ok((kind, "digits")), "{text}");
        }
        for text in ["node/digits", "pod/digits"] {
            assert!(model_name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn both_spellings_of_a_target_are_equal() {
        let target = |text: &str| text.parse::<ResourceTarget>().unwrap();
        assert_eq!(target("function/digits").name(None), Ok(Some("digits".into())));
        assert_eq!(target("fn").name(Some("digits".into())), Ok(Some("digits".into())));
        assert_eq!(target("wf/traffic").name(None), Ok(Some("traffic".into())));
        assert_eq!(target("workflow").kind, ResourceKind::Workflow);
        assert_eq!(target("nodes").name(None), Ok(None));
        assert!(target("function/a").name(Some("b".into())).is_err());
        assert_eq!("pods".parse::<ResourceTarget>(), Err(UnknownKind("pods".into())));
    }
}
