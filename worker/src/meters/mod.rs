//! What a worker's `/metrics` shows: its GPUs, links, queue, host memory, objects, and what its functions
//! score. Read when it is scraped: nothing is counted on the way of a request. Requests as clients see
//! them are the gateways' to tell.
//!
//! Bounded: [`FUNCTIONS_MAX`] functions have labels of their own, the first by name; the others are
//! `_other` together.

mod counted;
mod objects;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::BTreeMap;
use std::fmt;

use axum::body::Body;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Response, StatusCode};
use millrace_policy::admission::Score;
use millrace_policy::dispatch::PredictionError;
use millrace_policy::fabric;
use millrace_policy::paths::Direction;
use millrace_proto::metrics::MetricsPage;
use millrace_proto::worker::HostModel;
use millrace_transport::SharedResult;
use millrace_types::topology::LinkId;
use millrace_types::{FunctionKey, Slo};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

use self::counted::Counted;
use self::writer::{Labels, Writer};
use crate::control::desired::{Desired, Function};
use crate::control::telemetry;
use crate::handle::NodeHandle;
use crate::hints::{Followed, Hints};
use crate::host_tier::Counts;
use crate::objects::{Objects, Tally};
use crate::programs::Programs;
use crate::sequences::{self, Sequences};
use crate::snapshot::{GpuHealth, NodeSnapshot};

/// Functions with labels of their own.
const FUNCTIONS_MAX: usize = 1000;
/// The label of the others.
const OTHER: &str = "_other";

/// Answers whoever scrapes.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) node: NodeHandle,
    pub(crate) host: telemetry::Host,
    pub(crate) objects: Objects,
    pub(crate) sequences: Sequences,
    pub(crate) desired: watch::Receiver<Desired>,
    pub(crate) hints: Hints,
    pub(crate) programs: Option<Programs>,
    pub(crate) page: SharedResult<Result<MetricsPage, fmt::Error>>,
}

impl Shown {
    /// The answer to a scrape.
    pub(crate) async fn answer(&self, headers: &HeaderMap) -> Response<Body> {
        match self.page.get(|| self.page_now()).await {
            Ok(page) => {
                let (kind, text) = page.negotiated(headers);
                let mut response = Response::new(Body::from(text));
                response.headers_mut().insert(CONTENT_TYPE, kind);
                response
            }
            Err(error) => {
                let mut response = Response::new(Body::from(format!("cannot write the metrics: {error}\n")));
                *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
                response
            }
        }
    }

    async fn page_now(&self) -> Result<MetricsPage, fmt::Error> {
        let objectives = {
            let desired = self.desired.borrow();
            let objective = |it: &Function| Some((it.key.function.clone(), it.slo?));
            desired.functions.iter().filter_map(objective).collect()
        };
        let host_models = self.host.models.borrow().to_vec();
        let host_counts = **self.host.counts.borrow();
        let snapshot = self.node.snapshot().await;
        let objects = self.objects.tally();
        let followed = self.hints.followed();
        let restarts = self.programs.as_ref().map(Programs::restarts).unwrap_or_default();
        let sequences = self.sequences.tallies();
        let seen =
            Seen { snapshot, host_models, host_counts, objects, objectives, followed, restarts, sequences };
        text(seen).map(MetricsPage::new)
    }
}

/// What is shown at one moment.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    pub(crate) snapshot: NodeSnapshot,
    pub(crate) host_models: Vec<HostModel>,
    pub(crate) host_counts: Counts,
    pub(crate) objects: Tally,
    /// What functions go by, where they have an objective.
    pub(crate) objectives: BTreeMap<FunctionKey, Slo>,
    /// What became of hints before they came to the node.
    pub(crate) followed: Followed,
    /// How often processes were started again, of functions that are programs.
    pub(crate) restarts: BTreeMap<FunctionKey, u64>,
    /// The sequences of functions that keep state.
    pub(crate) sequences: BTreeMap<FunctionKey, sequences::Tally>,
}

/// The metrics as OpenMetrics text.
///
/// # Errors
/// Never, unless the text cannot grow.
pub(crate) fn text(seen: Seen) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(seen));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for Seen {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut writer = Writer(&mut encoder);
        self.gpus(&mut writer)?;
        self.links(&mut writer)?;
        self.dispatch(&mut writer)?;
        objects::write(&self.objects, &mut writer)?;
        self.functions(&mut writer)
    }
}

