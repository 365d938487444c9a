//! Graphs: the captured work of a single stream.
#![allow(unsafe_code, reason = "exports C functions, and writes through pointers of the caller")]

use std::ffi::c_ulonglong;
use std::sync::Arc;

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUresult::*, CUstream, CUstreamCaptureMode};

use crate::calls::put;
use crate::state::{next_id, state};
use crate::stream::Item;

/// Captured work in its order.
#[derive(Debug, Clone)]
pub(crate) struct Graph {
    items: Arc<[Item]>,
}

driver! {
    Start fn cuStreamBeginCapture_v2(stream: CUstream, _mode: CUstreamCaptureMode) |call| {
        if stream.is_null() {
            return Err(call.broken(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "the default stream"));
        }
        if !state().stream(call, stream)?.begin_capture() {
            return Err(call.broken(CUDA_ERROR_ILLEGAL_STATE, "the stream is captured already"));
        }
        Ok(())
    }

    Start fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) |call| {
        let mut state = state();
        let Some(items) = state.stream(call, stream)?.end_capture() else {
            return Err(call.broken(CUDA_ERROR_ILLEGAL_STATE, "the stream is not captured"));
        };
        let id = next_id();
        // SAFETY: the caller's address for a graph.
        unsafe { put(graph, id as CUgraph)? };
        state.graphs.insert(id, Graph { items: items.into() });
        Ok(())
    }

    Start fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, _flags: c_ulonglong) |call| {
        let mut state = state();
        let found = state.graphs.get(&graph.addr()).cloned();
        let found = found.ok_or_else(|| call.unknown("graph", graph.addr()))?;
        let id = next_id();
        // SAFETY: the caller's address for an executable graph.
        unsafe { put(executable, id as CUgraphExec)? };
        state.executable_graphs.insert(id, found);
        Ok(())
    }

    Start fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) |call| {
        let mut state = state();
        let found = state.executable_graphs.get(&executable.addr()).cloned();
        let found = found.ok_or_else(|| call.unknown("executable graph", executable.addr()))?;
        let stream = state.stream(call, stream)?;
        if stream.is_capturing() {
            return Err(call.broken(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "a graph within a graph"));
        }
        found.items.iter().try_for_each(|item| stream.push(call, item.work.clone()))
    }

    Start fn cuGraphDestroy(graph: CUgraph) |call| {
        let found = state().graphs.remove(&graph.addr());
        found.map(|_| ()).ok_or_else(|| call.unknown("graph", graph.addr()))
    }

    // Queued launches keep the work.
    Start fn cuGraphExecDestroy(executable: CUgraphExec) |call| {
        let found = state().executable_graphs.remove(&executable.addr());
        found.map(|_| ()).ok_or_else(|| call.unknown("executable graph", executable.addr()))
    }
}
