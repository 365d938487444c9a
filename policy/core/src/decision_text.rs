//! Canonical text of decisions, and its digest: a commit that changes no behaviour leaves the
//! digest unchanged.
//!
//! A line has the time in nanoseconds, the name of the decision, and the decision's request, model
//! or object, GPU and bytes, if present: `1500000 assign r7 m3 g0`. The names are part of the
//! digest; the names of types, variants and fields are not. Lines of one moment are sorted, so that
//! the order of the cores at that moment makes no difference.

use std::fmt;
use std::hash::Hasher as _;

use millrace_types::{Bytes, GpuIndex, ModelId, Timestamp};

use crate::fnv::Fnv;
use crate::ids::{ObjectKey, RequestKey};

/// A decision of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecisionText {
    name: &'static str,
    request: Option<RequestKey>,
    subject: Option<Subject>,
    gpu: Option<GpuIndex>,
    bytes: Option<Bytes>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Subject {
    Model(ModelId),
    Object(ObjectKey),
}

impl DecisionText {
    /// Returns a decision with this name in the canonical text. A renamed variant keeps its name in
    /// the text.
    #[must_use]
    pub const fn new(name: &'static str) -> Self {
        Self { name, request: None, subject: None, gpu: None, bytes: None }
    }

    /// Adds the request.
    #[must_use]
    pub const fn request(self, request: RequestKey) -> Self {
        Self { request: Some(request), ..self }
    }

    /// Adds the model.
    #[must_use]
    pub const fn model(self, model: ModelId) -> Self {
        Self { subject: Some(Subject::Model(model)), ..self }
    }

    /// Adds the object.
    #[must_use]
    pub const fn object(self, object: ObjectKey) -> Self {
        Self { subject: Some(Subject::Object(object)), ..self }
    }

    /// Adds the GPU.
    #[must_use]
    pub const fn gpu(self, gpu: GpuIndex) -> Self {
        Self { gpu: Some(gpu), ..self }
    }

    /// Adds the number of bytes.
    #[must_use]
    pub const fn bytes(self, bytes: Bytes) -> Self {
        Self { bytes: Some(bytes), ..self }
    }
}

impl fmt::Display for DecisionText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)?;
        if let Some(request) = self.request {
            write!(f, " r{}", request.0)?;
        }
        match self.subject {
            Some(Subject::Model(model)) => write!(f, " m{}", model.0)?,
            Some(Subject::Object(object)) => write!(f, " o{}", object.0)?,
            None => {}
        }
        if let Some(gpu) = self.gpu {
            write!(f, " g{}", gpu.0)?;
        }
        if let Some(bytes) = self.bytes {
            write!(f, " {}", bytes.0)?;
        }
        Ok(())
    }
}

/// Number of a node's decisions, and the digest of their text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DecisionDigest {
    now: Timestamp,
    /// Lines of the present moment.
    lines: Vec<String>,
    fold: Fnv,
    count: u64,
}

impl DecisionDigest {
    /// Adds a decision. `on` is the GPU of the deciding core, and counts if the decision names no
    /// GPU.
    pub(crate) fn take(&mut self, now: Timestamp, on: Option<GpuIndex>, decision: DecisionText) {
        if now != self.now {
            self.flush();
            self.now = now;
        }
        let decision = DecisionText { gpu: decision.gpu.or(on), ..decision };
        self.lines.push(format!("{} {decision}\n", now.0));
        self.count += 1;
    }

    /// Returns the number of decisions and the digest of their text.
    #[must_use]
    pub fn digest(&self) -> (u64, u64) {
        let mut all = self.clone();
        all.flush();
        (all.count, all.fold.finish())
    }

    fn flush(&mut self) {
        self.lines.sort_unstable();
        for line in self.lines.drain(..) {
            self.fold.write(line.as_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assign(request: u64) -> DecisionText {
        DecisionText::new("assign").request(RequestKey(request)).model(ModelId(3)).gpu(GpuIndex(0))
    }

    fn digest(decisions: &[(u64, DecisionText)]) -> (u64, u64) {
        let mut all = DecisionDigest::default();
        for &(at, decision) in decisions {
            all.take(Timestamp(at), Some(GpuIndex(1)), decision);
        }
        all.digest()
    }

    #[test]
    fn the_text_names_each_part_that_a_decision_has() {
        assert_eq!(assign(7).to_string(), "assign r7 m3 g0");
        let moved = DecisionText::new("migrate").object(ObjectKey(9)).bytes(Bytes(12));
        assert_eq!(moved.to_string(), "migrate o9 12");
    }

    #[test]
    fn the_order_within_a_moment_makes_no_difference_and_the_moment_does() {
        let digest_of = |times: [u64; 2]| digest(&[(times[0], assign(1)), (times[1], assign(2))]);
        assert_eq!(digest_of([5, 5]), digest(&[(5, assign(2)), (5, assign(1))]));
        assert_ne!(digest_of([5, 5]), digest_of([5, 6]));
        assert_ne!(digest_of([5, 6]), digest(&[(5, assign(2)), (6, assign(1))]));
    }

    #[test]
    fn a_decision_without_a_gpu_gets_the_gpu_of_its_core() {
        let run = |gpu: Option<GpuIndex>| DecisionText { gpu, ..DecisionText::new("run") };
        assert_eq!(digest(&[(1, run(None))]), digest(&[(1, run(Some(GpuIndex(1))))]));
        assert_ne!(digest(&[(1, run(None))]), digest(&[(1, run(Some(GpuIndex(2))))]));
    }

    #[test]
    fn the_decision_digest_does_not_change_between_builds() {
        assert_eq!(digest(&[(1, assign(7)), (2, assign(8))]), (2, 3_357_841_219_831_247_357));
    }
}
