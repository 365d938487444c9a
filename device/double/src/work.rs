//! Streams, events, and the work that is queued.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys::{CUevent, CUresult, CUstream};

use crate::kernels::Launch;
use crate::rule::{BAD_HANDLE, Refusal, abort, broken, now};

#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) all: BTreeMap<usize, Stream>,
    pub(crate) events: BTreeMap<usize, Arc<Event>>,
}

#[derive(Debug)]
pub(crate) struct Stream {
    /// The first is running, or is the next to run.
    pub(crate) queue: VecDeque<Work>,
    /// SMs on which the kernels run.
    pub(crate) sms: Arc<[u32]>,
    pub(crate) green: Option<usize>,
    /// Launches of a capture that has begun.
    pub(crate) capture: Option<Vec<Arc<Launch>>>,
    /// State of the generator of delays, if there are any.
    pub(crate) random: Option<u64>,
}

#[derive(Debug, Clone)]
pub(crate) enum Work {
    Copy { to: u64, from: u64, bytes: u64 },
    Set { at: u64, byte: u8, bytes: u64 },
    Kernel(Arc<Launch>),
    Record { event: Arc<Event>, recording: u64 },
    Wait { event: Arc<Event>, recording: u64 },
    Fail(CUresult),
}

impl Streams {
    pub(crate) const NEW: Self = Self { all: BTreeMap::new(), events: BTreeMap::new() };

    pub(crate) fn is_busy(&self) -> bool {
        self.all.values().any(|stream| !stream.queue.is_empty())
    }

    pub(crate) fn get(&mut self, stream: CUstream) -> Result<&mut Stream, Refusal> {
        self.all.get_mut(&(stream as usize)).ok_or_else(|| broken(BAD_HANDLE, "not a stream"))
    }
}

impl Work {
    /// Returns whether the work uses bytes of a range.
    pub(crate) fn uses(&self, range: &Range<u64>) -> bool {
        let within = |at: u64, bytes: u64| at < range.end && range.start < at + bytes;
        match self {
            Self::Copy { to, from, bytes } => within(*to, *bytes) || within(*from, *bytes),
            Self::Set { at, bytes, .. } => within(*at, *bytes),
            Self::Kernel(launch) => launch.spans().any(|span| within(span.at, span.bytes)),
            Self::Record { .. } | Self::Wait { .. } | Self::Fail(_) => false,
        }
    }
}

/// A point in a stream. The recordings of an event are counted.
#[derive(Debug, Default)]
pub(crate) struct Event {
    pub(crate) recorded: AtomicU64,
    done: AtomicU64,
    /// Time of the last recording that has happened.
    pub(crate) time: AtomicU64,
}

impl Event {
    pub(crate) fn is_done(&self, recording: u64) -> bool {
        self.done.load(Ordering::Acquire) >= recording
    }

    /// Notes that a recording has happened.
    pub(crate) fn finish(&self, recording: u64) {
        self.time.store(now(), Ordering::Relaxed);
        self.done.store(recording, Ordering::Release);
    }

    /// Returns the number of the last recording. Ends the process if there is none.
    pub(crate) fn recorded(&self, call: &str) -> u64 {
        match self.recorded.load(Ordering::Relaxed) {
            0 => abort(call, "the event was never recorded"),
            recording => recording,
        }
    }
}

impl Streams {
    pub(crate) fn event(&self, event: CUevent) -> Result<Arc<Event>, Refusal> {
        let known = self.events.get(&(event as usize)).cloned();
        known.ok_or_else(|| broken(BAD_HANDLE, "not an event"))
    }
}
