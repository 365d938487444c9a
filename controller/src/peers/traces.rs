//! Assembles a trace from the spans that controllers and workers keep. A process without `--keep-spans`
//! contributes no spans.

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_proto::admin as api;
use millrace_proto::decoding::{WalkLimits, decode};
use millrace_proto::trace::wire::{Span, Spans};
use millrace_proto::trace::{FOUND_MAX, SpanRing, newest_within_limits};
use millrace_proto::worker::GetSpansRequest;
use millrace_types::{Failure, Reason};
use prost::Message as _;

use super::fanout::{ASK_TIMEOUT, PeerAnswer, PeerFanout};
use crate::fleet::AttachedWorker;
use crate::raft::PeerClient;

/// The longest id, in bytes.
const ID_LEN_MAX: usize = 128;

/// The sources of spans: this process and all peers. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Traces {
    pub(crate) own: Option<SpanRing>,
    pub(crate) everyone: PeerFanout,
}

impl Traces {
    /// Returns the trace with this id, or the last trace of the request with this id.
    ///
    /// # Errors
    /// `MALFORMED_REQUEST`, or `TRACE_NOT_FOUND` if no process keeps a span of the trace.
    pub(crate) async fn find(&self, id: &str) -> Result<api::Trace, Failure> {
        if id.is_empty() || id.len() > ID_LEN_MAX {
            let message =
                format!("an id has 1 to {ID_LEN_MAX} characters: give the id of a request or a trace");
            return Err(Failure::malformed(message));
        }
        let found = put_together(self.ask_all(id).await).map_err(|missing| not_found(id, &missing))?;
        if found.trace_id == id {
            return Ok(found);
        }
        // Only some of the trace's spans carry the request id, so ask again by the trace id.
        let whole = put_together(self.ask_all(&found.trace_id).await);
        Ok(whole.unwrap_or(found))
    }

    async fn ask_all(&self, id: &str) -> Vec<PeerAnswer<Vec<Span>>> {
        let own = self.own.as_ref().map(|kept| kept.find(id)).unwrap_or_default();
        let controller = |peer: PeerClient| async move {
            let spans: Vec<u8> =
                peer.call(ASK_TIMEOUT, &id, async |mut it, message| it.get_spans(message).await).await?;
            let spans: Result<Spans, _> = decode(spans.into(), WalkLimits::PEER);
            spans
                .map(|it| it.spans)
                .map_err(|error| Failure::new(Reason::Internal, format!("controller {}: {error}", peer.id())))
        };
        let worker = |worker: Arc<AttachedWorker>| async move {
            let request = tonic::Request::new(GetSpansRequest { id: id.to_owned() });
            Ok(worker.calls.get_spans(request).await?.map(|it| it.spans))
        };
        let mut given = self.everyone.ask(controller, worker).await;
        given.push(Ok(own));
        given
    }
}

/// Returns the local spans of an id, encoded for another controller.
pub(super) fn given(kept: Option<&SpanRing>, id: &str) -> Vec<u8> {
    Spans { spans: kept.map(|kept| kept.find(id)).unwrap_or_default() }.encode_to_vec()
}

/// Assembles the newest trace from all given spans. Processes that share a span store return the same
/// span twice.
fn put_together(given: impl IntoIterator<Item = PeerAnswer<Vec<Span>>>) -> Result<api::Trace, Vec<String>> {
    let mut spans = BTreeMap::new();
    let mut missing = Vec::new();
    for part in given {
        match part {
            Ok(part) => spans.extend(part.into_iter().map(|span| (span.span_id.clone(), span))),
            Err(why) => missing.push(why),
        }
    }
    let Some(last) = spans.values().max_by_key(|span: &&Span| span.start_unix_ns) else {
        return Err(missing);
    };
    let trace_id = last.trace_id.clone();
    let mut spans: Vec<_> = spans.into_values().filter(|span| span.trace_id == trace_id).collect();
    spans.sort_by_key(|span| span.start_unix_ns);
    let told = newest_within_limits(spans.iter().rev()).count();
    if spans.len() >= FOUND_MAX || told < spans.len() {
        spans.drain(..spans.len() - told);
        missing.push(format!("all spans before the last {told}"));
    }
    Ok(api::Trace { trace_id, spans, missing })
}

fn not_found(id: &str, missing: &[String]) -> Failure {
    let message = match missing {
        [] => format!(
            "no process keeps a span of {id}: start controllers and workers with --keep-spans; a process keeps only its latest spans, until it exits"
        ),
        missing => {
            format!("no span of {id} was found, but some processes did not answer: {}", missing.join("; "))
        }
    };
    Failure::new(Reason::TraceNotFound, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(trace: &str, id: &str, start_unix_ns: u64) -> Span {
        Span { trace_id: trace.into(), span_id: id.into(), start_unix_ns, ..Span::default() }
    }

    #[test]
    fn spans_of_the_newest_trace_are_assembled_in_order() {
        let given = [
            Ok(vec![span("new", "b", 20), span("old", "x", 1)]),
            Err("worker-2: no answer within 1s".to_owned()),
            Ok(vec![span("new", "c", 30), span("new", "b", 20), span("new", "a", 10)]),
        ];
        let trace = put_together(given).unwrap();
        assert_eq!(trace.trace_id, "new");
        assert_eq!(trace.spans, [span("new", "a", 10), span("new", "b", 20), span("new", "c", 30)]);
        assert_eq!(trace.missing, ["worker-2: no answer within 1s"]);
    }

    #[test]
    fn a_trace_without_spans_is_not_found() {
        let missing = put_together([Ok(Vec::new()), Err("w".to_owned())]).unwrap_err();
        assert_eq!(missing, ["w"]);
        assert!(not_found("r", &missing).message.contains("some processes did not answer: w"));
        assert!(not_found("r", &[]).message.contains("--keep-spans"));
    }
}
