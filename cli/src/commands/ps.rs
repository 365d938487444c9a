//! `ps`: the models on each GPU.

use std::collections::BTreeMap;

use futures::TryStreamExt as _;
use millrace_client::messages as wire;

use crate::failure::CommandFailure;
use crate::output::fields::short_digest;
use crate::output::residents::{ResidentState, residents, weights};
use crate::output::table::{TextTable, col, wide};
use crate::output::{ListOutput, documents, list, text};
use crate::session::ClusterSession;

/// Show the models resident on each GPU.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    output: ListOutput,
}

pub(crate) async fn run(args: Args, session: &ClusterSession) -> Result<(), CommandFailure> {
    let functions = session.admin.functions(None).try_collect::<Vec<_>>();
    let (nodes, functions) = futures::try_join!(session.admin.nodes(), functions)?;
    let documents: Vec<_> = residents(&nodes)
        .map(|(node, gpu, model)| documents::ResidentModelDocument::new(node, gpu, model.clone()))
        .collect();
    let empty = "no model is on a GPU: a model is loaded when it is first invoked";
    list(args.output.output, &documents, &table(&nodes, &weights(&functions)), empty)
}

fn table(nodes: &[wire::Node], weights: &BTreeMap<&str, u64>) -> TextTable {
    let mut table = TextTable::new([
        col("NODE"),
        col("GPU"),
        col("FUNCTION"),
        col("SIZE"),
        col("LOADED"),
        col("IDLE"),
        col("STATE"),
        wide("DIGEST"),
        wide("EXECUTOR"),
    ]);
    for (node, gpu, model) in residents(nodes) {
        let state = ResidentState::of(gpu, model, weights);
        let word = match state {
            ResidentState::Running => "Running",
            ResidentState::Loading { .. } => "Loading",
            ResidentState::Idle => "Idle",
        };
        let idle =
            model.idle.and_then(|idle| idle.try_into().ok()).filter(|_| state != ResidentState::Running);
        let weights = weights.get(model.digest.as_str()).copied();
        table.row([
            node.to_owned(),
            gpu.index.to_string(),
            model.functions.join(","),
            text::size(model.bytes),
            weights.map(|weights| percent(model.loaded_bytes, weights)).unwrap_or_default(),
            idle.map(text::age).unwrap_or_default(),
            word.to_owned(),
            short_digest(&model.digest),
            model.executor_pid.to_string(),
        ]);
    }
    table
}

fn percent(part: u64, whole: u64) -> String {
    let percent = (u128::from(part) * 100).checked_div(u128::from(whole)).unwrap_or(100);
    format!("{percent}%")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::ListFormat;

    #[test]
    fn models_are_shown_as_running_loading_or_idle() {
        let model = |function: &str, loaded_bytes| wire::ResidentModel {
            functions: vec![function.into()],
            digest: "sha256:0".into(),
            bytes: 6 << 20,
            loaded_bytes,
            idle: Some(prost_types::Duration { seconds: 90, nanos: 0 }),
            executor_pid: 7,
        };
        let gpus = vec![
            wire::Gpu {
                models: vec![model("default/a@1", 4 << 20), model("default/b@2", 1 << 20)],
                running: vec![wire::RunningRequest { function: "default/a@1".into(), ..Default::default() }],
                executor_pid: 7,
                ..Default::default()
            },
            wire::Gpu {
                index: 1,
                models: vec![model("t/c@1", 4 << 20)],
                executor_pid: 8,
                ..Default::default()
            },
        ];
        let nodes = [wire::Node { name: "n0".into(), gpus, ..Default::default() }];
        let expected = "\
NODE   GPU   FUNCTION      SIZE      LOADED   IDLE   STATE
n0     0     default/a@1   6.0 MiB   100%     -      Running
n0     0     default/b@2   6.0 MiB   25%      90s    Loading
n0     1     t/c@1         6.0 MiB   100%     90s    Idle
";
        assert_eq!(
            table(&nodes, &BTreeMap::from([("sha256:0", 4 << 20)])).render(ListFormat::Table),
            expected
        );
        let unknown = table(&nodes, &BTreeMap::new()).render(ListFormat::Table);
        assert!(unknown.contains("n0     0     default/b@2   6.0 MiB   -        90s    Idle\n"), "{unknown}");
    }
}
