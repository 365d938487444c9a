//! `get nodes` and `get gpus`.

use millrace_client::{Admin, messages as wire};

use crate::failure::CommandFailure;
use crate::output::nodes::{host_budget, node_status};
use crate::output::residents;
use crate::output::table::{TextTable, col, wide};
use crate::output::{ListFormat, document, documents, list, print, text};

pub(super) async fn named(admin: &Admin, name: Option<&str>) -> Result<Vec<wire::Node>, CommandFailure> {
    let mut nodes = admin.nodes().await?;
    if let Some(name) = name {
        nodes.retain(|node| node.name == name);
        if nodes.is_empty() {
            return Err(CommandFailure::not_found(format!("there is no node {name:?}"))
                .hint("list the nodes: millrace get nodes"));
        }
    }
    Ok(nodes)
}

pub(super) fn nodes(nodes: Vec<wire::Node>, one: bool, format: ListFormat) -> Result<(), CommandFailure> {
    let table = node_table(&nodes);
    let documents: Vec<_> = nodes.into_iter().map(documents::NodeDocument::from).collect();
    if let [node] = documents.as_slice()
        && one
        && let Some(text) = document(format, node)?
    {
        return print(&text);
    }
    list(format, &documents, &table, "no node has joined: start one with 'millrace up'")
}

pub(super) fn gpus(nodes: &[wire::Node], format: ListFormat) -> Result<(), CommandFailure> {
    let all = || nodes.iter().flat_map(|node| node.gpus.iter().map(|gpu| (node.name.as_str(), gpu)));
    let documents: Vec<_> = all().map(|(node, gpu)| documents::GpuDocument::new(node, gpu.clone())).collect();
    list(format, &documents, &gpu_table(all()), "there are no GPUs: see 'millrace get nodes'")
}

fn node_table(nodes: &[wire::Node]) -> TextTable {
    let mut table = TextTable::new([
        col("NAME"),
        col("STATUS"),
        col("GPUS"),
        col("GPU-MEMORY"),
        col("HOST-TIER"),
        col("FUNCTIONS"),
        col("QUEUED"),
        wide("TOPOLOGY"),
        wide("ADDRESS"),
        wide("EPOCH"),
        wide("CHECKPOINT"),
        wide("INDEXED"),
        wide("STORAGE"),
        wide("COLD-STARTS"),
        wide("GROUP"),
    ]);
    for node in nodes {
        let used: u64 = node.gpus.iter().map(|gpu| gpu.used_bytes).sum();
        let memory: u64 = node.gpus.iter().map(|gpu| gpu.memory_bytes).sum();
        let up = node.gpus.iter().filter(|gpu| gpu.health == "Up").count();
        table.row([
            node.name.clone(),
            node_status(node),
            format!("{up}/{}", node.gpus.len()),
            format!("{}/{}", text::size(used), text::size(memory)),
            format!("{}/{}", text::size(node.host_tier_bytes), text::size(host_budget(node))),
            node.placements.to_string(),
            node.queued.to_string(),
            node.topology.clone(),
            node.address.clone(),
            node.epoch.to_string(),
            node.checkpoint_seq.to_string(),
            node.index_entries.to_string(),
            text::size(node.host_memory_bytes),
            node.cold_starts.to_string(),
            if node.group_bytes > 0 { text::size(node.group_bytes) } else { String::new() },
        ]);
    }
    table
}

