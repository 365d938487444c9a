//! The data that `top` shows, derived from samples: the same for a screen and for text.

use std::collections::BTreeMap;
use std::time::Duration;

use millrace_client::messages as wire;
use millrace_proto::activity::FunctionActivity;

use super::link;
use super::objective::ObjectiveCells;
use super::pane::{EVENTS, FUNCTIONS, GPUS, LINKS, Pane};
use super::sample::{ClusterSample, EventLog, SampleHistory, SampleInterval, quantile};
use super::table::{Cell, PaneRow, SortableTable, Tone};
use crate::output::events::EventDocument;
use crate::output::residents::UNITS;
use crate::output::text::{latency, size};

/// The data of a display.
#[derive(Debug)]
pub(super) struct Dashboard {
    /// The summary of the cluster, as lines.
    pub(super) head: Vec<(String, Tone)>,
    gpus: SortableTable,
    functions: SortableTable,
    links: SortableTable,
    events: SortableTable,
}

impl Dashboard {
    /// Derives the picture from the samples. Returns `None` before the first sample.
    pub(super) fn of(history: &SampleHistory, events: &EventLog) -> Option<Self> {
        let now = history.now()?;
        let since = SampleComparison { before: history.before(), now };
        Some(Self {
            head: since.head(),
            gpus: SortableTable { columns: GPUS, rows: since.gpus() },
            functions: SortableTable { columns: FUNCTIONS, rows: since.functions() },
            links: SortableTable { columns: LINKS, rows: since.links() },
            events: SortableTable {
                columns: EVENTS,
                rows: events.kept.iter().rev().enumerate().map(|(place, it)| event(place, it)).collect(),
            },
        })
    }

    pub(super) fn sheet(&self, pane: Pane) -> &SortableTable {
        match pane {
            Pane::Gpus => &self.gpus,
            Pane::Functions => &self.functions,
            Pane::Links => &self.links,
            Pane::Events => &self.events,
        }
    }
}

/// The newest sample, and an earlier sample to compare with.
#[derive(Clone, Copy)]
struct SampleComparison<'a> {
    before: Option<&'a ClusterSample>,
    now: &'a ClusterSample,
}

impl<'a> SampleComparison<'a> {
    fn span(&self) -> Option<SampleInterval> {
        Some(SampleInterval::between(self.before?, self.now))
    }

    fn head(&self) -> Vec<(String, Tone)> {
        vec![self.cluster(), self.machines(), self.requests()]
    }

    fn cluster(&self) -> (String, Tone) {
        let status = &self.now.status;
        let up = status.controllers.iter().filter(|it| it.reachable).count();
        let leads = match status.leader {
            0 => "no controller leads".to_owned(),
            leader => format!("controller {leader} leads in term {}", status.term),
        };
        let of = status.controllers.len();
        let mut text = format!("cluster {}: {leads}, {up} of {of} controllers up", status.cluster_id);
        // Show only the first warning: 'cluster status' lists all.
        if let Some(warning) = status.warnings.first() {
            text += &format!("; {warning}");
        }
        let tone = match () {
            () if !status.quorum || status.leader == 0 => Tone::Bad,
            () if up < of || !status.warnings.is_empty() => Tone::Warning,
            () => Tone::Plain,
        };
        (text, tone)
    }

    fn machines(&self) -> (String, Tone) {
        let nodes = &self.now.nodes;
        let connected = nodes.iter().filter(|node| node.connected).count();
        let gpus: Vec<_> = nodes.iter().flat_map(|node| &node.gpus).collect();
        let up = gpus.iter().filter(|gpu| gpu.health == "Up").count();
        let sum = |of: fn(&wire::Gpu) -> u64| size(gpus.iter().map(|gpu| of(gpu)).sum());
        let queued: u32 = nodes.iter().map(|node| node.queued).sum();
        let text = format!(
            "{connected} of {} nodes connected, {up} of {} GPUs up, {} of {} of GPU memory used, {queued} requests queued",
            nodes.len(),
            gpus.len(),
            sum(|gpu| gpu.used_bytes),
            sum(|gpu| gpu.memory_bytes),
        );
        let whole = connected == nodes.len() && up == gpus.len();
        (text, if whole { Tone::Plain } else { Tone::Warning })
    }

