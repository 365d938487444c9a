//! Whether any call of a run may have run: what an error says of itself, and what a run that may not be
//! made twice goes by.

use std::sync::atomic::{AtomicBool, Ordering};

use millrace_types::Failure;

use crate::serving::dispatch::Answer;

/// Whether any call of a run may have run, those of the workflows in it among them.
#[derive(Debug, Default)]
pub(super) struct Ran<'o> {
    any: AtomicBool,
    /// Of the run that it lies in.
    outer: Option<&'o Ran<'o>>,
}

/// A call that is out. Dropped before its end, nobody knows whether it ran.
struct Out<'a> {
    ran: &'a Ran<'a>,
    may_have_run: bool,
}

impl<'o> Ran<'o> {
    /// Of a run in another.
    pub(super) fn within(outer: &'o Ran<'o>) -> Self {
        Self { any: AtomicBool::new(false), outer: Some(outer) }
    }

    /// Waits for a call's end. Whoever drops that takes the call for one that ran.
    pub(super) async fn by(
        &self,
        call: impl Future<Output = Result<Answer, Failure>>,
    ) -> Result<Answer, Failure> {
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
