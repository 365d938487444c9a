//! A worker's `/metrics`: its GPUs, links, queue, host memory, objects, and the scores of its
//! functions. The values are read during the scrape, so requests pay nothing for metrics. The
//! gateways report requests as clients see them.
//!
//! The page is bounded: [`FUNCTIONS_MAX`] functions have separate labels, the first by name.
//! The other functions are summed as `_other`.

mod counted;
mod objects;
#[cfg(test)]
mod tests;
mod writer;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use axum::body::Body;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, Response, StatusCode};
use millrace_proto::metrics::MetricsPage;
use millrace_proto::worker::HostModel;
use millrace_scheduling::admission::FunctionTotals;
use millrace_scheduling::dispatch::PredictionError;
use millrace_transfers::fabric;
use millrace_transfers::paths::HostDirection;
use millrace_transport::SharedResult;
use millrace_types::topology::LinkId;
use millrace_types::{Alpha, FunctionKey, Priority, Slo, SloCounts};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::watch;

use self::counted::{Counted, required};
use self::writer::{MetricLabels, MetricsWriter};
use crate::control::telemetry;
use crate::desired_state::{DesiredState, NodeSlices, PlacedFunction};
use crate::handle::NodeHandle;
use crate::host_tier::HostTierCounts;
use crate::objects::{ObjectStore, ObjectTally};
use crate::prewarming::{HintFollower, HintOutcomes};
use crate::programs::ProgramStore;
use crate::sequences::{self, SequenceManager};
use crate::slo_scores::SloScores;
use crate::snapshot::{GpuHealth, NodeSnapshot};

/// Maximum number of functions with separate labels.
const FUNCTIONS_MAX: usize = 1000;
/// Label of all other functions together.
const OTHER: &str = "_other";

/// Answers scrapes.
#[derive(Debug)]
pub(crate) struct MetricsHandler {
    pub(crate) node: NodeHandle,
    pub(crate) host: telemetry::HostTierTelemetry,
    pub(crate) objects: ObjectStore,
    pub(crate) sequences: SequenceManager,
    pub(crate) desired: watch::Receiver<DesiredState>,
    pub(crate) scores: watch::Receiver<SloScores>,
    pub(crate) hints: HintFollower,
    pub(crate) programs: Option<ProgramStore>,
    pub(crate) page: SharedResult<Result<MetricsPage, fmt::Error>>,
}

impl MetricsHandler {
    /// Returns the response to a scrape.
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
            let objective = |it: &PlacedFunction| Some((it.key.function.clone(), it.slo?));
            desired.functions.iter().filter_map(objective).collect()
        };
        let host_models = self.host.models.borrow().to_vec();
        let host_counts = **self.host.counts.borrow();
        let snapshot = self.node.snapshot().await;
        let objects = self.objects.tally();
        let followed = self.hints.followed();
        let restarts = self.programs.as_ref().map(ProgramStore::restarts).unwrap_or_default();
        let sequences = self.sequences.tallies();
        let seen = MetricsSnapshot {
            snapshot,
            host_models,
            host_counts,
            objects,
            objectives,
            scores: Arc::clone(&self.scores.borrow()),
            followed,
            restarts,
            sequences,
            slices: Arc::clone(&self.desired.borrow().slices),
        };
        text(seen).map(MetricsPage::new)
    }
}

/// The values of one scrape.
#[derive(Debug, Default)]
pub(crate) struct MetricsSnapshot {
    pub(crate) snapshot: NodeSnapshot,
    pub(crate) host_models: Vec<HostModel>,
    pub(crate) host_counts: HostTierCounts,
    pub(crate) objects: ObjectTally,
    /// Objectives of the functions that have one.
    pub(crate) objectives: BTreeMap<FunctionKey, Slo>,
    /// SLO counts by which the node schedules, earlier placements included.
    pub(crate) scores: SloScores,
    /// Outcomes of the hints that were not passed on to the node.
    pub(crate) followed: HintOutcomes,
    /// Restarts of the processes of functions that are programs.
    pub(crate) restarts: BTreeMap<FunctionKey, u64>,
    /// Sequences of the functions that keep state.
    pub(crate) sequences: BTreeMap<FunctionKey, sequences::SequenceTally>,
    /// Slices of the functions that ask for slices.
    pub(crate) slices: Arc<NodeSlices>,
}

