//! Streams: threads that carry out queued work in order, with seeded delays.
#![allow(unsafe_code, reason = "exports C functions, and writes through pointers of the caller")]

use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{CUdevice, CUdeviceptr, CUresult, CUresult::*, CUstream, cuuint32_t};

use crate::calls::{CallOutcome, DriverCall, put};
use crate::config::CONFIG;
use crate::context::Current;
use crate::event::LOOK;
use crate::faults;
use crate::green::SmSet;
use crate::kernels::mix;
use crate::state::{State, next_id, state};
use crate::work::{Condition, Touch, Work, nap};

/// Most urgent priority; the least urgent is 0.
pub(crate) const GREATEST_PRIORITY: c_int = -5;
/// Handles of the default streams: null, legacy, and of each thread. The double has a single one.
const DEFAULT_STREAMS: [usize; 3] = [0, 1, 2];

#[derive(Debug)]
pub(crate) struct DeviceStream {
    pub(crate) id: usize,
    pub(crate) device: CUdevice,
    pub(crate) green: Option<usize>,
    /// SMs on which kernels of this stream run.
    pub(crate) sms: SmSet,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// Queued work; the thread runs the first item, and removes it afterwards.
    items: VecDeque<Item>,
    pushed: u64,
    finished: u64,
    /// Whether the stream was destroyed: the thread ends when the queue is empty.
    ended: bool,
    /// Captured work, while a capture is on.
    capture: Option<Vec<Item>>,
}

/// Work and the call that queued the work.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    pub(crate) call: DriverCall,
    pub(crate) work: Work,
}

