//! Capture of the launches of a stream, and their replay.
#![allow(unsafe_code, reason = "exports functions of the driver, which write through pointers")]

use std::ffi::c_ulonglong;

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUresult, CUstream, CUstreamCaptureMode};

use crate::rule::{BAD_HANDLE, broken, require, store};
use crate::state::call;
use crate::work::Work;

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: CUstream, _mode: CUstreamCaptureMode) -> CUresult {
    call("cuStreamBeginCapture_v2", |mut state| {
        let stream = state.streams.get(stream)?;
        let code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        require(stream.capture.is_none(), code, "a capture has begun")?;
        stream.capture = Some(Vec::new());
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: CUstream, to: *mut CUgraph) -> CUresult {
    call("cuStreamEndCapture", |mut state| {
        let launches = state.streams.get(stream)?.capture.take();
        let code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
        let launches = launches.ok_or_else(|| broken(code, "no capture has begun"))?;
        let number = state.number();
        state.graphs.captured.insert(number, launches);
        // SAFETY: the caller's address.
        unsafe { store(to, number as CUgraph) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGraphInstantiateWithFlags(
    to: *mut CUgraphExec,
    graph: CUgraph,
    _flags: c_ulonglong,
) -> CUresult {
    call("cuGraphInstantiateWithFlags", |mut state| {
        let launches = state.graphs.captured.get(&(graph as usize)).cloned();
        let launches = launches.ok_or_else(|| broken(BAD_HANDLE, "not a graph"))?;
        let number = state.number();
        state.graphs.executable.insert(number, launches);
        // SAFETY: the caller's address.
        unsafe { store(to, number as CUgraphExec) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(graph: CUgraphExec, stream: CUstream) -> CUresult {
    call("cuGraphLaunch", |mut state| {
        let launches = state.graphs.executable.get(&(graph as usize)).cloned();
        let launches = launches.ok_or_else(|| broken(BAD_HANDLE, "not an executable graph"))?;
        launches.into_iter().try_for_each(|launch| state.queue(stream, Work::Kernel(launch)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: CUgraph) -> CUresult {
    call("cuGraphDestroy", |mut state| {
        require(state.graphs.captured.remove(&(graph as usize)).is_some(), BAD_HANDLE, "not a graph")
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(graph: CUgraphExec) -> CUresult {
    call("cuGraphExecDestroy", |mut state| {
        let known = state.graphs.executable.remove(&(graph as usize)).is_some();
        require(known, BAD_HANDLE, "not an executable graph")
    })
}
