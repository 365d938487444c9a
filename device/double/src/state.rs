//! All values of the driver in this process behind one lock, and the frame of a call.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUresult, CUstream};

use crate::faults::{self, Faults};
use crate::kernels::{Kernel, Launch};
use crate::mappings::{Host, Memory};
use crate::rule::{Refusal, abort, broken, print, require};
use crate::work::{Streams, Work};

/// All values of the driver in this process.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) context: Primary,
    pub(crate) memory: Memory,
    pub(crate) host: Host,
    pub(crate) streams: Streams,
    pub(crate) modules: Modules,
    pub(crate) greens: Greens,
    pub(crate) graphs: Graphs,
    pub(crate) counts: Counts,
    pub(crate) faults: Faults,
    /// Last number that was given to a value.
    last: usize,
}

static STATE: Mutex<State> = Mutex::new(State {
    context: Primary::NEW,
    memory: Memory::NEW,
    host: Host::NEW,
    streams: Streams::NEW,
    modules: Modules::NEW,
    greens: Greens::NEW,
    graphs: Graphs::NEW,
    counts: Counts::NEW,
    faults: Faults::NEW,
    last: 0,
});

/// Signalled when work was queued or has finished.
pub(crate) static PROGRESS: Condvar = Condvar::new();

pub(crate) type Locked = MutexGuard<'static, State>;

pub(crate) fn lock() -> Locked {
    // Ignores a poisoned lock: a panic in a call aborts the process.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits until a condition holds. Other threads go on meanwhile.
pub(crate) fn wait_while(state: Locked, condition: impl FnMut(&mut State) -> bool) -> Locked {
    PROGRESS.wait_while(state, condition).unwrap_or_else(PoisonError::into_inner)
}

impl State {
    /// Returns a number that no other value has. Never null as a pointer.
    pub(crate) fn number(&mut self) -> usize {
        self.last += 1;
        // Far from every address, so that a number that is used as an address is found.
        self.last << 8
    }
}

/// SMs of the GPU.
pub(crate) const SMS: u32 = 132;

#[derive(Debug)]
pub(crate) struct Primary {
    pub(crate) started: bool,
    pub(crate) retained: u32,
    pub(crate) context: usize,
    /// Error after which all work fails.
    pub(crate) lost: Option<CUresult>,
}

impl Primary {
    pub(crate) const NEW: Self = Self { started: false, retained: 0, context: 0, lost: None };
}

thread_local! {
    /// Context of this thread, or 0.
    pub(crate) static CURRENT: Cell<usize> = const { Cell::new(0) };
}

#[derive(Debug)]
pub(crate) struct Modules {
    /// Parameter sizes of each kernel of a module's text, by name.
    pub(crate) all: BTreeMap<usize, BTreeMap<String, Vec<usize>>>,
    /// Module and kernel of each function.
    pub(crate) functions: BTreeMap<usize, (usize, &'static Kernel)>,
}

impl Modules {
    pub(crate) const NEW: Self = Self { all: BTreeMap::new(), functions: BTreeMap::new() };
}

#[derive(Debug)]
pub(crate) struct Greens {
    pub(crate) contexts: BTreeMap<usize, Arc<[u32]>>,
    /// The driver has no call to release a description.
    pub(crate) descriptions: BTreeMap<usize, Arc<[u32]>>,
}

impl Greens {
    pub(crate) const NEW: Self = Self { contexts: BTreeMap::new(), descriptions: BTreeMap::new() };
}

type Launches = Vec<Arc<Launch>>;

#[derive(Debug)]
pub(crate) struct Graphs {
    pub(crate) captured: BTreeMap<usize, Launches>,
    pub(crate) executable: BTreeMap<usize, Launches>,
}

impl Graphs {
    pub(crate) const NEW: Self = Self { captured: BTreeMap::new(), executable: BTreeMap::new() };
}

#[derive(Debug)]
pub(crate) struct Counts {
    pub(crate) calls: BTreeMap<&'static str, u64>,
    pub(crate) to_gpu: u64,
    pub(crate) to_host: u64,
    pub(crate) on_gpu: u64,
}

impl Counts {
    pub(crate) const NEW: Self = Self { calls: BTreeMap::new(), to_gpu: 0, to_host: 0, on_gpu: 0 };

    /// Counts a call, and returns the number of calls of this name.
    fn count(&mut self, call: &'static str) -> u64 {
        let calls = self.calls.entry(call).or_default();
        *calls += 1;
        *calls
    }
}

impl State {
    /// Refuses a call that needs a context if none is current on this thread.
    pub(crate) fn current(&self) -> Result<(), Refusal> {
        let is_current = self.context.retained > 0 && CURRENT.get() == self.context.context;
        require(is_current, CUresult::CUDA_ERROR_INVALID_CONTEXT, "no context is current on this thread")
    }

    /// Loses the context: no more work is done.
    pub(crate) fn lose(&mut self, code: CUresult) {
        self.context.lost.get_or_insert(code);
        PROGRESS.notify_all();
    }

    /// Refuses a call if the context is lost.
    pub(crate) fn alive(&self) -> Result<(), Refusal> {
        self.context.lost.map_or(Ok(()), |code| Err(code.into()))
    }
}

impl State {
    /// Puts work into a stream.
    pub(crate) fn queue(&mut self, stream: CUstream, mut work: Work) -> Result<(), Refusal> {
        self.alive()?;
        if let Some(code) = self.faults.of_work.take() {
            work = Work::Fail(code);
        }
        let stream = self.streams.get(stream)?;
        match (&mut stream.capture, work) {
            (None, work) => stream.queue.push_back(work),
            (Some(launches), Work::Kernel(launch)) => launches.push(launch),
            (Some(_), _) => {
                let code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
                return Err(broken(code, "only launches can be captured"));
            }
        }
        PROGRESS.notify_all();
        Ok(())
    }
}

/// Ends the process if queued or running work names bytes of a range. A lost context does no more work,
/// so the call waits for what was running.
pub(crate) fn unused(mut state: Locked, call: &str, range: &Range<u64>) -> Locked {
    if state.context.lost.is_some() {
        state = wait_while(state, |state| state.streams.is_busy());
    }
    let mut queued = state.streams.all.values().flat_map(|stream| &stream.queue);
    if let Some(work) = queued.find(|work| work.uses(range)) {
        abort(call, &format!("queued or running work names the range: {work:x?}"));
    }
    state
}

/// Carries out a call of the driver: counts the call, answers the fault that a test asked for, and
/// prints the rule that the caller broke.
pub(crate) fn call(name: &'static str, body: impl FnOnce(Locked) -> Result<(), Refusal>) -> CUresult {
    let mut state = lock();
    let nth = state.counts.count(name);
    let needs_start =
        !matches!(name, "cuInit" | "cuDriverGetVersion" | "cuGetErrorName" | "cuGetErrorString");
    if needs_start && !state.context.started {
        print(name, "cuInit was not called");
        return CUresult::CUDA_ERROR_NOT_INITIALIZED;
    }
    match state.faults.due(name, nth) {
        None => {}
        Some(code) if faults::is_sticky(code) && faults::queues_work(name) => {
            state.faults.of_work = Some(code);
        }
        Some(code) => {
            if faults::is_sticky(code) {
                state.lose(code);
            }
            return code;
        }
    }
    match body(state) {
        Ok(()) => CUresult::CUDA_SUCCESS,
        Err(refusal) => {
            if let Some(rule) = refusal.rule {
                print(name, &rule);
            }
            refusal.code
        }
    }
}