fn gpu_table<'a>(gpus: impl Iterator<Item = (&'a str, &'a wire::Gpu)>) -> TextTable {
    let mut table = TextTable::new([
        col("NODE"),
        col("GPU"),
        col("TYPE"),
        col("HEALTH"),
        col("USED"),
        col("MEMORY"),
        col("MODELS"),
        col("RUNNING"),
        wide("BUSY"),
        wide("SWAPS"),
        wide("PEER-SWAPS"),
        wide("EVICTIONS"),
        wide("RESTARTS"),
        wide("PID"),
    ]);
    for (node, gpu) in gpus {
        table.row([
            node.to_owned(),
            gpu.index.to_string(),
            gpu.gpu_type.clone(),
            gpu.health.clone(),
            text::size(gpu.used_bytes),
            text::size(gpu.memory_bytes),
            (gpu.models.len() + gpu.models_left_out as usize).to_string(),
            residents::running(gpu),
            gpu.busy.and_then(|busy| busy.try_into().ok()).map(text::age).unwrap_or_default(),
            gpu.swaps.to_string(),
            gpu.peer_swaps.to_string(),
            gpu.evictions.to_string(),
            gpu.restarts.to_string(),
            pids(gpu),
        ]);
    }
    table
}

/// The number of processes that a table lists. Beyond it, the table has the count.
const PIDS_SHOWN: usize = 4;

/// Returns the pid of a GPU's executor, or the pids if its models have executors of their own.
fn pids(gpu: &wire::Gpu) -> String {
    let pids: Vec<_> = gpu.executor_pids.iter().take(PIDS_SHOWN).map(u32::to_string).collect();
    match gpu.executor_pids.len() {
        0 if gpu.executor_pid == 0 => String::new(),
        // A worker of another build reports a single pid.
        0 => gpu.executor_pid.to_string(),
        all if all > PIDS_SHOWN => format!("{} (+{})", pids.join(","), all - PIDS_SHOWN),
        _ => pids.join(","),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_status_has_its_state_and_its_scheduling() {
        let base = wire::Node { connected: true, ..Default::default() };
        let breaks = wire::Condition { reason: "StreamBreaks".into(), ..Default::default() };
        for (node, expected) in [
            (wire::Node { connected: false, conditions: vec![breaks], ..base.clone() }, "StreamBreaks"),
            (base.clone(), "Connected"),
            (wire::Node { connected: false, ..base.clone() }, "Disconnected"),
            (wire::Node { lease: wire::NodeLease::Fenced.into(), ..base.clone() }, "Silent"),
            (wire::Node { status: wire::NodeStatus::Lost.into(), connected: false, ..base.clone() }, "Lost"),
            (
                wire::Node { scheduling: wire::NodeScheduling::Draining.into(), ..base.clone() },
                "Connected,Draining",
            ),
            (wire::Node { scheduling: wire::NodeScheduling::Schedulable.into(), ..base }, "Connected"),
        ] {
            assert_eq!(node_status(&node), expected);
        }
    }

    #[test]
    fn a_gpu_lists_up_to_four_executors_and_counts_the_rest() {
        let gpu = |executor_pid, executor_pids: &[u32]| wire::Gpu {
            executor_pid,
            executor_pids: executor_pids.to_vec(),
            ..Default::default()
        };
        assert_eq!(pids(&gpu(7, &[7])), "7");
        assert_eq!(pids(&gpu(7, &[])), "7");
        assert_eq!(pids(&gpu(0, &[])), "");
        assert_eq!(pids(&gpu(0, &[7, 8, 9])), "7,8,9");
        assert_eq!(pids(&gpu(0, &[1, 2, 3, 4, 5, 6])), "1,2,3,4 (+2)");
    }

    #[test]
    fn gpus_are_listed_with_their_memory_and_models() {
        let gpu = wire::Gpu {
            index: 1,
            gpu_type: "emulated".into(),
            health: "Up".into(),
            memory_bytes: 4 << 30,
            used_bytes: 64 << 20,
            models: vec![wire::ResidentModel::default()],
            ..Default::default()
        };
        let expected = "\
NODE   GPU   TYPE       HEALTH   USED       MEMORY    MODELS   RUNNING
n0     1     emulated   Up       64.0 MiB   4.0 GiB   1        -
";
        assert_eq!(gpu_table([("n0", &gpu)].into_iter()).render(ListFormat::Table), expected);
    }
}
