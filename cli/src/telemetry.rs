//! Telemetry: logs to stderr, traces to an OTLP collector if one is configured, and recent spans in
//! memory if `keep_spans` is set. Without a collector and kept spans, no spans are created. A
//! server also keeps its last log lines in memory for 'millrace logs'.

mod lines;

use std::io::IsTerminal as _;
use std::time::Duration;

use millrace_proto::trace::{SCOPE, SpanRing};
use opentelemetry::global::{set_text_map_propagator, set_tracer_provider};
use opentelemetry::trace::TracerProvider as _;
use opentelemetry::{Key, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{Sampler, SdkTracerProvider};
use tracing_subscriber::filter::{FilterExt as _, LevelFilter, filter_fn};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

use crate::config::{Config, LogFormat};
use crate::failure::{CommandFailure, no_colour};

/// The timeout of an export. An unreachable collector delays the end of the process by the same
/// time.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// The identity of a process in its spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessIdentity {
    /// The service name, shared by all processes of a kind.
    pub(crate) service: &'static str,
    /// The name of this process.
    pub(crate) name: String,
    /// Whether other processes may ask this process for spans and log lines.
    pub(crate) serves: bool,
}

/// The exporters to flush before the process ends.
pub(crate) struct Telemetry {
    traces: Option<SdkTracerProvider>,
}

/// Starts logging, and tracing if spans are exported or kept. Must be called within a runtime that
/// outlives the telemetry. Returns the store of kept spans too, if the process keeps spans.
pub(crate) fn start(
    config: &Config,
    default_log: &str,
    process: &ProcessIdentity,
) -> Result<(Telemetry, Option<SpanRing>), CommandFailure> {
    let kept = config.keep_spans.filter(|_| process.serves).map(|max| SpanRing::new(&process.name, max));
    let traces = traces(config, process, kept.clone())?;
    if let Some(traces) = &traces {
        set_text_map_propagator(TraceContextPropagator::new());
        set_tracer_provider(traces.clone());
    }
    let mut layers = layers(config, default_log, traces.as_ref())?;
    if process.serves {
        layers.push(lines::kept(filter(config, default_log)?, &process.name, traces.is_some()));
    }
    tracing_subscriber::registry()
        .with(layers)
        .try_init()
        .map_err(|error| CommandFailure::failed(format!("cannot start logging: {error}")))?;
    Ok((Telemetry { traces }, kept))
}

/// Returns the filter of log events.
fn filter(config: &Config, default_log: &str) -> Result<EnvFilter, CommandFailure> {
    let directives = config.log.as_deref().unwrap_or(default_log);
    EnvFilter::builder().parse(directives).map_err(|error| {
        CommandFailure::usage(format!("--log {directives:?}: {error}")).hint(
            "write a level (error, warn, info, debug, trace) or directives such as millrace_worker=debug",
        )
    })
}

type Layers = Vec<Box<dyn Layer<Registry> + Send + Sync>>;

fn layers(
    config: &Config,
    default_log: &str,
    traces: Option<&SdkTracerProvider>,
) -> Result<Layers, CommandFailure> {
    let filter = filter(config, default_log)?;
    // A span costs a request microseconds wherever a layer reads it. Log lines name their subject
    // themselves, so spans are added to log lines only at level debug or finer.
    let in_spans = filter.max_level_hint().is_none_or(|most| most >= LevelFilter::DEBUG);
    let filter = filter.and(filter_fn(move |about| about.is_event() || in_spans));
    let lines = fmt::layer().with_writer(std::io::stderr);
    let lines = match config.log_format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal() && !no_colour()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    // Keep the layers in a list. In a stack of layers, an absent layer counts as one that enables
    // every span, so unread spans would be created.
    let mut layers = vec![lines.with_filter(filter).boxed()];
    layers.extend(traces.map(|provider| {
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer(SCOPE));
        // Code location, thread and poll times do not help an operator.
        let layer = layer.with_location(false).with_threads(false).with_tracked_inactivity(false);
        layer.with_target(false).with_filter(filter_fn(is_ours)).boxed()
    }));
    Ok(layers)
}

/// Returns whether a span or event is from Millrace: libraries have their own at this level.
fn is_ours(about: &tracing::Metadata<'_>) -> bool {
    *about.level() <= tracing::Level::INFO && about.target().starts_with(SCOPE)
}

/// Returns the provider that exports or keeps spans, or `None` if neither is configured.
fn traces(
    config: &Config,
    process: &ProcessIdentity,
    kept: Option<SpanRing>,
) -> Result<Option<SdkTracerProvider>, CommandFailure> {
    if config.otlp_endpoint.is_none() && kept.is_none() {
        return Ok(None);
    }
    let instance = KeyValue::new(Key::from_static_str("service.instance.id"), process.name.clone());
    let resource = Resource::builder().with_service_name(process.service).with_attribute(instance);
    let sampler = Sampler::parent_based(Sampler::TraceIdRatioBased(config.trace_sample));
    let mut provider = SdkTracerProvider::builder().with_sampler(sampler).with_resource(resource.build());
    if let Some(kept) = kept {
        provider = provider.with_span_processor(kept);
    }
    if let Some(endpoint) = &config.otlp_endpoint {
        provider = provider.with_batch_exporter(exporter_to(endpoint)?);
    }
    Ok(Some(provider.build()))
}

fn exporter_to(endpoint: &str) -> Result<SpanExporter, CommandFailure> {
    let exporter =
        SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(EXPORT_TIMEOUT).build();
    exporter.map_err(|error| {
        CommandFailure::usage(format!("cannot send traces to {endpoint:?}: {error}"))
            .hint("name an OTLP gRPC endpoint such as http://127.0.0.1:4317")
    })
}

impl Telemetry {
    /// Exports the remaining spans. Must be called from a plain thread while the runtime still
    /// runs, because the export runs on the runtime.
    pub(crate) fn shut_down(self) {
        if let Some(Err(error)) = self.traces.map(|provider| provider.shutdown()) {
            tracing::warn!(%error, "the last traces were not sent");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_created_only_if_a_layer_reads_them() {
        let spans_at = |directives: &str| {
            let config = Config { log: Some(directives.to_owned()), ..Config::empty() };
            let layers = layers(&config, "warn", None).unwrap();
            let subscriber = tracing_subscriber::registry().with(layers);
            tracing::subscriber::with_default(subscriber, || !tracing::info_span!("request").is_disabled())
        };
        assert!(!spans_at("info"));
        assert!(spans_at("debug"));
    }
}
