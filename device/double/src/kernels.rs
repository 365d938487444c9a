//! The kernels of `kernels.ptx` as Rust functions. Each has the exact result of a launch with
//! one-dimensional blocks and a one-dimensional grid.
#![allow(unsafe_code, reason = "kernels work on memory that callers name by addresses")]

use std::ops::Range;
use std::slice::{from_raw_parts, from_raw_parts_mut};
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUresult;

use crate::rule::{now, sleep};

pub(crate) struct Kernel {
    pub(crate) name: &'static str,
    /// Sizes of the parameters in bytes.
    pub(crate) parameters: &'static [usize],
    spans: fn(&Launch) -> Vec<Span>,
    /// Runs on these SMs.
    run: unsafe fn(&Launch, &[u32]),
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name)
    }
}

/// Memory that a launch uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub(crate) at: u64,
    pub(crate) bytes: u64,
    align: u64,
}

/// A launch with its arguments.
#[derive(Debug)]
pub(crate) struct Launch {
    pub(crate) kernel: &'static Kernel,
    /// Arguments of 4 bytes are the lower half.
    pub(crate) args: Vec<u64>,
    pub(crate) grid: u32,
    pub(crate) block: u32,
}

impl Launch {
    pub(crate) fn name(&self) -> &'static str {
        self.kernel.name
    }

    pub(crate) fn spans(&self) -> impl Iterator<Item = Span> {
        (self.kernel.spans)(self).into_iter().filter(|span| span.bytes > 0)
    }

    /// Returns the error of a launch whose memory is not there.
    pub(crate) fn check(&self, is_reached: impl Fn(&Range<u64>) -> bool) -> Result<(), (CUresult, String)> {
        for span in self.spans() {
            let range = span.at..span.at.saturating_add(span.bytes);
            if !is_reached(&range) {
                return Err((CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, format!("illegal address: {span:x?}")));
            }
            if !span.at.is_multiple_of(span.align) {
                return Err((CUresult::CUDA_ERROR_MISALIGNED_ADDRESS, format!("not aligned: {span:x?}")));
            }
        }
        Ok(())
    }

    pub(crate) fn run(&self, sms: &[u32]) {
        // SAFETY: the memory was checked, and unmapping ends the process while the launch is queued.
        unsafe { (self.kernel.run)(self, sms) }
    }
}

fn span(at: u64, bytes: u64, align: u64) -> Span {
    Span { at, bytes, align }
}

/// Returns the words of a range.
///
/// # Safety
/// The memory is there, and other work does not use it.
unsafe fn words<'a>(at: u64, bytes: u64) -> &'a mut [u64] {
    // SAFETY: the caller's promise.
    unsafe { from_raw_parts_mut(at as *mut u64, (bytes / 8) as usize) }
}

/// The finaliser of splitmix64.
pub(crate) fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

pub(crate) const KERNELS: &[Kernel] = &[
    Kernel {
        name: "millrace_xor",
        parameters: &[8, 8, 4],
        spans: |launch| vec![span(launch.args[0], launch.args[1], 4)],
        run: xor,
    },
    Kernel {
        name: "millrace_pattern",
        parameters: &[8, 8, 8],
        spans: |launch| vec![span(launch.args[0], launch.args[1], 8)],
        run: pattern,
    },
    Kernel {
        name: "millrace_check",
        parameters: &[8, 8, 8, 8],
        spans: |launch| vec![span(launch.args[0], launch.args[1], 8), span(launch.args[3], 8, 8)],
        run: check,
    },
    Kernel {
        name: "millrace_hash",
        parameters: &[8, 8, 8],
        spans: |launch| {
            let grid = u64::from(launch.grid);
            vec![span(launch.args[0], grid * launch.args[1], 16), span(launch.args[2], grid * 8, 8)]
        },
        run: hash,
    },
    Kernel { name: "millrace_spin", parameters: &[8], spans: |_| Vec::new(), run: spin },
    Kernel {
        name: "millrace_fma",
        parameters: &[8, 4],
        spans: |launch| vec![span(launch.args[0], u64::from(launch.grid) * u64::from(launch.block) * 4, 4)],
        run: fma,
    },
    Kernel {
        name: "millrace_touch",
        parameters: &[8, 8, 4, 8],
        spans: |launch| vec![span(launch.args[0], launch.args[1], 16), span(launch.args[3], 8, 8)],
        run: touch,
    },
    Kernel {
        name: "millrace_smid",
        parameters: &[8, 8],
        spans: |launch| vec![span(launch.args[0], u64::from(launch.grid) * 4, 4)],
        run: smid,
    },
    Kernel {
        name: "millrace_flag",
        parameters: &[8, 4],
        spans: |launch| vec![span(launch.args[0], 4, 4)],
        run: flag,
    },
    Kernel {
        name: "millrace_await",
        parameters: &[8, 4, 8],
        spans: |launch| vec![span(launch.args[0], 4, 4)],
        run: await_flag,
    },
];

