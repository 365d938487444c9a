//! Writes metrics with values that are read during the scrape.

use std::fmt;

use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric as _, MetricEncoder};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Unit;

/// Labels of one value of a metric.
pub(super) type MetricLabels = Vec<(&'static str, String)>;

/// Name, help text and unit of a metric.
pub(super) type MetricDescription = (&'static str, &'static str, Option<Unit>);

/// Writes metrics, each with all of its values.
pub(super) struct MetricsWriter<'a, 'b>(pub(super) &'a mut DescriptorEncoder<'b>);

impl MetricsWriter<'_, '_> {
    pub(super) fn counters(
        &mut self,
        about: MetricDescription,
        rows: impl Iterator<Item = (MetricLabels, f64)>,
    ) -> fmt::Result {
        self.write(MetricType::Counter, about, rows, |value, encoder| {
            ConstCounter::new(value).encode(encoder)
        })
    }

    pub(super) fn gauges(
        &mut self,
        about: MetricDescription,
        rows: impl Iterator<Item = (MetricLabels, f64)>,
    ) -> fmt::Result {
        self.write(MetricType::Gauge, about, rows, |value, encoder| ConstGauge::new(value).encode(encoder))
    }

    pub(super) fn counter(&mut self, (name, help, unit): MetricDescription, value: u64) -> fmt::Result {
        let metric = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Counter)?;
        ConstCounter::new(value).encode(metric)
    }

    pub(super) fn gauge(&mut self, (name, help, unit): MetricDescription, value: f64) -> fmt::Result {
        let metric = self.0.encode_descriptor(name, help, unit.as_ref(), MetricType::Gauge)?;
        ConstGauge::new(value).encode(metric)
    }

    fn write(
        &mut self,
        kind: MetricType,
        (name, help, unit): MetricDescription,
        rows: impl Iterator<Item = (MetricLabels, f64)>,
        write: impl Fn(f64, MetricEncoder<'_>) -> fmt::Result,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit.as_ref(), kind)?;
        for (labels, value) in rows {
            write(value, metric.encode_family(&labels)?)?;
        }
        Ok(())
    }
}
