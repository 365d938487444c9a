//! Records whether any call of a run may have run. The error of a run reports this, and a run that must
//! not be repeated depends on this report.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace_types::Failure;

use crate::serving::dispatch::CallResponse;

/// Whether any call of a run, including nested workflows, may have run.
#[derive(Debug, Default)]
pub(super) struct ExecutionRecord<'o> {
    any: AtomicBool,
    /// The record of the outer run.
    outer: Option<&'o ExecutionRecord<'o>>,
}

/// A call in progress. A call that is dropped before the end may have run.
struct Out<'a> {
    ran: &'a ExecutionRecord<'a>,
    may_have_run: bool,
}

impl<'o> ExecutionRecord<'o> {
    /// Returns the record of a nested run.
    pub(super) fn within(outer: &'o ExecutionRecord<'o>) -> Self {
        Self { any: AtomicBool::new(false), outer: Some(outer) }
    }

    /// Waits for a call's end. If this future is dropped, the call counts as possibly run.
    pub(super) async fn by(
        &self,
        call: impl Future<Output = Result<CallResponse, Failure>>,
    ) -> Result<CallResponse, Failure> {
        let mut out = Out { ran: self, may_have_run: true };
        let result = call.await;
        out.may_have_run = match &result {
            Ok(answer) => answer.response.lost.is_empty(),
            Err(failure) => failure.may_have_executed,
        };
        result
    }

    pub(super) fn get(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    fn note(&self) {
        self.any.store(true, Ordering::Relaxed);
        if let Some(outer) = self.outer {
            outer.note();
        }
    }
}

impl Drop for Out<'_> {
    fn drop(&mut self) {
        if self.may_have_run {
            self.ran.note();
        }
    }
}
