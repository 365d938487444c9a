//! The slices of GPUs that functions have or wait for.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_cluster_state::{FunctionRecord, PlacementRecord, State};
use millrace_proto::admin as api;
use millrace_proto::convert::slice_terms_wire;
use millrace_proto::slices::SliceUse;
use millrace_types::{Failure, NodeName};

use super::listing::{fill, page_size_or_all};
use super::{AdminService, node_name, unknown_token};
use crate::fleet::{AttachedWorker, Workers};
use crate::leadership::MissingSlices;

impl AdminService {
    pub(super) async fn list_slices(
        &self,
        request: api::ListSlicesRequest,
    ) -> Result<api::ListSlicesResponse, Failure> {
        let node = Some(&request.node).filter(|node| !node.is_empty()).map(|node| node_name(node));
        let node = node.transpose()?;
        let after = match request.page_token.as_str() {
            "" => None,
            token => Some(position(token).ok_or_else(|| Failure::malformed(unknown_token(token)))?),
        };
        let size = page_size_or_all(request.page_size);
        let state = self.read(request.consistency()).await?;
        let used = uses(&self.fleet.workers());
        let missing = self.outlook.missing_slices();
        let functions = state.functions().filter(|function| {
            let key = (function.key.tenant.as_str(), function.key.name.as_str());
            after.is_none_or(|(tenant, name, _)| key >= (tenant, name))
        });
        let slices = functions.flat_map(|function| slices(&state, function, &missing, &used, node.as_ref()));
        let rest = slices.filter(|(number, slice)| {
            let at = (slice.tenant.as_str(), slice.function.as_str(), *number);
            after.is_none_or(|after| at > after)
        });
        let (slices, last) = fill(rest, size, |(_, slice)| slice.clone());
        let token = last.map(|(number, slice)| format!("{}/{}/{number}", slice.tenant, slice.function));
        Ok(api::ListSlicesResponse { slices, next_page_token: token.unwrap_or_default() })
    }
}

/// Parses a token: the tenant, the function and the number of the last slice on the page before.
fn position(token: &str) -> Option<(&str, &str, u64)> {
    let (function, number) = token.rsplit_once('/')?;
    let (tenant, name) = function.split_once('/')?;
    Some((tenant, name, number.parse().ok()?))
}

/// Returns the use of each slice as last reported.
fn uses(workers: &Workers) -> BTreeMap<u64, SliceUse> {
    let of_worker = |worker: &Arc<AttachedWorker>| {
        let telemetry = worker.telemetry();
        let gpus = telemetry.iter().flat_map(|telemetry| &telemetry.gpus);
        gpus.flat_map(|gpu| &gpu.slices).map(|used| (used.id, *used)).collect::<Vec<_>>()
    };
    workers.values().flat_map(of_worker).collect()
}

/// Returns the slices of a function on a node or on all nodes, each with its number in the order. The
/// slices that wait for a GPU are on no node, and last.
fn slices(
    state: &State,
    function: &FunctionRecord,
    missing: &MissingSlices,
    used: &BTreeMap<u64, SliceUse>,
    node: Option<&NodeName>,
) -> Vec<(u64, api::Slice)> {
    let of_function = || api::Slice {
        tenant: function.key.tenant.to_string(),
        function: function.key.name.to_string(),
        ..api::Slice::default()
    };
    let of_placement = |placement: &Arc<PlacementRecord>| {
        let slice = |slice: &millrace_cluster_state::SliceRecord| {
            let shown = api::Slice {
                id: slice.id.0,
                node: placement.node.to_string(),
                gpu: slice.gpu.0,
                terms: Some(slice_terms_wire(slice.terms)),
                r#use: used.get(&slice.id.0).copied(),
                ..of_function()
            };
            (slice.id.0, shown)
        };
        placement.slices.iter().map(slice).collect::<Vec<_>>()
    };
    let placements = state.placements_of(&function.key);
    let placed = placements.filter(|placement| node.is_none_or(|node| placement.node == *node));
    let mut slices: Vec<_> = placed.flat_map(of_placement).collect();
    slices.sort_unstable_by_key(|(id, _)| *id);
    let waits = missing.get(&function.key).filter(|_| node.is_none());
    slices.extend(waits.into_iter().flat_map(|missing| {
        let terms = function.latest().spec.slices.map(|asked| slice_terms_wire(asked.terms));
        let shown = api::Slice { terms, waits: missing.why.to_string(), ..of_function() };
        (0..missing.count).rev().map(move |number| (u64::MAX - u64::from(number), shown.clone()))
    }));
    slices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_names_the_last_slice() {
        assert_eq!(position("shop/classify/12"), Some(("shop", "classify", 12)));
        for wrong in ["", "12", "a/12", "a/b/c", "a/b/-1"] {
            assert_eq!(position(wrong), None, "{wrong}");
        }
    }
}
