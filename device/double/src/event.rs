//! Events: points in a stream, and waits for them.
#![allow(unsafe_code, reason = "exports functions of the driver, which write through pointers")]

use std::ffi::c_uint;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use cudarc::driver::sys::{CUevent, CUresult, CUstream};

use crate::rule::{BAD_HANDLE, require, store};
use crate::state::{State, call, wait_while};
use crate::work::Work;

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: CUstream, event: CUevent, _flags: c_uint) -> CUresult {
    call("cuStreamWaitEvent", |mut state| {
        let event = state.streams.event(event)?;
        let recording = event.recorded("cuStreamWaitEvent");
        state.queue(stream, Work::Wait { event, recording })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(to: *mut CUevent, _flags: c_uint) -> CUresult {
    call("cuEventCreate", |mut state| {
        state.current()?;
        let number = state.number();
        state.streams.events.insert(number, Arc::default());
        // SAFETY: the caller's address.
        unsafe { store(to, number as CUevent) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    call("cuEventDestroy_v2", |mut state| {
        // Queued work keeps what it needs of the event.
        let known = state.streams.events.remove(&(event as usize)).is_some();
        require(known, BAD_HANDLE, "not an event")
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: CUevent, stream: CUstream) -> CUresult {
    call("cuEventRecord", |mut state| {
        let event = state.streams.event(event)?;
        let recording = event.recorded.load(Ordering::Relaxed) + 1;
        state.queue(stream, Work::Record { event: Arc::clone(&event), recording })?;
        event.recorded.store(recording, Ordering::Relaxed);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    call("cuEventQuery", |state| {
        state.alive()?;
        let event = state.streams.event(event)?;
        let done = event.is_done(event.recorded.load(Ordering::Relaxed));
        if done { Ok(()) } else { Err(CUresult::CUDA_ERROR_NOT_READY.into()) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    call("cuEventSynchronize", |state| {
        let event = state.streams.event(event)?;
        let recording = event.recorded("cuEventSynchronize");
        let waits = |state: &mut State| !event.is_done(recording) && state.context.lost.is_none();
        wait_while(state, waits).alive()
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventElapsedTime_v2(millis: *mut f32, from: CUevent, to: CUevent) -> CUresult {
    call("cuEventElapsedTime_v2", |state| {
        state.alive()?;
        let mut times = [0; 2];
        for (time, event) in times.iter_mut().zip([from, to]) {
            let event = state.streams.event(event)?;
            let recording = event.recorded.load(Ordering::Relaxed);
            require(recording > 0, BAD_HANDLE, "the event was never recorded")?;
            if !event.is_done(recording) {
                return Err(CUresult::CUDA_ERROR_NOT_READY.into());
            }
            *time = event.time.load(Ordering::Relaxed);
        }
        // SAFETY: the caller's address.
        unsafe { store(millis, (times[1] as i64 - times[0] as i64) as f32 / 1e6) }
    })
}
