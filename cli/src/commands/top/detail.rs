//! The details of a row as lines.

use std::cmp::Reverse;

use millrace_client::messages as wire;

use super::dashboard::{bar, gpu_name, latency_text, name, share};
use super::link;
use super::pane::Pane;
use super::sample::{ClusterSample, EventLog, SampleHistory, SampleInterval, quantile, seconds};
use super::table::Tone;
use crate::output::events::EventDocument;
use crate::output::residents::{ResidentState, residents, weights};
use crate::output::text::size;

type Line = (String, Tone);

/// Returns the details of a row as lines.
pub(super) fn detail(pane: Pane, id: &str, history: &SampleHistory, events: &EventLog) -> Vec<Line> {
    let Some(now) = history.now() else { return Vec::new() };
    let (mut lines, about) = match pane {
        Pane::Gpus => (gpu(now, id), format!("gpu/{id}")),
        Pane::Functions => (function(history, now, id), format!("function/{id}")),
        Pane::Links => return link(now, id),
        Pane::Events => (Vec::new(), id.to_owned()),
    };
    let its: Vec<_> = events.kept.iter().rev().filter(|it| it.object == about).collect();
    if !its.is_empty() {
        lines.push((String::new(), Tone::Plain));
        lines.push((format!("Events of {about}, the newest first:"), Tone::Plain));
    }
    lines.extend(its.into_iter().map(|it| {
        let EventDocument { time, reason, message, .. } = EventDocument::from(it);
        let tone = if it.severity() == wire::EventSeverity::Warning { Tone::Warning } else { Tone::Plain };
        (format!("  {}  {reason}: {message}", time.unwrap_or_default()), tone)
    }));
    lines
}

fn plain(text: impl Into<String>) -> Line {
    (text.into(), Tone::Plain)
}

fn gone(id: &str) -> Vec<Line> {
    vec![plain(format!("{id} no longer exists"))]
}

fn gpu(now: &ClusterSample, id: &str) -> Vec<Line> {
    let mut all = now.nodes.iter().flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)));
    let found = all.find(|(node, gpu)| gpu_name(&node.name, gpu) == id);
    let Some((node, gpu)) = found else { return gone(id) };
    let mut lines = vec![
        plain(format!("GPU {id}: {}, {}", gpu.gpu_type, gpu.health)),
        plain(format!(
            "{} of {} used; {} requests are queued on the node",
            size(gpu.used_bytes),
            size(gpu.memory_bytes),
            node.queued
        )),
        plain(format!(
            "swaps: {} (from other GPUs: {}), evictions: {}, restarts: {}, busy for {:.1} s",
            gpu.swaps,
            gpu.peer_swaps,
            gpu.evictions,
            gpu.restarts,
            seconds(gpu.busy)
        )),
        plain(""),
        plain("Models, the largest first:"),
    ];
    let weights = weights(&now.functions);
    let mut models: Vec<_> = gpu.models.iter().collect();
    models.sort_by_key(|model| Reverse(model.bytes));
    lines.extend(models.into_iter().map(|model| {
        let (state, tone) = match ResidentState::of(gpu, model, &weights) {
            ResidentState::Running => ("running".to_owned(), Tone::Good),
            ResidentState::Loading { of } => {
                (format!("loading, {} of {} copied", size(model.loaded_bytes), size(of)), Tone::Plain)
            }
            ResidentState::Idle => (format!("idle for {:.0} s", seconds(model.idle)), Tone::Plain),
        };
        let bar = bar(share(model.bytes, gpu.memory_bytes), 20);
        let functions = model.functions.join(", ");
        (format!("  {bar} {:>10}  {functions}: {state}", size(model.bytes)), tone)
    }));
    lines
}

fn function(history: &SampleHistory, now: &ClusterSample, id: &str) -> Vec<Line> {
    let known = now
        .functions
        .iter()
        .find(|it| it.spec.as_ref().is_some_and(|spec| name(&spec.tenant, &spec.name) == id));
    let Some(known) = known else { return workflow(history, now, id) };
    let mut lines = vec![plain(format!("Function {id}, generation {}", known.generation))];
    lines.extend(known.conditions.iter().map(condition));
    lines.extend(counted(history, now, id));
    lines.extend([plain(""), plain("On GPUs:")]);
    let its = |revision: &String| revision.split_once('@').is_some_and(|(name, _)| name == id);
    let copies = residents(&now.nodes).filter(|(.., model)| model.functions.iter().any(its));
    lines.extend(copies.map(|(node, gpu, model)| {
        plain(format!(
            "  {}: {} of weights copied, {} of memory used, idle for {:.0} s",
            gpu_name(node, gpu),
            size(model.loaded_bytes),
            size(model.bytes),
            seconds(model.idle)
        ))
    }));
    lines
}

