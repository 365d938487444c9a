//! Events. Each recording has a generation: who waits for an event waits for the generation that was
//! recorded last before the wait.
#![allow(unsafe_code, reason = "exports C functions, and writes through pointers of the caller")]

use std::ffi::c_uint;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use cudarc::driver::sys::{CUdevice, CUevent, CUresult, CUresult::*, CUstream};

use crate::calls::{CallOutcome, DriverCall, put};
use crate::faults;
use crate::state::{State, next_id, state};
use crate::work::{Work, monotonic_nanos};

/// Flag of an event without times.
const DISABLE_TIMING: c_uint = 2;
/// Interval at which waits look for an error that ended the context.
pub(crate) const LOOK: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(crate) struct Event {
    device: CUdevice,
    timed: bool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    /// Generation of the last recording; 0 before the first.
    recorded: u64,
    /// Newest generation that has happened.
    done: u64,
    /// Time of that generation, in nanoseconds of CLOCK_MONOTONIC.
    at: u64,
    /// Name of the stream with the capture that contains the last recording.
    captured: Option<usize>,
}

impl Event {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a generation happen now.
    pub(crate) fn complete(&self, generation: u64) {
        let mut progress = self.progress();
        progress.done = progress.done.max(generation);
        progress.at = monotonic_nanos();
        self.changed.notify_all();
    }

    /// Waits until a generation has happened.
    pub(crate) fn wait(&self, generation: u64) -> CallOutcome {
        let mut progress = self.progress();
        while progress.done < generation {
            if let Some(code) = faults::ended_by() {
                return Err(code);
            }
            progress = self.changed.wait_timeout(progress, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Returns the last generation, for a wait. A wait before the recording is dangerous: a driver does
    /// not wait at all.
    fn awaited(&self, call: &DriverCall) -> Result<u64, CUresult> {
        let progress = self.progress();
        if progress.captured.is_some() {
            return Err(call.broken(CUDA_ERROR_CAPTURED_EVENT, "the event is part of a capture"));
        }
        if progress.recorded == 0 {
            call.dangerous("a wait for an event before its recording");
        }
        Ok(progress.recorded)
    }
}

impl State {
    fn event(&self, call: &DriverCall, event: CUevent) -> Result<Arc<Event>, CUresult> {
        let found = self.events.get(&event.addr()).cloned();
        found.ok_or_else(|| call.unknown("event", event.addr()))
    }
}

fn record(call: &DriverCall, event: CUevent, stream: CUstream) -> CallOutcome {
    let mut state = state();
    let event = state.event(call, event)?;
    let stream = state.stream(call, stream)?;
    if event.device != stream.device {
        return Err(call.broken(CUDA_ERROR_INVALID_HANDLE, "the event is of another device than the stream"));
    }
    if stream.is_capturing() {
        event.progress().captured = Some(stream.id);
        return Ok(());
    }
    let generation = {
        let mut progress = event.progress();
        progress.captured = None;
        progress.recorded += 1;
        progress.recorded
    };
    stream.push(call, Work::Record { event, generation })
}

fn let_stream_wait(call: &DriverCall, stream: CUstream, event: CUevent) -> CallOutcome {
    let mut state = state();
    let event = state.event(call, event)?;
    let stream = state.stream(call, stream)?;
    let captured = event.progress().captured;
    if captured.is_some() && captured == Some(stream.id) && stream.is_capturing() {
        // The order within the stream is the order of the graph.
        return Ok(());
    }
    if captured.is_some() {
        let rule = "the event is part of a capture: the double captures single streams";
        return Err(call.broken(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, rule));
    }
    if stream.is_capturing() {
        let rule = "a captured stream waits for an event from outside";
        return Err(call.broken(CUDA_ERROR_STREAM_CAPTURE_ISOLATION, rule));
    }
    let generation = event.awaited(call)?;
    stream.push(call, Work::Wait { event, generation })
}

/// Returns the milliseconds between two events that have happened.
fn elapsed(call: &DriverCall, start: CUevent, end: CUevent) -> Result<f32, CUresult> {
    let state = state();
    let time = |event: CUevent| {
        let event = state.event(call, event)?;
        let progress = event.progress();
        if !event.timed || progress.recorded == 0 {
            return Err(call.broken(CUDA_ERROR_INVALID_HANDLE, "an event without a time"));
        }
        if progress.done < progress.recorded { Err(CUDA_ERROR_NOT_READY) } else { Ok(progress.at) }
    };
    let start = time(start)?;
    Ok((i128::from(time(end)?) - i128::from(start)) as f32 / 1e6)
}

driver! {
    Context fn cuEventCreate(event: *mut CUevent, flags: c_uint) |call| {
        if flags > 3 {
            return Err(call.invalid(format!("the flags {flags:#x}")));
        }
        let mut state = state();
        let device = state.current(call)?.device;
        let id = next_id();
        // SAFETY: the caller's address for an event.
        unsafe { put(event, id as CUevent)? };
        let timed = flags & DISABLE_TIMING == 0;
        let event = Event { device, timed, progress: Mutex::default(), changed: Condvar::new() };
        state.events.insert(id, Arc::new(event));
        Ok(())
    }

    Context fn cuEventDestroy_v2(event: CUevent) |call| {
        let mut state = state();
        state.event(call, event)?;
        // Queued work shares the ownership of the event, as with the driver.
        state.events.remove(&event.addr());
        Ok(())
    }

    Context fn cuEventRecord(event: CUevent, stream: CUstream) |call| { record(call, event, stream) }

    Start fn cuEventQuery(event: CUevent) |call| {
        let event = state().event(call, event)?;
        let generation = event.awaited(call)?;
        let is_done = event.progress().done >= generation;
        if is_done { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    }

    Context fn cuEventSynchronize(event: CUevent) |call| {
        let event = state().event(call, event)?;
        let generation = event.awaited(call)?;
        event.wait(generation)
    }

    Context fn cuEventElapsedTime_v2(millis: *mut f32, start: CUevent, end: CUevent) |call| {
        let elapsed = elapsed(call, start, end)?;
        // SAFETY: the caller's address for a number.
        unsafe { put(millis, elapsed) }
    }

    Context fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) |call| {
        if flags != 0 {
            return Err(call.invalid(format!("the flags {flags:#x}")));
        }
        let_stream_wait(call, stream, event)
    }
}