unsafe fn xor(launch: &Launch, _: &[u32]) {
    let threads = u64::from(launch.grid) * u64::from(launch.block);
    let words = threads.min(launch.args[1] / 4) as usize;
    // SAFETY: the memory was checked.
    let words = unsafe { from_raw_parts_mut(launch.args[0] as *mut u32, words) };
    words.iter_mut().for_each(|word| *word ^= launch.args[2] as u32);
}

unsafe fn pattern(launch: &Launch, _: &[u32]) {
    let seed = launch.args[2];
    // SAFETY: the memory was checked.
    let words = unsafe { words(launch.args[0], launch.args[1]) };
    (0_u64..).zip(words).for_each(|(i, word)| *word = mix(seed.wrapping_add(i)));
}

unsafe fn check(launch: &Launch, _: &[u32]) {
    let seed = launch.args[2];
    // SAFETY: the memory was checked.
    let words = unsafe { words(launch.args[0], launch.args[1]) };
    let differ = (0_u64..).zip(words).filter(|(i, word)| **word != mix(seed.wrapping_add(*i))).count();
    let out = launch.args[3] as *mut u64;
    // SAFETY: the memory was checked.
    unsafe { out.write(out.read().wrapping_add(differ as u64)) };
}

unsafe fn hash(launch: &Launch, _: &[u32]) {
    let chunk = launch.args[1];
    for block in 0..u64::from(launch.grid) {
        let at = launch.args[0] + block * chunk;
        // SAFETY: the memory was checked.
        let words = unsafe { from_raw_parts(at as *const u64, (chunk / 8) as usize) };
        let sum = (0_u64..)
            .zip(words)
            .map(|(i, word)| mix(word ^ i.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
            .fold(0, u64::wrapping_add);
        let out = (launch.args[2] + block * 8) as *mut u64;
        // SAFETY: the memory was checked.
        unsafe { out.write(out.read().wrapping_add(sum)) };
    }
}

unsafe fn spin(launch: &Launch, _: &[u32]) {
    sleep(launch.args[0]);
}

unsafe fn fma(launch: &Launch, _: &[u32]) {
    /// The numbers of the last launch, which depend only on its rounds and its block size.
    static NUMBERS: Mutex<(u32, Vec<f32>)> = Mutex::new((0, Vec::new()));
    const M: f32 = 0.999_023_44; // 1 - 2^-10
    const C: f32 = 0.000_976_562_5; // 2^-10
    let rounds = launch.args[1] as u32;
    let mut numbers = NUMBERS.lock().unwrap_or_else(PoisonError::into_inner);
    if numbers.0 != rounds || numbers.1.len() != launch.block as usize {
        let number = |thread: u32| {
            let mut chains = [0.0, 1.0, 2.0, 3.0].map(|chain| thread as f32 + chain);
            for _ in 0..u64::from(rounds) * 8 {
                chains = chains.map(|chain| chain.mul_add(M, C));
            }
            (chains[0] + chains[1]) + (chains[2] + chains[3])
        };
        *numbers = (rounds, (0..launch.block).map(number).collect());
    }
    let threads = launch.grid as usize * launch.block as usize;
    // SAFETY: the memory was checked.
    let out = unsafe { from_raw_parts_mut(launch.args[0] as *mut f32, threads) };
    out.chunks_exact_mut(launch.block as usize).for_each(|out| out.copy_from_slice(&numbers.1));
}

unsafe fn touch(launch: &Launch, _: &[u32]) {
    if launch.args[2] % 2 == 1 {
        // SAFETY: the memory was checked.
        let sum = unsafe { words(launch.args[0], launch.args[1]) }.iter().fold(0, |sum, word| sum ^ word);
        let out = launch.args[3] as *mut u64;
        // SAFETY: the memory was checked.
        unsafe { out.write(out.read() ^ sum) };
    }
}

unsafe fn smid(launch: &Launch, sms: &[u32]) {
    // SAFETY: the memory was checked.
    let out = unsafe { from_raw_parts_mut(launch.args[0] as *mut u32, launch.grid as usize) };
    out.iter_mut().zip(sms.iter().cycle()).for_each(|(out, sm)| *out = *sm);
    sleep(launch.args[1]);
}

unsafe fn flag(launch: &Launch, _: &[u32]) {
    // SAFETY: the memory was checked.
    let flag = unsafe { AtomicU32::from_ptr(launch.args[0] as *mut u32) };
    fence(Ordering::SeqCst);
    flag.store(launch.args[1] as u32, Ordering::SeqCst);
}

unsafe fn await_flag(launch: &Launch, _: &[u32]) {
    // SAFETY: the memory was checked.
    let flag = unsafe { AtomicU32::from_ptr(launch.args[0] as *mut u32) };
    let until = now().saturating_add(launch.args[2]);
    while flag.load(Ordering::SeqCst) != launch.args[1] as u32 && now() < until {
        std::thread::yield_now();
    }
}
