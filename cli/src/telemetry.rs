//! Logs to stderr; traces to an OTLP collector when one is named, and kept in memory when so many are
//! to be kept. Without either there are no spans. A server keeps its last log lines too, for 'millrace
//! logs'.

mod lines;

use std::io::IsTerminal as _;
use std::time::Duration;

use millrace_proto::trace::{Kept, SCOPE};
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

use crate::args::LogFormat;
use crate::config::Config;
use crate::failure::{Failure, no_colour};

/// How long one export may take. At the end of the process it is also how long an unreachable
/// collector can hold it up.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(3);

/// What this process is to those who read its spans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Process {
    /// The same for all that do the same.
    pub(crate) service: &'static str,
    /// Its own.
    pub(crate) name: String,
    /// Whether anybody may ask it for spans.
    pub(crate) serves: bool,
}

/// What has to be flushed before the process ends.
pub(crate) struct Telemetry {
    traces: Option<SdkTracerProvider>,
}

/// Starts logging, and tracing where somebody wants spans. Within a runtime that outlives it. Gives
/// what is kept in memory, too, where that is asked for.
pub(crate) fn start(
    config: &Config,
    default_log: &str,
    process: &Process,
) -> Result<(Telemetry, Option<Kept>), Failure> {
    let kept = config.keep_spans.filter(|_| process.serves).map(|max| Kept::new(&process.name, max));
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
        .map_err(|error| Failure::failed(format!("cannot start logging: {error}")))?;
    Ok((Telemetry { traces }, kept))
}

/// What is logged.
fn filter(config: &Config, default_log: &str) -> Result<EnvFilter, Failure> {
    let directives = config.log.as_deref().unwrap_or(default_log);
    EnvFilter::builder().parse(directives).map_err(|error| {
        Failure::usage(format!("--log {directives:?}: {error}")).hint(
            "write a level (error, warn, info, debug, trace) or directives such as millrace_worker=debug",
        )
    })
}

type Layers = Vec<Box<dyn Layer<Registry> + Send + Sync>>;

fn layers(config: &Config, default_log: &str, traces: Option<&SdkTracerProvider>) -> Result<Layers, Failure> {
    let filter = filter(config, default_log)?;
    // A span costs a request microseconds wherever anyone looks at it. Log lines name what they are
    // about themselves, so only those who ask for detail see them within spans.
    let in_spans = filter.max_level_hint().is_none_or(|most| most >= LevelFilter::DEBUG);
    let filter = filter.and(filter_fn(move |about| about.is_event() || in_spans));
    let lines = fmt::layer().with_writer(std::io::stderr);
    let lines = match config.log_format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal() && !no_colour()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    // A list, not one layer on another: an absent layer in a stack counts as one that wants every
    // span, and then they are made for nobody.
    let mut layers = vec![lines.with_filter(filter).boxed()];
    layers.extend(traces.map(|provider| {
        let layer = tracing_opentelemetry::layer().with_tracer(provider.tracer(SCOPE));
        // Where in the code, on which thread and how long it was polled is nothing to an operator.
        let layer = layer.with_location(false).with_threads(false).with_tracked_inactivity(false);
        layer.with_target(false).with_filter(filter_fn(is_ours)).boxed()
    }));
    Ok(layers)
}

/// Spans and events of Millrace: libraries have their own at this level.
fn is_ours(about: &tracing::Metadata<'_>) -> bool {
    *about.level() <= tracing::Level::INFO && about.target().starts_with(SCOPE)
}

/// Where spans go; `None` where nobody wants any.
fn traces(
    config: &Config,
    process: &Process,
    kept: Option<Kept>,
) -> Result<Option<SdkTracerProvider>, Failure> {
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

fn exporter_to(endpoint: &str) -> Result<SpanExporter, Failure> {
    let exporter =
        SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(EXPORT_TIMEOUT).build();
    exporter.map_err(|error| {
        Failure::usage(format!("cannot send traces to {endpoint:?}: {error}"))
            .hint("name an OTLP gRPC endpoint such as http://127.0.0.1:4317")
    })
}

impl Telemetry {
    /// Sends what is left. To be called from a plain thread while the runtime still runs: the
    /// export happens on it.
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
    fn spans_are_made_only_where_someone_looks_at_them() {
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
