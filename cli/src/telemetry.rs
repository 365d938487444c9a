//! Logs to stderr, and traces to an OTLP collector when one is named.

use std::io::IsTerminal as _;
use std::time::Duration;

use opentelemetry::global::set_text_map_propagator;
use opentelemetry::trace::TracerProvider as _;
use opentelemetry_otlp::{SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::SdkTracerProvider;
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

/// What has to be flushed before the process ends.
pub(crate) struct Telemetry {
    traces: Option<SdkTracerProvider>,
}

/// Starts logging, and tracing when a collector is named. Within a runtime that outlives it.
pub(crate) fn start(config: &Config, default_log: &str) -> Result<Telemetry, Failure> {
    let (layers, traces) = layers(config, default_log)?;
    tracing_subscriber::registry()
        .with(layers)
        .try_init()
        .map_err(|error| Failure::failed(format!("cannot start logging: {error}")))?;
    Ok(Telemetry { traces })
}

type Layers = Vec<Box<dyn Layer<Registry> + Send + Sync>>;

fn layers(config: &Config, default_log: &str) -> Result<(Layers, Option<SdkTracerProvider>), Failure> {
    let directives = config.log.as_deref().unwrap_or(default_log);
    let filter = EnvFilter::builder().parse(directives).map_err(|error| {
        Failure::usage(format!("--log {directives:?}: {error}")).hint(
            "write a level (error, warn, info, debug, trace) or directives such as millrace_worker=debug",
        )
    })?;
    // A span costs a request microseconds wherever anyone looks at it. Log lines name what they are
    // about themselves, so only those who ask for detail see them within spans.
    let in_spans = filter.max_level_hint().is_none_or(|most| most >= LevelFilter::DEBUG);
    let filter = filter.and(filter_fn(move |about| about.is_event() || in_spans));
    let lines = fmt::layer().with_writer(std::io::stderr);
    let lines = match config.log_format {
        LogFormat::Text => lines.with_ansi(std::io::stderr().is_terminal() && !no_colour()).boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    let traces = config.otlp_endpoint.as_deref().map(exporting_to).transpose()?;
    // A list, not one layer on another: an absent layer in a stack counts as one that wants every
    // span, and then they are made for nobody.
    let mut layers = vec![lines.with_filter(filter).boxed()];
    layers.extend(traces.as_ref().map(|provider| {
        let tracer = provider.tracer("millrace");
        tracing_opentelemetry::layer().with_tracer(tracer).with_filter(LevelFilter::INFO).boxed()
    }));
    Ok((layers, traces))
}

fn exporting_to(endpoint: &str) -> Result<SdkTracerProvider, Failure> {
    let exporter =
        SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(EXPORT_TIMEOUT).build();
    let exporter = exporter.map_err(|error| {
        Failure::usage(format!("cannot send traces to {endpoint:?}: {error}"))
            .hint("name an OTLP gRPC endpoint such as http://127.0.0.1:4317")
    })?;
    set_text_map_propagator(TraceContextPropagator::new());
    let resource = Resource::builder().with_service_name("millrace").build();
    Ok(SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build())
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
            let config = Config {
                endpoints: Vec::new(),
                tenant: millrace_types::TenantName::new("default").unwrap(),
                log: Some(directives.to_owned()),
                log_format: LogFormat::Text,
                otlp_endpoint: None,
                artifacts: None,
            };
            let (layers, _) = layers(&config, "warn").unwrap();
            let subscriber = tracing_subscriber::registry().with(layers);
            tracing::subscriber::with_default(subscriber, || !tracing::info_span!("request").is_disabled())
        };
        assert!(!spans_at("info"));
        assert!(spans_at("debug"));
    }
}