impl DeviceStream {
    /// Creates a stream and its thread.
    fn start(
        call: &DriverCall,
        device: CUdevice,
        green: Option<usize>,
        sms: SmSet,
    ) -> Result<Arc<Self>, CUresult> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let stream = Arc::new(Self {
            id: next_id(),
            device,
            green,
            sms,
            queue: Mutex::default(),
            changed: Condvar::new(),
        });
        let thread = {
            let stream = Arc::clone(&stream);
            move || stream.serve(CONFIG.seed.map(|seed| mix(seed ^ number.rotate_left(32))))
        };
        let spawned = std::thread::Builder::new().name(format!("cuda-stream-{number}")).spawn(thread);
        spawned.map_err(|error| call.broken(CUDA_ERROR_OUT_OF_MEMORY, format!("no thread: {error}")))?;
        Ok(stream)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Carries out queued work until the stream is destroyed.
    fn serve(&self, mut random: Option<u64>) {
        loop {
            let item = {
                let mut queue = self.queue();
                loop {
                    if let Some(item) = queue.items.front() {
                        break item.clone();
                    }
                    if queue.ended {
                        return;
                    }
                    queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            };
            if let Some(random) = &mut random {
                *random = mix(random.wrapping_add(0x9e37_79b9_7f4a_7c15));
                nap(delay(*random));
            }
            // After an error, the queue is drained without effect: events do not happen any more.
            if faults::ended_by().is_none()
                && let Err(code) = item.call.late_fault.map_or_else(|| item.work.run(self, &item.call), Err)
            {
                faults::end_context(code);
            }
            let mut queue = self.queue();
            // The event happens when the queue no longer holds its recording, because whoever sees the event
            // may destroy the stream.
            if let Work::Record { event, generation } = &item.work
                && faults::ended_by().is_none()
            {
                event.complete(*generation);
            }
            queue.items.pop_front();
            queue.finished += 1;
            self.changed.notify_all();
        }
    }

    /// Queues work, or adds the work to the capture.
    pub(crate) fn push(&self, call: &DriverCall, work: Work) -> CallOutcome {
        let mut queue = self.queue();
        let item = Item { call: *call, work };
        if let Some(capture) = &mut queue.capture {
            capture.push(item);
            return Ok(());
        }
        queue.items.push_back(item);
        queue.pushed += 1;
        self.changed.notify_all();
        Ok(())
    }

    /// Waits for all work that is queued by now.
    pub(crate) fn finish(&self, call: &DriverCall) -> CallOutcome {
        let mut queue = self.queue();
        if queue.capture.is_some() {
            return Err(call.broken(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a wait during a capture"));
        }
        let target = queue.pushed;
        while queue.finished < target {
            if let Some(code) = faults::ended_by() {
                return Err(code);
            }
            queue = self.changed.wait_timeout(queue, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        faults::ended_by().map_or(Ok(()), Err)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue().items.is_empty()
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.queue().capture.is_some()
    }

    /// Begins a capture. Returns false if one is on.
    pub(crate) fn begin_capture(&self) -> bool {
        let mut queue = self.queue();
        let is_new = queue.capture.is_none();
        queue.capture.get_or_insert_default();
        is_new
    }

    pub(crate) fn end_capture(&self) -> Option<Vec<Item>> {
        self.queue().capture.take()
    }

    /// Describes the first queued work.
    pub(crate) fn first_queued(&self) -> String {
        self.queue().items.front().map_or_else(|| "nothing".to_owned(), |item| item.call.to_string())
    }

    /// Describes queued work that uses a byte of the range.
    pub(crate) fn queued_use(&self, at: u64, bytes: u64) -> Option<String> {
        let queue = self.queue();
        let uses = |item: &&Item| item.work.touches().iter().any(|touch| touch.uses(at, bytes));
        queue.items.iter().find(uses).map(|item| format!("{} on stream {:#x}", item.call, self.id))
    }

    /// Describes a queued launch of a module's function.
    pub(crate) fn queued_launch(&self, module: usize) -> Option<String> {
        let queue = self.queue();
        let launches = |item: &&Item| matches!(&item.work, Work::Launch(launch) if launch.module == module);
        queue.items.iter().find(launches).map(|item| item.call.to_string())
    }

    /// Ends the thread after the queued work.
    pub(crate) fn end(&self) {
        self.queue().ended = true;
        self.changed.notify_all();
    }
}

/// Returns a delay in nanoseconds: mostly none or short, and at times long enough for a host that does
/// not wait to be seen.
fn delay(random: u64) -> u64 {
    let most = match random % 16 {
        0..=7 => return 0,
        8..=14 => 500_000,
        _ => 5_000_000,
    };
    (random >> 8) % most
}

impl State {
    /// Creates a stream of a context.
    pub(crate) fn new_stream(
        &mut self,
        call: &DriverCall,
        context: Current,
    ) -> Result<Arc<DeviceStream>, CUresult> {
        let green = context.green.and_then(|green| self.green_contexts.get(&green));
        let sms = green.map_or_else(SmSet::all, |green| green.sms.clone());
        DeviceStream::start(call, context.device, context.green, sms)
    }

    /// Returns a stream by its handle. Null is the default stream of the current context.
    pub(crate) fn stream(
        &mut self,
        call: &DriverCall,
        stream: CUstream,
    ) -> Result<Arc<DeviceStream>, CUresult> {
        if DEFAULT_STREAMS.contains(&stream.addr()) {
            let current = self.current(call)?;
            if let Some(found) = self.default_streams.get(&current.context) {
                return Ok(Arc::clone(found));
            }
            let new = self.new_stream(call, current)?;
            self.default_streams.insert(current.context, Arc::clone(&new));
            return Ok(new);
        }
        let found = self.streams.get(&stream.addr()).cloned();
        let found = found.ok_or_else(|| call.unknown("stream", stream.addr()))?;
        if found.green.is_some_and(|green| !self.green_contexts.contains_key(&green)) {
            return Err(
                call.broken(CUDA_ERROR_CONTEXT_IS_DESTROYED, "the stream's green context is destroyed")
            );
        }
        Ok(found)
    }

    /// Checks the memory of work before the work is queued.
    pub(crate) fn check_memory(
        &self,
        call: &DriverCall,
        stream: &DeviceStream,
        touches: &[Touch],
    ) -> CallOutcome {
        let check = |touch: &Touch| touch.check(self, stream.device);
        touches.iter().try_for_each(check).map_err(|rule| call.invalid(rule))
    }
}

/// Checks the memory of work, and queues the work.
pub(crate) fn enqueue(call: &DriverCall, stream: CUstream, work: Work) -> CallOutcome {
    let mut state = state();
    let stream = state.stream(call, stream)?;
    state.check_memory(call, &stream, &work.touches())?;
    stream.push(call, work)
}

/// Checks an address and flags of a wait for a value, or of a write of a value.
fn check_value(call: &DriverCall, at: u64, flags: c_uint, most: c_uint) -> CallOutcome {
    if at.is_multiple_of(4) && flags <= most {
        return Ok(());
    }
    Err(call.invalid(format!("the address {at:#x} with the flags {flags:#x}")))
}

driver! {
    Context fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, _priority: c_int) |call| {
        if flags > 1 {
            return Err(call.invalid(format!("the flags {flags:#x}")));
        }
        let mut state = state();
        let current = state.current(call)?;
        let new = state.new_stream(call, current)?;
        // SAFETY: the caller's address for a stream.
        unsafe { put(stream, new.id as CUstream)? };
        state.streams.insert(new.id, new);
        Ok(())
    }

    Context fn cuStreamDestroy_v2(stream: CUstream) |call| {
        let mut state = state();
        let Some(found) = state.streams.get(&stream.addr()).cloned() else {
            return Err(call.unknown("stream", stream.addr()));
        };
        if !found.is_idle() {
            call.dangerous(format!("the stream is destroyed, and {} is still queued", found.first_queued()));
        }
        state.streams.remove(&stream.addr());
        found.end();
        Ok(())
    }

    Context fn cuStreamQuery(stream: CUstream) |call| {
        let stream = state().stream(call, stream)?;
        if stream.is_idle() { Ok(()) } else { Err(CUDA_ERROR_NOT_READY) }
    }

    Context fn cuStreamSynchronize(stream: CUstream) |call| {
        let stream = state().stream(call, stream)?;
        stream.finish(call)
    }

    Start fn cuStreamWaitValue32_v2(stream: CUstream, at: CUdeviceptr, value: cuuint32_t, flags: c_uint) |call| {
        check_value(call, at, flags, 3)?;
        let conditions = [Condition::Reached, Condition::Equal, Condition::AnyBit, Condition::Nor];
        enqueue(call, stream, Work::AwaitValue { at, value, condition: conditions[flags as usize] })
    }

    Start fn cuStreamWriteValue32_v2(stream: CUstream, at: CUdeviceptr, value: cuuint32_t, flags: c_uint) |call| {
        check_value(call, at, flags, 0)?;
        enqueue(call, stream, Work::WriteValue { at, value })
    }
}
