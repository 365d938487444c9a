//! What is still known of one request or trace: the spans that controllers and workers keep of it,
//! put together. Nothing is known where they keep none (`--keep-spans`).

use std::collections::BTreeMap;
use std::sync::Arc;

use millrace_proto::admin as api;
use millrace_proto::decoding::{WalkLimits, decode};
use millrace_proto::trace::wire::{Span, Spans};
use millrace_proto::trace::{FOUND_MAX, Kept, last_that_fit};
use millrace_proto::worker::GetSpansRequest;
use millrace_types::{Failure, Reason};
use prost::Message as _;

use crate::everyone::{ASK_TIMEOUT, Everyone, Given};
use crate::fleet::Worker;
use crate::raft::Peer;

/// The longest id.
const ID_LEN_MAX: usize = 128;

/// Who keeps spans. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Traces {
    pub(crate) own: Option<Kept>,
    pub(crate) everyone: Everyone,
}

impl Traces {
    /// The trace that an id names, or the last one that a request of this id was in.
    ///
    /// # Errors
    /// `MALFORMED_REQUEST`, or `TRACE_NOT_FOUND` where nobody keeps a span of it.
    pub(crate) async fn find(&self, id: &str) -> Result<api::Trace, Failure> {
        if id.is_empty() || id.len() > ID_LEN_MAX {
            let message = format!("an id has 1 to {ID_LEN_MAX} characters: give a request's or a trace's");
            return Err(Failure::malformed(message));
        }
        let found = put_together(self.ask_all(id).await).map_err(|missing| not_found(id, &missing))?;
        if found.trace_id == id {
            return Ok(found);
        }
        // Not everybody who was in it knows whose request it was.
        let whole = put_together(self.ask_all(&found.trace_id).await);
        Ok(whole.unwrap_or(found))
    }

    async fn ask_all(&self, id: &str) -> Vec<Given<Vec<Span>>> {
        let own = self.own.as_ref().map(|kept| kept.find(id)).unwrap_or_default();
        let controller = |peer: Peer| async move {
            let spans: Vec<u8> =
                peer.call(ASK_TIMEOUT, &id, async |mut it, message| it.get_spans(message).await).await?;
            let spans: Result<Spans, _> = decode(spans.into(), WalkLimits::PEER);
            spans
                .map(|it| it.spans)
                .map_err(|error| Failure::new(Reason::Internal, format!("controller {}: {error}", peer.id())))
        };
        let worker = |worker: Arc<Worker>| async move {
            let request = tonic::Request::new(GetSpansRequest { id: id.to_owned() });
            Ok(worker.calls.get_spans(request).await?.map(|it| it.spans))
        };
        let mut given = self.everyone.ask(controller, worker).await;
        given.push(Ok(own));
        given
    }
}

/// What is kept here, as another controller is given it.
pub(crate) fn given(kept: Option<&Kept>, id: &str) -> Vec<u8> {
    Spans { spans: kept.map(|kept| kept.find(id)).unwrap_or_default() }.encode_to_vec()
}

/// One trace of all that was given, the one that began last. Processes that share what they keep give
/// a span twice.
fn put_together(given: impl IntoIterator<Item = Given<Vec<Span>>>) -> Result<api::Trace, Vec<String>> {
    let (mut spans, mut missing) = (BTreeMap::new(), Vec::new());
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
    let told = last_that_fit(spans.iter().rev()).count();
    if spans.len() >= FOUND_MAX || told < spans.len() {
        spans.drain(..spans.len() - told);
        missing.push(format!("all spans before the last {told}"));
    }
    Ok(api::Trace { trace_id, spans, missing })
}

fn not_found(id: &str, missing: &[String]) -> Failure {
    let message = match missing {
        [] => format!(
            "no span of {id} is kept: start controllers and workers with --keep-spans; the last ones are kept until their process ends"
        ),
        missing => format!("no span of {id} was found, but not everybody answered: {}", missing.join("; ")),
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
    fn parts_of_the_last_trace_are_put_together_in_order() {
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
    fn without_a_span_there_is_no_trace() {
        let missing = put_together([Ok(Vec::new()), Err("w".to_owned())]).unwrap_err();
        assert_eq!(missing, ["w"]);
        assert!(not_found("r", &missing).message.contains("not everybody answered: w"));
        assert!(not_found("r", &[]).message.contains("--keep-spans"));
    }
}