    fn requests(&self) -> (String, Tone) {
        let Some(span) = self.span() else {
            let tone = if self.now.missing.is_empty() { Tone::Quiet } else { Tone::Warning };
            return (format!("requests: counting{}", self.not_counted()), tone);
        };
        let grown = self.now.activity.functions.iter().filter_map(|now| Some((self.was(now)?, now)));
        let grown: Vec<_> = grown.collect();
        let sum = |of: fn(&FunctionActivity) -> u64| -> f64 {
            grown.iter().map(|(was, now)| span.rate(of(was), of(now))).sum()
        };
        let answered = sum(|it| it.answered);
        let failed = sum(|it| it.failed);
        let mut text =
            format!("{answered:.1} requests/s answered, {failed:.1}/s failed, over {:.0} s", span.0);
        if self.now.left_out > 0 {
            text += &format!("; {} less busy functions are left out", self.now.left_out);
        }
        text += &self.not_counted();
        let tone = match () {
            () if failed > 0.0 => Tone::Bad,
            () if !self.now.missing.is_empty() => Tone::Warning,
            () => Tone::Plain,
        };
        (text, tone)
    }

    /// Lists the processes that did not answer.
    fn not_counted(&self) -> String {
        self.now.missing.iter().map(|missing| format!("; not counted: {missing}")).collect()
    }

    /// Returns a function's earlier counts, or zero counts if the function is new. Returns `None`
    /// if the earlier sample may have left the function out: its count since the start is no rate.
    fn was(&self, now: &FunctionActivity) -> Option<FunctionActivity> {
        let before = self.before?;
        let its = |it: &&FunctionActivity| it.tenant == now.tenant && it.function == now.function;
        let found = before.activity.functions.iter().find(its).cloned();
        found.or_else(|| (before.left_out == 0).then(FunctionActivity::default))
    }

    fn gpus(&self) -> Vec<PaneRow> {
        let nodes = self.now.nodes.iter();
        nodes.flat_map(|node| node.gpus.iter().map(move |gpu| self.gpu(node, gpu))).collect()
    }

    fn gpu(&self, node: &wire::Node, gpu: &wire::Gpu) -> PaneRow {
        let before = self.before.and_then(|sample| {
            let node = sample.nodes.iter().find(|it| it.name == node.name && it.epoch == node.epoch)?;
            node.gpus.iter().find(|it| it.index == gpu.index)
        });
        let rate = |of: fn(&wire::Gpu) -> u64| {
            let rate = before.and_then(|before| Some(self.span()?.rate(of(before), of(gpu))));
            rate.map_or_else(Cell::unknown, |rate| Cell::number(rate, format!("{rate:.1}")))
        };
        let busy = before.and_then(|before| Some(self.span()?.share(before.busy, gpu.busy)));
        let state = Cell::text(if node.connected { gpu.health.as_str() } else { "Away" });
        let taken = share(gpu.used_bytes, gpu.memory_bytes);
        PaneRow {
            id: gpu_name(&node.name, gpu),
            cells: vec![
                Cell::text(&node.name),
                // Negate the index, because numbers are sorted in descending order.
                Cell::number(-f64::from(gpu.index), gpu.index.to_string()),
                match (node.connected, gpu.health.as_str()) {
                    (true, "Up") => state.tone(Tone::Good),
                    (true, "Starting") => state.tone(Tone::Warning),
                    _ => state.tone(Tone::Bad),
                },
                Cell::number(taken, format!("{} {:>3.0}%", bar(taken, 8), taken * 100.0)),
                Cell::number(gpu.models.len() as f64, gpu.models.len().to_string()),
                busy.map_or_else(Cell::unknown, |busy| {
                    Cell::number(busy, format!("{:.0}%", busy.min(1.0) * 100.0))
                }),
                rate(|gpu| gpu.swaps),
                rate(|gpu| gpu.evictions),
                Cell::number(gpu.restarts as f64, gpu.restarts.to_string()).tone(if gpu.restarts > 0 {
                    Tone::Warning
                } else {
                    Tone::Quiet
                }),
                Cell::text(sms(gpu)),
                Cell::text(running(gpu)),
            ],
        }
    }

    fn functions(&self) -> Vec<PaneRow> {
        let active = self.now.activity.functions.iter().map(|it| (name(&it.tenant, &it.function), it));
        let active: BTreeMap<_, _> = active.collect();
        let functions = self.now.functions.iter().filter_map(|it| {
            let spec = it.spec.as_ref()?;
            Some(DashboardModel { tenant: &spec.tenant, name: &spec.name, slo: spec.slo.as_ref() })
        });
        let workflows = self.now.workflows.iter().filter_map(|it| {
            let spec = it.spec.as_ref()?;
            Some(DashboardModel { tenant: &spec.tenant, name: &spec.name, slo: spec.slo.as_ref() })
        });
        // Functions and workflows share a name space.
        let known = functions.chain(workflows).map(|it| (name(it.tenant, it.name), it));
        let known: BTreeMap<_, _> = known.collect();
        // A deleted function still has counts, but no row.
        known.iter().map(|(id, known)| self.function(id, known, active.get(id).copied())).collect()
    }

