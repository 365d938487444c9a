//! The dry run of a set of applies.

use millrace_proto::admin::{self, apply_item::Item};
use millrace_proto::convert::{function_spec_wire, workflow_spec_wire};
use millrace_types::{Digest, Failure, FunctionSpec, Reason, WorkflowSpec};

use super::{Admin, ApplyOutcome};
use crate::error::Error;

/// A function or workflow to apply.
#[derive(Debug, Clone, PartialEq)]
pub enum ApplyItem {
    /// A function with its model.
    Function {
        /// The function's spec.
        spec: FunctionSpec,
        /// The model: an artifact of the cluster, or a pending model of the same dry run.
        artifact: Digest,
    },
    /// A workflow of functions that the set or the cluster has.
    Workflow(WorkflowSpec),
}

/// A model that the caller has not uploaded yet.
#[derive(Debug, Clone, PartialEq)]
pub struct PendingModel {
    /// The digest of the model file.
    pub digest: Digest,
    /// The description of the model in the file.
    pub model: admin::ModelSummary,
}

/// The response to a dry run.
#[derive(Debug, Clone, PartialEq)]
pub enum DryRun {
    /// All items are valid: each once, in an order in which the server accepts them.
    Taken(Vec<DryRunStep>),
    /// An item is invalid: no order of the items makes the server accept it.
    Refused(ItemRefusal),
}

/// An item that the server accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DryRunStep {
    /// The item's position in the call.
    pub item: usize,
    /// The outcome of applying the item.
    pub outcome: ApplyOutcome,
}

/// An item that the server refuses.
#[derive(Debug, Clone, PartialEq)]
pub struct ItemRefusal {
    /// The item's position in the call.
    pub item: usize,
    /// The failure that an apply of the item would return.
    pub failure: Failure,
    /// The stored workflow that the item would break, if that is the reason.
    pub broken: Option<BrokenWorkflow>,
}

/// A stored workflow that an item of a dry run would break.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenWorkflow {
    /// The workflow's name. The tenant is the item's.
    pub workflow: String,
    /// The edge that would not fit, and the reason.
    pub problem: String,
}

impl Admin {
    /// Tries a set of functions and workflows on a copy of the cluster's state, and stores nothing.
    /// The server counts `models` as uploaded. Each item in the result is the first of the
    /// remaining items that the server accepts after the items before.
    ///
    /// # Errors
    /// [`Error`] when the call fails, with `UNIMPLEMENTED` if the server is older than this client.
    /// The refusal of an item is not an error but a [`DryRun::Refused`].
    pub async fn dry_run_apply(
        &self,
        items: &[ApplyItem],
        models: Vec<PendingModel>,
    ) -> Result<DryRun, Error> {
        let models = models.into_iter().map(|PendingModel { digest, model }| admin::PendingModel {
            digest: digest.to_string(),
            model: Some(model),
        });
        let request = admin::DryRunApplyRequest {
            items: items.iter().map(item_wire).collect(),
            models: models.collect(),
        };
        let answer =
            self.ask(request, async |mut client, request| client.dry_run_apply(request).await).await?;
        read(answer, items.len())
    }
}

fn item_wire(item: &ApplyItem) -> admin::ApplyItem {
    let item = match item {
        ApplyItem::Function { spec, artifact } => Item::Function(admin::FunctionItem {
            spec: Some(function_spec_wire(spec)),
            digest: artifact.to_string(),
        }),
        ApplyItem::Workflow(spec) => Item::Workflow(workflow_spec_wire(spec)),
    };
    admin::ApplyItem { item: Some(item) }
}

fn read(answer: admin::DryRunApplyResponse, items: usize) -> Result<DryRun, Error> {
    let position = |item: u32| {
        usize::try_from(item).ok().filter(|&item| item < items).ok_or_else(|| {
            Error::BadAnswer(format!("item {item} is beyond the {items} items of the dry run"))
        })
    };
    if let Some(admin::ItemRefusal { item, reason, message, broken }) = answer.refusal {
        // A newer server may have a reason that this client does not know.
        let reason: Reason = reason.parse().unwrap_or(Reason::Internal);
        let broken = broken.map(|it| BrokenWorkflow { workflow: it.workflow, problem: it.problem });
        let failure = Failure::new(reason, message);
        return Ok(DryRun::Refused(ItemRefusal { item: position(item)?, failure, broken }));
    }
    let step = |step: admin::DryRunStep| {
        Ok(DryRunStep { item: position(step.item)?, outcome: ApplyOutcome::read(step.outcome)? })
    };
    let steps = answer.steps.into_iter().map(step).collect::<Result<Vec<_>, Error>>()?;
    let mut named: Vec<usize> = steps.iter().map(|step| step.item).collect();
    named.sort_unstable();
    if !named.into_iter().eq(0..items) {
        return Err(Error::BadAnswer("the response does not name every item of the dry run once".to_owned()));
    }
    Ok(DryRun::Taken(steps))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(items: &[u32]) -> Result<DryRun, Error> {
        let outcome = admin::ApplyOutcome::Created.into();
        let steps = items.iter().map(|&item| admin::DryRunStep { item, outcome }).collect();
        read(admin::DryRunApplyResponse { steps, refusal: None }, 2)
    }

    #[test]
    fn an_answer_that_does_not_name_every_item_once_is_malformed() {
        let step = |item| DryRunStep { item, outcome: ApplyOutcome::Created };
        assert_eq!(steps(&[1, 0]).unwrap(), DryRun::Taken(vec![step(1), step(0)]));
        for items in [[].as_slice(), &[0], &[0, 0], &[0, 2], &[0, 1, 1]] {
            assert!(matches!(steps(items), Err(Error::BadAnswer(_))), "{items:?}");
        }
    }

    #[test]
    fn a_refusal_keeps_its_reason_and_an_unknown_reason_is_internal() {
        let refused = |item: u32, reason: &str| {
            let message = "what happened".to_owned();
            let refusal = admin::ItemRefusal { item, reason: reason.into(), message, broken: None };
            read(admin::DryRunApplyResponse { steps: Vec::new(), refusal: Some(refusal) }, 2)
        };
        for (wire, reason) in [("NAME_TAKEN", Reason::NameTaken), ("NEWER", Reason::Internal)] {
            let failure = Failure::new(reason, "what happened");
            let expected = DryRun::Refused(ItemRefusal { item: 1, failure, broken: None });
            assert_eq!(refused(1, wire).unwrap(), expected);
        }
        assert!(matches!(refused(2, "NAME_TAKEN"), Err(Error::BadAnswer(_))));
    }
}
