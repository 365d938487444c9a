//! The scheduling policy for people and programs: in the shape of its manifest, with a `status`
//! beside it.

use millrace_client::messages as wire;
use millrace_proto::policy::PolicySpec;
use millrace_types::manifest::{ManifestKind, POLICY};
use serde::Serialize;

use crate::output::documents::ManifestDocument;
use crate::output::table::{TextColumn, TextTable, col, wide};
use crate::output::text::{moment, non_empty};

pub(crate) type PolicyDocument =
    ManifestDocument<PolicyMetadataDocument, PolicySpecDocument, PolicyStatusDocument>;

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyMetadataDocument {
    name: &'static str,
    generation: u64,
    resource_version: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    updated_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    updated_by: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct PolicyStatusDocument {
    nodes: Vec<Node>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Node {
    node: String,
    obeys: bool,
    generation: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    actual: Option<PolicySpecDocument>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicyChangeDocument {
    generation: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    changed_at: Option<String>,
    changed_by: String,
    spec: PolicySpecDocument,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PolicySpecDocument {
    #[serde(skip_serializing_if = "Option::is_none")]
    preset: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    dispatch: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    eviction: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overtakes_max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alpha: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    batching: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    slo_window: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    transfer_sharing: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    host_links: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu_sharing: Option<String>,
}

impl From<PolicySpec> for PolicySpecDocument {
    fn from(spec: PolicySpec) -> Self {
        Self {
            preset: non_empty(spec.preset),
            dispatch: non_empty(spec.dispatch),
            eviction: non_empty(spec.eviction),
            overtakes_max: spec.overtakes_max,
            alpha: non_empty(spec.alpha),
            batching: non_empty(spec.batching),
            slo_window: spec.slo_window,
            transfer_sharing: non_empty(spec.transfer_sharing),
            host_links: non_empty(spec.host_links),
            gpu_sharing: non_empty(spec.gpu_sharing),
        }
    }
}

impl From<wire::Policy> for PolicyDocument {
    fn from(policy: wire::Policy) -> Self {
        let node = |it: wire::NodePolicy| Node {
            node: it.node,
            obeys: it.obeys,
            generation: it.generation,
            actual: it.actual.map(PolicySpecDocument::from),
        };
        let metadata = PolicyMetadataDocument {
            name: POLICY,
            generation: policy.generation,
            resource_version: policy.resource_version,
            updated_at: policy.updated_at.and_then(moment),
            updated_by: non_empty(policy.updated_by),
        };
        let status = PolicyStatusDocument { nodes: policy.nodes.into_iter().map(node).collect() };
        Self::new(ManifestKind::Policy, metadata, policy.spec.unwrap_or_default().into(), status)
    }
}

impl From<wire::PolicyChange> for PolicyChangeDocument {
    fn from(change: wire::PolicyChange) -> Self {
        Self {
            generation: change.generation,
            changed_at: change.changed_at.and_then(moment),
            changed_by: change.changed_by,
            spec: change.spec.unwrap_or_default().into(),
        }
    }
}

/// Returns the columns of a policy's settings.
fn columns() -> [TextColumn; 10] {
    [
        col("PRESET"),
        col("DISPATCH"),
        col("EVICTION"),
        col("OVERTAKES"),
        col("ALPHA"),
        col("BATCHING"),
        col("WINDOW"),
        wide("TRANSFERS"),
        wide("HOST LINKS"),
        wide("GPU SHARING"),
    ]
}

/// Returns the settings of a policy, in the order of the columns.
fn cells(spec: &PolicySpec) -> [String; 10] {
    let number = |number: Option<u32>| number.map(|number| number.to_string()).unwrap_or_default();
    [
        spec.preset.clone(),
        spec.dispatch.clone(),
        spec.eviction.clone(),
        number(spec.overtakes_max),
        spec.alpha.clone(),
        spec.batching.clone(),
        number(spec.slo_window),
        spec.transfer_sharing.clone(),
        spec.host_links.clone(),
        spec.gpu_sharing.clone(),
    ]
}

/// Returns a table of the desired policy and the settings in force on each node.
pub(crate) fn table(policy: &wire::Policy) -> TextTable {
    let header = [col("NODE")].into_iter().chain(columns());
    let last = [col("CHANGE"), col("OBEYS"), wide("UPDATED"), wide("BY")];
    let mut table = TextTable::new(header.chain(last).collect::<Vec<_>>());
    let wanted = cells(&policy.spec.clone().unwrap_or_default());
    let updated = policy.updated_at.and_then(moment).unwrap_or_default();
    let last = [policy.generation.to_string(), String::new(), updated, policy.updated_by.clone()];
    table.row(["(wanted)".to_owned()].into_iter().chain(wanted).chain(last).collect::<Vec<_>>());
    for node in &policy.nodes {
        let actual = cells(&node.actual.clone().unwrap_or_default());
        let obeys = if node.obeys { "yes" } else { "no" }.to_owned();
        let last = [node.generation.to_string(), obeys, String::new(), String::new()];
        table.row([node.node.clone()].into_iter().chain(actual).chain(last).collect::<Vec<_>>());
    }
    table
}

/// Returns a table of the last changes.
pub(crate) fn changes(changes: &[wire::PolicyChange]) -> TextTable {
    let first = [col("CHANGE"), col("WHEN"), col("BY")];
    let mut table = TextTable::new(first.into_iter().chain(columns()).collect::<Vec<_>>());
    for change in changes {
        let settings = cells(&change.spec.clone().unwrap_or_default());
        let when = change.changed_at.and_then(moment).unwrap_or_default();
        let first = [change.generation.to_string(), when, change.changed_by.clone()];
        table.row(first.into_iter().chain(settings).collect::<Vec<_>>());
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::{ListFormat, document};
    use millrace_proto::convert::policy_spec_wire;
    use millrace_types::manifest::{self, Manifest};
    use millrace_types::policy::{
        Batches, DispatchName, EvictionName, GpuSharingName, HostLinksName, PresetName, TransferSharingName,
    };

    #[test]
    fn the_desired_policy_is_printed_above_the_policy_of_each_node() {
        let spec = |dispatch: &str| PolicySpec { dispatch: dispatch.into(), ..Default::default() };
        let node =
            |node: &str, actual, obeys| wire::NodePolicy { node: node.into(), actual, obeys, generation: 2 };
        let windowed = PolicySpec { slo_window: Some(100), ..spec("torpor") };
        let policy = wire::Policy {
            spec: Some(spec("torpor")),
            generation: 2,
            nodes: vec![node("a", Some(windowed), true), node("b", None, false)],
            ..Default::default()
        };
        let expected = "\
NODE       PRESET   DISPATCH   EVICTION   OVERTAKES   ALPHA   BATCHING   WINDOW   CHANGE   OBEYS
(wanted)   -        torpor     -          -           -       -          -        2        -
a          -        torpor     -          -           -       -          100      2        yes
b          -        -          -          -           -       -          -        2        no
";
        assert_eq!(table(&policy).render(ListFormat::Table), expected);
        let json = serde_json::to_value(PolicyDocument::from(policy)).unwrap();
        assert_eq!(json["spec"], serde_json::json!({ "dispatch": "torpor" }));
        assert_eq!(json["status"]["nodes"][1]["obeys"], false);
    }

    #[test]
    fn a_printed_policy_can_be_applied_again() {
        let all = millrace_types::PolicySpec {
            preset: Some(PresetName::LalbO3),
            dispatch: Some(DispatchName::LalbO3),
            eviction: Some(EvictionName::Lru),
            overtakes_max: Some(9),
            alpha: None,
            batching: Some(Batches::Off),
            slo_window: None,
            transfer_sharing: Some(TransferSharingName::Faastube),
            host_links: Some(HostLinksName::All),
            gpu_sharing: Some(GpuSharingName::Slices),
        };
        let windowed = millrace_types::PolicySpec {
            dispatch: Some(DispatchName::Unified),
            slo_window: Some(100),
            ..millrace_types::PolicySpec::NONE
        };
        for spec in [all, windowed, millrace_types::PolicySpec::NONE] {
            let node = wire::NodePolicy { node: "a".into(), ..Default::default() };
            let policy = wire::Policy {
                spec: Some(policy_spec_wire(&spec)),
                updated_by: "alice".into(),
                nodes: vec![node],
                ..Default::default()
            };
            let text = document(ListFormat::Yaml, &PolicyDocument::from(policy)).unwrap().unwrap();
            assert_eq!(manifest::parse(&text).unwrap(), [Manifest::Policy(spec)], "{text}");
        }
    }

    #[test]
    fn the_policy_is_printed_field_by_field() {
        let spec = PolicySpec { dispatch: "torpor".into(), overtakes_max: Some(9), ..Default::default() };
        let node =
            wire::NodePolicy { node: "a".into(), actual: Some(spec.clone()), obeys: true, generation: 2 };
        let policy = wire::Policy {
            spec: Some(spec),
            generation: 2,
            resource_version: 7,
            updated_at: None,
            updated_by: "alice".into(),
            nodes: vec![node],
        };
        let expected = "\
apiVersion: millrace/v1
kind: Policy
metadata:
  name: cluster
  generation: 2
  resourceVersion: 7
  updatedBy: alice
spec:
  dispatch: torpor
  overtakesMax: 9
status:
  nodes:
  - node: a
    obeys: true
    generation: 2
    actual:
      dispatch: torpor
      overtakesMax: 9
";
        assert_eq!(document(ListFormat::Yaml, &PolicyDocument::from(policy)).unwrap().unwrap(), expected);
    }
}