    fn function(&self, id: &str, known: &DashboardModel<'_>, now: Option<&FunctionActivity>) -> PaneRow {
        let none = FunctionActivity {
            tenant: known.tenant.to_owned(),
            function: known.name.to_owned(),
            ..FunctionActivity::default()
        };
        if now.is_none() && self.now.left_out > 0 {
            // The function may be idle or left out of the sample, so its counts are unknown.
            let mut cells = vec![Cell::unknown(); FUNCTIONS.len()];
            cells[0] = Cell::text(id);
            return PaneRow { id: id.to_owned(), cells };
        }
        let now = now.unwrap_or(&none);
        let before = self.was(now);
        let span = self.span().filter(|_| before.is_some());
        let was = before.as_ref().unwrap_or(&none);
        let rate = |count: fn(&FunctionActivity) -> u64, bad: Tone| {
            let rate = span.map(|span| span.rate(count(was), count(now)));
            rate.map_or_else(Cell::unknown, |rate| {
                let tone = if rate > 0.0 { bad } else { Tone::Quiet };
                Cell::number(rate, format!("{rate:.1}")).tone(tone)
            })
        };
        let took = |of: f64| {
            let took = span.and_then(|_| quantile(Some(was), now, of));
            took.map_or_else(Cell::unknown, |took| Cell::number(took.as_secs_f64(), latency_text(took)))
        };
        let objective = ObjectiveCells::of(known.slo, was, now);
        let gpus = span.map(|span| span.share(was.gpu_time, now.gpu_time));
        PaneRow {
            id: id.to_owned(),
            cells: vec![
                Cell::text(id),
                rate(|it| it.answered, Tone::Plain),
                rate(|it| it.failed, Tone::Bad),
                took(0.5),
                took(0.98),
                objective.as_ref().map_or_else(Cell::unknown, ObjectiveCells::goal),
                objective.as_ref().map_or_else(Cell::unknown, ObjectiveCells::in_time),
                objective.as_ref().map_or_else(Cell::unknown, ObjectiveCells::due),
                Cell::number(f64::from(now.in_flight), now.in_flight.to_string()),
                gpus.map_or_else(Cell::unknown, |gpus| Cell::number(gpus, format!("{gpus:.2}"))),
            ],
        }
    }

    fn links(&self) -> Vec<PaneRow> {
        let rows = self.now.activity.links.iter().map(|now| {
            let before = self.before.and_then(|sample| {
                sample.activity.links.iter().find(|it| it.node == now.node && it.link == now.link)
            });
            link::row(before.zip(self.span()), now)
        });
        rows.collect()
    }
}

/// A function or a workflow, to which requests are sent.
struct DashboardModel<'a> {
    tenant: &'a str,
    name: &'a str,
    slo: Option<&'a wire::Slo>,
}

fn event(place: usize, event: &wire::Event) -> PaneRow {
    let EventDocument { time, reason, object, message, .. } = EventDocument::from(event);
    let tone = match event.severity() {
        wire::EventSeverity::Warning => Tone::Warning,
        _ => Tone::Plain,
    };
    PaneRow {
        id: object.to_owned(),
        cells: vec![
            // The position keeps events of the same second in order, the newest first.
            Cell::number(-(place as f64), time.unwrap_or_else(|| "-".to_owned())),
            Cell::text(reason).tone(tone),
            Cell::text(object),
            Cell::text(message),
        ],
    }
}

pub(super) fn name(tenant: &str, function: &str) -> String {
    format!("{tenant}/{function}")
}

pub(super) fn gpu_name(node: &str, gpu: &wire::Gpu) -> String {
    format!("{node}/{}", gpu.index)
}

pub(super) fn latency_text(took: Duration) -> String {
    if took == Duration::MAX { ">50 s".to_owned() } else { latency(took) }
}

pub(super) fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// Returns a bar of the given width, filled to the share.
pub(super) fn bar(share: f64, width: usize) -> String {
    let full = (share.clamp(0.0, 1.0) * width as f64).round() as usize;
    format!("{}{}", "█".repeat(full), "░".repeat(width - full))
}

/// Returns the SM units of a GPU, a letter for each request that has a token for them and a dot for each free
/// unit.
fn sms(gpu: &wire::Gpu) -> String {
    let mut strip = ['.'; UNITS as usize];
    for (letter, running) in ('a'..='z').zip(&gpu.running) {
        let whole = running.units == 0 && gpu.running.len() == 1;
        let (first, units) = if whole { (0, UNITS) } else { (running.first_unit, running.units) };
        let places = strip.iter_mut().skip(first as usize).take(units as usize);
        places.for_each(|place| *place = letter);
    }
    strip.iter().collect()
}

