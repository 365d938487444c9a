//! Streams and copies. Each stream has a thread, which carries out the queued work in order.
#![allow(unsafe_code, reason = "copies memory that callers name by addresses")]

use std::collections::VecDeque;
use std::ffi::{c_int, c_uchar, c_uint, c_void};
use std::sync::Arc;

use cudarc::driver::sys::{CUdeviceptr, CUresult, CUstream};

use crate::kernels::mix;
use crate::rule::{INVALID, Refusal, abort, broken, print, require, sleep, store};
use crate::state::{Locked, PROGRESS, SMS, State, call, lock, wait_while};
use crate::work::{Stream, Work};

/// Longest delay before a piece of work, in nanoseconds.
const DELAY_MAX: u64 = 400_000;

/// Creates a stream with a thread.
pub(crate) fn add_stream(
    state: &mut State,
    sms: Arc<[u32]>,
    green: Option<usize>,
) -> Result<CUstream, Refusal> {
    let number = state.number();
    let seed = std::env::var("MILLRACE_DOUBLE_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    let random = seed.map(|seed| mix(seed ^ number as u64));
    let spawned = std::thread::Builder::new().name("double".to_owned()).spawn(move || serve(number));
    spawned.map_err(|error| broken(CUresult::CUDA_ERROR_OPERATING_SYSTEM, error.to_string()))?;
    let stream = Stream { queue: VecDeque::new(), sms, green, capture: None, random };
    state.streams.all.insert(number, stream);
    Ok(number as CUstream)
}

/// Carries out the work of a stream, until the stream is destroyed.
fn serve(number: usize) {
    loop {
        let idle = |state: &mut State| state.streams.all.get(&number).is_some_and(|s| s.queue.is_empty());
        let mut state = wait_while(lock(), idle);
        let Some(stream) = state.streams.all.get_mut(&number) else { return };
        let Some(work) = stream.queue.front().cloned() else { continue };
        let sms = Arc::clone(&stream.sms);
        let delay = stream.random.as_mut().map_or(0, |random| {
            *random = mix(random.wrapping_add(1));
            if *random % 2 == 0 { *random / 2 % DELAY_MAX } else { 0 }
        });
        drop(state);
        sleep(delay);
        let mut state = lock();
        if state.context.lost.is_none() {
            state = carry_out(state, &work, &sms);
        }
        if let Work::Record { event, recording } = work {
            event.finish(recording);
        }
        if let Some(stream) = state.streams.all.get_mut(&number) {
            stream.queue.pop_front();
        }
        PROGRESS.notify_all();
    }
}

/// Carries out a piece of work, without the lock if that takes time.
fn carry_out(mut state: Locked, work: &Work, sms: &[u32]) -> Locked {
    match work {
        Work::Record { .. } => return state,
        Work::Wait { event, recording } => {
            let waits = |state: &mut State| !event.is_done(*recording) && state.context.lost.is_none();
            return wait_while(state, waits);
        }
        Work::Fail(code) => {
            state.lose(*code);
            return state;
        }
        Work::Kernel(launch) => {
            if let Err((code, rule)) =
                launch.check(|range| state.memory.is_open(range) || state.host.is_reached(range))
            {
                print(launch.name(), &rule);
                state.lose(code);
                return state;
            }
        }
        Work::Copy { .. } | Work::Set { .. } => {}
    }
    drop(state);
    match *work {
        // SAFETY: the call checked the memory of the GPU, the caller promised that of the host, and
        // unmapping ends the process while this work is queued.
        Work::Copy { to, from, bytes } => unsafe {
            std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize);
        },
        // SAFETY: as above.
        Work::Set { at, byte, bytes } => unsafe {
            std::ptr::write_bytes(at as *mut u8, byte, bytes as usize)
        },
        Work::Kernel(ref launch) => launch.run(sms),
        Work::Record { .. } | Work::Wait { .. } | Work::Fail(_) => {}
    }
    lock()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreateWithPriority(
    to: *mut CUstream,
    _flags: c_uint,
    _priority: c_int,
) -> CUresult {
    call("cuStreamCreateWithPriority", |mut state| {
        state.current()?;
        let stream = add_stream(&mut state, (0..SMS).collect(), None)?;
        // SAFETY: the caller's address.
        unsafe { store(to, stream) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: CUstream) -> CUresult {
    call("cuStreamDestroy_v2", |mut state| {
        if state.context.lost.is_some() {
            state = wait_while(state, |state| state.streams.is_busy());
        }
        let queue = &state.streams.get(stream)?.queue;
        if let Some(work) = queue.front() {
            abort("cuStreamDestroy_v2", &format!("the stream has queued work: {work:x?}"));
        }
        state.streams.all.remove(&(stream as usize));
        PROGRESS.notify_all();
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: CUstream) -> CUresult {
    call("cuStreamSynchronize", |mut state| {
        let code = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        require(state.streams.get(stream)?.capture.is_none(), code, "a capture has begun")?;
        let number = stream as usize;
        let busy = |state: &mut State| state.streams.all.get(&number).is_some_and(|s| !s.queue.is_empty());
        wait_while(state, busy).alive()
    })
}

/// Direction of a copy.
#[derive(Debug, Clone, Copy)]
enum Direction {
    ToGpu,
    ToHost,
    OnGpu,
}

/// Queues a copy. The source is read when the work runs, from unregistered memory too.
fn copy(
    name: &'static str,
    direction: Direction,
    to: u64,
    from: u64,
    bytes: usize,
    at: CUstream,
) -> CUresult {
    call(name, |mut state| {
        let bytes = bytes as u64;
        let range = |at: u64| at..at.saturating_add(bytes);
        let (on_gpu, on_host): (&[u64], &[u64]) = match direction {
            Direction::ToGpu => (&[to], &[from]),
            Direction::ToHost => (&[from], &[to]),
            Direction::OnGpu => (&[to, from], &[]),
        };
        let open = on_gpu.iter().all(|at| state.memory.is_open(&range(*at)));
        require(open, INVALID, "the memory of the GPU is not mapped with access")?;
        let apart = !on_host.iter().any(|at| state.memory.is_reserved(&range(*at)));
        require(apart, INVALID, "the memory of the host is the GPU's")?;
        state.queue(at, Work::Copy { to, from, bytes })?;
        let counts = &mut state.counts;
        *match direction {
            Direction::ToGpu => &mut counts.to_gpu,
            Direction::ToHost => &mut counts.to_host,
            Direction::OnGpu => &mut counts.on_gpu,
        } += bytes;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, n: usize, at: CUstream) -> CUresult {
    copy("cuMemcpyHtoDAsync_v2", Direction::ToGpu, to, from as u64, n, at)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, n: usize, at: CUstream) -> CUresult {
    copy("cuMemcpyDtoHAsync_v2", Direction::ToHost, to as u64, from, n, at)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, n: usize, at: CUstream) -> CUresult {
    copy("cuMemcpyDtoDAsync_v2", Direction::OnGpu, to, from, n, at)
}

#[unsafe(no_mangle)]
extern "C" fn cuMemsetD8Async(at: CUdeviceptr, byte: c_uchar, n: usize, stream: CUstream) -> CUresult {
    call("cuMemsetD8Async", |mut state| {
        let open = state.memory.is_open(&(at..at.saturating_add(n as u64)));
        require(open, INVALID, "the memory of the GPU is not mapped with access")?;
        state.queue(stream, Work::Set { at, byte, bytes: n as u64 })
    })
}
