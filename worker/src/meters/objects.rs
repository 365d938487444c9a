//! Metrics of the intermediate data that the worker holds, and of its fetches for requests (D04).

use std::fmt;

use prometheus_client::registry::Unit;

use super::writer::MetricsWriter;
use crate::objects::{FetchCounts, METHODS, ObjectTally, method_name};

pub(super) fn write(tally: &ObjectTally, writer: &mut MetricsWriter<'_, '_>) -> fmt::Result {
    let ObjectTally { usage, fetched, asked, addresses } = tally;
    writer.gauge(("millrace_objects", "Objects on this worker", None), usage.objects as f64)?;
    writer.gauge(
        ("millrace_objects_memory", "Memory of objects, on GPUs and the host", Some(Unit::Bytes)),
        usage.bytes.get() as f64,
    )?;
    writer.counter(("millrace_objects_kept", "Objects stored", None), usage.kept)?;
    writer.counter(
        ("millrace_objects_expired", "Objects that expired before they were released", None),
        usage.expired,
    )?;
    writer.counter(
        ("millrace_objects_refused", "Outputs answered as bytes because they did not fit", None),
        usage.refused,
    )?;
    writer
        .gauge(("millrace_objects_copies", "Copies of other workers' objects", None), usage.copies as f64)?;
    writer.gauge(
        (
            "millrace_objects_copies_memory",
            "Host memory of copies of other workers' objects",
            Some(Unit::Bytes),
        ),
        usage.copied.get() as f64,
    )?;
    let of = |whom: &str, calls: u64| (vec![("asked", whom.to_owned())], calls as f64);
    let calls = [
        of("address", *addresses),
        of("home", asked.home),
        of("tier2", asked.tier2),
        of("holder", asked.holders),
    ];
    writer.counters(
        ("millrace_objects_lookups", "Calls to find data that a process named, by destination", None),
        calls.into_iter(),
    )?;
    let by_method = |read: fn(&FetchCounts) -> u64| {
        let rows = METHODS.iter().zip(fetched);
        rows.map(move |(&method, fetched)| {
            (vec![("method", method_name(method).to_owned())], read(fetched) as f64)
        })
    };
    writer.counters(
        ("millrace_objects_fetches", "Objects read as inputs, by method of transfer", None),
        by_method(|it| it.fetches),
    )?;
    writer.counters(
        (
            "millrace_objects_fetched",
            "Bytes of objects read as inputs, by method of transfer",
            Some(Unit::Bytes),
        ),
        by_method(|it| it.bytes),
    )
}