/// Returns the functions that run on a GPU, each after its letter in [`sms`] if there are several.
fn running(gpu: &wire::Gpu) -> String {
    match gpu.running.as_slice() {
        [] => String::new(),
        [one] => one.function.clone(),
        several => {
            let named = ('a'..='z').zip(several).map(|(letter, it)| format!("{letter} {}", it.function));
            named.collect::<Vec<_>>().join(", ")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::history;
    use super::super::sample::tests::sample;
    use super::*;
    use crate::clock::now;

    fn texts(picture: &Dashboard, pane: Pane) -> Vec<Vec<&str>> {
        let rows = picture.sheet(pane).rows.iter();
        rows.map(|row| row.cells.iter().map(|cell| cell.text.as_str()).collect()).collect()
    }

    #[test]
    fn the_sms_of_a_shared_gpu_are_drawn_with_a_letter_for_each_request() {
        let part = |function: &str, first_unit, units| wire::RunningRequest {
            function: function.into(),
            first_unit,
            units,
        };
        let gpu = |running| wire::Gpu { running, ..Default::default() };
        let shared = gpu(vec![part("t/x@1", 8, 4), part("t/y@1", 0, 8), part("t/z@1", 0, 0)]);
        assert_eq!(sms(&shared), "bbbbbbbbaaaa....");
        assert_eq!(running(&shared), "a t/x@1, b t/y@1, c t/z@1");
        assert_eq!(sms(&gpu(Vec::new())), "................");
        // A part beyond the last unit, from a worker of another build, is not drawn.
        assert_eq!(sms(&gpu(vec![part("t/x@1", 12, 30)])), "............aaaa");
    }

    #[test]
    fn rates_and_shares_cover_the_time_between_two_samples() {
        let (history, events) = history();
        let picture = Dashboard::of(&history, &events).unwrap();
        let gpus = texts(&picture, Pane::Gpus);
        let memory = "████░░░░  50%";
        let sms = "aaaaaaaaaaaaaaaa";
        assert_eq!(
            gpus,
            [["worker-1", "1", "Up", memory, "1", "50%", "2.0", "0.0", "1", sms, "default/digits@1"]]
        );
        let functions = texts(&picture, Pane::Functions);
        assert_eq!(
            functions[0],
            [
                "default/digits",
                "50.0",
                "2.0",
                "9.17 ms",
                "9.17 ms",
                "80.0 ms p98",
                "50.0%",
                "+4800",
                "2",
                "0.00"
            ]
        );
        assert_eq!(functions[1][..4], ["default/quiet", "0.0", "0.0", "-"]);
        let workflow = &functions[2];
        assert_eq!(workflow[0], "default/reader");
        assert_eq!(
            workflow[5..8],
            ["80.0 ms p98", "50.0%", "+4800"],
            "the workflow has an objective of its own"
        );
        assert_eq!(
            texts(&picture, Pane::Links),
            [["worker-1", "pcie 1", "768.0 MiB/s", "50%", "512.0 MiB/s", "1.5 GiB", "1"]],
            "the rate covers both directions, and the share the busier one"
        );
        let reasons: Vec<_> = texts(&picture, Pane::Events).iter().map(|row| row[1]).collect();
        assert_eq!(reasons, ["ExecutorRestarted", "GpuUp"], "the newest event comes first");
        let head: Vec<_> = picture.head.iter().map(|(text, _)| text.as_str()).collect();
        assert_eq!(
            head,
            [
                "cluster c: controller 1 leads in term 4, 1 of 1 controllers up",
                "1 of 1 nodes connected, 1 of 1 GPUs up, 512.0 MiB of 1.0 GiB of GPU memory used, 3 requests queued",
                "100.0 requests/s answered, 4.0/s failed, over 2 s",
            ]
        );
        assert_eq!(picture.head[2].1, Tone::Bad);
    }

    #[test]
    fn the_first_sample_shows_no_rates() {
        let mut one = SampleHistory::default();
        one.add(sample(now(), &["w"]), Duration::from_secs(10));
        assert!(Dashboard::of(&SampleHistory::default(), &EventLog::default()).is_none());
        let picture = Dashboard::of(&one, &EventLog::default()).unwrap();
        assert_eq!(picture.head[2].0, "requests: counting");
        assert_eq!(picture.head[0].1, Tone::Bad, "no controller leads");
    }
}