fn workflow(history: &SampleHistory, now: &ClusterSample, id: &str) -> Vec<Line> {
    let known = now.workflows.iter().find_map(|it| {
        let spec = it.spec.as_ref().filter(|spec| name(&spec.tenant, &spec.name) == id)?;
        Some((it, spec))
    });
    let Some((known, spec)) = known else { return gone(id) };
    let mut lines = vec![plain(format!("Workflow {id}, generation {}", known.generation))];
    lines.extend(known.conditions.iter().map(condition));
    lines.extend(counted(history, now, id));
    lines.extend([plain(""), plain("Steps:")]);
    lines.extend(spec.steps.iter().map(|step| {
        let run = match &step.run {
            Some(wire::workflow_step::Run::Function(name)) => format!("function {name}"),
            Some(wire::workflow_step::Run::Workflow(name)) => format!("workflow {name}"),
            None => "-".to_owned(),
        };
        plain(format!("  {}: {run}", step.name))
    }));
    lines
}

fn condition(condition: &wire::Condition) -> Line {
    let tone = match condition.status() {
        wire::ConditionStatus::True => Tone::Good,
        wire::ConditionStatus::False => Tone::Bad,
        wire::ConditionStatus::Unknown | wire::ConditionStatus::Unspecified => Tone::Warning,
    };
    (format!("  {}: {} ({})", condition.r#type, condition.reason, condition.message), tone)
}

/// Returns a function's counts, or nothing before its first request.
fn counted(history: &SampleHistory, now: &ClusterSample, id: &str) -> Vec<Line> {
    let find = |sample: &ClusterSample| {
        sample.activity.functions.iter().find(|it| name(&it.tenant, &it.function) == id).cloned()
    };
    let Some(counted) = find(now) else { return Vec::new() };
    let before = history.before();
    let span = before.map_or(0.0, |before| SampleInterval::between(before, now).0);
    let earlier = before.and_then(find);
    let took =
        |of: f64| quantile(earlier.as_ref(), &counted, of).map_or_else(|| "-".to_owned(), latency_text);
    vec![
        plain(""),
        plain(format!(
            "{} answered, {} failed, {} in flight",
            counted.answered, counted.failed, counted.in_flight
        )),
        plain(format!(
            "latency of the last {span:.0} s: p50 {}, p90 {}, p98 {}, p99 {}, slowest {}",
            took(0.5),
            took(0.9),
            took(0.98),
            took(0.99),
            took(1.0)
        )),
        plain(format!(
            "objective: {} of {} requests within the deadline; GPU time charged: {:.1} s",
            counted.slo_in_time,
            counted.slo_requests,
            seconds(counted.gpu_time)
        )),
    ]
}

fn link(now: &ClusterSample, id: &str) -> Vec<Line> {
    let Some(link) = now.activity.links.iter().find(|it| link::name(it) == id) else { return gone(id) };
    vec![
        plain(format!("Link {id}")),
        plain(format!("{}/s by the topology, in each direction", size(link.bytes_per_second))),
        plain(format!(
            "{} carried towards GPUs, {}/s measured over its last batches",
            size(link.carried_bytes),
            size(link.measured_bytes_per_second)
        )),
        plain(format!(
            "{} carried to the host, {}/s measured over its last batches",
            size(link.carried_to_host_bytes),
            size(link.measured_to_host_bytes_per_second)
        )),
        plain(format!("{} batches granted and not finished", link.outstanding)),
    ]
}

#[cfg(test)]
mod tests {
    use super::super::fixture::history;
    use super::*;

    #[test]
    fn details_show_the_models_of_a_gpu_and_the_latencies_of_a_function() {
        let (history, events) = history();
        let text = |pane, id| {
            let lines = detail(pane, id, &history, &events).into_iter();
            lines.map(|(text, _)| text).collect::<Vec<_>>().join("\n")
        };
        let gpu = text(Pane::Gpus, "worker-1/1");
        assert!(gpu.contains("default/digits@1: running") && gpu.contains("ExecutorRestarted: its"), "{gpu}");
        let function = text(Pane::Functions, "default/digits");
        assert!(function.contains("p99 9.17 ms") && function.contains("worker-1/1: 512.0 MiB"), "{function}");
        let workflow = text(Pane::Functions, "default/reader");
        assert!(workflow.contains("objective: 100 of 200 requests within the deadline"), "{workflow}");
        assert!(workflow.contains("  say: function quiet"), "{workflow}");
        let link = text(Pane::Links, "worker-1/pcie 1");
        assert!(link.contains("1.0 GiB carried towards GPUs"), "{link}");
        assert!(link.contains("512.0 MiB carried to the host, 512.0 MiB/s measured"), "{link}");
        assert_eq!(text(Pane::Gpus, "worker-1/7"), "worker-1/7 no longer exists");
    }
}