impl Seen {
    fn gpus(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        let gpus = || self.snapshot.gpus.iter().map(|gpu| (vec![("gpu", gpu.index.0.to_string())], gpu));
        writer.gauges(
            ("millrace_gpu_up", "1 while the GPU serves", None),
            gpus().map(|(mut labels, gpu)| {
                labels.push(("gpu_type", gpu.gpu_type.clone()));
                (labels, f64::from(u8::from(gpu.health == GpuHealth::Up)))
            }),
        )?;
        writer.gauges(
            ("millrace_gpu_memory", "The GPU's memory", Some(Unit::Bytes)),
            gpus().map(|(labels, gpu)| (labels, gpu.memory.get() as f64)),
        )?;
        writer.gauges(
            ("millrace_gpu_memory_taken", "What of it models and objects hold", Some(Unit::Bytes)),
            gpus().map(|(labels, gpu)| (labels, gpu.used.get() as f64)),
        )?;
        writer.gauges(
            ("millrace_gpu_objects_memory", "What of that objects take", Some(Unit::Bytes)),
            gpus().map(|(labels, gpu)| (labels, gpu.data.used.get() as f64)),
        )?;
        writer.gauges(
            ("millrace_gpu_objects_pool", "The same, with what is kept for more objects", Some(Unit::Bytes)),
            gpus().map(|(labels, gpu)| (labels, gpu.data.pool.get() as f64)),
        )?;
        writer.counters(
            ("millrace_gpu_objects_migrated", "Objects copied to the host to make room", None),
            gpus().map(|(labels, gpu)| (labels, gpu.data.migrated as f64)),
        )?;
        writer.counters(
            ("millrace_gpu_objects_refused", "Outputs that went to the host for want of room", None),
            gpus().map(|(labels, gpu)| (labels, gpu.data.refused as f64)),
        )?;
        writer.gauges(
            ("millrace_gpu_models", "Models on the GPU, or on their way there", None),
            gpus().map(|(labels, gpu)| (labels, gpu.models.len() as f64)),
        )?;
        writer.counters(
            ("millrace_gpu_busy", "Time that the GPU computed", Some(Unit::Seconds)),
            gpus().map(|(labels, gpu)| (labels, gpu.busy.as_secs_f64())),
        )?;
        writer.counters(
            ("millrace_gpu_swaps", "Models brought onto the GPU", None),
            gpus().map(|(labels, gpu)| (labels, gpu.swaps as f64)),
        )?;
        // Counted at its end, where the other is at its beginning: a difference of the two could go down.
        writer.counters(
            ("millrace_gpu_peer_swaps", "Of those, the ones that came whole from another GPU", None),
            gpus().map(|(labels, gpu)| (labels, gpu.peer_swaps as f64)),
        )?;
        writer.counters(
            ("millrace_gpu_evictions", "Models that made room on the GPU", None),
            gpus().map(|(labels, gpu)| (labels, gpu.evictions as f64)),
        )?;
        writer.counters(
            ("millrace_gpu_executor_restarts", "Executors of the GPU started after the first", None),
            gpus().map(|(labels, gpu)| (labels, gpu.restarts as f64)),
        )
    }

