//! Streams and events.
#![allow(unsafe_code, reason = "calls the CUDA driver")]

use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;

use super::{Context, check, released};
use crate::error::DriverError;

/// The urgency of a stream's work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamPriority {
    Normal,
    /// Before all normal work.
    High,
}

/// An ordered queue of work. The owner drops the stream after its work.
#[derive(Debug)]
pub(crate) struct RawStream {
    stream: sys::CUstream,
    context: Context,
}

// SAFETY: the driver's streams may be used from all threads.
unsafe impl Send for RawStream {}
// SAFETY: as above.
unsafe impl Sync for RawStream {}

impl RawStream {
    pub(crate) fn new(context: &Context, priority: StreamPriority) -> Result<Self, DriverError> {
        context.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: the driver writes two integers.
        let result = unsafe { sys::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", result)?;
        let priority = match priority {
            StreamPriority::Normal => least,
            StreamPriority::High => greatest,
        };
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the driver writes a stream, which is destroyed once, on drop.
        let result = unsafe { sys::cuStreamCreateWithPriority(&raw mut stream, flags, priority) };
        check("cuStreamCreateWithPriority", result)?;
        Ok(Self { stream, context: context.clone() })
    }

    /// Takes over a stream that the driver created in another way.
    ///
    /// # Safety
    /// The stream is not destroyed elsewhere.
    pub(super) unsafe fn of_driver(stream: sys::CUstream, context: &Context) -> Self {
        Self { stream, context: context.clone() }
    }

    pub(super) fn raw(&self) -> sys::CUstream {
        self.stream
    }

    /// Returns the address by which other libraries know the stream.
    pub(crate) fn address(&self) -> usize {
        self.stream as usize
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    /// Copies host memory to the GPU.
    ///
    /// # Safety
    /// Both ranges stay until the copy has finished, and nobody writes to them.
    pub(crate) unsafe fn copy_to_gpu(&self, to: u64, from: &[u8]) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.stream) };
        check("cuMemcpyHtoDAsync_v2", result)
    }

    /// Copies memory of the GPU to the host.
    ///
    /// # Safety
    /// Both ranges stay until the copy has finished, and nobody uses the host's until then.
    pub(crate) unsafe fn copy_to_host(&self, to: *mut u8, from: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(to.cast(), from, bytes as usize, self.stream) };
        check("cuMemcpyDtoHAsync_v2", result)
    }

    /// Copies memory of a GPU to memory of a GPU.
    ///
    /// # Safety
    /// Both ranges stay until the copy has finished.
    pub(crate) unsafe fn copy_on_gpu(&self, to: u64, from: u64, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes as usize, self.stream) };
        check("cuMemcpyDtoDAsync_v2", result)
    }

    /// Sets all bytes of a range.
    ///
    /// # Safety
    /// The range stays until the work has finished.
    pub(crate) unsafe fn set(&self, at: u64, byte: u8, bytes: u64) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        let result = unsafe { sys::cuMemsetD8Async(at, byte, bytes as usize, self.stream) };
        check("cuMemsetD8Async", result)
    }

    /// Lets later work wait for an event.
    pub(crate) fn after(&self, event: &RawEvent) -> Result<(), DriverError> {
        // SAFETY: the driver keeps what it needs of the event.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.stream, event.0.event, 0) })
    }

    /// Records an event after all work so far.
    pub(crate) fn record(&self) -> Result<RawEvent, DriverError> {
        self.context.enter()?;
        let event = RawEvent::new(&self.context)?;
        self.record_again(&event)?;
        Ok(event)
    }

    /// Moves an event behind all work so far.
    pub(crate) fn record_again(&self, event: &RawEvent) -> Result<(), DriverError> {
        // SAFETY: both live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.0.event, self.stream) })
    }

    /// Waits for all work of the stream.
    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }

    /// Captures the work that `queue` puts into the stream, and returns the work as a graph.
    pub(crate) fn capture(
        &self,
        queue: impl FnOnce() -> Result<(), DriverError>,
    ) -> Result<Graph, DriverError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives.
        check("cuStreamBeginCapture_v2", unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) })?;
        let queued = queue();
        let mut graph = std::ptr::null_mut();
        // SAFETY: the driver writes a graph, which is destroyed below.
        let ended =
            check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(self.stream, &raw mut graph) });
        queued?;
        ended?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the driver writes an executable graph, which is destroyed once, on drop.
        let made = check("cuGraphInstantiateWithFlags", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)
        });
        // SAFETY: the graph is ours, and the executable graph does not need it.
        released("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) });
        made?;
        Ok(Graph { executable })
    }

    /// Queues a captured graph.
    ///
    /// # Safety
    /// The memory that the graph names stays until the work has finished.
    pub(crate) unsafe fn launch_graph(&self, graph: &Graph) -> Result<(), DriverError> {
        // SAFETY: the caller's promise.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.executable, self.stream) })
    }
}

impl Drop for RawStream {
    fn drop(&mut self) {
        // SAFETY: the stream is this value's own.
        released("cuStreamDestroy_v2", unsafe { sys::cuStreamDestroy_v2(self.stream) });
    }
}

/// Captured work.
#[derive(Debug)]
pub(crate) struct Graph {
    executable: sys::CUgraphExec,
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: the graph is this value's own.
        released("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.executable) });
    }
}

/// A point in a stream. Clones are the same point.
#[derive(Debug, Clone)]
pub(crate) struct RawEvent(Arc<OwnedEvent>);

#[derive(Debug)]
struct OwnedEvent {
    event: sys::CUevent,
    context: Context,
}

// SAFETY: the driver's events may be used from all threads.
unsafe impl Send for OwnedEvent {}
// SAFETY: as above.
unsafe impl Sync for OwnedEvent {}

impl RawEvent {
    /// Creates an event that is not recorded yet. A context is current.
    fn new(context: &Context) -> Result<Self, DriverError> {
        let mut event = std::ptr::null_mut();
        // SAFETY: the driver writes an event, which is destroyed once, on drop.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, 0) })?;
        Ok(Self(Arc::new(OwnedEvent { event, context: context.clone() })))
    }

    /// Returns whether the work before the event has finished.
    pub(crate) fn is_done(&self) -> Result<bool, DriverError> {
        // SAFETY: the event lives.
        match unsafe { sys::cuEventQuery(self.0.event) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    /// Waits for the work before the event.
    pub(crate) fn wait(&self) -> Result<(), DriverError> {
        self.0.context.enter()?;
        // SAFETY: the event lives.
        check("cuEventSynchronize", unsafe { sys::cuEventSynchronize(self.0.event) })
    }

    /// Returns the GPU's time from an earlier event to this one. Both have happened.
    pub(crate) fn since(&self, earlier: &Self) -> Result<Duration, DriverError> {
        let mut millis = 0.0;
        // SAFETY: both events live, and the driver writes a number.
        let result = unsafe { sys::cuEventElapsedTime_v2(&raw mut millis, earlier.0.event, self.0.event) };
        check("cuEventElapsedTime_v2", result)?;
        Ok(Duration::from_secs_f64(f64::from(millis.max(0.0)) / 1e3))
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        // SAFETY: the event is this value's own. The driver frees it after the work that uses it.
        released("cuEventDestroy_v2", unsafe { sys::cuEventDestroy_v2(self.event) });
    }
}