/// Returns the metrics as OpenMetrics text.
///
/// # Errors
/// Only if the text cannot grow.
pub(crate) fn text(seen: MetricsSnapshot) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(seen));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

impl Collector for MetricsSnapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut writer = MetricsWriter(&mut encoder);
        self.gpus(&mut writer)?;
        self.slices(&mut writer)?;
        self.links(&mut writer)?;
        self.dispatch(&mut writer)?;
        objects::write(&self.objects, &mut writer)?;
        self.functions(&mut writer)
    }
}

impl MetricsSnapshot {
    fn gpus(&self, writer: &mut MetricsWriter<'_, '_>) -> fmt::Result {
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
            ("millrace_gpu_memory_taken", "GPU memory allocated to models and objects", Some(Unit::Bytes)),
            gpus().map(|(labels, gpu)| (labels, gpu.used.get() as f64)),
        )?;
        writer.gauges(
            ("millrace_gpu_objects_memory", "GPU memory of objects", Some(Unit::Bytes)),
            gpus().map(|(labels, gpu)| (labels, gpu.data.used.get() as f64)),
        )?;
        writer.gauges(
            (
                "millrace_gpu_objects_pool",
                "GPU memory of objects and of their pool's free part",
                Some(Unit::Bytes),
            ),
            gpus().map(|(labels, gpu)| (labels, gpu.data.pool.get() as f64)),
        )?;
        writer.counters(
            (
                "millrace_gpu_objects_migrated",
                "Objects copied to the host because GPU memory was short",
                None,
            ),
            gpus().map(|(labels, gpu)| (labels, gpu.data.migrated as f64)),
        )?;
        writer.counters(
            (
                "millrace_gpu_objects_refused",
                "Outputs sent to the host because they did not fit on the GPU",
                None,
            ),
            gpus().map(|(labels, gpu)| (labels, gpu.data.refused as f64)),
        )?;
        writer.gauges(
            ("millrace_gpu_models", "Models on the GPU, or being copied there", None),
            gpus().map(|(labels, gpu)| (labels, gpu.models.len() as f64)),
        )?;
        writer.counters(
            ("millrace_gpu_busy", "Time the GPU spent computing", Some(Unit::Seconds)),
            gpus().map(|(labels, gpu)| (labels, gpu.busy.as_secs_f64())),
        )?;
        writer.counters(
            ("millrace_gpu_swaps", "Models loaded onto the GPU", None),
            gpus().map(|(labels, gpu)| (labels, gpu.swaps as f64)),
        )?;
        // Counted when the copy ends, while swaps are counted at their begin: a difference of the
        // two could decrease.
        writer.counters(
            (
                "millrace_gpu_peer_swaps",
                "Models loaded onto the GPU that were copied whole from another GPU",
                None,
            ),
            gpus().map(|(labels, gpu)| (labels, gpu.peer_swaps as f64)),
        )?;
        writer.counters(
            (
                "millrace_gpu_sm_violations",
                "Launches on SM units that another launch had at the same time, as the emulated GPU counted",
                None,
            ),
            gpus().map(|(labels, gpu)| (labels, gpu.sm_violations as f64)),
        )?;
        writer.counters(
            ("millrace_gpu_evictions", "Models evicted from the GPU", None),
            gpus().map(|(labels, gpu)| (labels, gpu.evictions as f64)),
        )?;
        writer.counters(
            ("millrace_gpu_executor_restarts", "Executors of the GPU started after the first", None),
            gpus().map(|(labels, gpu)| (labels, gpu.restarts as f64)),
        )
    }

    fn slices(&self, writer: &mut MetricsWriter<'_, '_>) -> fmt::Result {
        let owners: BTreeMap<_, _> = self
            .slices
            .iter()
            .flat_map(|(key, placed)| placed.on.iter().map(move |slice| (slice.id, &key.function)))
            .collect();
        let uses = || {
            let gpus = self.snapshot.gpus.iter();
            let slices = gpus.flat_map(|gpu| gpu.slices.iter().map(move |slice| (gpu.index, slice)));
            // A slice that was taken away stays until its last run has ended.
            slices.filter_map(|(gpu, &(slice, used))| {
                let owner = owners.get(&slice)?;
                let labels = vec![
                    ("tenant", owner.tenant.to_string()),
                    ("function", owner.name.to_string()),
                    ("slice", slice.to_string()),
                    ("gpu", gpu.0.to_string()),
                ];
                Some((labels, used))
            })
        };
        writer.counters(
            ("millrace_slice_busy", "Device time of the slice", Some(Unit::Seconds)),
            uses().map(|(labels, used)| (labels, used.busy.as_secs_f64())),
        )?;
        writer.counters(
            (
                "millrace_slice_sm",
                "Device time of the slice, times its share of the SMs",
                Some(Unit::Seconds),
            ),
            uses().map(|(labels, used)| (labels, used.sm.as_secs_f64())),
        )?;
        writer.counters(
            (
                "millrace_slice_starved",
                "Seconds at the end of which the slice lacked more than 50 ms of its requested time",
                None,
            ),
            uses().map(|(labels, used)| (labels, used.starved as f64)),
        )
    }

    fn links(&self, writer: &mut MetricsWriter<'_, '_>) -> fmt::Result {
        let links = || self.snapshot.links.iter().map(|it| (vec![("link", it.link.0.to_string())], it));
        let one_way = |link: &LinkId, direction: HostDirection| {
            let direction = match direction {
                HostDirection::ToGpu => "to_gpu",
                HostDirection::FromGpu => "to_host",
            };
            vec![("link", link.0.to_string()), ("direction", direction.to_owned())]
        };
        let traffic = || {
            self.snapshot.links.iter().flat_map(|it| {
                let to_gpu = (one_way(&it.link, HostDirection::ToGpu), it.carried, it.measured);
                let to_host =
                    (one_way(&it.link, HostDirection::FromGpu), it.carried_to_host, it.measured_to_host);
                [to_gpu, to_host]
            })
        };
        writer.counters(
            ("millrace_link_carried", "Bytes that the link carried, by direction", Some(Unit::Bytes)),
            traffic().map(|(labels, carried, _)| (labels, carried.get() as f64)),
        )?;
        writer.gauges(
            (
                "millrace_link_rate_bytes_per_second",
                "Rate of the link in each direction according to the topology",
                None,
            ),
            links().map(|(labels, link)| (labels, link.rate.0 as f64)),
        )?;
        writer.gauges(
            (
                "millrace_link_measured_bytes_per_second",
                "Rate of the link's last batches, by direction",
                None,
            ),
            traffic().filter_map(|(labels, _, measured)| Some((labels, measured?.0 as f64))),
        )?;
        writer.gauges(
            ("millrace_link_outstanding", "Batches granted on the link and not finished", None),
            links().map(|(labels, link)| (labels, f64::from(link.outstanding))),
        )?;
        let fabric::TransferCounts { ended, waits } = &self.snapshot.transfers;
        let waits = || waits.iter().map(|((link, way), wait)| (one_way(link, *way), wait));
        writer.counters(
            ("millrace_link_waits", "Transfers that got their first batch on the link", None),
            waits().map(|(labels, wait)| (labels, wait.transfers as f64)),
        )?;
        writer.counters(
            (
                "millrace_link_wait",
                "Total time that transfers waited for their first batch on the link",
                Some(Unit::Seconds),
            ),
            waits().map(|(labels, wait)| (labels, wait.waited.as_secs_f64())),
        )?;
        let standings = |direction: &'static str, counts: &fabric::GuaranteeCounts| {
            counts.named().map(|(standing, count)| {
                let labels = vec![("direction", direction.to_owned()), ("standing", standing.to_owned())];
                (labels, count as f64)
            })
        };
        writer.counters(
            (
                "millrace_transfers",
                "Transfers between host and GPU memory, by direction and rate guarantee",
                None,
            ),
            standings("to_gpu", &ended.to_gpu).into_iter().chain(standings("to_host", &ended.from_gpu)),
        )
    }

    fn dispatch(&self, writer: &mut MetricsWriter<'_, '_>) -> fmt::Result {
        let stats = &self.snapshot.dispatch;
        let batches = self.snapshot.batches;
        for (name, help, count) in [
            ("millrace_dispatch_hits", "Requests sent to a GPU that held their model", stats.hits),
            ("millrace_dispatch_misses", "Requests sent to a GPU without their model", stats.misses),
            (
                "millrace_dispatch_false_misses",
                "Requests sent to a GPU without their model while another GPU held it",
                stats.false_misses,
            ),
            ("millrace_dispatch_reserved", "Requests reserved for a busy GPU", stats.reserved),
            ("millrace_dispatch_passed", "Requests that left the queue before older ones", stats.overtakings),
            ("millrace_host_cold_starts", "Models loaded from the disk again", self.host_counts.cold_starts),
            ("millrace_host_evictions", "Models evicted from host memory", self.host_counts.evictions),
            ("millrace_batches", "Runs of several requests together", batches.batches),
            ("millrace_batched_requests", "Requests in batched runs", batches.requests),
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
                "Times the most overtaken request was overtaken",
                None,
                stats.overtaken_max as f64,
            ),
            (
                "millrace_dispatch_visits_max",
                "Overtakings as the LALB paper counts them: searches without a hit included",
                None,
                stats.visits_max as f64,
            ),
            (
                "millrace_dispatch_top_copies",
                "GPUs that hold the most requested model",
                None,
                stats.top_copies as f64,
            ),
            ("millrace_host_models", "Models in host memory", None, self.host_models.len() as f64),
            (
                "millrace_host_models_memory",
                "Bytes of the models in host memory",
                Some(Unit::Bytes),
                bytes as f64,
            ),
        ] {
            writer.gauge((name, help, unit), value)?;
        }
        // Only the `torpor` policy has alphas.
        let help = "Share of required request counts that is prioritised, by priority level";
        let alpha = |(level, alpha): (&Priority, &Alpha)| {
            (vec![("priority", level.to_string())], f64::from(alpha.ppm()) / f64::from(Alpha::ONE.ppm()))
        };
        writer.gauges(("millrace_dispatch_alpha", help, None), stats.alphas.iter().map(alpha))
    }

    fn prewarms(&self, writer: &mut MetricsWriter<'_, '_>) -> fmt::Result {
        let here = self.followed;
        let node = self.snapshot.dispatch.prewarms;
        let outcomes = [
            ("gpu", node.brought),
            ("host", here.host),
            ("there", here.there + node.there),
            ("busy", here.busy + node.busy),
        ];
        let labelled = |(outcome, count): (&str, u64)| (vec![("outcome", outcome.to_owned())], count as f64);
        let help = "Prewarming hints for a workflow's next models, by outcome";
        writer.counters(("millrace_prewarms", help, None), outcomes.into_iter().map(labelled))
    }

    /// Writes the prediction errors of the cost model (L15).
    fn predictions(&self, writer: &mut MetricsWriter<'_, '_>) -> fmt::Result {
        let labelled = |(gpu_type, it): (&str, PredictionError)| {
            (vec![("gpu_type", gpu_type.to_owned()), ("turn", it.turn.name().to_owned())], it)
        };
        let told = || self.snapshot.predictions().map(labelled);
        writer.counters(
            ("millrace_dispatch_predictions", "Turns on GPUs with a predicted duration", None),
            told().map(|(labels, it)| (labels, it.predictions as f64)),
        )?;
        let help = "Sum of relative prediction errors: divide by the number of predictions";
        writer.counters(
            ("millrace_dispatch_prediction_errors", help, None),
            told().map(|(labels, it)| (labels, it.thousandths as f64 / 1000.0)),
        )?;
        // Before three row counts of some model ran there is no value.
        let help = "Mean relative error of predicted batch runs, for row counts left out of the fit";
        let held_out = self.snapshot.dispatch.held_out;
        let about = ("millrace_batch_prediction_error_ratio", help, None);
        held_out.map_or(Ok(()), |percent| writer.gauge(about, percent / 100.0))
    }

    fn functions(&self, writer: &mut MetricsWriter<'_, '_>) -> fmt::Result {
        let shown = self.shown();
        let functions = || shown.iter().map(|(labels, it)| (labels.clone(), it));
        writer.counters(
            ("millrace_function_requests", "Requests that ended on this worker, by outcome", None),
            functions().flat_map(|(labels, it)| {
                let ended = |outcome: &str, count: u64| {
                    ([labels.clone(), vec![("outcome", outcome.to_owned())]].concat(), count as f64)
                };
                let FunctionTotals { completed, expired, failed, cancelled, .. } = it.score;
                [
                    ended("completed", completed),
                    ended("expired", expired),
                    ended("failed", failed),
                    ended("cancelled", cancelled),
                ]
            }),
        )?;
        writer.gauges(
            ("millrace_function_in_flight", "Requests admitted and not answered yet", None),
            functions().map(|(labels, it)| (labels, f64::from(it.in_flight))),
        )?;
        writer.counters(
            ("millrace_function_gpu", "Charged GPU time", Some(Unit::Seconds)),
            functions().map(|(labels, it)| (labels, it.score.billed_ms as f64 / 1e3)),
        )?;
        writer.counters(
            ("millrace_function_slo_requests", "Requests that count towards the objective", None),
            functions().map(|(labels, it)| (labels, it.score.scored as f64)),
        )?;
        writer.counters(
            (
                "millrace_function_slo_in_time",
                "Requests that count towards the objective and were answered in time",
                None,
            ),
            functions().map(|(labels, it)| (labels, it.score.in_time as f64)),
        )?;
        let restarts = |(labels, it): (MetricLabels, &Counted)| Some((labels, it.restarts? as f64));
        let help = "Restarts of a program's processes";
        writer
            .counters(("millrace_function_process_restarts", help, None), functions().filter_map(restarts))?;
        let kept = || functions().filter_map(|(labels, it)| Some((labels, it.sequences?)));
        writer.gauges(
            ("millrace_function_sequences", "Sequences with stored state", None),
            kept().map(|(labels, it)| (labels, it.live as f64)),
        )?;
        writer.counters(
            ("millrace_function_sequences_ended", "Sequences not ended by their clients, by reason", None),
            kept().flat_map(|(labels, it)| {
                let ended = |reason: &str, count: u64| {
                    ([labels.clone(), vec![("reason", reason.to_owned())]].concat(), count as f64)
                };
                [ended("idle", it.ended.idle), ended("lost", it.ended.lost)]
            }),
        )?;
        let required = |(labels, it): (MetricLabels, &Counted)| Some((labels, it.required?));
        let help = "Requests to answer in time until the objective is met; negative: spare";
        writer.gauges(("millrace_function_required_requests", help, None), functions().filter_map(required))
    }

    /// Returns the metrics of each function, summed over its revisions. Beyond the bound, the last
    /// functions by name are summed, so that successive scrapes show the same functions.
    fn shown(&self) -> Vec<(MetricLabels, Counted)> {
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
                // Before the first look of the checkpoints, the node schedules by its own counts.
                let own = || SloCounts { m: it.score.in_time, n: it.score.scored };
                let counts = self.scores.get(key).copied().unwrap_or_else(own);
                let required = self.objectives.get(key).map(|slo| required(counts, slo));
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