    fn links(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        let links = || self.snapshot.links.iter().map(|it| (vec![("link", it.link.0.to_string())], it));
        let one_way = |link: &LinkId, direction: Direction| {
            let direction = match direction {
                Direction::ToGpu => "to_gpu",
                Direction::FromGpu => "to_host",
            };
            vec![("link", link.0.to_string()), ("direction", direction.to_owned())]
        };
        let traffic = || {
            self.snapshot.links.iter().flat_map(|it| {
                let to_gpu = (one_way(&it.link, Direction::ToGpu), it.carried, it.measured);
                let to_host =
                    (one_way(&it.link, Direction::FromGpu), it.carried_to_host, it.measured_to_host);
                [to_gpu, to_host]
            })
        };
        writer.counters(
            ("millrace_link_carried", "What the link carried", Some(Unit::Bytes)),
            traffic().map(|(labels, carried, _)| (labels, carried.get() as f64)),
        )?;
        writer.gauges(
            ("millrace_link_rate_bytes_per_second", "Its rate each way as the topology says", None),
            links().map(|(labels, link)| (labels, link.rate.0 as f64)),
        )?;
        writer.gauges(
            ("millrace_link_measured_bytes_per_second", "The same, of its last batches", None),
            traffic().filter_map(|(labels, _, measured)| Some((labels, measured?.0 as f64))),
        )?;
        writer.gauges(
            ("millrace_link_outstanding", "Batches granted on the link and not finished", None),
            links().map(|(labels, link)| (labels, f64::from(link.outstanding))),
        )?;
        let fabric::Tally { ended, waits } = &self.snapshot.transfers;
        let waits = || waits.iter().map(|((link, way), wait)| (one_way(link, *way), wait));
        writer.counters(
            ("millrace_link_waits", "Transfers that had their first batch by the link", None),
            waits().map(|(labels, wait)| (labels, wait.transfers as f64)),
        )?;
        writer.counters(
            ("millrace_link_wait", "How long they waited for it, together", Some(Unit::Seconds)),
            waits().map(|(labels, wait)| (labels, wait.waited.as_secs_f64())),
        )?;
        let standings = |direction: &'static str, counts: &fabric::Counts| {
            counts.named().map(|(standing, count)| {
                let labels = vec![("direction", direction.to_owned()), ("standing", standing.to_owned())];
                (labels, count as f64)
            })
        };
        writer.counters(
            ("millrace_transfers", "Transfers from host memory and to it, by what they could count on", None),
            standings("to_gpu", &ended.to_gpu).into_iter().chain(standings("to_host", &ended.from_gpu)),
        )
    }

    fn dispatch(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        let (stats, batches) = (&self.snapshot.dispatch, self.snapshot.batches);
        for (name, help, count) in [
            ("millrace_dispatch_hits", "Requests given to a GPU that held their model", stats.hits),
            ("millrace_dispatch_misses", "Requests given to a GPU that did not hold it", stats.misses),
            ("millrace_dispatch_false_misses", "Of those, while another GPU held it", stats.false_misses),
            ("millrace_dispatch_reserved", "Requests bound to a busy GPU", stats.reserved),
            ("millrace_dispatch_passed", "Requests that left the queue before older ones", stats.passed),
            (
                "millrace_host_cold_starts",
                "Models that came from the disk again",
                self.host_counts.cold_starts,
            ),
            (
                "millrace_host_evictions",
                "Models that left host memory for others",
                self.host_counts.evictions,
            ),
            ("millrace_batches", "Runs of several requests", batches.batches),
            ("millrace_batched_requests", "Requests in them", batches.requests),
        ] {
            writer.counter((name, help, None), count)?;
        }
        self.prewarms(writer)?;
        self.predictions(writer)?;
        let bytes: u64 = self.host_models.iter().map(|model| model.bytes).sum();
        for (name, help, unit, value) in [
            ("millrace_node_queued", "Requests in the node's queue", None, f64::from(self.snapshot.queued)),
            (
                "millrace_dispatch_overtaken_max",
                "How often the most overtaken request was overtaken",
                None,
                stats.overtaken_max as f64,
            ),
            (
                "millrace_dispatch_visits_max",
                "The same as the LALB paper counts: also once for every look that found no hit",
                None,
                stats.visits_max as f64,
            ),
            (
                "millrace_dispatch_top_copies",
                "GPUs that hold the model asked for most",
                None,
                stats.top_copies as f64,
            ),
            ("millrace_host_models", "Models in host memory", None, self.host_models.len() as f64),
            ("millrace_host_models_memory", "What they take", Some(Unit::Bytes), bytes as f64),
        ] {
            writer.gauge((name, help, unit), value)?;
        }
        // Torpor alone has one.
        let help = "The share of required request counts that is prioritised";
        stats.alpha.map_or(Ok(()), |alpha| writer.gauge(("millrace_dispatch_alpha", help, None), alpha))
    }

    fn prewarms(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        let (here, node) = (self.followed, self.snapshot.dispatch.prewarms);
        let outcomes = [
            ("gpu", node.brought),
            ("host", here.host),
            ("there", here.there + node.there),
            ("busy", here.busy + node.busy),
        ];
        let labelled = |(outcome, count): (&str, u64)| (vec![("outcome", outcome.to_owned())], count as f64);
        let help = "Models that a workflow was likely to ask for next, by what became of them";
        writer.counters(("millrace_prewarms", help, None), outcomes.into_iter().map(labelled))
    }

    /// How wrong the cost model is (L15).
    fn predictions(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        let labelled = |(gpu_type, it): (&str, PredictionError)| {
            (vec![("gpu_type", gpu_type.to_owned()), ("turn", it.turn.name().to_owned())], it)
        };
        let told = || self.snapshot.predictions().map(labelled);
        writer.counters(
            ("millrace_dispatch_predictions", "Turns on GPUs whose length was predicted", None),
            told().map(|(labels, it)| (labels, it.predictions as f64)),
        )?;
        let help = "By how much the predictions were off, by what came: divide by their number";
        writer.counters(
            ("millrace_dispatch_prediction_errors", help, None),
            told().map(|(labels, it)| (labels, it.thousandths as f64 / 1000.0)),
        )?;
        // Before three sizes of some model ran there is none.
        let help = "By how much predicted runs of several rows are off, of sizes they were drawn without";
        let held_out = self.snapshot.dispatch.held_out;
        let about = ("millrace_batch_prediction_error_ratio", help, None);
        held_out.map_or(Ok(()), |percent| writer.gauge(about, percent / 100.0))
    }

    fn functions(&self, writer: &mut Writer<'_, '_>) -> fmt::Result {
        let shown = self.shown();
        let functions = || shown.iter().map(|(labels, it)| (labels.clone(), it));
        writer.counters(
            ("millrace_function_requests", "Requests that ended on this worker, by how", None),
            functions().flat_map(|(labels, it)| {
                let ended = |outcome: &str, count: u64| {
                    ([labels.clone(), vec![("outcome", outcome.to_owned())]].concat(), count as f64)
                };
                let Score { completed, expired, failed, cancelled, .. } = it.score;
                [
                    ended("completed", completed),
                    ended("expired", expired),
                    ended("failed", failed),
                    ended("cancelled", cancelled),
                ]
            }),
        )?;
        writer.gauges(
            ("millrace_function_in_flight", "Requests admitted and not answered", None),
            functions().map(|(labels, it)| (labels, f64::from(it.in_flight))),
        )?;
        writer.counters(
            ("millrace_function_gpu", "GPU time that is charged", Some(Unit::Seconds)),
            functions().map(|(labels, it)| (labels, it.score.billed_ms as f64 / 1e3)),
        )?;
        writer.counters(
            ("millrace_function_slo_requests", "Requests that count towards the objective", None),
            functions().map(|(labels, it)| (labels, it.score.scored as f64)),
        )?;
        writer.counters(
            ("millrace_function_slo_in_time", "Of those, the ones answered in time", None),
            functions().map(|(labels, it)| (labels, it.score.in_time as f64)),
        )?;
        let restarts = |(labels, it): (Labels, &Counted)| Some((labels, it.restarts? as f64));
        let help = "Processes of a program started after the first at their place";
        writer
            .counters(("millrace_function_process_restarts", help, None), functions().filter_map(restarts))?;
        let kept = || functions().filter_map(|(labels, it)| Some((labels, it.sequences?)));
        writer.gauges(
            ("millrace_function_sequences", "Sequences whose state is kept", None),
            kept().map(|(labels, it)| (labels, it.live as f64)),
        )?;
        writer.counters(
            ("millrace_function_sequences_ended", "Sequences that their clients did not end, by why", None),
            kept().flat_map(|(labels, it)| {
                let ended = |reason: &str, count: u64| {
                    ([labels.clone(), vec![("reason", reason.to_owned())]].concat(), count as f64)
                };
                [ended("idle", it.ended.idle), ended("lost", it.ended.lost)]
            }),
        )?;
        let required = |(labels, it): (Labels, &Counted)| Some((labels, it.required?));
        let help = "Requests still to be answered in time to meet the objective; negative: to spare";
        writer.gauges(("millrace_function_required_requests", help, None), functions().filter_map(required))
    }

    /// Each function with what it counted on this node, its revisions together; the last by name as one
    /// where they are too many, so that a scrape has those that the one before had.
    fn shown(&self) -> Vec<(Labels, Counted)> {
        let all = self.snapshot.scores().into_iter();
        let mut all: Vec<_> = all
            .map(|(key, (score, in_flight))| {
                let restarts = self.restarts.get(key).copied();
                let sequences = self.sequences.get(key).copied();
                (key, Counted { score, in_flight, restarts, sequences, required: None })
            })
            .collect();
        let rest = all.split_off(all.len().min(FUNCTIONS_MAX));
        let labels = |tenant: &str, function: &str| {
            vec![("tenant", tenant.to_owned()), ("function", function.to_owned())]
        };
        let mut shown: Vec<_> = all
            .into_iter()
            .map(|(key, it)| {
                let required = self.objectives.get(key).map(|slo| it.required(slo));
                (labels(key.tenant.as_str(), key.name.as_str()), Counted { required, ..it })
            })
            .collect();
        if !rest.is_empty() {
            let mut other = Counted::default();
            rest.into_iter().for_each(|(_, it)| other.add(it));
            shown.push((labels(OTHER, OTHER), other));
        }
        shown
    }
}
