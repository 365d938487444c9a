//! W3C trace context through gRPC metadata and HTTP headers.
//!
//! With no OpenTelemetry layer installed the current span has no context, and injecting writes
//! nothing.

use http::HeaderMap;
use opentelemetry::Context;
use opentelemetry::global::get_text_map_propagator;
use opentelemetry::propagation::{Extractor, Injector};
use tonic::metadata::{KeyRef, MetadataKey, MetadataMap, MetadataValue};
use tracing::Span;
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

struct Metadata<'a>(&'a MetadataMap);
struct MetadataMut<'a>(&'a mut MetadataMap);
struct Headers<'a>(&'a HeaderMap);

impl Extractor for Metadata<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        let ascii = |key| match key {
            KeyRef::Ascii(key) => Some(key.as_str()),
            KeyRef::Binary(_) => None,
        };
        self.0.keys().filter_map(ascii).collect()
    }
}

impl Injector for MetadataMut<'_> {
    fn set(&mut self, key: &str, value: String) {
        // A propagator's keys and values are plain ASCII; one that is not cannot travel.
        if let (Ok(key), Ok(value)) =
            (MetadataKey::from_bytes(key.as_bytes()), MetadataValue::try_from(value))
        {
            self.0.insert(key, value);
        }
    }
}

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}

/// The trace context a gRPC caller sent.
#[must_use]
pub fn extract(metadata: &MetadataMap) -> Context {
    get_text_map_propagator(|propagator| propagator.extract(&Metadata(metadata)))
}

/// The trace context an HTTP caller sent.
#[must_use]
pub fn extract_headers(headers: &HeaderMap) -> Context {
    get_text_map_propagator(|propagator| propagator.extract(&Headers(headers)))
}

/// Makes `span` a child of the caller's.
pub fn adopt(span: &Span, parent: Context) {
    // An error means that no OpenTelemetry layer is installed: there is nothing to join then.
    if let Err(error) = span.set_parent(parent) {
        tracing::trace!(%error, "span keeps no parent");
    }
}

/// Writes the current span's context into a request's metadata.
pub fn inject(metadata: &mut MetadataMap) {
    let context = Span::current().context();
    get_text_map_propagator(|propagator| propagator.inject_context(&context, &mut MetadataMut(metadata)));
}
