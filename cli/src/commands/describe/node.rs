//! `describe node`.

use millrace_client::messages as wire;
use millrace_proto::policy::PolicySpec;

use crate::commands::describe::lines::{condition_line, field};
use crate::output::nodes::{host_budget, node_status};
use crate::output::text;

pub(super) fn report(node: &wire::Node) -> String {
    let sizes = |used, of| format!("{} of {}", text::size(used), text::size(of));
    let mut lines = vec![
        field("Name", &node.name),
        field("Status", &node_status(node)),
        field("Address", &node.address),
        field("Epoch", &node.epoch.to_string()),
        field("Topology", &node.topology),
        field("Functions", &node.placements.to_string()),
        field("Queued", &format!("{} requests", node.queued)),
        field("Host models", &sizes(node.host_tier_bytes, host_budget(node))),
        field("Cold starts", &node.cold_starts.to_string()),
        field("Checkpoint", &format!("{}, with {} pieces of data", node.checkpoint_seq, node.index_entries)),
        field("Policy", &node.policy.as_ref().map(policy).unwrap_or_default()),
        field("Alpha", &alphas(node)),
        field("Drain", &node.operation),
        "GPUs:".to_owned(),
    ];
    lines.extend(node.gpus.iter().map(|gpu| {
        let used = sizes(gpu.used_bytes, gpu.memory_bytes);
        format!(
            "  {:<3} {:<12} {:<10} {used}, models: {}",
            gpu.index,
            gpu.gpu_type,
            gpu.health,
            gpu.models.len()
        )
    }));
    lines.push("Conditions:".to_owned());
    lines.extend(node.conditions.iter().map(condition_line));
    lines.join("\n")
}

fn policy(spec: &PolicySpec) -> String {
    let eviction = &spec.eviction;
    format!("{}, with the eviction {eviction} and batching {}", spec.dispatch, spec.batching)
}

/// Formats the committed alpha of each priority level.
fn alphas(node: &wire::Node) -> String {
    let one = |(level, alpha): (&u32, &f64)| format!("{alpha} at priority {level}");
    node.alphas.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_report_shows_its_memory_policy_and_alphas() {
        let gpu = wire::Gpu {
            gpu_type: "v100".into(),
            health: "Up".into(),
            memory_bytes: 16 << 30,
            used_bytes: 1 << 30,
            models: vec![wire::ResidentModel::default()],
            ..Default::default()
        };
        let policy = PolicySpec {
            dispatch: "torpor".into(),
            eviction: "torpor".into(),
            batching: "on".into(),
            ..Default::default()
        };
        let node = wire::Node {
            name: "n0".into(),
            epoch: 3,
            address: "127.0.0.1:7080".into(),
            connected: true,
            topology: "p3.8xlarge".into(),
            host_memory_bytes: 64 << 30,
            host_tier_bytes: 2 << 30,
            status: wire::NodeStatus::Live.into(),
            placements: 12,
            checkpoint_seq: 40,
            policy: Some(policy),
            alphas: [(4, 0.25), (8, 1.0)].into(),
            gpus: vec![gpu],
            conditions: vec![wire::Condition {
                r#type: "Stream".into(),
                status: wire::ConditionStatus::True.into(),
                reason: "Attached".into(),
                message: String::new(),
            }],
            ..Default::default()
        };
        let expected = "\
Name:        n0
Status:      Connected
Address:     127.0.0.1:7080
Epoch:       3
Topology:    p3.8xlarge
Functions:   12
Queued:      0 requests
Host models: 2.0 GiB of 64.0 GiB
Cold starts: 0
Checkpoint:  40, with 0 pieces of data
Policy:      torpor, with the eviction torpor and batching on
Alpha:       0.25 at priority 4, 1 at priority 8
Drain:       -
GPUs:
  0   v100         Up         1.0 GiB of 16.0 GiB, models: 1
Conditions:
  Stream     True     Attached";
        assert_eq!(report(&node), expected);
    }
}
