//! The dry run of several applies: returns an order in which all applies succeed, or a refusal.
//! [`millrace_cluster_state::apply_set`] decides. This module parses requests and builds responses. The
//! limits of clients' messages (`WalkLimits::CLIENT`) bound the items and models of a request.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::future::join_all;
use millrace_cluster_state::{ApplySet, CommandRefusal, ModelSummary, SetItem, SetRefusal};
use millrace_proto::admin::{self as api, apply_item::Item};
use millrace_proto::convert;
use millrace_types::{Bytes, Digest, Failure, Reason, TensorSpec};
use tonic::Request;

use super::functions::{COPY_PATIENCE, outcome};
use super::{AdminService, caller};
use crate::raft::refused;

impl AdminService {
    pub(super) async fn dry_run_apply(
        &self,
        request: Request<api::DryRunApplyRequest>,
    ) -> Result<api::DryRunApplyResponse, Failure> {
        let caller = caller(&request)?;
        let api::DryRunApplyRequest { items: wanted, models } = request.into_inner();
        let models = models.into_iter().map(pending_model).collect::<Result<BTreeMap<_, _>, _>>()?;
        let mut items = Vec::with_capacity(wanted.len());
        for (position, item) in wanted.into_iter().enumerate() {
            match self.set_item(item) {
                Ok(item) => items.push(item),
                Err(failure) => return Ok(refusal(position, failure, None)),
            }
        }
        // Wait like an apply: a model that is being copied to a majority is no reason to refuse.
        let uploaded: BTreeSet<Digest> = items.iter().filter_map(model_of).collect();
        let uploaded = uploaded.iter().filter(|digest| !models.contains_key(digest));
        join_all(uploaded.map(|digest| self.artifacts.copied_within(COPY_PATIENCE, digest))).await;
        let permit = Arc::clone(&self.order_searches).acquire_owned().await;
        let permit = permit.map_err(|error| Failure::new(Reason::Internal, error.to_string()))?;
        let state = self.replica.linearizable().await?;
        let set = ApplySet { items, models, voters: self.voters(), caller, stamp: self.replica.now() };
        // The search for an order may try thousands of items, so it runs on a separate thread. The
        // thread holds the permit, because the search continues after the client has left.
        let searched = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            state.dry_run_set(&set)
        });
        let searched = searched.await;
        let searched = searched
            .map_err(|error| Failure::new(Reason::Internal, format!("the dry run failed: {error}")))?;
        match searched {
            Ok(steps) => {
                let steps = steps.into_iter().map(|step| api::DryRunStep {
                    item: position_wire(step.item),
                    outcome: outcome(step.applied).into(),
                });
                Ok(api::DryRunApplyResponse { steps: steps.collect(), refusal: None })
            }
            Err(SetRefusal { item, refusal: why }) => {
                let failure = refused(&why);
                let broken = match why.shortened() {
                    CommandRefusal::BreaksWorkflow { workflow, problem, .. } => {
                        Some(api::BrokenWorkflow { workflow: workflow.name.to_string(), problem })
                    }
                    _ => None,
                };
                Ok(refusal(item, failure, broken))
            }
        }
    }

    /// Converts an item, with the checks that need no state.
    fn set_item(&self, item: api::ApplyItem) -> Result<SetItem, Failure> {
        let no_spec = || Failure::new(Reason::InvalidSpec, "there is no spec");
        match item.item.ok_or_else(no_spec)? {
            Item::Workflow(spec) => Ok(SetItem::Workflow { spec: convert::workflow_spec(spec)? }),
            Item::Function(api::FunctionItem { spec, digest }) => {
                let spec = convert::function_spec(spec.ok_or_else(no_spec)?)?;
                self.check_runnable(spec.runtime)?;
                Ok(SetItem::Function { spec, digest: parse_digest(&digest)? })
            }
        }
    }
}

fn model_of(item: &SetItem) -> Option<Digest> {
    match item {
        SetItem::Function { digest, .. } => Some(*digest),
        SetItem::Workflow { .. } => None,
    }
}

fn parse_digest(text: &str) -> Result<Digest, Failure> {
    text.parse().map_err(|error| Failure::malformed(format!("{error}")))
}

fn pending_model(pending: api::PendingModel) -> Result<(Digest, ModelSummary), Failure> {
    let digest = parse_digest(&pending.digest)?;
    let model = pending.model.unwrap_or_default();
    let tensors = |wire: Vec<api::TensorSpec>| -> Result<Vec<TensorSpec>, Failure> {
        wire.into_iter().map(convert::tensor_spec).collect()
    };
    let model = ModelSummary {
        weights: Bytes(model.weights_bytes),
        parameters: model.parameters,
        launches: model.launches,
        inputs: tensors(model.inputs)?,
        outputs: tensors(model.outputs)?,
    };
    Ok((digest, model))
}

fn refusal(item: usize, failure: Failure, broken: Option<api::BrokenWorkflow>) -> api::DryRunApplyResponse {
    let refusal = api::ItemRefusal {
        item: position_wire(item),
        reason: failure.reason.to_string(),
        message: failure.message,
        broken,
    };
    api::DryRunApplyResponse { steps: Vec::new(), refusal: Some(refusal) }
}

fn position_wire(item: usize) -> u32 {
    u32::try_from(item).unwrap_or(u32::MAX)
}
